# SPDX-License-Identifier: Apache-2.0
"""What all engine tests share: the engine's python, two models, prompts."""

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.harness import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
MAKER = Path(__file__).resolve().parent / "make_model.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300 * PATIENCE))


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """Python of the pinned engine environment, installed once."""
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "vllm_env.py"], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(made.stdout.strip())


def model(python: Path, size: str) -> Path:
    """Folder of a model with random weights, made once for each version of its maker and environment."""
    version = hashlib.sha256(MAKER.read_bytes() + str(python.parents[1].name).encode()).hexdigest()[:12]
    folder = python.parents[2] / "models" / f"{size}-{version}"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            subprocess.run([python, MAKER, partial, size], check=True)
            partial.rename(folder)
    return folder


@pytest.fixture(scope="session")
def small_model(engine_python: Path) -> Path:
    """3.4 million parameters: for function."""
    return model(engine_python, "small")


@pytest.fixture(scope="session")
def large_model(engine_python: Path) -> Path:
    """53 million parameters: for comparing times."""
    return model(engine_python, "large")

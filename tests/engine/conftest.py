# SPDX-License-Identifier: Apache-2.0
"""What all engine tests share: the engine's python, two models, prompts."""

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.harness import PATIENCE
from tests.engine.nursery import nursery

ROOT = Path(__file__).resolve().parents[2]
MAKER = Path(__file__).resolve().parent / "make_model.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300 * PATIENCE))


@pytest.fixture(scope="session")
def engine_python() -> Iterator[Path]:
    """Python of the pinned engine environment, installed once."""
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "vllm_env.py"], stdout=subprocess.PIPE, text=True, check=True
    )
    python = Path(made.stdout.strip())
    with nursery(python):
        yield python


def model(python: Path, size: str) -> Path:
    """Folder of a model with random weights, made once for each version of its maker and environment.

    All are made at once: starting the maker takes longer than making one.
    """
    version = hashlib.sha256(MAKER.read_bytes() + str(python.parents[1].name).encode()).hexdigest()[:12]
    place = python.parents[2] / "models"
    place.mkdir(exist_ok=True)
    with (place / f"{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / f"{size}-{version}").exists():
            partial = place / f"{version}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            subprocess.run([python, MAKER, partial], check=True)
            for made in partial.iterdir():
                shutil.rmtree(place / f"{made.name}-{version}", ignore_errors=True)
                made.rename(place / f"{made.name}-{version}")
            partial.rmdir()
    return place / f"{size}-{version}"


@pytest.fixture(scope="session")
def small_model(engine_python: Path) -> Path:
    """3.4 million parameters: for function."""
    return model(engine_python, "small")


@pytest.fixture(scope="session")
def large_model(engine_python: Path) -> Path:
    """53 million parameters: for comparing times."""
    return model(engine_python, "large")

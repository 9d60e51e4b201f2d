# SPDX-License-Identifier: Apache-2.0
"""What an engine's process imports needs nothing but what a vLLM image has."""

import subprocess
import sys

import pytest
from tests.architecture.source import modules

REFUSED = (
    "cupy",
    "kopf",
    "kubernetes",
    "prometheus_client",
    "structlog",
    "jwt",
    "xxhash",
    "yaml",
    "cryptography",
    "torch",
    "vllm",
)
ROOMS = ("kvpool.model", "kvpool.config", "kvpool.wire", "kvpool.client", "kvpool.transfer", "kvpool.connector")
NEEDS_ENGINE = (
    "import torch",
    "from torch",
    "import vllm",
    "from vllm",
    "import triton",
    "from kvpool.transfer.kernels",
)

SCRIPT = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ImportError(f"{{name}} is not in a vLLM image")

sys.meta_path.insert(0, Refuse())
for name in {names!r}:
    importlib.import_module(name)
"""


def light_modules() -> list[str]:
    """Modules of the engine's side that need neither the engine itself nor a mover's environment."""
    return [
        m.dotted
        for m in modules()
        if m.dotted.startswith(ROOMS)
        and not m.dotted.startswith("kvpool.transfer.kernels.")
        and not any(line.startswith(NEEDS_ENGINE) for line in m.text.splitlines())
    ]


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_the_engine_side_imports_without_the_servers_packages() -> None:
    names = light_modules()

    result = run(SCRIPT.format(refused=REFUSED, names=names))

    assert {"kvpool.wire.codec", "kvpool.config", "kvpool.client.ports"} <= set(names)
    assert result.returncode == 0, result.stderr


def test_the_hook_refuses() -> None:
    assert "not in a vLLM image" in run(SCRIPT.format(refused=REFUSED, names=["kvpool.metrics.exporter"])).stderr


@pytest.mark.parametrize("name", ["kvpool.wire.codec", "kvpool.config"])
def test_the_vocabulary_imports_without_zmq(name: str) -> None:
    result = run(SCRIPT.format(refused=(*REFUSED, "zmq"), names=[name]))

    assert result.returncode == 0, result.stderr

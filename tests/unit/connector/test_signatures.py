# SPDX-License-Identifier: Apache-2.0
"""The facade against the connector interface of each vLLM that it is tested with, as recorded from its source.

    python -m tests.unit.connector.test_signatures 0.33.0

records a version whose environment is installed (tools/vllm_env.py).
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tools.vllm_env import PINS, environment

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "tests" / "golden" / "vllm"
FACADE = ROOT / "cacheserver" / "kvpool" / "connector" / "facade.py"
BASES = ("KVConnectorBase_V1", "SupportsHMA")


def methods(source: str, classes: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What the methods of *classes* take, by name."""
    found = {}
    for made in ast.parse(source).body:
        for method in made.body if isinstance(made, ast.ClassDef) and made.name in classes else ():
            if isinstance(method, ast.FunctionDef):
                arguments = method.args
                marks = {getattr(d, "id", getattr(d, "attr", "")) for d in method.decorator_list}
                found[method.name] = {
                    "takes": [a.arg for a in arguments.posonlyargs + arguments.args][1:],
                    "optional": len(arguments.defaults),
                    "any_keywords": arguments.kwarg is not None,
                    "abstract": "abstractmethod" in marks,
                }
    return dict(sorted(found.items()))


def recorded(version: str) -> dict[str, dict[str, Any]]:
    return json.loads((RECORDED / f"connector-{version}.json").read_text())


def misfits(theirs: dict[str, dict[str, Any]], ours: dict[str, dict[str, Any]]) -> list[str]:
    """What would fail when an engine with *theirs* as its interface calls *ours*."""
    wrong = [f"{name} is missing" for name, method in theirs.items() if method["abstract"] and name not in ours]
    for name in sorted(set(theirs) & set(ours)):
        takes, given = ours[name]["takes"], theirs[name]["takes"]
        required = takes[: len(takes) - ours[name]["optional"]]
        if takes[: len(given)] != given:
            wrong.append(f"{name} is called with {given} and takes {takes}")
        elif len(required) > len(given):
            wrong.append(f"{name} needs {required[len(given) :]} as well")
        if theirs[name]["any_keywords"] and not ours[name]["any_keywords"]:
            wrong.append(f"{name} may be called with other keywords, too")
    return wrong


@pytest.mark.behaviour("R083", "R120")
@pytest.mark.parametrize("version", sorted(PINS))
def test_the_facade_takes_what_each_engine_gives(version: str) -> None:
    ours = methods(FACADE.read_text(), ("KVPoolConnector",))

    assert len(ours) > 20
    assert misfits(recorded(version), ours) == []


def test_a_misfit_is_told() -> None:
    theirs = methods(
        "class KVConnectorBase_V1:\n"
        "    @abstractmethod\n"
        "    def a(self, x): ...\n"
        "    def b(self, x, **kwargs): ...\n"
        "    def c(self, x): ...\n"
        "    def d(self, x): ...\n",
        BASES,
    )
    ours = methods("class C:\n    def b(self, x): ...\n    def c(self, y): ...\n    def d(self, x, y): ...\n", ("C",))

    assert misfits(theirs, ours) == [
        "a is missing",
        "b may be called with other keywords, too",
        "c is called with ['x'] and takes ['y']",
        "d needs ['y'] as well",
    ]


def record(version: str) -> None:
    """Write what a version's interface is."""
    place = next(environment(version).parents[1].glob("lib/python*/site-packages"))
    source = (place / "vllm/distributed/kv_transfer/kv_connector/v1/base.py").read_text()
    lines = [f" {json.dumps(name)}: {json.dumps(method)}" for name, method in methods(source, BASES).items()]
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"connector-{version}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record(sys.argv[1])

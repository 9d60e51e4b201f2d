# SPDX-License-Identifier: Apache-2.0
"""The entry point: exit codes, light imports, a page that is never stale."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.cli import docs, main
from kvpool.cli.errors import Failure, UsageError
from kvpool.cli.main import main as run

ROOT = Path(__file__).parents[3]
HEAVY = ("numpy", "msgspec", "zmq", "structlog", "prometheus_client", "vllm", "torch")


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from kvpool.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        f"finally:\n    print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert done.returncode == 0
    assert "doctor" in done.stdout
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("arguments", [[], ["serve"], ["status", "--no-such"], ["keys"], ["bench"]])
def test_unknown_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(arguments)

    assert ended.value.code == 2
    assert "usage: kvpool" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(UsageError("--x: wrong; do y"), 2), (Failure("gone; do y"), 1)])
def test_an_error_is_one_line_without_a_traceback(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Module:
        @staticmethod
        def run(_: object) -> int:
            raise error

    monkeypatch.setattr(main.importlib, "import_module", lambda _: Module)

    assert run(["keys", "--out", "x"]) == code
    assert capsys.readouterr().err == f"kvpool keys: {error}\n"


def test_reference_page_is_generated_from_the_parser() -> None:
    assert (ROOT / "docs" / "reference" / "cli.md").read_text() == docs.render()


def test_keys_are_private_and_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.key"

    assert run(["keys", "--out", str(file)]) == 0
    public = capsys.readouterr().out.strip()

    assert len(public) == 40
    assert file.stat().st_mode & 0o777 == 0o600
    assert public not in file.read_text()
    assert run(["keys", "--out", str(file)]) == 1
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "control", "--shard-bytes", "many"], "--shard-bytes"),
        (["bench", "control", "--clients", "0"], "--clients"),
        (["bench", "control", "--cells", "lookup,speed"], "speed"),
        (["server", "--set", "l1.size_bytes=1"], "l1.size_bytes"),
    ],
)
def test_wrong_values_are_exit_code_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert words in capsys.readouterr().err

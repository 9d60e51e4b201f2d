# SPDX-License-Identifier: Apache-2.0
"""What `kvpool bench gpu` measured so far: whatever ends the bench takes none of it along."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from kvpool.cli.bench.command import write_report
from kvpool.cli.bench.gpu_rig import WrongBytesError, note
from kvpool.cli.bench.results import BenchReport, Cell, table

__all__ = ["Kept"]

_UNDER_WAY: Final = "the bench is not over, or was killed"


class Kept:
    """Cells, said and written one by one as they come, and shown as a table in the end.

    The report's ``machine["failed"]`` says why there are not more of them; it is empty if there are all.
    """

    def __init__(self, report: BenchReport, path: str | None) -> None:
        """Keep nothing yet.

        Args:
            report: without cells.
            path: where to write it; None: nowhere.
        """
        self._report, self._path = report, path
        self._cells: list[Cell] = []

    def add(self, cell: Cell) -> None:
        """Keep one more.

        Raises:
            Failure: no bytes were compared for it, or the report cannot be written.
        """
        table([cell])
        self._cells.append(cell)
        note(f"{cell.name}: {cell.skipped or f'{cell.value:.4g} {cell.unit}'}")
        self._write(_UNDER_WAY)

    @contextlib.contextmanager
    def whatever_ends(self) -> Iterator[None]:
        """Show and write what was kept as the block ends: at its end, by a failure, Ctrl-C or SIGTERM.

        Where bytes were wrong there is no table and no report.
        """
        try:
            yield
        except WrongBytesError:
            if self._path and self._cells:
                Path(self._path).unlink(missing_ok=True)
            raise
        except BaseException as e:
            self._show(f"{type(e).__name__}: {e}".removesuffix(": "))
            note(f"ended before its end; {len(self._cells)} cells were measured")
            raise
        self._show("")

    def _show(self, failed: str) -> None:
        print(table(self._cells), flush=True)
        self._write(failed)

    def _write(self, failed: str) -> None:
        if self._path:
            machine = self._report.machine | {"failed": failed}
            write_report(self._path, replace(self._report, cells=tuple(self._cells), machine=machine))

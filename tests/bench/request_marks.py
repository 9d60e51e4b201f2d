# SPDX-License-Identifier: Apache-2.0
"""Where the time of a request through a ring goes: runs a command whose processes note their steps, and shows medians.

    python -m tests.bench.request_marks -- python -m kvpool.cli.main bench gpu --cells sizes

What counts are the last dozen requests of each kind that were alone. The marks cost some ten microseconds each, and are
in what they show.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MARKS = Path(__file__).with_name("marks")
_LEAST = 8
_LAST = 12
"""Of each kind so many count. Those before bring in what they are the first to use: a bench fills memory with them."""


class Mark(NamedTuple):
    """One line of a process."""

    at_s: float
    who: str
    step: str


def read(folder: Path) -> list[Mark]:
    """Return the marks of all processes, in order."""
    lines = (line.split(maxsplit=2) for file in folder.iterdir() for line in file.read_text().splitlines())
    return sorted(Mark(float(at), who, step) for at, who, step in lines)


def requests(marks: Sequence[Mark]) -> Iterator[list[Mark]]:
    """Yield the marks of each request that was alone: from its call until somebody was told of its end."""
    span: list[Mark] = []
    alone = True
    for mark in marks:
        if mark.step == "call <":
            alone, span = not span, [mark]
        elif span:
            span.append(mark)
            ended = any(m.step == "end >" for m in span)
            if ended and mark.step == "told >":
                if alone:
                    yield span
                span, alone = [], True


def table(spans: Sequence[list[Mark]]) -> Iterator[tuple[float, str]]:
    """Yield (median milliseconds from the call, step), for the first and the last time that each step is noted."""
    times: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        began_s = span[0].at_s
        seen: dict[str, list[float]] = defaultdict(list)
        for mark in span:
            seen[f"{mark.who}: {mark.step}"].append(1e3 * (mark.at_s - began_s))
        for step, found in seen.items():
            times[step].append(found[0])
            if len(found) > 1:
                times[f"{step} (last of {len(found)})"].append(found[-1])
    least = len(spans) // 2
    yield from sorted((statistics.median(found), step) for step, found in times.items() if len(found) > least)


def shown(marks: Sequence[Mark]) -> Iterator[str]:
    """Yield lines for each kind of request and number of slots that it needed."""
    kinds: dict[tuple[str, int], list[list[Mark]]] = defaultdict(list)
    for span in requests(marks):
        steps = [mark.step for mark in span]
        kind = "store" if any(step.startswith("send PrepareStore") for step in steps) else "load"
        kinds[kind, steps.count("ask <")].append(span)
    for (kind, slots), spans in sorted(kinds.items()):
        if len(spans) >= _LEAST:
            last = spans[-_LAST:]
            yield f"{kind} of {slots} slots, median of the last {len(last)}, ms from the call"
            yield from (f"  {at_ms:9.3f}  {step}" for at_ms, step in table(last))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", nargs="+")
    command = parser.parse_args(arguments).command
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(MARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
        code = subprocess.run(
            command, check=False, env=os.environ | {"KVPOOL_MARKS": folder, "PYTHONPATH": path}
        ).returncode
        sys.stdout.writelines(f"{line}\n" for line in shown(read(Path(folder))))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

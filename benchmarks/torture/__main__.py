"""A table of all cases, and whether each was as it is right.

    python -m benchmarks.torture [--generated] [--only WORDS] [--keep DIR]

Exit code 1 with a surprise. Packages with tokenizers are downloaded once, into .cache/torture.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.torture import catalog, packages
from benchmarks.torture.cases import Case, Outcome
from benchmarks.torture.server import server

_STYLES = {"equal": "green", "refused": "green", "taken": "green", "absent": "yellow", "surprise": "red"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torture", description=__doc__)
    parser.add_argument("--generated", action="store_true", help="the cases that need no download")
    parser.add_argument("--only", default="", help="the cases whose names have these words")
    parser.add_argument("--keep", type=Path, help="keep the files of surprises in this directory")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    console = Console(stderr=True)
    if not options.generated:
        packages.download(console.print)
    cases = catalog.generated() if options.generated else catalog.cases()
    cases = [case for case in cases if options.only in case.name]
    results = []
    with server() as process, tempfile.TemporaryDirectory() as scratch, console.status("") as status:
        for number, case in enumerate(cases):
            status.update(f"{number} of {len(cases)}: {case.name}")
            directory = Path(scratch, str(number))
            outcome = process.run(case.name, directory)
            results.append((case, outcome))
            if not console.is_terminal:
                print(f"{number + 1}/{len(cases)} {outcome.state} {case.name}", file=sys.stderr, flush=True)
            if outcome.state == "surprise" and options.keep:
                shutil.copytree(directory, options.keep / f"{number:03}", symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(directory, ignore_errors=True)
    report(results, time.monotonic() - began)
    return int(any(outcome.state == "surprise" for _, outcome in results))


def report(results: Sequence[tuple[Case, Outcome]], seconds: float) -> None:
    """Print the table, the surprises below it, and the run time."""
    table = Table("", "case", "documents", "tokens", "outcome", "seconds", box=None)
    for column in (2, 3, 5):
        table.columns[column].justify = "right"
    for case, outcome in results:
        style = _STYLES[outcome.state]
        counts = [f"{count:,}" if count else "" for count in (outcome.documents, outcome.tokens)]
        table.add_row(
            case.group, case.name, *counts, f"[{style}]{outcome.state}[/]", f"{outcome.seconds:.1f}"
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for case, outcome in results:
        if outcome.state in ("surprise", "absent"):
            console.print(f"\n{outcome.state}: {case.group} {case.name}", style="bold", markup=False)
            console.print(outcome.why, markup=False, highlight=False)
    counted = Counter(outcome.state for _, outcome in results)
    states = ", ".join(f"{counted[state]} {state}" for state in _STYLES if counted[state])
    console.print(f"\n{len(results)} cases: {states}; {seconds:,.0f} s", highlight=False)


if __name__ == "__main__":
    sys.exit(main())

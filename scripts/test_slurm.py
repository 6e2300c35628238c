"""Run the tests that need a real Slurm, and the README's demo, on the Slurm of several Debian releases.

Each release has a root file system of its own (debian_root.py). Results, logs and the table go to
.cache/test-slurm/.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / ".cache" / "test-slurm"
ROOTS = REPOSITORY / ".cache" / "debian"

_SUITES = ("bookworm", "trixie", "sid")
_DEMO = "make demo"
_EPILOG = """\
examples:
  .venv/bin/python scripts/test_slurm.py                  everything; hours
  .venv/bin/python scripts/test_slurm.py --suites sid --accounting off -- tests/runs tests/chains
  .venv/bin/python scripts/test_slurm.py --table-only     the table of the last results

The demo is left out where tests are selected. A log for each release and mode lies in .cache/test-slurm.

exit code:
  0 all passed; 1 something failed or crashed
"""
# Relative to /slipway, and ignored by git.
_JUNIT = Path(".cache/junit.xml")
_TEST_LINE = re.compile(r"\[ *(\d+)%\] (PASSED|FAILED|ERROR|SKIPPED) (\S+)")


@dataclass
class Counts:
    """Counts of the tests of one file, by outcome."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        parts = [str(self.passed)] if self.passed else []
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{self.skipped} skipped"] if self.skipped else []
        return ", ".join(parts)


@dataclass
class Result:
    """One run of the tests: on the Slurm of one suite, with accounting or without."""

    suite: str
    accounting: str
    slurm: str = "?"
    date: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))
    seconds: float = 0.0
    crash: str | None = None
    files: dict[str, Counts] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    # File and reason of each skipped test.
    skips: list[tuple[str, str]] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.suite}, accounting {self.accounting}"

    @property
    def is_bad(self) -> bool:
        return bool(self.crash or self.failures)

    @property
    def log(self) -> Path:
        return RESULTS / f"{self.suite}-{self.accounting}.log"

    @property
    def file(self) -> Path:
        return self.log.with_suffix(".json")

    def save(self) -> None:
        self.file.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def add(self, file: str, outcome: str, test: str = "", reason: str = "") -> None:
        counts = self.files.setdefault(file, Counts())
        setattr(counts, outcome, getattr(counts, outcome) + 1)
        if outcome == "failed":
            self.failures.append(test or file)
        elif outcome == "skipped":
            self.skips.append((file, reason))


def load(suite: str, accounting: str) -> Result | None:
    """Return the last result of a suite, if there is one."""
    path = Result(suite, accounting).file
    if not path.is_file():
        return None
    values: dict[str, Any] = json.loads(path.read_text())
    values["files"] = {file: Counts(**counts) for file, counts in values["files"].items()}
    return Result(**values)


def read_junit(path: Path, result: Result) -> None:
    """Add what pytest reported."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        file, skip = case.get("file", "?"), case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            result.add(file, "failed", test=f"{file}::{case.get('name')}")
        elif skip is not None:
            result.add(file, "skipped", reason=skip.get("message", ""))
        else:
            result.add(file, "passed")


class Runner:
    """A runner of commands in the root file systems, with a log for each and progress on the console."""

    def __init__(self, console: Console, options: argparse.Namespace) -> None:
        self.console = console
        self.options = options

    def run(self, suite: str) -> list[Result]:
        """Test one suite in all modes."""
        results = [Result(suite, accounting) for accounting in self.options.accounting]
        setup = RESULTS / f"{suite}-setup.log"
        for path in [setup, *(path for result in results for path in (result.log, result.file))]:
            path.unlink(missing_ok=True)
        code = self.call(f"{suite}: set-up", setup, suite, "make", ".venv/test.done", tree="fresh")
        if code:
            for result in results:
                result.crash = _crash("set-up", code, setup)
                result.save()
            return results
        # The lock of debian_root.py: nobody else replaces the copy of the tree meanwhile.
        with (ROOTS / f"{suite}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            slurm = self.version(suite)
            for result in results:
                result.slurm = slurm
                self.test(result)
                result.save()
        return results

    def version(self, suite: str) -> str:
        """Return Slurm's version, such as 24.11.5."""
        command = self.command(suite, "shared", "slurmctld", "-V")
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]

    def test(self, result: Result) -> None:
        """Run the tests, and the demo unless tests were selected."""
        start = time.monotonic()
        # A report of earlier tests must not pass for one of these.
        junit = ROOTS / result.suite / "slipway" / _JUNIT
        junit.unlink(missing_ok=True)
        command = [".venv/bin/pytest", "--warm", "-m", "slurm", "-v", "-n", str(self.options.workers)]
        command += ["--ignore=tests/pyxis", "--ignore=tests/nemo", f"--accounting={result.accounting}"]
        # The older family of reports names the file of each test.
        command += [f"--junitxml={_JUNIT}", "-o", "junit_family=xunit1", *self.options.pytest]
        title = f"{result.title}: tests"
        code = self.call(title, result.log, result.suite, *command)
        if junit.is_file():
            read_junit(junit, result)
        if code not in (0, 1) or not junit.is_file():
            result.crash = _crash("pytest", code, result.log)
        if not self.options.pytest:
            self.demonstrate(result)
        result.seconds = round(time.monotonic() - start, 1)

    def demonstrate(self, result: Result) -> None:
        """Run the demo: as the README does, or on a sandbox with accounting that is up already."""
        first = ".venv/bin/slipway sandbox up --accounting && " if result.accounting == "on" else ""
        code = self.call(f"{result.title}: demo", result.log, result.suite, "sh", "-c", f"{first}{_DEMO}")
        result.add(_DEMO, "failed" if code else "passed")

    def command(self, suite: str, tree: str, *words: str) -> list[str]:
        script = REPOSITORY / "scripts" / "debian_root.py"
        options = [
            f"--hosts={self.options.hosts}",
            f"--tree={tree}",
            *(["--refresh"] if tree == "fresh" else ["--network=none"]),
        ]
        return [sys.executable, str(script), suite, *options, *words]

    def call(self, title: str, log: Path, suite: str, *words: str, tree: str = "shared") -> int:
        """Run a command to its end, with its output in a log; return its exit code."""
        start = time.monotonic()
        with log.open("a") as output, self.progress(title) as status:
            output.write(f"$ {shlex.join(words)}\n")
            output.flush()
            with subprocess.Popen(
                self.command(suite, tree, *words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process:
                try:
                    for line in process.stdout or ():
                        output.write(line)
                        output.flush()
                        self.show(line, title, status)
                except BaseException:
                    # The namespaces and all processes in them end with it.
                    process.kill()
                    raise
        duration = _minutes(time.monotonic() - start)
        self.console.print(f"{title}: exit code {process.returncode} after {duration}")
        return process.returncode

    @contextmanager
    def progress(self, title: str) -> Iterator[Status | None]:
        """Show a spinner on a terminal, a line elsewhere."""
        if self.console.is_terminal:
            with self.console.status(title) as status:
                yield status
        else:
            self.console.print(title)
            yield None

    def show(self, line: str, title: str, status: Status | None) -> None:
        """Show what takes long, each failed test, and on a terminal how far the tests are."""
        if line.startswith(("Making ", "Waiting ")):  # of debian_root.py
            self.console.print(f"  {line.rstrip()}", markup=False, highlight=False)
        if match := _TEST_LINE.search(line):
            percent, outcome, test = match.groups()
            if outcome in ("FAILED", "ERROR"):
                self.console.print(f"  [red]{outcome}[/] {escape(test)}")
            if status:
                status.update(f"{title} {percent} % [dim]{escape(test)}[/]")


def report(results: list[Result], console: Console) -> None:
    """Print the table, and write it as Markdown and JSON."""
    header = ["", *(f"{one.slurm}\n{one.suite}\naccounting {one.accounting}" for one in results)]
    files = sorted({file for one in results for file in one.files} - {_DEMO})
    files += [_DEMO] if any(_DEMO in one.files for one in results) else []
    rows = [[file, *(str(one.files.get(file, "")) for one in results)] for file in files]
    rows.append(["all", *(str(_total(one)) + ("\ncrashed" if one.crash else "") for one in results)])
    rows.append(["time", *(_minutes(one.seconds) for one in results)])
    notes = [*_notes(results)]

    table = Table(*header, title="Tests on a real Slurm: passed, failed, skipped")
    for name, *cells in rows:
        cells = [name.removeprefix("tests/"), *cells]
        table.add_row(*(f"[red]{cell}[/]" if re.search("failed|crashed", cell) else cell for cell in cells))
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)

    lines = [header, ["---"] * len(header), *rows]
    markdown = [f"| {' | '.join(cell.replace(chr(10), '<br>') for cell in row)} |" for row in lines]
    text = "\n".join([*markdown, "", *(f"- {note}" for note in notes)])
    (RESULTS / "table.md").write_text(text.rstrip() + "\n")
    (RESULTS / "table.json").write_text(json.dumps([asdict(one) for one in results], indent=2) + "\n")
    console.print(f"Also in {_relative(RESULTS)}: table.md, table.json, and the logs")


def _notes(results: list[Result]) -> Iterator[str]:
    """Say what crashed, what failed, and why tests were skipped; the same of several runs once."""
    for one in results:
        if one.crash:
            yield f"crashed: {one.title}: {one.crash}"
    for test, titles in _grouped(
        (test.partition("[")[0], one.title) for one in results for test in one.failures
    ):
        yield f"failed: {test} ({titles})"
    skips = ((f"{file}: {reason}", one.title) for one in results for file, reason in one.skips)
    for skip, titles in _grouped(skips):
        yield f"skipped: {skip} ({titles})"


def _grouped(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    groups: dict[str, dict[str, None]] = defaultdict(dict)
    for key, title in pairs:
        groups[key][title] = None
    for key, titles in groups.items():
        yield key, "; ".join(titles)


def _total(result: Result) -> Counts:
    counts = result.files.values()
    return Counts(*(sum(getattr(one, name) for one in counts) for name in ("passed", "failed", "skipped")))


def _crash(what: str, code: int, log: Path) -> str:
    lines = log.read_text().splitlines()
    return f"{what} ended with exit code {code}: {lines[-1].strip()} ({_relative(log)})"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02} min"


def _relative(path: Path) -> Path:
    return path.relative_to(REPOSITORY)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run the tests that need a real Slurm on the Slurm of several Debian releases.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suites", nargs="+", default=_SUITES, metavar="SUITE", help="bookworm trixie sid")
    parser.add_argument("--accounting", nargs="+", default=("on", "off"), choices=("on", "off"))
    parser.add_argument("--workers", type=int, default=2, help="of pytest (default: 2)")
    parser.add_argument(
        "--hosts", default="installer", choices=("installer", "keep"), help="as of debian_root.py"
    )
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    parser.add_argument("pytest", nargs="*", metavar="-- ARGUMENT", help="of pytest, such as files")
    return parser.parse_args(words)


def main() -> int:
    """Test all suites; return 1 if something failed."""
    options = parse(sys.argv[1:])
    RESULTS.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.table_only:
        loaded = (load(suite, accounting) for suite in options.suites for accounting in options.accounting)
        results = [result for result in loaded if result]
    else:
        runner = Runner(console, options)
        results = [result for suite in options.suites for result in runner.run(suite)]
    report(results, console)
    return int(any(result.is_bad for result in results))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

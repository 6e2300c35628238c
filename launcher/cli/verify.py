"""`slipway verify`: check that a run did its work."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from launcher import errors
from launcher.cli.runs import add_run, selected_run
from launcher.errors import one_line
from launcher.monitor.evidence import Evidence, gather
from launcher.monitor.verification import RunCheck, RunVerdict, exit_code, verify
from launcher.ui.tables import align
from launcher.ui.terminal import open_console

_DESCRIPTION = """\
Check that a run did its work, and print the evidence of each check: the job ended well, the last step was
reached, every loss is a finite number, the loss fell, no step is missing, no rank had an error, every rank
ended, and a complete checkpoint of the last step exists. Of a data preparation, conversion or evaluation: its
files exist. A run that was launched several times is verified as a whole.

examples:
  slipway verify gpt3_126m
  slipway verify gpt3_126m --launch 2          its state at the end of its second launch
  slipway follow gpt3_126m; slipway verify gpt3_126m && slipway launch ...
  slipway verify gpt3_126m --json | jq -r '.checks[] | select(.verdict == "failed") | .evidence'

exit code:
  0  verified: every check passed
  1  a check failed
  2  there is no such run
  3  no check failed, but the verdict of some is unknown
  4  the run is still under way"""

_WORDS = {
    errors.DONE: "verified",
    errors.WENT_WRONG: "failed",
    errors.NOT_KNOWN: "cannot be told",
    errors.UNDER_WAY: "still under way",
}
_COLOURS = {
    RunVerdict.OK: "green",
    RunVerdict.FAILED: "bold red",
    RunVerdict.UNKNOWN: "bold magenta",
    RunVerdict.NOT_APPLICABLE: "dim",
}
_VERDICT_COLOURS = {errors.DONE: "bold green", errors.WENT_WRONG: "bold red"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("verify", help="check that a run did its work", description=_DESCRIPTION)
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print an object with all checks")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the checks and the verdict; return the exit code."""
    selected = selected_run(args)
    gathered = gather(selected.run_dir, selected.launch)
    checks = verify(gathered)
    code = exit_code(gathered, checks)
    if args.json:
        print(json.dumps(_object(gathered, checks, code), indent=2))
    else:
        print_checks(checks)
        _print_verdict(gathered, checks, code)
    return code


def _object(gathered: Evidence, checks: Sequence[RunCheck], code: int) -> dict[str, object]:
    launch = gathered.launch
    return {
        "run": launch.paths.run_name,
        "run_dir": str(launch.paths.run_dir),
        "launch": launch.paths.number,
        "job_id": None if launch.manifest.job_id is None else launch.job_in(gathered.status),
        "state": gathered.status.state.value,
        "verdict": _WORDS[code],
        "checks": [
            {"name": check.name, "verdict": check.verdict.value, "evidence": check.evidence}
            for check in checks
        ],
    }


def print_checks(checks: Sequence[RunCheck]) -> None:
    """Print one line for each check, with the verdict in its colour."""
    rows = [(check.name, check.verdict.value, one_line(check.evidence)) for check in checks]
    if not sys.stdout.isatty():
        print(align([("CHECK", "VERDICT", "EVIDENCE"), *rows]))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("evidence", overflow="fold")
    for check, (name, verdict, evidence) in zip(checks, rows, strict=True):
        dim = "dim" if check.verdict is RunVerdict.NOT_APPLICABLE else ""
        table.add_row(name, Text(verdict, _COLOURS[check.verdict]), Text(evidence, dim))
    open_console().print(table)


def _print_verdict(gathered: Evidence, checks: Sequence[RunCheck], code: int) -> None:
    paths = gathered.launch.paths
    line = one_line(f"{paths.run_name}, launch {paths.number}: {_WORDS[code]}{_why(checks, code)}")
    if not sys.stdout.isatty():
        print(line)
        return
    from rich.text import Text

    open_console().print(Text(line, _VERDICT_COLOURS.get(code, "bold magenta")))


def _why(checks: Sequence[RunCheck], code: int) -> str:
    deciding = RunVerdict.UNKNOWN if code == errors.NOT_KNOWN else RunVerdict.FAILED
    names = ", ".join(check.name for check in checks if check.verdict is deciding)
    if not names:
        return ""
    return f" ({'failed so far: ' if code == errors.UNDER_WAY else ''}{names})"

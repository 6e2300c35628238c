"""`slipway launch --smoke`: two steps of the training on one node before the launch."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from launcher import exit_codes
from launcher.drafting import Draft, Request
from launcher.errors import UserError, one_line
from launcher.runs.paths import short
from launcher.runs.receipts import note_ended
from launcher.ui.tables import print_code

if TYPE_CHECKING:
    from launcher.checks.gate import CheckReport
    from launcher.launching import Launched

OPTION = "--smoke"


def add_smoke(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        OPTION,
        action="store_true",
        help="run two steps on one node first, as run <name>_smoke, and launch only if they succeed. With"
        " --dry-run: print the script of the smoke test",
    )


def smoke_first(
    args: argparse.Namespace, reports: Sequence[CheckReport], request: Request, *, dry: bool
) -> tuple[list[CheckReport], int | None]:
    """Run the smoke of a launch and say how it went.

    Returns
    -------
    The report of the launch with the scheduler's answer, and the exit code: None to go on with the launch.

    Raises
    ------
    UserError
        If the launch or its smoke test would be refused; nothing is written then.
    """
    from launcher.checks.gate import require_passed, show_to_scheduler
    from launcher.smoke import launch_smoke, plan_smoke

    (report,) = reports
    smoke = plan_smoke(report.draft, request, args.no_check)
    if dry:
        for line in smoke.summary:
            _say(line)
        print_code(smoke.draft.rendered.script, "bash")
        return [report], 0
    if request.number is not None or request.tag is not None:
        raise UserError("--launch-number and --tag render a launch again: they need --dry-run")
    # The launch itself is judged before its smoke takes its time.
    report = show_to_scheduler(report)
    require_passed([report])
    launched = launch_smoke(smoke)
    for warning in launched.warnings:
        print(f"slipway: {warning}", file=sys.stderr)
    _say(f"run {launched.paths.run_name}, job {launched.manifest.job_id}: {smoke.summary[0]}")
    for line in smoke.summary[1:]:
        _say(line)
    code = _followed(launched, quiet=args.json)
    return [report], _tell(report.draft, launched, code)


def _followed(launched: Launched, *, quiet: bool) -> int:
    """Follow the smoke test to its end; with `quiet` on stderr, as stdout is for programs."""
    from launcher.monitor.follow import follow_and_tell

    with contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext():
        code = follow_and_tell(launched.paths.run_dir, launched.paths.number)
    if code != exit_codes.WATCHING_ENDED:
        note_ended(str(launched.manifest.job_id))
    return code


def _tell(draft: Draft, launched: Launched, code: int) -> int | None:
    from launcher.monitor.verification import RunCheck, RunVerdict
    from launcher.smoke import checks_of

    name = draft.plan.paths.run_name
    if code == exit_codes.WATCHING_ENDED:
        _say(f"{name} itself was not launched")
        return code
    checks: list[RunCheck] = checks_of(launched)
    failed = [check for check in checks if check.verdict is RunVerdict.FAILED]
    if failed or code:
        for check in failed if code == 0 else ():  # after a failed job, the end of its log was printed
            _say(f"{check.name}: failed: {check.evidence}")
        where = short(launched.paths.run_dir)
        _say(f"failed, and {name} was not launched; the files of the smoke test are in {where}")
        return exit_codes.WENT_WRONG
    for check in checks:
        if check.verdict is RunVerdict.UNKNOWN:
            _say(f"{check.name}: cannot tell: {check.evidence}")
    _say(f"passed; launching {name}")
    return None


def without_smoke(command: list[str]) -> list[str]:
    """Return the command line without `--smoke`, for the record of the launch itself."""
    return list(_without(command))


def _without(command: list[str]) -> Iterator[str]:
    options_end = command.index("--") if "--" in command else len(command)
    for index, word in enumerate(command):
        is_option = index < options_end and word.startswith("--s") and OPTION.startswith(word)
        if not is_option:
            yield word


def _say(line: str) -> None:
    print(f"smoke: {one_line(line)}", file=sys.stderr, flush=True)

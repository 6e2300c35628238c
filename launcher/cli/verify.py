"""`slipway verify`: check that a run did its work."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from launcher import errors
from launcher.cli.options import Verbs, add_option, add_verb
from launcher.cli.runs import add_run, select_run
from launcher.errors import escape
from launcher.monitor.evidence import gather
from launcher.monitor.verification import RunVerdict, exit_code, verify
from launcher.ui.tables import print_listing, print_styled
from launcher.ui.terminal import print_json

_HELP = """\
Check that a run did its work, and print the evidence of each check: the job ended well, the last step was
reached, every loss is a finite number, the loss fell, no step is missing, no rank had an error, every rank
ended, and a complete checkpoint of the last step exists. For a data preparation, conversion or evaluation:
its files exist. A run that was launched several times is verified as a whole.

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
    errors.NOT_KNOWN: "not known",
    errors.UNDER_WAY: "still under way",
}
_COLOURS = {
    RunVerdict.OK: "green",
    RunVerdict.FAILED: "bold red",
    RunVerdict.UNKNOWN: "bold magenta",
    RunVerdict.NOT_APPLICABLE: "dim",
}
_VERDICT_COLOURS = {errors.DONE: "bold green", errors.WENT_WRONG: "bold red"}


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "verify", run, text=_HELP)
    add_run(parser)
    add_option(parser, "--json", "print an object with all checks")


def run(args: argparse.Namespace) -> int:
    selected = select_run(args)
    gathered = gather(selected.run_dir, selected.launch)
    checks = verify(gathered)
    code = exit_code(gathered, checks)
    if args.json:
        launch, status = gathered.launch, gathered.status
        content = {
            "run": launch.paths.run_name,
            "run_dir": str(launch.paths.run_dir),
            "launch": launch.paths.number,
            "job_id": None if launch.manifest.job_id is None else launch.find_job(status),
            "state": status.state.value,
            "verdict": _WORDS[code],
            "checks": [{**asdict(check), "verdict": check.verdict.value} for check in checks],
        }
        print_json(content)
        return code
    rows = []
    for check in checks:
        dim = "dim" if check.verdict is RunVerdict.NOT_APPLICABLE else ""
        verdict = (check.verdict.value, _COLOURS[check.verdict])
        rows.append(((check.name, ""), verdict, (escape(check.evidence), dim)))
    print_listing(("CHECK", "VERDICT", "EVIDENCE"), rows, unfolded=(0, 1))
    deciding = RunVerdict.UNKNOWN if code == errors.NOT_KNOWN else RunVerdict.FAILED
    names = ", ".join(check.name for check in checks if check.verdict is deciding)
    so_far = "failed so far: " if code == errors.UNDER_WAY else ""
    why = f" ({so_far}{names})" if names else ""
    paths = gathered.launch.paths
    line = escape(f"{paths.run_name}, launch {paths.number}: {_WORDS[code]}{why}")
    print_styled([((line, _VERDICT_COLOURS.get(code, "bold magenta")),)])
    return code

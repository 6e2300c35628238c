"""`slipway launch`: plan a launch and submit it, or show what would be submitted."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.findings import add_no_check, stop_at_errors
from launcher.cli.printing import print_code
from launcher.cli.smoke import add_smoke, smoke_first, without_smoke
from launcher.drafting import Draft, Request, draft
from launcher.errors import UserError
from launcher.runs.paths import short

if TYPE_CHECKING:
    from launcher.launching import Launched
    from launcher.runs.manifest import Manifest
    from launcher.runs.paths import LaunchPaths

_EPILOG = """\
examples:
  slipway launch training=gpt3/126m cluster=bcm --dry-run
  slipway launch training=gpt3/126m cluster=bcm training.trainer.num_nodes=2 cluster.partition=gpu
  slipway launch training=gpt3/tiny cluster=sandbox --follow
  slipway launch training=gpt3/tiny cluster=local training.run.name=first_try
  slipway launch training=gpt3/5b cluster=bcm --smoke       two steps on one node first

An override is KEY=VALUE for a key of the tree in conf/, GROUP=CHOICE for a file of a folder there, +KEY=VALUE
for a key that the tree does not show, ~KEY to drop one.

exit code:
  0    submitted; with --follow: the job completed
  1    with --smoke: the two steps failed, and nothing else was launched; with --follow: the job failed
  2    a mistake in what was asked for; or the scheduler does not answer, and nothing was launched
  3    the scheduler stopped answering: whether there is a job is not known, and the next launch of the run
       finds out first
  130  interrupted
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "launch",
        help="plan a training and submit it",
        description="Compose the configuration, check it, render the job script and submit it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="such as training=gpt3/126m")
    parser.add_argument("--follow", action="store_true", help="show the progress until the job ends")
    parser.add_argument("--json", action="store_true", help="tell what was submitted as JSON")
    add_smoke(parser)
    add_launch_options(parser)
    parser.set_defaults(run=run)


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all verbs that launch share."""
    parser.add_argument("--dry-run", action="store_true", help="print the script; write and submit nothing")
    add_no_check(parser)
    add_tree_options(parser)
    add_replay_options(parser, "with --dry-run: the script of an earlier launch again, byte for byte")


def add_tree_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all verbs that render: trees of the user's own."""
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a conf tree of your own, read first")
    parser.add_argument("--template-dir", type=Path, metavar="DIR", help="templates of your own, read first")


def add_replay_options(parser: argparse.ArgumentParser, title: str) -> None:
    """Add what a launch's files depend on besides the overrides."""
    replay = parser.add_argument_group(title)
    replay.add_argument("--launch-number", type=int, metavar="N", help="the number that it has")
    replay.add_argument("--tag", help="its tag; launcher_cmd.log holds the whole command")


def run(args: argparse.Namespace) -> int:
    """Walk to the door that the arguments name; return the exit code."""
    request = request_of(args, args.overrides)
    made = _checked(args, request)
    if args.smoke:
        code = smoke_first(args, made, request, dry=_is_dry(args, made))
        if code is not None:
            return code
        request = replace(request, command=without_smoke(list(request.command)))
    launched = _launch(args, made, request)
    if launched is None:
        return 0
    paths = launched.paths
    _tell(paths, launched.manifest, as_json=args.json)
    if not args.follow:
        return 0
    from launcher.monitor.follow import follow_and_tell

    return follow_and_tell(paths.run_dir, paths.number)


def draft_and_launch(args: argparse.Namespace, overrides: list[str]) -> Launched | None:
    """Walk to the door that `add_launch_options` chose; ``None`` after a dry run, which prints the script.

    Raises
    ------
    UserError
        If the request has a mistake, or the scheduler refuses.
    """
    request = request_of(args, overrides)
    return _launch(args, _checked(args, request), request)


def _checked(args: argparse.Namespace, request: Request) -> Draft:
    made = draft(request)
    stop_at_errors(made, args.no_check, look=not _is_dry(args, made))
    return made


def _is_dry(args: argparse.Namespace, made: Draft) -> bool:
    return bool(args.dry_run or made.composition.config.dry_run)


def _launch(args: argparse.Namespace, made: Draft, request: Request) -> Launched | None:
    if _is_dry(args, made):
        print_code(made.rendered.script, "bash")
        return None
    if request.number is not None or request.tag is not None:
        raise UserError("--launch-number and --tag render a launch again: they need --dry-run")
    # Imported late: a dry run neither writes nor submits.
    from launcher.launching import launch

    try:
        launched = launch(made, request, tell=_tell_at_once)
    except KeyboardInterrupt:
        run_dir = shlex.quote(short(made.plan.paths.run_dir))
        print(f"slipway: interrupted; whether there is a job: slipway status {run_dir}", file=sys.stderr)
        raise
    for warning in launched.warnings:
        print(f"slipway: {warning}", file=sys.stderr)
    return launched


def request_of(args: argparse.Namespace, overrides: list[str]) -> Request:
    """What was asked for, with the command line of this process."""
    program = [sys.executable, sys.argv[0]] if sys.argv[0].endswith(".py") else [sys.argv[0]]
    if args.launch_number is not None and args.launch_number < 1:
        raise UserError(f"--launch-number {args.launch_number}: launches are numbered from 1")
    return Request(
        overrides=overrides,
        command=[*program, *sys.argv[1:]],
        config_dir=args.config_dir,
        template_dir=args.template_dir,
        number=args.launch_number,
        tag=args.tag,
    )


def _tell_at_once(line: str) -> None:
    print(f"slipway: {line}", file=sys.stderr, flush=True)


def _tell(paths: LaunchPaths, manifest: Manifest, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"job_id": manifest.job_id, "run_dir": str(paths.run_dir), "launch": paths.number}))
        return
    from launcher.schedulers.arrays import declared_tasks

    task = "".join(f"_{number}" for number in declared_tasks(paths.directory)[:1])  # an array's first
    log = paths.run_dir / paths.log_name(f"{manifest.job_id}{task}")
    places = {"local": "on this machine", "allocation": "in this allocation"}
    where = places.get(manifest.scheduler, "to Slurm")
    layout = f"{manifest.nodes} × {manifest.tasks_per_node} tasks"
    print(f"Submitted {where}: job {manifest.job_id}, run {paths.run_name}, launch {paths.number}, {layout}")
    print(f"  directory  {short(paths.run_dir)}")
    print(f"  log        {short(log)}")
    print(f"  follow it  slipway follow {shlex.quote(short(paths.run_dir))}", flush=True)

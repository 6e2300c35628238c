"""`slipway launch`: plan a launch and submit it, or show what would be submitted."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.findings import add_no_check, stop_at_errors
from launcher.cli.smoke import add_smoke, smoke_first, without_smoke
from launcher.cli.workspace import is_workspace, open_workspace, refuse_options
from launcher.drafting import Draft, Request, drafts
from launcher.errors import UserError
from launcher.runs.paths import short
from launcher.ui.tables import print_code

if TYPE_CHECKING:
    from launcher.launching import Launched
    from launcher.runs.manifest import Manifest
    from launcher.runs.paths import LaunchPaths

# Where --build makes the image.
_HOST, _JOB = "host", "job"

_EPILOG = """\
examples:
  slipway launch training=gpt3/126m cluster=bcm --dry-run
  slipway launch training=gpt3/126m cluster=bcm training.trainer.num_nodes=2 cluster.partition=gpu
  slipway launch training=gpt3/tiny cluster=sandbox --follow
  slipway launch training=gpt3/tiny cluster=local training.run.name=first_try
  slipway launch training=gpt3/5b cluster=bcm --smoke       two steps on one node first
  slipway launch training=gpt3/5b cluster=bcm container=nemo --build       first its image, if missing
  slipway launch stages=[data_preparation,training] training=gpt3/126m cluster=bcm
  slipway launch stages=[workspace] training=gpt3/126m cluster=bcm            a shell on a node, in its image
  slipway launch stages=[workspace] training=gpt3/126m cluster=bcm --print    the command that opens it

An override is KEY=VALUE for a key of the tree in conf/, GROUP=CHOICE for a file of a folder there, +KEY=VALUE
for a key that the tree does not show, ~KEY to drop one. UNIQUE_OUTPUT_DIR=1 is unique_output_dir=true.

exit code:
  0    submitted; with --follow: the job completed
  any  with stages=[workspace]: that of the shell
  1    with --smoke: the two steps failed, and nothing else was launched; with --follow: the job failed
  2    a mistake in what was asked for; or the scheduler does not answer, and nothing was launched
  3    the scheduler stopped answering: whether there is a job is not known, and the next launch of the run
       finds out first
  4    a job was submitted, and not all that was asked for was done: the output could not be written, or a
       later stage was refused; stderr names the job, and it goes on
  130  interrupted; stderr names what was submitted
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
    _add_build(parser)
    add_smoke(parser)
    add_launch_options(parser)
    parser.add_argument(
        "--print",
        dest="dry_run",
        action="store_true",
        help="the same as --dry-run: of a workspace, its command",
    )
    parser.set_defaults(run=run)


def _add_build(parser: argparse.ArgumentParser) -> None:
    # As options of their own: argparse would take the next override for the value of a bare --build.
    parser.add_argument(
        "--build",
        f"--build={_HOST}",
        dest="build",
        action="store_const",
        const=_HOST,
        help="first make the image that `container` names, where it is not there yet: a recipe is built, an"
        " image of a registry imported",
    )
    parser.add_argument(
        f"--build={_JOB}",
        dest="build",
        action="store_const",
        const=_JOB,
        help="the same in a job without GPUs, which the launch waits for",
    )


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
    replay.add_argument(
        "--launch-dir",
        type=Path,
        metavar="DIR",
        help="its directory, results/RUN/launches/N: what is stored there is rendered, whatever became of the"
        " trees and of the other arguments",
    )
    replay.add_argument("--launch-number", type=int, metavar="N", help="the number that it has")
    replay.add_argument("--tag", help="its tag; launcher_cmd.log holds the whole command")
    replay.add_argument("--stage", metavar="STAGE", help="its stage, where the overrides ask for several")


def run(args: argparse.Namespace) -> int:
    """Walk to the door that the arguments name; return the exit code."""
    request = request_of(args, args.overrides)
    if args.build is None or request.launch_dir is not None:
        made = _checked(args, request)
    else:
        made, request = _built(args, request)
    if is_workspace(made):
        refuse_options(args)
    if args.smoke and request.launch_dir is None:
        code = smoke_first(args, _only_one(made), request, dry=_is_dry(args, made))
        if code is not None:
            return code
        request = replace(request, command=without_smoke(list(request.command)))
    launched = _launch(args, made, request)
    tell_all(launched, as_json=args.json)
    return _follow(launched) if args.follow else 0


def _follow(launched: Sequence[Launched]) -> int:
    """Follow the jobs one after the other; the worst of their ends counts."""
    from launcher.exit_codes import WATCHING_ENDED, worst_code
    from launcher.monitor.follow import follow_and_tell

    codes: list[int] = []
    for one in launched:
        codes.append(follow_and_tell(one.paths.run_dir, one.paths.number))
        if codes[-1] == WATCHING_ENDED:
            return WATCHING_ENDED
    return worst_code(codes)


def _only_one(made: Sequence[Draft]) -> Draft:
    if len(made) > 1:
        raise UserError(
            "--smoke: the two steps would need what the stages before have not made yet",
            key="stages",
            hint="launch these first; then stages=[training] --smoke",
        )
    return made[0]


def draft_and_launch(args: argparse.Namespace, overrides: list[str]) -> Launched | None:
    """Walk to the door that `add_launch_options` chose; ``None`` after a dry run, which prints the script.

    Raises
    ------
    UserError
        If the request has a mistake, or the scheduler refuses.
    """
    request = request_of(args, overrides)
    launched = _launch(args, _checked(args, request), request)
    return launched[0] if launched else None


def _checked(args: argparse.Namespace, request: Request) -> list[Draft]:
    made = drafts(request)
    if request.launch_dir is None:  # which was checked when it was launched
        stop_at_errors(made, args.no_check, look=not _is_dry(args, made))
    return made


def _built(args: argparse.Namespace, request: Request) -> tuple[list[Draft], Request]:
    """Check a launch and make its image; where a job is to make it, that job is the first draft."""
    # Imported late: most launches make no image.
    from launcher.cli.building import building, make, tell_dry

    if args.smoke and args.build == _JOB:
        raise UserError("--smoke: it would not wait for the job of --build=job", hint="--smoke --build=host")
    planned = building(request, args.no_check, as_job=args.build == _JOB)
    dry = _is_dry(args, planned.made)
    stop_at_errors(planned.made, planned.skipped, look=not dry)
    if planned.needed is not None:
        if dry:
            tell_dry(planned.needed)
        else:
            make(planned.needed, quiet=args.json)
    return planned.made, planned.request


def _is_dry(args: argparse.Namespace, made: Sequence[Draft]) -> bool:
    return bool(args.dry_run or made[0].composition.config.dry_run)


def _launch(args: argparse.Namespace, made: Sequence[Draft], request: Request) -> list[Launched]:
    if _is_dry(args, made):
        print_each(made, [one.rendered.script for one in made], "bash")
        return []
    if (request.number, request.tag, request.stage, request.launch_dir) != (None, None, None, None):
        raise UserError(
            "--launch-dir, --launch-number, --tag and --stage render a launch again: they need --dry-run"
        )
    if is_workspace(made):
        open_workspace(made[0])
    # Imported late: a dry run neither writes nor submits.
    from launcher.launching import launch_stages

    try:
        launched = launch_stages(made, request, tell=_tell_at_once)
    except KeyboardInterrupt:
        runs = shlex.join(short(one.plan.paths.run_dir) for one in made)
        print(f"slipway: interrupted; whether there is a job: slipway status {runs}", file=sys.stderr)
        raise
    for warning in dict.fromkeys(warning for one in launched for warning in one.warnings):
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
        stage=args.stage,
        launch_dir=args.launch_dir,
    )


def _tell_at_once(line: str) -> None:
    print(f"slipway: {line}", file=sys.stderr, flush=True)


def print_each(made: Sequence[Draft], texts: Sequence[str], language: str) -> None:
    """Print a file of each draft; of several, with a line above that says whose it is."""
    for position, (one, text) in enumerate(zip(made, texts, strict=True)):
        if len(made) > 1:
            path = one.plan.paths.script
            print_code(f"{chr(10) * (position > 0)}# --- {one.plan.job.stage}: {path} ---\n", language)
        print_code(text, language)


def tell_all(launched: Sequence[Launched], *, as_json: bool) -> None:
    """Say what was submitted: as JSON an object, of several stages a list of them."""
    if not as_json:
        for one in launched:
            _tell(one.paths, one.manifest)
    elif launched:
        content = [
            {"job_id": one.manifest.job_id, "run_dir": str(one.paths.run_dir), "launch": one.paths.number}
            for one in launched
        ]
        print(json.dumps(content[0] if len(content) == 1 else content))


def _tell(paths: LaunchPaths, manifest: Manifest) -> None:
    from launcher.schedulers.job_status import declared_tasks

    task = "".join(f"_{number}" for number in declared_tasks(paths.directory)[:1])  # an array's first
    log = paths.run_dir / paths.log_name(f"{manifest.job_id}{task}")
    places = {"local": "on this machine", "allocation": "in this allocation"}
    where = places.get(manifest.scheduler, "to Slurm")
    nodes = f"{manifest.nodes}" if manifest.max_nodes is None else f"{manifest.nodes}-{manifest.max_nodes}"
    layout = f"{nodes} × {manifest.tasks_per_node} tasks"
    if manifest.links > 1:
        layout += f", link 1 of at most {manifest.links}"
    if manifest.after is not None:
        layout += f", waits for {manifest.after}"
    print(f"Submitted {where}: job {manifest.job_id}, run {paths.run_name}, launch {paths.number}, {layout}")
    print(f"  directory  {short(paths.run_dir)}")
    print(f"  log        {short(log)}")
    print(f"  follow it  slipway follow {shlex.quote(short(paths.run_dir))}", flush=True)

"""`slipway launch`: plan a launch and submit it, or show what would be submitted."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.drafting import Draft, Request, draft
from launcher.runs.paths import short

if TYPE_CHECKING:
    from launcher.runs.manifest import Manifest
    from launcher.runs.paths import LaunchPaths

_EPILOG = """\
examples:
  slipway launch training=gpt3/126m cluster=bcm --dry-run
  slipway launch training=gpt3/126m cluster=bcm training.trainer.num_nodes=2 cluster.partition=gpu
  slipway launch training=gpt3/tiny cluster=sandbox --follow
  slipway launch training=gpt3/tiny cluster=local training.run.name=first_try

An override is KEY=VALUE for a key of the tree in conf/, GROUP=CHOICE for a file of a folder there, +KEY=VALUE
for a key that the tree does not show, ~KEY to drop one.
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
    parser.add_argument("--dry-run", action="store_true", help="print the script; write and submit nothing")
    parser.add_argument("--follow", action="store_true", help="show the progress until the job ends")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a conf tree of your own, read first")
    parser.add_argument("--template-dir", type=Path, metavar="DIR", help="templates of your own, read first")
    parser.add_argument("--json", action="store_true", help="tell what was submitted as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Walk to the door that the arguments name; return the exit code."""
    request = make_request(args.overrides, args.config_dir, args.template_dir)
    made = draft(request)
    if args.dry_run or made.composition.config.dry_run:
        _print_script(made)
        return 0
    # Imported late: a dry run neither writes nor submits.
    from launcher.launching import launch

    launched = launch(made, request)
    paths = launched.paths
    if launched.warning:
        print(f"slipway: {launched.warning}", file=sys.stderr)
    _tell(paths, launched.manifest, as_json=args.json)
    if not args.follow:
        return 0
    from launcher.monitor.follow import follow_and_tell

    return follow_and_tell(paths.run_dir, paths.number)


def make_request(
    overrides: list[str], config_dir: Path | None = None, template_dir: Path | None = None
) -> Request:
    """A request that remembers the command line of this process."""
    program = [sys.executable, sys.argv[0]] if sys.argv[0].endswith(".py") else [sys.argv[0]]
    return Request(overrides, [*program, *sys.argv[1:]], config_dir, template_dir)


def _print_script(made: Draft) -> None:
    if not sys.stdout.isatty():
        sys.stdout.write(made.rendered.script)
        return
    # Imported late: in a pipe there is nothing to colour.
    from rich.console import Console
    from rich.syntax import Syntax

    # No wrapping: what is copied from the terminal is to be the script.
    highlighted = Syntax(made.rendered.script, "bash", theme="ansi_dark", background_color="default")
    Console().print(highlighted.highlight(made.rendered.script), soft_wrap=True, end="")


def _tell(paths: LaunchPaths, manifest: Manifest, *, as_json: bool) -> None:
    log = paths.run_dir / paths.log_name(manifest.job_id or "")
    if as_json:
        print(json.dumps({"job_id": manifest.job_id, "run_dir": str(paths.run_dir), "launch": paths.number}))
        return
    where = "on this machine" if manifest.scheduler == "local" else "to Slurm"
    layout = f"{manifest.nodes} × {manifest.tasks_per_node} tasks"
    print(f"Submitted {where}: job {manifest.job_id}, run {paths.run_name}, launch {paths.number}, {layout}")
    print(f"  directory  {short(paths.run_dir)}")
    print(f"  log        {short(log)}")
    print(f"  follow it  slipway follow {shlex.quote(short(paths.run_dir))}", flush=True)

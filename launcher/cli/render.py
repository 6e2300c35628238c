"""`slipway render`: the files of the next launch, printed and nowhere written."""

from __future__ import annotations

import argparse
import sys

from launcher.checks.gate import check_launch
from launcher.cli.requests import (
    add_no_check,
    add_replay_options,
    add_tree_options,
    is_workspace,
    print_drafts,
    request_of,
)
from launcher.config.stored import config_text
from launcher.drafting import drafts
from launcher.errors import UserError

_EPILOG = """\
examples:
  slipway render training=gpt3/126m cluster=bcm               the job script, as `launch --dry-run` shows it
  slipway render training=gpt3/126m --task                    what sets up each task
  slipway render training=gpt3/126m --config > job.yaml       the configuration that the job reads
  slipway render training=gpt3/126m training.trainer.num_nodes=64 | sbatch --test-only
  slipway render --launch-dir results/gpt3_126m/launches/3    what was launched, whatever conf/ says now

exit code:
  0  printed; nothing was written or submitted
  2  a mistake in what was asked for
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "render",
        help="print the script of the next launch",
        description="Compose the configuration, check it and print a file of the next launch: the script, "
        "or another one.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="such as training=gpt3/126m")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--task", action="store_true", help="print task.sh, what each task runs")
    which.add_argument("--config", action="store_true", help="print the YAML that the job reads")
    add_no_check(parser)
    add_tree_options(parser)
    add_replay_options(parser, "the files of an earlier launch again, byte for byte")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the file; return the exit code."""
    request = request_of(args, args.overrides)
    launches = drafts(request)
    if request.launch_dir is None:  # which was checked when it was launched
        check_launch(launches, args.no_check, look=False)
    if args.task:
        if is_workspace(launches):
            raise UserError("--task: a workspace has no tasks", key="stages")
        print_drafts(launches, [draft.rendered.task for draft in launches], "bash")
    elif args.config:
        texts = [
            (draft, config_text(config))
            for draft in launches
            if (config := draft.plan.job.payload_config) is not None
        ]
        if not texts:
            stage = launches[0].plan.job.stage
            raise UserError(f"stages=[{stage}]: a job of this stage reads no configuration")
        print_drafts([draft for draft, _ in texts], [text for _, text in texts], "yaml")
    else:
        print_drafts(launches, [draft.rendered.script for draft in launches], "bash")
    sys.stdout.flush()
    return 0

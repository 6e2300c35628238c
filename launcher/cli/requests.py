"""The options of the verbs that draft launches, the request that they make, and how drafts are printed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.drafting import Draft, Request
from launcher.errors import UserError
from launcher.stages.workspace import STAGE as WORKSPACE
from launcher.ui.tables import print_code


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all verbs that launch share."""
    parser.add_argument("--dry-run", action="store_true", help="print the script; write and submit nothing")
    add_no_check(parser)
    add_tree_options(parser)
    add_replay_options(parser, "with --dry-run: the script of an earlier launch again, byte for byte")


def add_no_check(parser: argparse.ArgumentParser) -> None:
    """Add the option that skips checks."""
    parser.add_argument(
        "--no-check",
        action="append",
        default=[],
        metavar="ID",
        help="skip a check, such as layout.gpus; may be given again. docs/checks.md has them all",
    )


def add_examining_verb(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str,
    epilog: str,
    overrides: str = "such as cluster=bcm",
) -> argparse.ArgumentParser:
    """Register a verb that examines the launch of some overrides; `overrides` is the help for these."""
    parser = subparsers.add_parser(name, help=help, description=description, epilog=epilog)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=overrides)
    parser.add_argument("--json", action="store_true", help="print an object")
    add_tree_options(parser)
    parser.set_defaults(run=run, launch_number=None, tag=None, stage=None, launch_dir=None)
    return parser


def add_tree_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the user's own trees."""
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a conf tree of your own, read first")
    parser.add_argument("--template-dir", type=Path, metavar="DIR", help="templates of your own, read first")


def add_replay_options(parser: argparse.ArgumentParser, title: str) -> None:
    """Add the options that a launch's files depend on besides the overrides."""
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


def request_of(args: argparse.Namespace, overrides: list[str]) -> Request:
    """Return the request of a command line, with the whole command of this process."""
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


def is_workspace(drafts: Sequence[Draft]) -> bool:
    """Return True if a shell was requested, and no job."""
    return drafts[0].plan.job.stage == WORKSPACE


def print_drafts(drafts: Sequence[Draft], texts: Sequence[str], language: str) -> None:
    """Print a file of each draft, under a line that names its stage if there are several."""
    for position, (draft, text) in enumerate(zip(drafts, texts, strict=True)):
        if len(drafts) > 1:
            path = draft.plan.paths.script
            print_code(
                f"{chr(10) * (position > 0)}# --- {draft.stage_name}: {path} ---\n",
                language,
            )
        print_code(text, language)

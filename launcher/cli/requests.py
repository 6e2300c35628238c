"""The options of the verbs that draft launches, the request that they make, and how drafts are printed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from launcher.cli.options import Verbs, add_option, add_overrides, add_tree_options, add_verb
from launcher.config.overrides import WORKSPACE
from launcher.drafting import Draft, Request
from launcher.errors import UserError
from launcher.ui.tables import print_code


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--dry-run", "print the script; write and submit nothing")
    add_no_check(parser)
    add_tree_options(parser)
    add_replay_options(parser, "with --dry-run: the script of an earlier launch again, byte for byte")


def add_no_check(parser: argparse.ArgumentParser) -> None:
    text = "skip a check, such as layout.gpus; may be given again. docs/checks.md has them all"
    add_option(parser, "--no-check ID", text, action="append", default=[])


def add_examining_verb(
    verbs: Verbs,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    overrides: str = "such as cluster=bcm",
) -> argparse.ArgumentParser:
    """Add a verb that examines the launch of some overrides; `overrides` is the help for these."""
    parser = add_verb(verbs, name, run, text=text)
    add_overrides(parser, overrides)
    add_option(parser, "--json", "print an object")
    add_tree_options(parser)
    return parser


def add_replay_options(parser: argparse.ArgumentParser, title: str) -> None:
    """Add the options that a launch's files depend on besides the overrides."""
    replay = parser.add_argument_group(title)
    text = "its directory, results/RUN/launches/N: its stored configuration is rendered; trees, overrides"
    add_option(replay, "--launch-dir DIR", f"{text} and --stage are ignored")
    add_option(replay, "--launch-number N", "number of the earlier launch")
    add_option(replay, "--tag TAG", "tag of the earlier launch; launcher_cmd.log holds the whole command")
    add_option(replay, "--stage STAGE", "stage of the earlier launch, if the overrides request several")


def read_request(
    args: argparse.Namespace, overrides: list[str], words: Sequence[str] | None = None
) -> Request:
    """Return the request of a command line; `words` are to be on record in place of this process's."""
    # Only verbs that render a launch again have all of these options.
    replay: dict[str, Any] = {
        name: getattr(args, name, None) for name in ("tag", "stage", "launch_dir", "launch_number")
    }
    number = replay.pop("launch_number")
    if number is not None and number < 1:
        raise UserError(f"--launch-number {number}: launches are numbered from 1")
    if replay["launch_dir"] is not None:
        return Request.from_launch(replay["launch_dir"], this_command(words), number, replay["tag"])
    trees = {"config_dirs": args.config_dirs, "template_dir": getattr(args, "template_dir", None)}
    return Request(overrides, this_command(words), number=number, **trees, **replay)


def this_command(words: Sequence[str] | None = None) -> list[str]:
    """Return the command line of this process, for the record of a launch, or one with other words."""
    program = [sys.executable, sys.argv[0]] if sys.argv[0].endswith(".py") else [sys.argv[0]]
    return [*program, *(sys.argv[1:] if words is None else words)]


def is_workspace(drafts: Sequence[Draft]) -> bool:
    """Return True if a shell was requested, and no job."""
    return drafts[0].plan.job.stage == WORKSPACE


def print_drafts(texts: Sequence[tuple[Draft, str]], language: str) -> None:
    """Print a file of each draft, under a line that names its stage if there are several."""
    for position, (draft, text) in enumerate(texts):
        if len(texts) > 1:
            gap = "\n" if position else ""
            print_code(f"{gap}# --- {draft.stage_name}: {draft.plan.paths.script} ---\n", language)
        print_code(text, language)

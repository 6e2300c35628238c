"""`slipway resume`: repeat the newest launch of a run."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.cli.launch import finish, launch_drafts
from launcher.cli.options import Verbs, add_option, add_overrides, add_tree_options, add_verb, verb_first
from launcher.cli.render import differences
from launcher.cli.requests import add_no_check, read_request
from launcher.cli.runs import add_run, select_run
from launcher.config.overrides import Override, hydra_value, parse_override
from launcher.config.site_trees import find_config_dirs
from launcher.drafting import Draft, drafts
from launcher.errors import UserError, escape
from launcher.jobs.launches import Launch, open_launch
from launcher.runs import paths
from launcher.runs.paths import COMMAND_LOG
from launcher.runs.trust import why_untrusted
from launcher.secrecy import MASK
from launcher.ui.terminal import print_message, print_stderr
from slipway.common.files import read_text

_HELP = """\
Repeat the newest launch of a run, with its overrides, its trees and the checks that it skipped, and with
further overrides. A training continues from its newest checkpoint.

The files of the trees are read as they are now: --dry-run shows what that changes. Relative paths start
where the run was launched, also in further overrides.

examples:
  slipway resume gpt3_126m                                      continue it
  slipway resume gpt3_126m training.trainer.max_steps=2000      train longer
  slipway resume gpt3_126m cluster.time_limit=8:00:00 --dry-run
  slipway resume 4711                                           the launch of this job

exit code:
  that of slipway launch"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "resume", run, text=_HELP)
    add_run(parser)
    add_overrides(parser, "such as training.trainer.max_steps=2000")
    add_option(parser, "--follow", "show the progress until the job ends")
    add_option(parser, "--json", "print the submitted job as JSON")
    add_option(parser, "--dry-run", "print the script, and what has changed; write and submit nothing")
    add_no_check(parser)


def run(args: argparse.Namespace) -> int:
    """Launch a run again, or print what would be launched; return the exit code."""
    selected = select_run(args)
    launch = open_launch(selected.run_dir, selected.launch)
    why = why_untrusted(launch.paths.manifest)
    if why is not None:
        message = f"{launch.paths.manifest}, the record of the launch, is not trusted: {why}"
        hint = f"read {launch.paths.directory / COMMAND_LOG}, and launch it yourself"
        raise UserError(escape(message), hint=escape(hint))
    _change_directory(launch.paths.directory)
    options = argparse.ArgumentParser(add_help=False)
    add_no_check(options)
    add_tree_options(options)
    recorded, _ = options.parse_known_args(verb_first(launch.manifest.command[1:]))
    recorded.no_check = [*recorded.no_check, *args.no_check]
    vars(args).update(vars(recorded))
    args.config_dirs = find_config_dirs(recorded.config_dirs)
    words = [f"--config-dir={tree}" for tree in recorded.config_dirs]
    words += [f"--template-dir={recorded.template_dir}"] if recorded.template_dir is not None else []
    words += [f"--no-check={name}" for name in recorded.no_check]
    overrides = _overrides(launch, [parse_override(text) for text in args.overrides])
    request = read_request(args, overrides, ["launch", *overrides, *words])
    drafted = drafts(request)
    launched = launch_drafts(args, drafted, request)
    for draft in drafted if not launched else ():  # a dry run
        if draft.plan.paths.run_dir == launch.paths.run_dir:
            _compare(launch, draft)
    return finish(args, launched)


def _compare(launch: Launch, draft: Draft) -> None:
    """Print the differences to the launch on record, and the limits of a dry run."""
    sys.stdout.flush()
    number, manifest = launch.paths.number, launch.manifest
    changes = list(differences(manifest, draft.numbered(number, manifest.tag)))
    for line in changes:
        print_stderr(escape(line))
    compared = "differs, as above, from" if changes else "is the same as"
    unseen = "a dry run looks at no checkpoint, data or queue"
    print_message(f"what would be launched now {compared} launch {number}; {unseen}")


def _overrides(launch: Launch, further: Sequence[Override]) -> list[str]:
    """Return the overrides on record, without those that further ones replace, and these."""
    stored = [parse_override(text) for text in launch.manifest.overrides]
    own, tree = [*further], launch.paths.run_dir.parent
    if tree != Path("results").absolute() and f"base_results_dir={tree}" not in launch.manifest.overrides:
        own.insert(0, parse_override(f"base_results_dir={hydra_value(str(tree))}"))
    if any(item.key == "stages" and "," in (item.value or "") for item in stored):
        own.insert(0, parse_override(f"stages=[{launch.manifest.stage}]"))
    replaced = {(item.sign, item.key) for item in own}
    kept = [item for item in stored if (item.sign, item.key) not in replaced]
    secret = next((escape(item.key) for item in kept if MASK in item.text), None)
    if secret is not None:
        raise UserError(f"{secret}: a secret, which is not on record", hint=f"give it again: {secret}=...")
    return [item.text for item in (*kept, *own)]


def _change_directory(launch_dir: Path) -> None:
    """Change to the directory in which a launch was typed, and show paths as from the one before."""
    here = Path.cwd()
    try:
        _, directory, *_ = shlex.split(read_text(launch_dir / COMMAND_LOG).partition("\n")[0])
        os.chdir(directory)
        paths.typed_in = here
    except (OSError, ValueError) as error:
        print_message(f"relative paths start here, not where the run was launched: {escape(str(error))}")

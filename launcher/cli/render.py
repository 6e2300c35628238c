"""`slipway render` and `slipway diff`: the files of the next launch, and their differences to the last."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from launcher.checks.gate import check_launch
from launcher.cli.options import Verbs, add_option, add_overrides, add_tree_options, add_verb
from launcher.cli.requests import add_no_check, add_replay_options, is_workspace, print_drafts, read_request
from launcher.cli.runs import find_one
from launcher.config.overrides import parse_override
from launcher.config.stored import config_text, stored_text
from launcher.drafting import Draft, Request, drafts
from launcher.errors import UserError, escape, explain_os_error
from launcher.jobs.launches import open_launch
from launcher.jobs.lookup import RunRef
from launcher.runs.manifest import Manifest, read_manifest, read_yaml
from launcher.runs.paths import LaunchPaths, display_path, launch_numbers
from launcher.ui.tables import print_styled
from slipway.common.files import read_text

_HELP = """\
Compose the configuration, check it and print a file of the next launch: the script, or another one.

examples:
  slipway render training=gpt3/126m cluster=bcm               the job script, as `launch --dry-run` shows it
  slipway render training=gpt3/126m --task                    what sets up each task
  slipway render training=gpt3/126m --config > job.yaml       the configuration that the job reads
  slipway render training=gpt3/126m training.trainer.num_nodes=64 | sbatch --test-only
  slipway render --launch-dir results/gpt3_126m/launches/3    the launched script, not that of today's conf/

exit code:
  0  printed; nothing was written or submitted
  2  a mistake in the command line or the configuration
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "render", run, text=_HELP)
    add_overrides(parser, "such as training=gpt3/126m")
    which = parser.add_mutually_exclusive_group()
    add_option(which, "--task", "print task.sh, what each task runs")
    add_option(which, "--config", "print the YAML that the job reads")
    add_no_check(parser)
    add_tree_options(parser)
    add_replay_options(parser, "the files of an earlier launch again, byte for byte")

    diff = add_verb(verbs, "diff", run_diff, text=_DIFF)
    add_overrides(diff, "such as training=gpt3/126m; or two runs")
    add_option(diff, "--launch N", "compare with launch N (default: the last)")
    add_tree_options(diff)


def run(args: argparse.Namespace) -> None:
    request = read_request(args, args.overrides)
    launches = drafts(request)
    if request.launch_dir is None:  # which was checked when it was launched
        check_launch(launches, args.no_check, look=False)
    if args.task and is_workspace(launches):
        raise UserError("--task: a workspace has no tasks", key="stages")
    if args.config:
        configs = [(draft, draft.plan.job.payload_config) for draft in launches]
        texts = [(draft, config_text(config)) for draft, config in configs if config is not None]
        if not texts:
            stage = launches[0].plan.job.stage
            raise UserError(f"stages=[{stage}]: a job of this stage reads no configuration")
    else:
        texts = [
            (draft, draft.texts[draft.plan.paths.task_script] if args.task else draft.script)
            for draft in launches
        ]
    print_drafts(texts, "yaml" if args.config else "bash")
    sys.stdout.flush()


# --- diff

_DIFF = """\
Show what would change if a run were launched again like this: a unified diff, from the files of its last
launch to those that `slipway launch` would write.

examples:
  slipway diff training=gpt3/126m cluster=bcm training.trainer.max_steps=700000
  slipway diff training=gpt3/126m cluster=bcm --launch 2       against launch 2 instead of the last one
  slipway diff first_run second_run                            the configurations of two runs

The launch's number and tag are held fixed, so that only real changes show: in the script, in task.sh, and in
the configuration that the job reads, and in the rest of the launch's configuration, root_config.yaml.

exit code, as of diff(1):
  0  no difference
  1  there are differences
  2  a mistake in the command line or the configuration, or the run was never launched
"""

# Far more than a script has; comparing larger files takes for ever.
_MOST_BYTES = 1 << 20

# The style of a line of a unified diff, by its beginning; the first that fits counts.
_STYLES = (("---", "bold"), ("+++", "bold"), ("@@", "cyan"), ("-", "red"), ("+", "green"))


def run_diff(args: argparse.Namespace) -> int:
    words = [parse_override(text) for text in args.overrides]
    if len(words) == 2 and all(word.value is None and not word.sign for word in words):
        return _print_differences(
            list(_compare_launches(*(find_one(word.key, Path("results")) for word in words)))
        )
    launches = drafts(
        Request(args.overrides, [], config_dirs=args.config_dirs, template_dir=args.template_dir)
    )
    if len(launches) > 1 and args.launch is not None:
        hint = f"stages=[{launches[-1].plan.job.stage}]"
        raise UserError(f"--launch {args.launch}: name its stage", key="stages", hint=hint)
    return _print_differences([line for draft in launches for line in _compare_stage(draft, args.launch)])


def _print_differences(lines: list[str]) -> int:
    styles = (next((style for start, style in _STYLES if line.startswith(start)), "") for line in lines)
    print_styled((part,) for part in zip(lines, styles, strict=True))
    return 1 if lines else 0


def _compare_launches(first: RunRef, second: RunRef) -> Iterator[str]:
    """Return the differences between the configurations of two runs' newest launches."""
    old, new = (open_launch(run.run_dir, run.launch).paths.root_config for run in (first, second))
    return compare_configs(old, new)


def compare_configs(old: Path, new: Path) -> Iterator[str]:
    """Return a unified diff of two stored configurations."""
    return _diff(old, _text(_read_config(old)), _text(_read_config(new)), display_path(new))


def _compare_stage(draft: Draft, launch: int | None) -> list[str]:
    run_dir = draft.plan.paths.run_dir
    try:
        numbers = launch_numbers(run_dir)
        if not numbers:
            where = f"there is nothing in {display_path(run_dir)} to compare with"
            hint = "`slipway render` with the same words shows the script"
            raise UserError(f"{run_dir.name} was never launched: {where}", hint=hint)
        if launch is not None and launch not in numbers:
            hint = f"launches: {', '.join(map(str, numbers))}"
            raise UserError(f"--launch {launch}: {run_dir.name} has no such launch", hint=hint)
        number = launch or numbers[-1]
        manifest = read_manifest(LaunchPaths(run_dir, run_dir.name, "", number).directory)
        return list(differences(manifest, draft.numbered(number, manifest.tag)))
    except OSError as error:
        raise explain_os_error(error, run_dir, "base_results_dir", verb="read") from error


def differences(manifest: Manifest, draft: Draft) -> Iterator[str]:
    """Yield a unified diff from the files of a launch to those of a draft of the same number and tag."""
    # Under the names that they had then: the run's or the job's name may be what changed.
    old = LaunchPaths(draft.plan.paths.run_dir, manifest.run, manifest.job_name, manifest.launch)
    config = draft.plan.job.payload_config
    yield from _diff(old.script, _read(old.script), draft.script)
    yield from _diff(old.task_script, _read(old.task_script), draft.texts[draft.plan.paths.task_script])
    # In the files several keys may share a line.
    before = _read_config(old.config)
    yield from _diff(old.config, _text(before), _text(config))
    root = _read_config(old.root_config)
    if root is not None:  # earlier versions stored none
        now = yaml.safe_load(stored_text(draft.stored_config, os.environ))
        # The files that the job reads are compared above.
        compared = () if before is None or config is None else (manifest.stage,)
        yield from _diff(old.root_config, _text(root, compared), _text(now, compared))


def _text(config: Mapping[str, Any] | None, without: tuple[str, ...] = ()) -> str | None:
    if config is None:
        return None
    return config_text({key: value for key, value in config.items() if key not in without})


def _read_config(path: Path) -> dict[str, Any] | None:
    try:
        return read_yaml(path)
    except FileNotFoundError:
        return None
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise UserError(f"{path}: no longer a valid configuration: {escape(str(error))}") from error


def _read(path: Path) -> str | None:
    try:
        return read_text(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: no longer a valid script: {escape(str(error))}") from error


def _diff(
    path: Path, before: str | None, text: str | None, name: str = "as it would be now"
) -> Iterator[str]:
    old = "/dev/null" if before is None else display_path(path)
    new = "/dev/null" if text is None else name
    return difflib.unified_diff(_lines(before), _lines(text), old, new, lineterm="")


def _lines(text: str | None) -> list[str]:
    # Not `splitlines`: a form feed in a value ends no line.
    return text.removesuffix("\n").split("\n") if text else []

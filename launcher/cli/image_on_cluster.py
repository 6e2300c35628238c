"""`slipway image ... --on-cluster`: the same command as a job without GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.errors import UserError, one_line

# With these values nothing is said of an option.
_UNSET = (None, False)
# Paths of the user's, which the job would look for where it starts.
_PATHS = ("temp_dir", "authfile", "config_dir", "template_dir")
_WORDS = ("compression", "via", "builder")
_FLAGS = ("force", "plain_http")


def add_on_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("as a job", "without GPUs, as image_job and stage_cluster.image say")
    group.add_argument("--on-cluster", action="store_true", help="submit it, and do not wait")
    group.add_argument("--dry-run", action="store_true", help="print the job's script; submit nothing")


def check(args: argparse.Namespace) -> None:
    """Refuse a dry run of what is no job.

    Raises
    ------
    UserError
        Naming what to do instead.
    """
    if args.dry_run and not args.on_cluster:
        raise UserError(
            "--dry-run shows the script of a job",
            hint="with --on-cluster; a Dockerfile: slipway image render",
        )


def submit(args: argparse.Namespace, words: Sequence[str], target: Path, overrides: Sequence[str]) -> int:
    """Submit a job that runs `slipway` with these words and the options of this call; return the exit code.

    Raises
    ------
    UserError
        If there is no queue for it, or the scheduler refuses.
    """
    # Imported late: most images are made here.
    from launcher.cli.launch import tell_all
    from launcher.cli.requests import print_drafts, request_of
    from launcher.drafting import draft
    from launcher.launching import launch
    from launcher.stages.image import ImageWork

    made_with = argparse.Namespace(**{**_NO_REPLAY, **vars(args)})
    work = ImageWork(target.stem, ("image", *words, *_options(args)), target)
    request = replace(request_of(made_with, list(overrides)), work=work)
    job = draft(request)
    if args.dry_run:
        print_drafts([job], [job.rendered.script], "bash")
        return 0
    launched = launch(job, request)
    tell_all([launched], as_json=args.json)
    if not args.json:
        print(f"  then       container={one_line(str(target))}")
    return 0


# What replays a launch.
_NO_REPLAY = {"launch_number": None, "tag": None, "stage": None, "launch_dir": None, "template_dir": None}


def _options(args: argparse.Namespace) -> Iterator[str]:
    given = vars(args)
    for name in (*_PATHS, *_WORDS, *_FLAGS):
        value = given.get(name)
        if value in _UNSET:
            continue
        option = f"--{name.replace('_', '-')}"
        yield option if value is True else f"{option}={_whole(value)}"


def _whole(value: str | Path) -> str:
    return str(value.expanduser().absolute()) if isinstance(value, Path) else value

"""`slipway incident`: everything about a launch that a ticket needs, as a folder and an archive."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.cli.options import Verbs, add_option, add_verb
from launcher.cli.runs import add_run, select_run
from launcher.errors import UserError, escape
from launcher.jobs.launches import open_launch
from launcher.monitor import incident
from launcher.runs.paths import display_path
from launcher.ui.terminal import print_json, print_stderr

_HELP = """\
Gather what a ticket about a launch needs, in a folder and in an archive of it: the ends of the logs, the
records of failed ranks, marks and alerts, Slurm's records of jobs and nodes, the configuration and what
changed since the last launch that worked. Read incident.md first: what happened, when, where, which rank
failed first, and what to try. Secrets are masked, sizes are bounded, and only you can read the files.

It may be another user's run, and one that is still running. What cannot be read is named in incident.md.

examples:
  slipway incident gpt3_126m                     of its newest launch, into this directory
  slipway incident gpt3_126m --launch 2 -o ~/tickets
  slipway incident 4711                          of the launch that became job 4711
  tar -tzf "$(slipway incident gpt3_126m --json | jq -r .archive)"

exit code:
  0  written
  2  there is no such run or launch, or the folder cannot be written"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "incident", run, text=_HELP)
    add_run(parser)
    text = "directory of the folder and the archive (default: this one)"
    add_option(parser, "-o --output DIR", text, default=Path())
    add_option(parser, "--json", "print an object with the paths, and with what is missing")


def run(args: argparse.Namespace) -> None:
    from launcher.cli.render import compare_configs  # late: it imports what composes a launch

    selected = select_run(args)
    launch = open_launch(selected.run_dir, selected.launch)
    files = incident.gather(launch, compare_configs)
    name, number = launch.manifest.run, launch.paths.number
    try:
        folder, archive = incident.write(files.texts, args.output.absolute(), name, number)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        message = f"cannot write into {escape(str(args.output))}: {reason}"
        raise UserError(message, hint="another directory: -o DIR") from error
    if args.json:
        paths = {"directory": str(folder), "archive": str(archive), "report": str(folder / incident.REPORT)}
        print_json({"run": name, "launch": number, **paths, "missing": files.missing})
        return
    print(display_path(folder / incident.REPORT))
    print(display_path(archive))
    for reason in files.missing:
        print_stderr(f"missing: {escape(reason)}")

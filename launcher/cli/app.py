"""The `slipway` command: picks the verb, and turns the user's mistakes into messages."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Sequence

from launcher import __version__
from launcher.errors import UserError

# Verb: its module. Only the module of the verb in use is imported, so that each stays quick to start.
_VERBS = {
    "launch": "launcher.cli.launch",
    "status": "launcher.cli.status",
    "follow": "launcher.cli.follow",
    "logs": "launcher.cli.logs",
    "plot": "launcher.cli.plot",
    "data": "launcher.cli.data",
    "sandbox": "launcher.cli.sandbox",
}

_EPILOG = """\
examples:
  slipway launch training=gpt3/126m cluster=bcm --dry-run    show the script, submit nothing
  slipway launch training=gpt3/126m cluster=bcm              submit it
  slipway status                                             the runs in ./results
  slipway sandbox up                                         a throw-away Slurm on this machine

`slipway VERB --help` tells more. Exit codes: 0 done, 1 it went wrong, 2 a mistake in what was asked for.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit code."""
    # Starting up makes a hundred thousand objects that all stay; looking for garbage among them takes longer
    # than rendering a script.
    gc.set_threshold(100_000)
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        args = _parse(given)
        return int(args.run(args))
    except UserError as error:
        print(f"slipway: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (`head`, a closed pager) has had enough. Without this, the flush at exit would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130


def _parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="slipway",
        description="Launches large-language-model pretraining on Slurm.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"slipway {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    chosen = [given[0]] if given and given[0] in _VERBS else list(_VERBS)
    for verb in chosen:
        importlib.import_module(_VERBS[verb]).add_parser(subparsers)
    args, rest = parser.parse_known_args(given)
    if rest:
        # argparse gives up on positionals after an option: `training=gpt3/5b --dry-run cluster=bcm`.
        if not hasattr(args, "overrides") or any(word.startswith("-") for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        args.overrides.extend(rest)
    return args


if __name__ == "__main__":
    sys.exit(main())

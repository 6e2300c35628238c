"""The `slipway` command: picks the verb, and turns the user's mistakes into messages."""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher import __version__
from launcher.errors import UserError, did_you_mean, explain_refusal, one_line
from launcher.secrecy import redacted
from launcher.terminal import escaped_streams

# Verb: its module. Only the module of the verb in use is imported, so that each stays quick to start.
_VERBS = {
    "launch": "launcher.cli.launch",
    "sweep": "launcher.cli.sweep",
    "check": "launcher.cli.check",
    "suggest": "launcher.cli.suggest",
    "doctor": "launcher.cli.doctor",
    "render": "launcher.cli.render",
    "diff": "launcher.cli.diff",
    "show": "launcher.cli.show",
    "list": "launcher.cli.list",
    "status": "launcher.cli.status",
    "follow": "launcher.cli.follow",
    "logs": "launcher.cli.logs",
    "plot": "launcher.cli.plot",
    "history": "launcher.cli.history",
    "cancel": "launcher.cli.cancel",
    "hold": "launcher.cli.hold",
    "release": "launcher.cli.release",
    "attach": "launcher.cli.attach",
    "verify": "launcher.cli.verify",
    "data": "launcher.cli.data",
    "image": "launcher.cli.image",
    "sandbox": "launcher.cli.sandbox",
    "init": "launcher.cli.init",
    "completion": "launcher.cli.completion",
}

# What follows a `--` of theirs is a command of the user's, which argparse must not look into.
_WITH_COMMAND = ("attach",)

_EPILOG = """\
examples:
  slipway list training                                      the model sizes
  slipway show training=gpt3/126m cluster=bcm                the configuration, and where each value is from
  slipway launch training=gpt3/126m cluster=bcm --dry-run    show the script, submit nothing
  slipway launch training=gpt3/126m cluster=bcm              submit it
  slipway sweep training=gpt3/126m training.model.optim.lr=1e-4,3e-4    a job array, a run for each value
  slipway suggest training=gpt3/40b nodes=16                 layouts that fit, the fastest first
  slipway diff training=gpt3/126m cluster=bcm                what launching it again would change
  slipway status                                             how the runs in ./results are
  slipway logs gpt3_126m -f                                  the log of a run, or of a job: slipway logs 4711
  slipway cancel gpt3_126m --save                            save a checkpoint, then end it
  slipway verify gpt3_126m                                   did it do what it was launched for?
  slipway image build nemo                                   a recipe's image, for every node
  slipway sandbox up                                         a throw-away Slurm on this machine
  slipway init                                               a small tree of your own to edit

`slipway VERB --help` tells more. Exit codes: 0 done, 1 it went wrong, 2 a mistake in what was asked for,
3 a job's state cannot be told.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit code."""
    # Starting up makes a hundred thousand objects that all stay; looking for garbage among them takes longer
    # than rendering a script.
    gc.set_threshold(100_000)
    _prepare_streams()
    with escaped_streams():
        _show_warnings()
        return _run(list(sys.argv[1:] if arguments is None else arguments) or ["--help"])


def _run(given: Sequence[str]) -> int:
    try:
        args = _parse(list(given))
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except UserError as error:
        return _tell(error)
    except FileNotFoundError:
        if _stands_somewhere():
            raise
        return _tell(UserError("the current directory was deleted", hint="cd to one that exists"))
    except BrokenPipeError:
        # The reader (`head`, a closed pager) has had enough.
        _drop_output()
        return 141
    except OSError as error:
        told = explain_refusal(error)
        if told is None:
            raise
        if error.filename is None:
            _drop_output()  # it was the output that could not be written
        return _tell(told)
    except KeyboardInterrupt:
        return 130


def _prepare_streams() -> None:
    """Let a program print whatever its outputs are; without one (`>&-`), into nothing."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # as long as the process
    if sys.stderr is None:
        sys.stderr = sys.stdout
    for stream in (sys.stdout, sys.stderr):
        # What cannot be printed is no error: a path that is no UTF-8 stays the bytes that it is, an arrow on
        # a terminal of ASCII is escaped.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            is_utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def _show_warnings() -> None:
    """Print what is logged, such as that a scheduler is waited for, as everything else is told."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("slipway: %(message)s"))
    logger = logging.getLogger("launcher")
    logger.handlers = [handler]
    logger.propagate = False


def _drop_output() -> None:
    """Without this, the flush at exit would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(error: UserError) -> int:
    for mistake in error.mistakes:
        # A scheduler's words and a colleague's file may hold what a terminal would obey.
        print("\n".join(map(one_line, f"slipway: {mistake}".split("\n"))), file=sys.stderr)
    return error.exit_code


def _stands_somewhere() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _parse(given: list[str]) -> argparse.Namespace:
    if not given[0].startswith("-") and given[0] not in _VERBS:
        told = f"{one_line(redacted(given[0]))}: there is no such verb"
        if "=" in given[0]:
            raise UserError(told, hint=f"to launch: slipway launch {shlex.join(map(redacted, given))}")
        raise UserError(told, hint=did_you_mean(given[0], _VERBS))
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
    end = given.index("--") if given[0] in _WITH_COMMAND and "--" in given else len(given)
    args, rest = parser.parse_known_args(given[:end])
    if given[0] in _WITH_COMMAND:
        args.command = given[end + 1 :]
    if rest:
        # argparse gives up on positionals after an option: `training=gpt3/5b --dry-run cluster=bcm`.
        if not hasattr(args, "overrides") or any(word.startswith("-") for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}{_without_dashes(rest)}")
        args.overrides.extend(rest)
    return args


def _without_dashes(words: Sequence[str]) -> str:
    overrides = [word.lstrip("-") for word in words if word.startswith("-") and "=" in word]
    return f"; an override has no dashes in front: {' '.join(overrides)}" if overrides else ""


if __name__ == "__main__":
    sys.exit(main())

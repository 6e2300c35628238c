"""The `slipway` command: picks the verb, and turns the user's mistakes into messages."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from launcher import __version__
from launcher.errors import UserError, did_you_mean, explain_refusal, one_line
from launcher.exit_codes import MISTAKE, UNDER_WAY, WATCHING_ENDED
from launcher.runs.receipts import acts, forget_jobs, submitted_jobs
from launcher.secrecy import MASK, printable, recorded, redacted, secrets_of
from launcher.ui.terminal import escaped_streams

_READER_GONE = 141  # as a shell tells a program that a closed pipe ended
_NAMED = 5  # jobs in a message

# Verb: its module. Only the module of the verb in use is imported, so that each stays quick to start.
_VERBS = {
    "launch": "launcher.cli.launch",
    "sweep": "launcher.cli.sweep",
    "check": "launcher.cli.check",
    "suggest": "launcher.cli.suggest",
    "doctor": "launcher.cli.doctor",
    "gpu-check": "launcher.cli.gpu_check",
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
    "release": "launcher.cli.hold",
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
3 a job's state cannot be told, 4 a job is under way, also where something failed after it was submitted, held
or cancelled.
"""


def main(arguments: Sequence[str] | None = None, started: Callable[[], None] | None = None) -> int:
    """Run one command line; return the exit code.

    Parameters
    ----------
    started
        Called once the modules of the verb are imported.
    """
    # Starting up makes a hundred thousand objects that all stay; looking for garbage among them takes longer
    # than rendering a script.
    gc.set_threshold(100_000)
    if arguments is None:
        use_utf8()
    forget_jobs()
    _prepare_streams()
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    _mask_messages(given)
    with escaped_streams():
        _show_warnings()
        return _run(given, started)


def _run(given: Sequence[str], started: Callable[[], None] | None) -> int:
    try:
        args = _parse(list(given))
        if started is not None:
            started()
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except UserError as error:
        return _failed(_tell(error))
    except OSError as error:
        return _failed(_tell_system(error))
    except KeyboardInterrupt:
        return _failed(WATCHING_ENDED)
    except Exception:
        _tell_done()
        raise


def _failed(code: int) -> int:
    """Return the exit code of a failure: never 2, nothing was done, where a job was submitted or acted on."""
    return UNDER_WAY if _tell_done() and code in (MISTAKE, _READER_GONE) else code


def _tell_done() -> bool:
    """Say what was done to jobs before something failed; return whether anything was."""
    return any([_tell_submitted(), _tell_acts()])


def _tell_acts() -> bool:
    told = [what.format(_jobs(job_ids)) for what, job_ids in acts().items()]
    if told:
        print(f"slipway: done all the same: {'; '.join(told)}", file=sys.stderr)
    return bool(told)


def _jobs(job_ids: Sequence[str]) -> str:
    """Name jobs in a message: the first few of many."""
    further = len(job_ids) - _NAMED
    more = f" and {further} more" if further > 0 else ""
    return f"job{'s' * (len(job_ids) > 1)} {', '.join(job_ids[:_NAMED])}{more}"


def _tell_submitted() -> bool:
    """Name the jobs that were submitted before something failed; return whether there are any."""
    jobs = submitted_jobs()
    if not jobs:
        return False
    print(
        f"slipway: submitted all the same: {_jobs(list(jobs))}",
        *(
            f"  on record in {one_line(str(directory))}"
            for directory in list(dict.fromkeys(jobs.values()))[:_NAMED]
        ),
        f"  how it is: slipway status {shlex.join(list(jobs)[:_NAMED])}",
        sep="\n",
        file=sys.stderr,
    )
    return True


def _tell_system(error: OSError) -> int:
    """Say what the system refused; raise it again if that is nothing that a user can do something about."""
    if isinstance(error, FileNotFoundError):
        if _stands_somewhere():
            _tell_done()
            raise error
        return _tell(UserError("the current directory was deleted", hint="cd to one that exists"))
    if isinstance(error, BrokenPipeError):
        # The reader (`head`, a closed pager) has had enough.
        _drop_output()
        return _READER_GONE
    told = explain_refusal(error)
    if error.filename is None and _is_output_lost():
        _drop_output()
        told = told or UserError(f"the output: {(error.strerror or str(error)).lower()}")
    if told is None:
        _tell_done()
        raise error
    return _tell(told)


def use_utf8() -> None:
    """Start this process again in Python's UTF-8 mode if it encodes paths otherwise.

    The files of a run are UTF-8. Under ``LC_ALL=C PYTHONUTF8=0`` a path in one of them could not be looked at
    if it has letters beyond ASCII.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _prepare_streams() -> None:
    """Let a program print whatever its outputs are; without one (`>&-`), into nothing."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # as long as the process
    if sys.stderr is None:
        sys.stderr = _lossy(sys.stdout)
    for stream in (sys.stdout, sys.stderr):
        # What cannot be printed is no error: a path that is no UTF-8 stays the bytes that it is, an arrow on
        # a terminal of ASCII is escaped.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            is_utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")
    # Work goes on, such as a submission, where what is said of it cannot be written.
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _lossy(sys.stderr)


class _Lossy(io.FileIO):
    """A file that drops what it cannot take."""

    def write(self, data: Any, /) -> int:
        """Write what can be written; report all of it as done."""
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def _lossy(stream: TextIO) -> TextIO:
    raw = _Lossy(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True, write_through=True
    )


class _Masked:
    """The stream of messages, warnings and tracebacks, with secrets masked; all else is the stream's own.

    No `io.TextIOBase`: Python 3.13 flushes one when it is collected, and its stream may be closed by then.

    Parameters
    ----------
    typed
        The secrets of this command line.
    """

    def __init__(self, stream: TextIO, typed: Iterable[str]) -> None:
        self.stream = stream
        self._typed = sorted(typed, key=len, reverse=True)

    def write(self, text: str, /) -> int:
        """Write text, masked; return the length of what was written."""
        for secret in self._typed:
            text = text.replace(secret, MASK)
        return self.stream.write(printable(text))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _mask_messages(given: Sequence[str]) -> None:
    """Let no message have a secret that is known, whoever writes it: we, argparse or Python."""
    stream = sys.stderr.stream if isinstance(sys.stderr, _Masked) else sys.stderr
    typed = {secret for word in given for secret in secrets_of(word)}
    masked = _Masked(stream, typed | {one_line(secret) for secret in typed})
    sys.stderr = cast("TextIO", masked)


def _show_warnings() -> None:
    """Print what is logged, such as that a scheduler is waited for, as everything else is told."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("slipway: %(message)s"))
    logger = logging.getLogger("launcher")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _is_output_lost() -> bool:
    """Tell whether stdout still holds what it could not write."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Let stdout write into nothing: the flush at exit would fail once more."""
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
    for module in dict.fromkeys(_VERBS[verb] for verb in chosen):
        importlib.import_module(module).add_parser(subparsers)
    end = given.index("--") if given[0] in _WITH_COMMAND and "--" in given else len(given)
    args, rest = parser.parse_known_args(given[:end])
    if given[0] in _WITH_COMMAND:
        args.command = given[end + 1 :]
    if rest:
        # argparse gives up on positionals after an option: `training=gpt3/5b --dry-run cluster=bcm`.
        if not hasattr(args, "overrides") or any(word.startswith("-") for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(recorded(rest))}{_without_dashes(rest)}")
        args.overrides.extend(rest)
    return args


def _without_dashes(words: Sequence[str]) -> str:
    overrides = [redacted(word.lstrip("-")) for word in words if word.startswith("-") and "=" in word]
    return f"; an override has no dashes in front: {' '.join(overrides)}" if overrides else ""


if __name__ == "__main__":
    sys.exit(main())

"""The `slipway` command: the table of verbs, and the user's mistakes as messages."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from launcher import __version__
from launcher.cli.options import verb_first
from launcher.cli.verbs import FORMER_VERBS, MODULES, OTHER_OPTIONS, OTHER_WORDS, VERBS
from launcher.config.site_trees import find_config_dirs
from launcher.errors import (
    MISTAKE,
    UNDER_WAY,
    WATCHING_ENDED,
    UserError,
    did_you_mean,
    escape,
    explain_refusal,
    nearest,
)
from launcher.runs.receipts import acts, forget_jobs, submitted_jobs
from launcher.secrecy import MASK, printable, recorded, redacted, secrets_of
from launcher.ui.terminal import ChangedStream, escape_streams, print_message

_READER_GONE = 141  # a shell's code for a program that a closed pipe ended

# The verbs that take a command of the user's after `--`, which argparse must not parse.
_WITH_COMMAND = ("attach",)

_EPILOG = """\
examples:
  slipway list training                                      the model sizes
  slipway show training=gpt3/126m cluster=bcm                the configuration, with the source of each value
  slipway launch training=gpt3/126m cluster=bcm --dry-run    show the script, submit nothing
  slipway launch training=gpt3/126m cluster=bcm              submit it
  slipway sweep training=gpt3/126m training.model.optim.lr=1e-4,3e-4    a job array with a run for each value
  slipway suggest training=gpt3/40b nodes=16                 layouts that fit, the fastest first
  slipway diff training=gpt3/126m cluster=bcm                the changes since the last launch
  slipway status                                             the state of the runs in ./results
  slipway logs gpt3_126m -f                                  the log of a run, or of a job: slipway logs 4711
  slipway cancel gpt3_126m --save                            save a checkpoint, then end the job
  slipway resume gpt3_126m                                   continue from its newest checkpoint
  slipway verify gpt3_126m                                   check that the training completed
  slipway convert gpt3_126m                                  its newest checkpoint, for Hugging Face
  slipway evaluate gpt3_126m@2000                            the held-out loss of a checkpoint
  slipway generate gpt3_126m "import "                       text that its newest checkpoint writes
  slipway image build nemo                                   a recipe's image, for every node
  slipway sandbox up                                         a throw-away Slurm on this machine
  slipway init                                               a small tree of your own to edit
  slipway adopt ~/nemo-launcher/launcher_scripts/conf        a tree of your own from a NeMo launcher's

`slipway VERB --help` has the details. Exit codes: 0 success, 1 failure, 2 a mistake in the command line or
the configuration, 3 the state of a job is unknown, 4 a job is under way, even if something failed after it
was submitted, held or cancelled, 75 a training was interrupted: `slipway resume` it, 130 after Ctrl-C.
"""


def main(arguments: Sequence[str] | None = None, started: Callable[[], None] | None = None) -> int:
    """Run one command line and return its exit code; call `started` once the verb's modules are imported."""
    if arguments is None:
        use_utf8()
    forget_jobs()
    _prepare_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Secrets are masked in all messages: Slipway's, argparse's and Python's.
    stream = sys.stderr.unchanged if isinstance(sys.stderr, _MaskedStream) else sys.stderr
    sys.stderr = cast("TextIO", _MaskedStream(stream, words))
    with escape_streams():
        _show_warnings()
        return _run(words, started)


def _run(words: Sequence[str], started: Callable[[], None] | None) -> int:
    try:
        args = _parse(verb_first(words) or ["--help"])
        if started is not None:
            started()
        if hasattr(args, "config_dirs"):
            args.config_dirs = find_config_dirs(args.config_dirs)
        code = int(args.run(args) or 0)
        sys.stdout.flush()
        return code
    except UserError as error:
        return _failure_code(_print_error(error))
    except OSError as error:
        return _failure_code(_print_system_error(error))
    except KeyboardInterrupt:
        return _failure_code(WATCHING_ENDED)
    except Exception:
        _print_done()
        raise


def _failure_code(code: int) -> int:
    """Return the exit code of a failure: not 2, "nothing was done", if a job was submitted or acted on."""
    return UNDER_WAY if _print_done() and code in (MISTAKE, _READER_GONE) else code


def _print_done() -> bool:
    """Print the jobs submitted or changed before the failure; return True if there are any."""
    jobs = dict(submitted_jobs)
    if jobs:
        print_message(f"submitted before the failure: {_jobs(list(jobs))}")
        for directory in list(dict.fromkeys(jobs.values()))[:_NAMED]:
            print(f"  on record in {escape(str(directory))}", file=sys.stderr)
        print(f"  show the state: slipway status {shlex.join(list(jobs)[:_NAMED])}", file=sys.stderr)
    done = [action.format(_jobs(job_ids)) for action, job_ids in acts.items()]
    if done:
        print_message(f"done before the failure: {'; '.join(done)}")
    return bool(jobs or done)


_NAMED = 5  # jobs in a message


def _jobs(job_ids: Sequence[str]) -> str:
    # Imported late: only a command that failed names jobs here.
    from launcher.ui.tables import join_first

    return f"job{'s' * (len(job_ids) > 1)} {join_first(job_ids, _NAMED)}"


def _print_system_error(error: OSError) -> int:
    """Print the system's refusal; raise the error again if a user cannot resolve it."""
    user_error = explain_refusal(error)
    if isinstance(error, BrokenPipeError):
        # The reader (`head`, a closed pager) has ended.
        _drop_output()
        return _READER_GONE
    if isinstance(error, FileNotFoundError):
        try:
            Path.cwd()
        except FileNotFoundError:
            user_error = UserError("the current directory was deleted", hint="cd to one that exists")
    elif error.filename is None and _is_output_lost():
        _drop_output()
        user_error = user_error or UserError(f"the output: {(error.strerror or str(error)).lower()}")
    if user_error is None:
        _print_done()
        raise error
    return _print_error(user_error)


def use_utf8() -> None:
    """Start this process again in Python's UTF-8 mode if it encodes paths otherwise.

    The files of a run are UTF-8. Under ``LC_ALL=C PYTHONUTF8=0`` a path in one of them could not be opened if
    it has letters beyond ASCII.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _prepare_streams() -> None:
    """Replace missing output streams (`>&-`) by ones into nothing, and let every text be printed."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # as long as the process
    if sys.stderr is None:
        sys.stderr = _make_lossy(sys.stdout)
    for stream in (sys.stdout, sys.stderr):
        # An unprintable text is no error: a path that is not UTF-8 keeps its bytes, an arrow on an ASCII
        # terminal is escaped.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            is_utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")
    # Work such as a submission continues even if its messages cannot be written.
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _make_lossy(sys.stderr)


class _Lossy(io.FileIO):
    """A file that drops output it cannot write."""

    def write(self, data: Any, /) -> int:
        """Write the data if possible; report all of it as written."""
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def _make_lossy(stream: TextIO) -> TextIO:
    raw = _Lossy(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True, write_through=True
    )


class _MaskedStream(ChangedStream):
    """The stream of messages, warnings and tracebacks, with known secrets and those of `words` masked."""

    def __init__(self, stream: TextIO, words: Iterable[str]) -> None:
        super().__init__(stream, self._mask)
        secrets = {secret for word in words for secret in secrets_of(word)}
        self._typed = sorted(secrets | set(map(escape, secrets)), key=len, reverse=True)

    def _mask(self, text: str) -> str:
        for secret in self._typed:
            text = text.replace(secret, MASK)
        return printable(text)


def _show_warnings() -> None:
    """Print logged warnings, such as a scheduler that does not answer, like every other message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("slipway: %(message)s"))
    logger = logging.getLogger("launcher")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _is_output_lost() -> bool:
    """Return True if stdout still has text that it could not write."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Redirect stdout to nothing: the flush at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(error: UserError) -> int:
    for mistake in error.mistakes:
        # A scheduler's message and another user's file may have control sequences.
        print_message("\n".join(map(escape, str(mistake).split("\n"))))
    return error.exit_code


class VerbParser(argparse.ArgumentParser):
    """The parser of the command and of each verb; its help keeps the line breaks of its texts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Name the newest runs where none is named; leave other mistakes to argparse."""
        if "arguments are required: RUN" not in message:
            super().error(message)
        # Imported late: few command lines leave it out.
        from launcher.cli.runs import RUN_HELP, hint_newest_runs

        raise UserError(f"no RUN: {RUN_HELP}", hint=hint_newest_runs(Path("results")))


def _accept_trees(parser: argparse.ArgumentParser) -> None:
    """Let every verb take `--config-dir`, which a site's wrapper passes to all; most read no tree."""
    for action in parser._actions:
        for below in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            _accept_trees(below)
    if "--config-dir" not in parser._option_string_actions:
        parser.add_argument("--config-dir", metavar="DIR", help=argparse.SUPPRESS)


def _parse(words: list[str]) -> argparse.Namespace:
    if words[0] == "help":
        words = [*words[1:2], "--help"]
    elif words[0] in ("version", "-v", "-V"):
        words = ["--version"]
    verb = words[0]
    if verb.startswith("-") and verb not in ("-h", "--help", "--version"):
        name = escape(redacted(verb)).partition("=")[0]
        raise UserError(f"{name}: options stand after the verb", hint=f"slipway VERB … {name} …")
    if not verb.startswith("-") and verb not in VERBS:
        message = f"{escape(redacted(verb))}: there is no such verb"
        meant = OTHER_WORDS.get(verb.lower())
        if "=" in verb:
            raise UserError(message, hint=f"to launch: slipway launch {shlex.join(map(redacted, words))}")
        if meant is not None:
            rest = [escape(shlex.quote(redacted(word))) for word in words[1:]]
            raise UserError(message, hint=f"did you mean: slipway {' '.join([meant, *rest])}")
        raise UserError(message, hint=FORMER_VERBS.get(verb) or did_you_mean(verb, VERBS))
    parser = VerbParser(
        prog="slipway",
        description="Launch and monitor large-language-model pretraining on Slurm.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"slipway {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    if verb in VERBS:
        add_verbs(subparsers, [verb])
        _accept_trees(subparsers.choices[verb])
    else:  # the help of all verbs needs none of their modules
        for name, summary in VERBS.items():
            subparsers.add_parser(name, help=summary)
    end = words.index("--") if verb in _WITH_COMMAND and "--" in words else len(words)
    args, rest = parser.parse_known_args(words[:end])
    if verb in _WITH_COMMAND:
        args.command = words[end + 1 :]
    if rest:
        # argparse gives up on positionals after an option: `training=gpt3/5b --dry-run cluster=bcm`.
        if not hasattr(args, "overrides") or any(word.startswith("-") for word in rest):
            raise _explain_unknown_arguments(rest, _find_innermost(subparsers.choices[verb], words[1:]))
        args.overrides.extend(rest)
    return args


def add_verbs(parsers: argparse._SubParsersAction[Any], verbs: Iterable[str] = VERBS) -> None:
    """Add the parsers of verbs; only their modules are imported, so that every verb starts quickly."""
    for name in dict.fromkeys(MODULES.get(verb, verb) for verb in verbs):  # one may have several verbs
        importlib.import_module(f"launcher.cli.{name}").add_parser(parsers)


def _find_innermost(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the verb below a verb that the words name, such as `show` of `data`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return next((action.choices[word] for word in words if word in action.choices), parser)
    return parser


def _explain_unknown_arguments(words: Sequence[str], parser: argparse.ArgumentParser) -> UserError:
    """Return the mistake of arguments that a verb does not take, with the nearest option."""
    # argparse counts the overrides before an unknown option as unknown, too.
    words = [word for word in words if word.startswith("-")] or words
    message = f"unrecognized arguments: {' '.join(recorded(words))}"
    takes_overrides = any(action.dest == "overrides" for action in parser._actions)
    names = [word.partition("=")[0] for word in words if takes_overrides]
    if other := next(filter(OTHER_OPTIONS.__contains__, names), None):
        return UserError(message, hint=f"in place of {other}: {OTHER_OPTIONS[other]}")
    bare = {word.lstrip("-"): word.partition("=")[0] for word in words if word.startswith("-")}
    # No key has a dash in it, and most options have.
    overrides = [redacted(text) for text in bare if "=" in text and "-" not in text.partition("=")[0]]
    if overrides:
        return UserError(message, hint=f"write overrides without dashes: {' '.join(overrides)}")
    options = [option for action in parser._actions for option in action.option_strings]
    near = [match for name in bare.values() if name.startswith("--") for match in nearest(name, options)]
    numbered = (action.option_strings[0] for action in parser._actions if action.metavar == "N")
    near += [f"{option} {words[0]}" for option in numbered if words[0].isdecimal()][:1]
    hint = f"did you mean {' or '.join(near)}?" if near else f"{parser.prog} --help lists the options"
    return UserError(message, hint=hint)


if __name__ == "__main__":
    sys.exit(main())

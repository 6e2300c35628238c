"""Prepare data, and read them: ``python -m slipway.corpus PHASE --config-path DIR --config-name FILE``.

Exit codes: 0 done or nothing to do, 2 a mistake of the user, 130 interrupted by Ctrl-C, 1 anything else.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slipway.common.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER_ERROR, UserError, escape
from slipway.common.extras import install_command
from slipway.corpus import errors, spec

# A disk, a quota or a file that is as large as it may be.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_LIBRARIES = {"numpy": "numpy", "yaml": "pyyaml", "tokenizers": "tokenizers"}

_EXAMPLES = """examples:
  python -m slipway.corpus run --config-path . --config-name preparation.yaml
  python -m slipway.corpus fetch --config-path . --config-name preparation.yaml
  python -m slipway.corpus tokenize --config-path . --config-name preparation.yaml --task 0 --tasks 50
  python -m slipway.corpus merge --config-path . --config-name preparation.yaml
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a phase; return the exit code."""
    options = _parse(arguments)
    # tokenizers reads it from the environment, which a spawned worker inherits.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        if options.phase in _READING:
            return _READING[options.phase](options)
        _check_libraries()
        preparation = spec.load(options.config_path, options.config_name)
        _PHASES[options.phase](preparation, options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    except errors.OutsideError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        print("interrupted; the same command continues from here", file=sys.stderr, flush=True)
        return errors.EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in _FULL:
            raise
        places = f"{preparation.work_dir} or {preparation.output_prefix.parent}"
        print(
            f"error: {error.strerror}: {escape(str(error.filename or places))}; finished work is kept: make "
            "room and run it again",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_FAILURE
    return EXIT_OK


def _check_libraries() -> None:
    """Raise UserError if a library that every preparation needs is missing, without importing it."""
    missing = [package for module, package in _LIBRARIES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(
            f"{sys.executable} lacks {', '.join(missing)}: install them there "
            f"({install_command('data')}), or choose an interpreter or an image that has them "
            "(cluster.python=..., container=...)"
        )


# Libraries are imported by the phases: `--help` and errors of a configuration need no library.
def _fetch(preparation: spec.Preparation, options: argparse.Namespace) -> None:
    from slipway.corpus import duplicates
    from slipway.corpus.cleaning import Cleaner
    from slipway.corpus.manifest import is_complete
    from slipway.corpus.plan import load_plan
    from slipway.corpus.sources import collect
    from slipway.corpus.tokenizers import obtain

    # A mistake ends the first job rather than each task of the next.
    Cleaner(preparation.filters)
    duplicates.check(preparation.deduplicate.minhash)
    files = collect(preparation)
    obtain(preparation, files)
    is_complete(load_plan(preparation))


def _tokenize(preparation: spec.Preparation, options: argparse.Namespace) -> None:
    from slipway.corpus.plan import load_plan
    from slipway.corpus.tokenizing import tokenize

    task, tasks = (options.task, options.tasks) if options.phase == "tokenize" else (0, 1)
    tokenize(load_plan(preparation), task, tasks)


def _merge(preparation: spec.Preparation, options: argparse.Namespace) -> None:
    from slipway.corpus.merging import merge
    from slipway.corpus.plan import load_plan

    merge(load_plan(preparation))


def _run(preparation: spec.Preparation, options: argparse.Namespace) -> None:
    _fetch(preparation, options)
    _tokenize(preparation, options)
    _merge(preparation, options)


_PHASES: dict[str, Callable[[spec.Preparation, argparse.Namespace], None]] = {
    "fetch": _fetch,
    "tokenize": _tokenize,
    "merge": _merge,
    "run": _run,
}


def _lint(options: argparse.Namespace) -> int:
    from slipway.corpus.lint import print_reports

    is_whole = print_reports(options.paths, options.format, options.text_key, options.tokenizer)
    return EXIT_OK if is_whole else EXIT_FAILURE


def _show(options: argparse.Namespace) -> int:
    from slipway.corpus.datasets import read_document

    json.dump(read_document(options.prefix, options.document, options.tokenizer), sys.stdout)
    return EXIT_OK


def _decode(options: argparse.Namespace) -> int:
    """Decode what stdin holds: ``{"tokenizer": [...], "ids": [[...]]}``; the texts are a JSON list."""
    from slipway.corpus.tokenizers import open_decoder

    question = json.load(sys.stdin)
    decoder = open_decoder([Path(path) for path in question["tokenizer"]])
    json.dump([decoder.decode(ids) for ids in question["ids"]], sys.stdout)
    return EXIT_OK


_READING: dict[str, Callable[[argparse.Namespace], int]] = {"lint": _lint, "show": _show, "decode": _decode}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slipway.corpus",
        description="Prepare data: from text, JSONL, Parquet, Wikipedia dumps or tar shards to tokens.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    phases = parser.add_subparsers(dest="phase", required=True, metavar="PHASE")
    for name, text in (
        ("fetch", "find or download the sources and the tokenizer, and list the units of work"),
        ("tokenize", "encode units into shards; done ones are skipped"),
        ("merge", "deduplicate, and join the shards"),
        ("run", "all three on this machine"),
    ):
        phase = phases.add_parser(name, help=text, description=text)
        phase.add_argument("--config-path", type=Path, required=True, help="directory of the configuration")
        phase.add_argument("--config-name", required=True, help="its file")
        if name == "tokenize":
            phase.add_argument("--task", type=_count, default=0, help="task of an array, from 0")
            phase.add_argument("--tasks", type=_count, default=1, help="tasks that the array has")
    lint = phases.add_parser("lint", help="check data sets and sources")
    lint.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a prefix, a file, or a directory")
    lint.add_argument("--format", default="auto", help="of source files (default: auto)")
    lint.add_argument("--text-key", default="text", help="key or column of the text (default: text)")
    show = phases.add_parser("show", help="print a document of a data set as a JSON object")
    show.add_argument("prefix", type=Path, help="path of the .bin and .idx without extension")
    show.add_argument("--document", type=int, default=0, help="its number, from 0; -1 is the last one")
    for reading in (lint, show):
        reading.add_argument("--tokenizer", type=Path, help="directory or file of the tokenizer")
    phases.add_parser("decode", help="print the texts of the tokens on stdin, both as JSON")
    options = parser.parse_args(arguments)
    if options.phase == "tokenize" and options.task >= options.tasks:
        parser.error(f"argument --task: {options.task}: expected less than --tasks {options.tasks}")
    return options


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())

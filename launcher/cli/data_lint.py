"""`slipway data lint`, `show` and `plot`: the contents and the faults of data files.

The files are read in other processes, as this needs numpy.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from launcher.cli.options import Verbs, add_option, add_verb
from launcher.errors import (
    DONE,
    MISTAKE,
    WENT_WRONG,
    UserError,
    escape,
    explain_os_error,
    nearest_files,
)
from launcher.images.progress import ImageProgress, show_progress
from launcher.runs.paths import PACKAGE
from launcher.ui.plotting import draw, read_counts, write_png
from launcher.ui.tables import print_lines, print_listing, print_pairs, print_styled
from launcher.ui.terminal import print_plot
from slipway.arithmetic.indexed import manifest_path
from slipway.common.extras import install_command

_LINT = """\
Check data before a training reads them: the .bin and .idx of a data set with their companion files, and the
sources that it is made from: text, JSONL, Parquet, Wikipedia dumps and tar shards, compressed or not.

  data sets  sizes, order of the sequences and documents, type of the tokens; their ids within the vocabulary
             of --tokenizer, or of the manifest; sha256, counts and origins against the manifest
  sources    everything that makes a record no document: bytes that are not UTF-8, lines that are no JSON, no
             text under --text-key, damaged compression; empty texts, ids that come twice, files that are
             copies of others

Needs the libraries of the extra `data`.

examples:
  slipway data lint raw/*.jsonl.zst --text-key content
  slipway data lint data/corpus_text_document --tokenizer data/bpe
  slipway data lint data/                               all data sets and files below
  slipway data lint raw/ --json | jq -r '.[] | select(.problems != {}) | .path'

exit code:
  0  nothing is wrong
  1  something is
  2  a mistake in the arguments, or a library is missing"""

_SHOW = """\
Print one document of a data set: its text, and the source file that it is from.

The tokenizer is that of the manifest unless --tokenizer names one: the directory of vocab.json and
merges.txt, of a tokenizer.json or of a SentencePiece model. Without any, the ids of the tokens are printed.

examples:
  slipway data show data/corpus_text_document                     the first document
  slipway data show data/corpus_text_document --document 4711
  slipway data show data/corpus_text_document --document -1 --tokenizer data/bpe
  slipway data show data/corpus_text_document --json | jq .tokens

exit code:
  0  printed
  2  there is no such data set, document or tokenizer, or a library is missing"""


def add_parsers(verbs: Verbs) -> None:
    lint = add_verb(verbs, "lint", run_lint, "check data sets and source files", _LINT)
    lint.add_argument("paths", nargs="+", metavar="PATH", help="a data set's prefix, a file, or a directory")
    add_option(lint, "--format FORMAT", "format of the source files (default: by name and content)")
    add_option(lint, "--text-key KEY", "key or column of the text (default: text)")
    show = add_verb(verbs, "show", run_show, "print a document of a data set as text", _SHOW)
    add_option(show, "--document N", "from 0; -1 is the last one", default=0)
    for parser, content in ((lint, "a list with an object for each file"), (show, "one object")):
        add_option(parser, "--tokenizer DIR", "directory or file of the tokenizer", type=str)
        add_option(parser, "--json", f"print {content}")
    text = "plot the lengths of documents, and the reasons for which they were dropped"
    plot = add_verb(verbs, "plot", run_plot, text, _PLOT)
    for parser in (show, plot):
        parser.add_argument("prefix", metavar="PREFIX", help="path of the .bin and .idx without extension")
    add_option(plot, "-o --output FILE", "PNG file (default: PREFIX.png)")
    add_option(plot, "--no-terminal", "no plot in the terminal")
    add_option(plot, "--json", "print the counts as one object, without plots")


def run_lint(args: argparse.Namespace) -> int:
    options = {"--format": args.format, "--text-key": args.text_key, "--tokenizer": args.tokenizer}
    words = [word for name, value in options.items() if value is not None for word in (name, value)]
    with (
        show_progress(quiet=args.json) as progress,
        answers("slipway.corpus", ["lint", *words, "--", *args.paths]) as lines,
    ):
        reports = list(_reports(lines, progress))
    if args.json:
        print(json.dumps(reports, indent=2, ensure_ascii=False))
    else:
        _print_reports(reports)
    return WENT_WRONG if any(report["problems"] for report in reports) else DONE


def _reports(lines: Iterator[str], progress: ImageProgress) -> Iterator[dict[str, Any]]:
    """Yield the reports, and show which file is being read."""
    path = None
    for line in lines:
        content = json.loads(line)
        if "progress" not in content:
            yield content
            continue
        if content["progress"] != path:
            path = content["progress"]
            progress.step(f"reading {escape(path)}", content["total"])
        if content["total"]:
            progress.advance(content["done"])
    progress.done()


def _print_reports(reports: list[dict[str, Any]]) -> None:
    rows = []
    for report in reports:
        counts = ("-" if report[name] is None else f"{report[name]:,}" for name in ("documents", "tokens"))
        cells = (escape(report["path"]), report["kind"], *counts)
        rows += [(*cells, escape(result)) for result in _results(report)]
    print_listing(("FILE", "FORMAT", "DOCUMENTS", "TOKENS", "RESULT"), rows)
    wrong = sum(bool(report["problems"]) for report in reports)
    notes = dict.fromkeys(note for report in reports for note in report["notes"])
    verdict = f"{len(reports)} checked, {wrong or 'none'} with problems"
    print_styled([(("", ""),), ((verdict, "bold red" if wrong else "green"),)])
    print_lines(*(f"not checked: {note}" for note in notes))


def _results(report: Mapping[str, Any]) -> list[str]:
    """Return a text for each problem of a file, or ``ok``."""
    texts = []
    for reason, problem in report["problems"].items():
        places, count = problem["first"], problem["count"]
        times = f" ({count:,} times)" if count > 1 else ""
        more = ", ..." if count > len(places) else ""
        where = f": {report['place']} {', '.join(map(str, places))}{more}" if places else ""
        texts.append(f"{reason}{times}{where}")
    return texts or ["ok"]


def run_show(args: argparse.Namespace) -> int:
    words = ["show", args.prefix, f"--document={args.document}"]
    # The program runs where the user is, so that relative paths mean the same.
    words += ["--tokenizer", str(Path(args.tokenizer))] if args.tokenizer is not None else []
    answer = ask("slipway.corpus", words)
    if args.json:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
        return DONE
    pairs = [
        ("data set", answer["prefix"]),
        ("document", f"{answer['document']:,} of {answer['documents']:,}"),
        ("tokens", f"{answer['tokens']:,}"),
    ]
    if answer["source"] is not None:
        pairs.append(("source", f"{answer['source']}, at {answer['offset']:,}"))
    print_pairs("document", pairs)
    text = " ".join(map(str, answer["ids"])) if answer["text"] is None else answer["text"]
    print_lines("", *text.split("\n"))
    return DONE


# --- programs that read data

_PREFIX = "error: "
# A library of an extra; without a part of ours something is broken.
_MISSING = re.compile(r"^ModuleNotFoundError: No module named '(?!slipway|launcher)([\w.]+)'$", re.MULTILINE)


def ask(module: str, arguments: Sequence[str], question: object = None) -> Any:
    """Return the answer of a program: the JSON that it prints; raise the errors of `answers`."""
    with answers(module, arguments, question) as lines:
        text = "".join(lines)
    return json.loads(text)


@contextmanager
def answers(
    module: str, arguments: Sequence[str], question: object = None, python: str = sys.executable
) -> Iterator[Iterator[str]]:
    """Start a program and yield its lines as they come; end it if they are not read to the end.

    Raise UserError if it ends with a mistake of the user's, RuntimeError with its stderr if it failed.
    """
    # The packages' directory, and not the working one (-P): paths in the arguments are the user's.
    paths = filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")])
    # A file: a pipe would fill up while nothing reads it.
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [python, "-P", "-m", module, *arguments],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL if question is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise explain_os_error(error, Path(python), "--python", verb="run") from error
        assert process.stdout is not None
        try:
            if process.stdin is not None:
                # It may end before it has read all, and says why.
                with suppress(BrokenPipeError), process.stdin as stream:
                    stream.write(json.dumps(question))
            yield iter(process.stdout)
        except BaseException:
            process.kill()
            raise
        finally:
            process.stdout.close()
            code = process.wait()
        errors.seek(0)
        message = errors.read().decode(errors="replace").strip()
    # Warnings may come before it.
    _, prefix, mistake = f"\n{message}".rpartition(f"\n{_PREFIX}")
    if code == MISTAKE and prefix:
        raise UserError(mistake)
    missing = _MISSING.search(message)
    if code and missing:
        raise UserError(f"{python} lacks {missing[1]}", hint=install_command("data", python))
    if code not in (DONE, WENT_WRONG) or (code and message):
        raise RuntimeError(f"python -m {module} ended with exit code {code}:\n{message}")


# --- plot

_SUFFIXES = (".manifest.json", ".bin", ".idx")
_PLOT = """\
Plot the documents of a data set that `slipway data` prepared: by length, and those that were dropped by
reason, in the terminal and as a PNG. The numbers are those of PREFIX.manifest.json, all splits together.

examples:
  slipway data plot data/corpus_text_document                    the plots, and PREFIX.png
  slipway data plot data/corpus_text_document -o lengths.png --no-terminal
  slipway data plot data/corpus_text_document --json             the numbers, without plots

exit code:
  0  printed
  2  there is no such manifest, or the plot cannot be written"""


def run_plot(args: argparse.Namespace) -> int:
    ending = next((suffix for suffix in _SUFFIXES if args.prefix.endswith(suffix)), "")
    prefix = Path(args.prefix.removesuffix(ending))
    manifest = _read(prefix)
    data = read_counts(prefix.name, manifest)
    if args.json:
        keys = ("counts", "lengths", "samples")
        print(json.dumps({key: manifest.get(key) for key in keys}, indent=2, ensure_ascii=False))
        if args.output is not None:
            write_png(args.output, data)
        return DONE
    pairs = [("documents", f"{data.documents:,}"), ("tokens", f"{data.tokens:,}")]
    if data.documents:
        pairs.append(("mean length", f"{data.tokens / data.documents:,.1f} tokens"))
    print_pairs(data.name, [*pairs, ("dropped", f"{sum(data.dropped.values()):,}")])
    if not args.no_terminal:
        print_plot(lambda width, coloured: draw(data, width, coloured=coloured))
    path = args.output or Path(f"{prefix}.png")
    write_png(path, data)
    print(f"\nplot: {path}")
    return DONE


def _read(prefix: Path) -> dict[str, Any]:
    path = manifest_path(prefix)
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("expected an object")
    except FileNotFoundError:
        near = nearest_files(path, ".manifest.json")
        hint = near or "only data that `slipway data` prepared have a manifest"
        raise UserError(f"{path}: there is no such file", hint=hint) from None
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except ValueError as error:
        raise UserError(f"{path}: not a manifest of data: {error}") from error
    return content

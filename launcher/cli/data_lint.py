"""`slipway data lint` and `slipway data show`: what data files hold, and what is wrong with them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.cli.data_programs import answers, ask
from launcher.errors import one_line
from launcher.exit_codes import DONE, WENT_WRONG
from launcher.images.progress import ImageProgress, show_progress
from launcher.ui.tables import print_listing, print_pairs, print_styled

_LINT = """\
Check data before a training reads them: the .bin and .idx of a data set with the files beside them, and the
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


def add_parsers(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs."""
    lint = verbs.add_parser(
        "lint",
        help="check data sets and source files",
        description=_LINT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    lint.add_argument("paths", nargs="+", metavar="PATH", help="a data set's prefix, a file, or a directory")
    lint.add_argument("--format", help="format of the source files (default: by name and content)")
    lint.add_argument("--text-key", metavar="KEY", help="key or column of the text (default: text)")
    _add_tokenizer(lint)
    lint.add_argument("--json", action="store_true", help="print a list with an object for each file")
    lint.set_defaults(run=run_lint)
    show = verbs.add_parser(
        "show",
        help="print a document of a data set as text",
        description=_SHOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument("prefix", metavar="PREFIX", help="path of the .bin and .idx without extension")
    show.add_argument("--document", type=int, default=0, metavar="N", help="from 0; -1 is the last one")
    _add_tokenizer(show)
    show.add_argument("--json", action="store_true", help="print one object")
    show.set_defaults(run=run_show)


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", metavar="DIR", help="directory or file of the tokenizer")


def run_lint(args: argparse.Namespace) -> int:
    """Print a line for each file; return 1 if something is wrong with one."""
    options = {"--format": args.format, "--text-key": args.text_key, "--tokenizer": args.tokenizer}
    words = [word for name, value in options.items() if value is not None for word in (name, value)]
    with (
        show_progress(quiet=args.json) as progress,
        answers("corpus.lint", [*words, "--", *args.paths]) as lines,
    ):
        reports = list(_reports(lines, progress))
    if args.json:
        print(json.dumps(reports, indent=2, ensure_ascii=False))
    else:
        _print_reports(reports)
    return WENT_WRONG if any(report["problems"] for report in reports) else DONE


def _reports(lines: Iterator[str], progress: ImageProgress) -> Iterator[dict[str, Any]]:
    """Yield the reports, and show what is being read."""
    path = None
    for line in lines:
        content = json.loads(line)
        if "progress" not in content:
            yield content
            continue
        if content["progress"] != path:
            path = content["progress"]
            progress.step(f"reading {one_line(path)}", content["total"])
        if content["total"]:
            progress.advance(content["done"])
    progress.done()


def _print_reports(reports: list[dict[str, Any]]) -> None:
    rows = [
        (
            one_line(report["path"]),
            report["kind"],
            _number(report["documents"]),
            _number(report["tokens"]),
            one_line(result),
        )
        for report in reports
        for result in _results(report)
    ]
    print_listing(("FILE", "FORMAT", "DOCUMENTS", "TOKENS", "RESULT"), rows)
    wrong = sum(bool(report["problems"]) for report in reports)
    notes = dict.fromkeys(note for report in reports for note in report["notes"])
    style = "bold red" if wrong else "green"
    verdict = f"{len(reports)} checked, {wrong or 'none'} with problems"
    print_styled([(("", ""),), ((verdict, style),), *(((f"not checked: {note}", ""),) for note in notes)])


def _results(report: Mapping[str, Any]) -> list[str]:
    """Return a text for each problem of a file; ``ok`` if there is none."""
    texts = []
    for reason, problem in report["problems"].items():
        places, count = problem["first"], problem["count"]
        text = reason
        if count > 1:
            text += f" ({count:,} times)"
        if places:
            more = ", ..." if count > len(places) else ""
            text += f": {report['place']} {', '.join(map(str, places))}{more}"
        texts.append(text)
    return texts or ["ok"]


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def run_show(args: argparse.Namespace) -> int:
    """Print a document."""
    words = [args.prefix, f"--document={args.document}"]
    # The program runs where the user is, so that relative paths mean the same.
    words += ["--tokenizer", str(Path(args.tokenizer))] if args.tokenizer is not None else []
    answer = ask("corpus.show", words)
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
    text = answer["text"]
    if text is None:
        text = " ".join(map(str, answer["ids"]))
    print_styled([(("", ""),), *(((line, ""),) for line in text.split("\n"))])
    return DONE

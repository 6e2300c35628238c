"""`slipway data`: prepare training data, on this machine by default or as jobs of a cluster."""

from __future__ import annotations

import argparse
import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from launcher.cli import data_audit, data_lint
from launcher.cli.launch import draft_and_launch
from launcher.cli.logs import follow_to_end
from launcher.cli.requests import add_launch_options
from launcher.config.overrides import hydra_value
from launcher.errors import UserError, file_mode
from launcher.jobs.launches import open_launch

_EXIT_CODES = """
exit code:
  0    the files were written; with --dry-run: the script was printed
  1    the job failed; its log, above, says why
  2    a mistake in the command line or the configuration, before there is a job
  130  Ctrl-C; the job continues, here or on the cluster: slipway cancel RUN
"""

_TOKENIZE_EPILOG = f"""\
examples:
  slipway data tokenize books/ --pattern '*.txt' --vocab-size 32000
  slipway data tokenize /usr/lib/python3.11 --pattern '*.py' data_dir=/shared/data
  slipway data tokenize corpus/ cluster=bcm cluster.partition=cpu      as a job of the cluster

Writes DATA_DIR/bpe/vocab.json and merges.txt (an existing tokenizer is used, not trained again) and
DATA_DIR/corpus_text_document.bin and .idx, which training=... reads by default. Other formats than text,
and sources on servers: slipway data prepare.
{_EXIT_CODES}"""

_PREPARE_EPILOG = f"""\
examples:
  slipway data prepare corpus.jsonl.zst
  slipway data prepare 'shards/*.jsonl' --text-key content --vocab-size 32000
  slipway data prepare https://dumps.wikimedia.org/simplewiki/latest/simplewiki-latest-pages-articles.xml.bz2
  slipway data prepare s3://bucket/c4/ --pattern '*.json.gz' --format jsonl --tokenizer-dir gpt2/
  slipway data prepare s3://bucket/c4/ cluster=bcm cluster.partition=cpu --tasks 50

Downloads what is on servers, reads text, JSONL, Parquet, Wikipedia dumps and tar shards, compressed or not,
and writes DATA_DIR/corpus_text_document.bin and .idx, which training=... reads by default, with a manifest of
their sources beside them. The same again does only what is missing. With --tasks on a cluster, three jobs
follow each other: one that downloads, an array that tokenizes, one that merges.
{_EXIT_CODES}"""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

# By the name of the key: the type of its value, and its help.
_OPTIONS = {
    "pattern": (str, "names of the files to take from a directory, such as *.jsonl.gz"),
    "vocab_size": (int, "size of a new tokenizer (default: 2048)"),
    "output_prefix": (Path, "path of the .bin and .idx without extension"),
    "tokenizer_dir": (Path, "directory of vocab.json and merges.txt"),
    "max_files": (int, "read at most so many files"),
    "max_bytes": (int, "read at most so many bytes of text"),
    "workers": (int, "encoding processes (default: 2)"),
}
_PREPARE_OPTIONS = {
    "text_key": (str, "field of JSONL, or column of Parquet, that holds the text (default: text)"),
    "tasks": (int, "tasks of a job array, on a cluster (default: 1)"),
    "on_error": (str, "raise (the default) at a record that cannot be read, or skip it"),
}
_FORMATS = ("txt", "jsonl", "parquet", "wikipedia", "tar")
# Formats with a choice of the group of their own; any takes all formats.
_CHOICES = {"txt": "text", "jsonl": "jsonl", "parquet": "parquet", "wikipedia": "wikipedia"}
_ANY = "mixed"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "data",
        help="prepare training data, and look at it",
        epilog="example: slipway data prepare corpus.jsonl.zst --vocab-size 32000",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    prepare = verbs.add_parser(
        "prepare",
        help="bring text, JSONL, Parquet, Wikipedia dumps or tar shards to Megatron's .bin/.idx",
        description="Fetch, read, clean and tokenize sources; write them as Megatron's .bin/.idx.",
        epilog=_PREPARE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_words(prepare, "a file, directory, glob or URL, or an override such as cluster=bcm")
    prepare.add_argument("--format", help=f"{', '.join(_FORMATS)}; by default told from each file")
    _add_options(prepare, {**_OPTIONS, **_PREPARE_OPTIONS})
    add_launch_options(prepare)
    prepare.set_defaults(run=run_prepare)
    tokenize = verbs.add_parser(
        "tokenize",
        help="train a BPE tokenizer and write text files as Megatron's .bin/.idx",
        description="Train a byte-level BPE tokenizer on text files and write them as Megatron's .bin/.idx.",
        epilog=_TOKENIZE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_words(tokenize, "a file, a directory, or an override such as cluster=bcm")
    _add_options(tokenize, _OPTIONS)
    add_launch_options(tokenize)
    tokenize.set_defaults(run=run_tokenize)
    for add in (data_audit.add_parsers, data_lint.add_parsers, data_lint.add_plot):
        add(verbs)


def _add_words(parser: argparse.ArgumentParser, text: str) -> None:
    # One list for both, as the app knows it: words may stand on both sides of an option.
    parser.add_argument("overrides", nargs="*", metavar="INPUT", help=text)


def _add_options(parser: argparse.ArgumentParser, options: Mapping[str, tuple[type, str]]) -> None:
    for name, (kind, text) in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)


def run_tokenize(args: argparse.Namespace) -> int:
    """Prepare text files, and show the log until the end; return the exit code."""
    return _run(args, ["data_preparation=text"], _OPTIONS)


def run_prepare(args: argparse.Namespace) -> int:
    """Prepare sources of any format, and show the logs of the jobs until the end; return the exit code."""
    choice = [f"data_preparation={_CHOICES.get(args.format, _ANY)}"]
    if args.format is not None:
        choice.append(f"data_preparation.format={hydra_value(args.format)}")
    return _run(args, choice, {**_OPTIONS, **_PREPARE_OPTIONS})


def _run(args: argparse.Namespace, choice: Sequence[str], options: Iterable[str]) -> int:
    overrides = [text for text in args.overrides if _is_override(text)]
    inputs = [text for text in args.overrides if text not in overrides]
    _check_inputs(inputs, overrides)
    defaults = ["stages=[data_preparation]", "cluster=local", *choice]
    if inputs:
        listed = ",".join(map(hydra_value, inputs))
        defaults.append(f"data_preparation.inputs=[{listed}]")
    for name in options:
        value = getattr(args, name)
        if value is not None:
            text = str(value.absolute() if isinstance(value, Path) else value)
            defaults.append(
                f"data_preparation.{name}={text if isinstance(value, int) else hydra_value(text)}"
            )
    for launched in draft_and_launch(args, [*defaults, *overrides]):
        code = follow_to_end(open_launch(launched.paths.run_dir, launched.paths.number))
        if code:
            return code
    return 0


def _is_override(text: str) -> bool:
    """Return True for ``cluster=bcm``, unless a file of that name exists; a URL may hold a ``=`` too."""
    return "=" in text and not _URL.match(text) and not Path(text).exists()


def _check_inputs(inputs: list[str], overrides: list[str]) -> None:
    if not inputs and not any(text.startswith("data_preparation.inputs=") for text in overrides):
        raise UserError("no input", hint="name the files or directories to prepare")
    for text in inputs:
        if not (_URL.match(text) or glob.has_magic(text) or file_mode(Path(text))):
            raise UserError(f"{text}: no such file or directory", hint="an override has the form KEY=VALUE")

"""`slipway data`: prepare training data, on this machine by default or as a job of a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.cli import data_audit, data_lint
from launcher.cli.launch import draft_and_launch
from launcher.cli.logs import follow_to_end
from launcher.cli.requests import add_launch_options
from launcher.config.overrides import hydra_value
from launcher.errors import UserError, file_mode
from launcher.jobs.launches import open_launch

_EPILOG = """\
examples:
  slipway data tokenize books/ --pattern '*.txt' --vocab-size 32000
  slipway data tokenize /usr/lib/python3.11 --pattern '*.py' data_dir=/shared/data
  slipway data tokenize corpus/ cluster=bcm cluster.partition=cpu      as a job of the cluster

Writes DATA_DIR/bpe/vocab.json and merges.txt (an existing tokenizer is used, not trained again) and
DATA_DIR/corpus_text_document.bin and .idx, which training=... reads by default.

exit code:
  0    the files were written; with --dry-run: the script was printed
  1    it failed
  2    a mistake in the command line or the configuration
  130  Ctrl-C; a job of a cluster continues
"""


_OPTIONS = ("pattern", "vocab_size", "output_prefix", "tokenizer_dir", "max_files", "max_bytes", "workers")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "data",
        help="prepare training data from text files",
        epilog="example: slipway data tokenize books/ --pattern '*.txt' --vocab-size 32000",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    tokenize = verbs.add_parser(
        "tokenize",
        help="train a BPE tokenizer and write text files as Megatron's .bin/.idx",
        description="Train a byte-level BPE tokenizer on text files and write them as Megatron's .bin/.idx.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tokenize.add_argument(
        # One list for both, as the app knows it: words may stand on both sides of an option.
        "overrides",
        nargs="+",
        metavar="INPUT",
        help="a file, a directory, or an override such as cluster=bcm",
    )
    tokenize.add_argument("--pattern", help="pattern of the files in a directory (default: *.txt)")
    tokenize.add_argument("--vocab-size", type=int, help="size of a new tokenizer (default: 2048)")
    tokenize.add_argument("--output-prefix", type=Path, help="path of the .bin and .idx without extension")
    tokenize.add_argument("--tokenizer-dir", type=Path, help="directory of vocab.json and merges.txt")
    tokenize.add_argument("--max-files", type=int, help="read at most so many files")
    tokenize.add_argument("--max-bytes", type=int, help="read at most so many bytes of text")
    tokenize.add_argument("--workers", type=int, help="encoding processes (default: 2)")
    add_launch_options(tokenize)
    tokenize.set_defaults(run=run_tokenize)
    for module in (data_audit, data_lint):
        module.add_parsers(verbs)


def run_tokenize(args: argparse.Namespace) -> int:
    """Launch the stage and show its log until it ends; return the exit code."""
    # `cluster=bcm` is an override unless a file of that name exists.
    overrides = [text for text in args.overrides if "=" in text and not Path(text).exists()]
    inputs = [text for text in args.overrides if text not in overrides]
    _check_inputs(inputs)
    defaults = [
        "stages=[data_preparation]",
        "cluster=local",
        f"data_preparation.inputs={_hydra_list(inputs)}",
    ]
    for name in _OPTIONS:
        value = getattr(args, name)
        if value is not None:
            text = str(value.absolute() if isinstance(value, Path) else value)
            defaults.append(
                f"data_preparation.{name}={text if isinstance(value, int) else hydra_value(text)}"
            )
    launched = draft_and_launch(args, [*defaults, *overrides])
    if launched is None:
        return 0
    return follow_to_end(open_launch(launched.paths.run_dir, launched.paths.number))


def _check_inputs(inputs: list[str]) -> None:
    if not inputs:
        raise UserError("no input", hint="name the files or directories to tokenize")
    for text in inputs:
        if not file_mode(Path(text)):
            raise UserError(f"{text}: no such file or directory", hint="an override has the form KEY=VALUE")


def _hydra_list(values: list[str]) -> str:
    return f"[{','.join(hydra_value(value) for value in values)}]"

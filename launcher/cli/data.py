"""`slipway data`: prepare training data, on this machine by default or as jobs of a cluster."""

from __future__ import annotations

import argparse
import glob
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from launcher.checks.gathering.data import data_sets, tokenizer_files
from launcher.checks.gathering.path_resolver import PathResolver
from launcher.cli import data_lint
from launcher.cli.data_lint import ask
from launcher.cli.launch import EXIT_CODES, launch_and_follow
from launcher.cli.options import Verbs, add_option, add_overrides, add_verb, whole_number
from launcher.cli.requests import add_launch_options
from launcher.cli.runs import add_run, select_run
from launcher.cli.verbs import VERBS
from launcher.config.overrides import hydra_value
from launcher.drafting import Request, draft
from launcher.errors import DONE, WENT_WRONG, UserError, escape, file_mode
from launcher.jobs.launches import open_launches
from launcher.monitor.readers import Segment, segment_with, segments
from launcher.runs.manifest import read_yaml
from launcher.ui.tables import print_lines, print_listing, print_styled
from launcher.ui.terminal import print_message
from slipway.common.sections import SourceFormat

if TYPE_CHECKING:
    from launcher.jobs.launches import Launch

_EXIT_CODES = EXIT_CODES.format(done="the files were written", failed="the job failed")

_TOKENIZE = f"""\
Train a byte-level BPE tokenizer on text files and write them as Megatron's .bin/.idx.

examples:
  slipway data tokenize books/ --pattern '*.txt' --vocab-size 32000
  slipway data tokenize /usr/lib/python3.11 --pattern '*.py' data_dir=/shared/data
  slipway data tokenize corpus/ cluster=bcm cluster.partition=cpu      as a job of the cluster

Writes DATA_DIR/bpe/vocab.json and merges.txt (an existing tokenizer is used, not trained again) and
DATA_DIR/corpus_text_document.bin and .idx, which training=... reads by default. Other formats than text,
and sources on servers: slipway data prepare.
{_EXIT_CODES}"""

_PREPARE = f"""\
Fetch, read, clean and tokenize sources; write them as Megatron's .bin/.idx.

examples:
  slipway data prepare corpus.jsonl.zst
  slipway data prepare 'shards/*.jsonl' --text-key content --vocab-size 32000
  slipway data prepare https://dumps.wikimedia.org/simplewiki/latest/simplewiki-latest-pages-articles.xml.bz2
  slipway data prepare s3://bucket/c4/ --pattern '*.json.gz' --format jsonl --tokenizer-dir gpt2/
  slipway data prepare s3://bucket/c4/ cluster=bcm cluster.partition=cpu --tasks 50

Downloads remote sources, reads text, JSONL, Parquet, Wikipedia dumps and tar shards, compressed or not,
and writes DATA_DIR/corpus_text_document.bin and .idx, which training=... reads by default, with a manifest of
their sources beside them. The same again does only what is missing. With --tasks on a cluster, three jobs
follow each other: one that downloads, an array that tokenizes, one that merges.
{_EXIT_CODES}"""

_AUDIT = """\
Print the documents of the global batch of a training step: data set, document, tokens of it, source file and
the place in it. This is arithmetic on the configuration of the launch and the .idx files, for any step, done
or to come: it needs neither a GPU nor torch, and starts no training.

What `training.resume.skip_samples` has passed over up to the step is listed too, and how often the windows of
a data set have been shown at most. --json has the samples and windows of each.

If several launches trained the step, the last one counts, because the model is the result of that one (after
going back to an earlier checkpoint, say); --launch names another.

Source and offset are known of data that `slipway data` prepared. OFFSET is the byte of a JSON line, the row
of a Parquet file, or the number of a page or member.

examples:
  slipway data audit gpt3_126m --step 4000
  slipway data audit gpt3_126m --step 4000 --text        with the text of the documents
  slipway data audit gpt3_126m --step 4000 --launch 2    as launch 2 trained it
  slipway data audit gpt3_126m --step 4000 --json | jq -r '.samples[].pieces[].source' | sort | uniq -c

exit code:
  0  printed
  1  printed, but the data are no longer those of the launch
  2  there is no such run or step, the run has another engine, or the data cannot be read"""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)

# By the name of the key: the type of its value, and its help.
_OPTIONS = {
    "pattern": (str, "names of the files to take from a directory, such as *.jsonl.gz"),
    "vocab_size": (int, "size of a new tokenizer (default: 2048)"),
    "output_prefix": (Path, "path of the .bin and .idx without extension"),
    "tokenizer_dir": (Path, "directory of the tokenizer"),
    "max_files": (int, "read at most this number of files"),
    "max_bytes": (int, "read at most this number of bytes of text"),
    "workers": (int, "encoding processes (default: 2)"),
}
_REPLACE = "replace another data set at the output prefix, which is refused otherwise"
_PREPARE_OPTIONS = {
    "text_key": (str, "field of JSONL, or column of Parquet, that holds the text (default: text)"),
    "tasks": (int, "tasks of a job array, on a cluster (default: 1)"),
    "on_error": (str, "raise (the default) at a record that cannot be read, or skip it"),
}
_FORMATS = get_args(SourceFormat)[1:]
# Formats that have their own choice of the group; `any` takes all formats.
_CHOICES = {"txt": "text", "jsonl": "jsonl", "parquet": "parquet", "wikipedia": "wikipedia"}
_ANY = "mixed"


def add_parser(verbs: Verbs) -> None:
    example = "example: slipway data prepare corpus.jsonl.zst --vocab-size 32000"
    parser = verbs.add_parser("data", help=VERBS["data"], epilog=example)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    text = "bring text, JSONL, Parquet, Wikipedia dumps or tar shards to Megatron's .bin/.idx"
    prepare = add_verb(verbs, "prepare", run_prepare, text, _PREPARE)
    add_overrides(prepare, "a file, directory, glob or URL, or an override such as cluster=bcm", "INPUT")
    add_option(prepare, "--format FORMAT", f"{', '.join(_FORMATS)}; by default detected per file")
    _add_options(prepare, {**_OPTIONS, **_PREPARE_OPTIONS})
    text = "train a BPE tokenizer and write text files as Megatron's .bin/.idx"
    tokenize = add_verb(verbs, "tokenize", run_prepare, text, _TOKENIZE)
    tokenize.set_defaults(format=None, choice="text")
    add_overrides(tokenize, "a file, a directory, or an override such as cluster=bcm", "INPUT")
    _add_options(tokenize, _OPTIONS)
    parser = add_verb(verbs, "audit", run_audit, "print the documents that a training step sees", _AUDIT)
    add_run(parser)
    add_option(parser, "--step N", "the training step, from 1", type=whole_number(1), required=True)
    add_option(parser, "--sample I", "only this sample of the global batch, from 0", type=int)
    add_option(parser, "--text", "print the decoded text")
    add_option(parser, "--json", "print one object, as a program would read it")
    data_lint.add_parsers(verbs)


def _add_options(parser: argparse.ArgumentParser, options: Mapping[str, tuple[type, str]]) -> None:
    for name, (kind, text) in options.items():
        add_option(parser, f"--{name.replace('_', '-')} {name.upper()}", text, type=kind)
    add_option(parser, "--name NAME", "name of the data set: DATA_DIR/NAME_text_document (default: corpus)")
    add_option(parser, "--replace", _REPLACE)
    add_launch_options(parser)


def run_prepare(args: argparse.Namespace) -> int:
    """Prepare sources, and show the logs of the jobs until the end; return the exit code."""
    # ``cluster=bcm`` is an input if a file of that name exists; a URL may hold a ``=`` too.
    inputs = [text for text in args.overrides if "=" not in text or _URL.match(text) or Path(text).exists()]
    overrides = [text for text in args.overrides if text not in inputs]
    if not inputs and not any(text.startswith("data_preparation.inputs=") for text in overrides):
        raise UserError("no input", hint="name the files or directories to prepare")
    for text in inputs:
        if not (_URL.match(text) or glob.has_magic(text) or file_mode(Path(text))):
            raise UserError(f"{text}: no such file or directory", hint="an override has the form KEY=VALUE")
    choice = getattr(args, "choice", _CHOICES.get(args.format, _ANY))
    defaults = ["stages=[data_preparation]", "cluster=local", f"data_preparation={choice}"]
    if inputs:
        defaults.append(f"data_preparation.inputs=[{','.join(map(hydra_value, inputs))}]")
    if args.name is not None:
        if not _NAME.fullmatch(args.name):
            raise UserError(f"--name {args.name}: expected letters, digits, _, - and . alone")
        defaults.append(f"data_preparation.output_prefix=${{data_dir}}/{args.name}_text_document")
    for name in ("format", *_OPTIONS, *_PREPARE_OPTIONS):
        value = getattr(args, name, None)  # `tokenize` has not all of them
        if value is not None:
            text = str(value.absolute() if isinstance(value, Path) else value)
            text = text if isinstance(value, int) else hydra_value(text)
            defaults.append(f"data_preparation.{name}={text}")
    defaults += ["data_preparation.replace=True"] if args.replace else []
    return launch_and_follow(args, [*defaults, *overrides], _lines_after_preparation)


def _lines_after_preparation(launched: Launch) -> Iterator[str]:
    """Yield the command that trains on the data, for a person."""
    node = read_yaml(launched.paths.config)["data_preparation"]
    if node["phase"] not in (None, "merge") or not sys.stdout.isatty():
        return
    prefix, directory, splits = Path(node["output_prefix"]), Path(node["tokenizer_dir"]), node["splits"]
    words = [f"data_dir={_format_path(prefix.parent)}"]
    if splits or (prefix.name, directory) != ("corpus_text_document", prefix.parent / "bpe"):
        parts = ",".join(f"{name}:[{_format_path(f'{prefix}_{name}')}]" for name in splits or ())
        key = "training.model.data.data_prefix"
        # Hydra makes no mapping of the list that is there.
        words = [f"~{key}", f"+{key}={{{parts}}}"] if parts else [f"{key}=[{_format_path(prefix)}]"]
        words += _tokenizer_words(directory)
    yield f"\n{shlex.join(['slipway', 'launch', 'training=gpt3/tiny', 'cluster=local', *words])}"


def _tokenizer_words(directory: Path) -> list[str]:
    """Return the overrides of a training for the tokenizer in a directory."""
    values = {"vocab_file": directory / "vocab.json", "merge_file": directory / "merges.txt"}
    if not values["vocab_file"].is_file():
        model = min(directory.glob("*.model"), default=None)
        library = "huggingface" if model is None else "sentencepiece"
        values = {"library": Path(library), "type" if model is None else "model": model or directory}
    return [f"training.model.tokenizer.{key}={_format_path(value)}" for key, value in values.items()]


def _format_path(path: Path | str) -> str:
    """Return a path as a user would write it in an override."""
    return str(path) if re.fullmatch(r"[\w./-]+", str(path), re.ASCII) else hydra_value(str(path))


# --- audit


def run_audit(args: argparse.Namespace) -> int:
    """Ask the trainer's program, and print its answer."""
    ref = select_run(args)
    segment = _segment(ref.run_dir, ref.launch, args.step)
    launch = segment.launch
    resolver = PathResolver(draft(Request.from_launch(launch.paths.directory)))
    answer = _ask(segment, resolver, args.step, with_tokens=args.text)
    answer = {"run": launch.paths.run_name, "launch": launch.paths.number, **answer}
    answer["trained"] = args.step <= segment.last
    if args.sample is not None:
        samples = answer["samples"]
        if not 0 <= args.sample < len(samples):
            expected = f"expected 0 to {len(samples) - 1}, the samples of this step"
            raise UserError(f"--sample {args.sample}: {expected}")
        answer["samples"] = [samples[args.sample]]
    if args.text:
        _add_texts(answer, resolver)
    if args.json:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        _print(answer, with_text=args.text)
    for change in answer["changed"]:
        print_message(f"the data are not those of launch {launch.paths.number}: {change}")
    return WENT_WRONG if answer["changed"] else DONE


def _segment(run_dir: Path, number: int | None, step: int) -> Segment:
    """Return the steps around the requested one; raise UserError if our trainer did not train it."""
    launches = [launch for launch in open_launches(run_dir) if launch.manifest.stage == "training"]
    selected = [launch for launch in launches if number in (None, launch.paths.number)]
    if not selected:
        known = ", ".join(str(launch.paths.number) for launch in launches) or "none"
        message = "has no training" if number is None else f"has no training as launch {number}"
        raise UserError(f"{run_dir.name} {message}", hint=f"launches: {known}")
    own = [launch for launch in selected if launch.manifest.engine == "megatron"]
    if not own:
        raise UserError(
            f"{run_dir.name} was trained with engine={selected[-1].manifest.engine}: the order of its "
            "samples is that engine's, and known for engine=megatron alone"
        )
    parts = segments(own)
    if not parts:
        # Nothing has been trained, so that the first launch is to begin with step 1.
        return Segment(own[-1], 0, 0, 0)
    chosen = segment_with(step, parts)
    if chosen is None:
        first = min(part.after_step for part in parts)
        raise UserError(
            f"--step {step}: expected more than {first}, after which the training of {run_dir.name} begins",
            hint=None if number is None else "without --launch the earlier launches are searched too",
        )
    return chosen


def _ask(segment: Segment, resolver: PathResolver, step: int, *, with_tokens: bool) -> dict[str, Any]:
    paths = segment.launch.paths
    arguments = ["--config-path", str(paths.directory), "--config-name", paths.config_name]
    arguments += ["--step", str(step), "--after-step", str(segment.after_step)]
    arguments += ["--after-samples", str(segment.after_samples)]
    for key, path in data_sets(resolver.values):
        prefix = str(Path(path.strip()))
        local = resolver.input(key, prefix, "")
        # A container of the job may have it at another path than this machine.
        if isinstance(local, Path) and str(local) != prefix:
            arguments += ["--place", prefix, str(local)]
    arguments += ["--tokens"] if with_tokens else []
    with tempfile.NamedTemporaryFile("w", prefix="slipway-", suffix=".json") as recorded:
        json.dump(segment.launch.manifest.data, recorded)
        recorded.flush()
        answer: dict[str, Any] = ask("slipway.trainer.data.audit", [*arguments, "--recorded", recorded.name])
    return answer


def _add_texts(answer: dict[str, Any], resolver: PathResolver) -> None:
    """Put a `text` in the place of the `ids` of each piece."""
    files = [resolver.host(path) for _, path in tokenizer_files(resolver.values, resolver.plan.job.engine)]
    pieces = [piece for sample in answer["samples"] for piece in sample["pieces"]]
    if not pieces:
        return
    if not files or None in files:
        raise UserError("--text: the tokenizer's files are not known on this machine")
    question = {"tokenizer": [str(file) for file in files], "ids": [piece.pop("ids") for piece in pieces]}
    for piece, text in zip(pieces, ask("slipway.corpus", ["decode"], question), strict=True):
        piece["text"] = text


def _print(answer: dict[str, Any], *, with_text: bool) -> None:
    samples = answer["samples"]
    pieces = [(sample, piece) for sample in samples for piece in sample["pieces"]]
    documents = {(sample["data_set"], piece["document"]) for sample, piece in pieces}
    sets = sorted({sample["data_set"] for sample in samples if sample["data_set"]})
    state = "" if answer["trained"] else ", not trained yet"
    held = f"{len(documents):,} documents of {', '.join(sets)}"
    print_lines(
        f"{answer['run']} step {answer['step']}: samples {answer['first_sample']:,} to "
        f"{answer['last_sample']:,}, epoch {answer['epoch']}, data generation {answer['data_generation']}, "
        f"launch {answer['launch']}{state}",
        *_describe_history(answer),
        held if sets else "mock data: samples without documents",
        "",
    )
    rows = []
    for sample, piece in pieces if sets else ():
        number, tokens = sample["number"], f"{piece['first']}-{piece['end'] - 1}"
        document, source = str(piece["document"]), escape(str(piece.get("source", "-")))
        if with_text:
            place = f", {piece['source']}:{piece['offset']}" if "source" in piece else ""
            title = f"sample {number}, {sample['data_set']} document {document}, tokens {tokens}{place}"
            print_styled([((title, "bold"),)])
            print_lines(*(f"    {line}" for line in piece["text"].splitlines()), "")
        name, offset = _name(sample["data_set"], sets), str(piece.get("offset", "-"))
        rows.append((str(number), document, tokens, name, source, offset))
    if sets and not with_text:
        print_listing(("SAMPLE", "DOCUMENT", "TOKENS", "DATA SET", "SOURCE", "OFFSET"), rows, numbers=2)


def _describe_history(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ranges that were passed over up to the step, and how often windows were shown."""
    for first, end in answer["skipped"]:
        yield f"passed over: samples {first:,} to {end - 1:,}"
    data_sets = answer["data_sets"]
    names = [data_set["data_set"] for data_set in data_sets]
    epochs = [-(-data_set["samples"] // data_set["windows"]) for data_set in data_sets]
    often = [
        f"{_name(name, names)} {count} times at most"
        for name, count in zip(names, epochs, strict=True)
        if count > 1
    ]
    if data_sets:
        # Another order may have shown the same windows before.
        order = " in this order" if answer["data_generation"] else ""
        seen = ", ".join(often) or "none twice"
        yield f"up to here: {answer['last_sample'] + 1:,} samples, {seen}{order}"


def _name(prefix: str, sets: Sequence[str]) -> str:
    """Return the shortest end of a data set's path that no other one has."""
    parts = Path(prefix).parts
    for count in range(1, len(parts) + 1):
        end = parts[-count:]
        if sum(Path(other).parts[-count:] == end for other in sets) == 1:
            return str(Path(*end))
    return prefix

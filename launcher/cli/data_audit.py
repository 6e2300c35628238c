"""`slipway data audit`: the documents that a training step sees."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.checks.gathering.data import data_sets, tokenizer_files
from launcher.checks.gathering.path_resolver import PathResolver
from launcher.cli.data_lint import ask
from launcher.cli.runs import add_run, selected_run
from launcher.drafting import Request, draft
from launcher.errors import UserError, one_line
from launcher.exit_codes import DONE, WENT_WRONG
from launcher.jobs.launches import Launch, open_launches
from launcher.monitor.readers import Segment, segment_with, segments
from launcher.ui.tables import print_listing, print_styled

_DESCRIPTION = """\
Print the documents of the global batch of a training step: data set, document, tokens of it, source file and
the place in it. This is arithmetic on the configuration of the launch and the .idx files, for any step, done
or to come: it needs neither a GPU nor torch, and starts no training.

Of a step that several launches trained, the last one counts, as it does for the model: after going back to an
earlier checkpoint these are the documents of the steps since then; --launch names another one.

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


def add_parsers(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "audit",
        help="print the documents that a training step sees",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run(parser)
    parser.add_argument(
        "--step", type=_positive, required=True, metavar="N", help="the training step, from 1"
    )
    parser.add_argument(
        "--sample", type=int, metavar="I", help="only this sample of the global batch, from 0"
    )
    parser.add_argument("--text", action="store_true", help="print the text that the tokens stand for")
    parser.add_argument("--json", action="store_true", help="print one object, as a program would read it")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Ask the trainer's program, and print its answer."""
    ref = selected_run(args)
    segment = _segment(ref.run_dir, ref.launch, args.step)
    launch = segment.launch
    resolver = PathResolver(_draft(launch))
    answer = _ask(segment, resolver, args.step, with_tokens=args.text)
    answer = {"run": launch.paths.run_name, "launch": launch.paths.number, **answer}
    answer["trained"] = args.step <= segment.last
    if args.sample is not None:
        answer["samples"] = [_chosen(answer["samples"], args.sample)]
    if args.text:
        _add_texts(answer, resolver)
    if args.json:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        _print(answer, with_text=args.text)
    for change in answer["changed"]:
        print(f"slipway: the data are not those of launch {launch.paths.number}: {change}", file=sys.stderr)
    return WENT_WRONG if answer["changed"] else DONE


def _segment(run_dir: Path, number: int | None, step: int) -> Segment:
    """Return the steps of a run that the requested one belongs to.

    Raise UserError if no launch is of our own trainer, or none begins before the step.
    """
    launches = [launch for launch in open_launches(run_dir) if launch.manifest.stage == "training"]
    wanted = [launch for launch in launches if number in (None, launch.paths.number)]
    if not wanted:
        known = ", ".join(str(launch.paths.number) for launch in launches) or "none"
        message = "has no training" if number is None else f"has no training as launch {number}"
        raise UserError(f"{run_dir.name} {message}", hint=f"launches: {known}")
    own = [launch for launch in wanted if launch.manifest.engine == "megatron"]
    if not own:
        raise UserError(
            f"{run_dir.name} was trained with engine={wanted[-1].manifest.engine}: the order of its samples "
            "is that engine's, and known for engine=megatron alone"
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


def _draft(launch: Launch) -> Any:
    return draft(Request(overrides=[], command=[], launch_dir=launch.paths.directory))


def _ask(segment: Segment, resolver: PathResolver, step: int, *, with_tokens: bool) -> dict[str, Any]:
    paths = segment.launch.paths
    arguments = ["--config-path", str(paths.directory), "--config-name", paths.config_name]
    arguments += ["--step", str(step), "--after-step", str(segment.after_step)]
    arguments += ["--after-samples", str(segment.after_samples)]
    for prefix, here in _places(resolver):
        arguments += ["--place", prefix, here]
    arguments += ["--tokens"] if with_tokens else []
    with tempfile.NamedTemporaryFile("w", prefix="slipway-", suffix=".json") as recorded:
        json.dump(segment.launch.manifest.data, recorded)
        recorded.flush()
        answer: dict[str, Any] = ask("trainer.data.audit", [*arguments, "--recorded", recorded.name])
    return answer


def _places(resolver: PathResolver) -> Iterator[tuple[str, str]]:
    """Yield the data sets that a container of the job has at another path than this machine."""
    for key, given in data_sets(resolver):
        prefix = str(Path(given.strip()))
        here = resolver.input(key, prefix, "")
        if isinstance(here, Path) and str(here) != prefix:
            yield prefix, str(here)


def _chosen(samples: Sequence[dict[str, Any]], number: int) -> dict[str, Any]:
    if not 0 <= number < len(samples):
        raise UserError(f"--sample {number}: expected 0 to {len(samples) - 1}, the samples of this step")
    return samples[number]


def _add_texts(answer: dict[str, Any], resolver: PathResolver) -> None:
    """Put a `text` in the place of the `ids` of each piece."""
    files = [resolver.host(given) for _, given in tokenizer_files(resolver)]
    pieces = [piece for sample in answer["samples"] for piece in sample["pieces"]]
    if not pieces:
        return
    if not files or None in files:
        raise UserError("--text: the tokenizer's files are not known on this machine")
    question = {"tokenizer": [str(file) for file in files], "ids": [piece.pop("ids") for piece in pieces]}
    for piece, text in zip(pieces, ask("corpus.decoding", [], question), strict=True):
        piece["text"] = text


def _print(answer: dict[str, Any], *, with_text: bool) -> None:
    samples, first = answer["samples"], answer["first_sample"]
    documents = {(sample["data_set"], piece["document"]) for sample in samples for piece in sample["pieces"]}
    sets = sorted({sample["data_set"] for sample in samples if sample["data_set"]})
    state = "" if answer["trained"] else ", not trained yet"
    last = first + answer["global_batch"] - 1
    lines = [
        f"{answer['run']} step {answer['step']}: samples {first:,} to {last:,}, epoch {answer['epoch']}, "
        f"data generation {answer['data_generation']}, launch {answer['launch']}{state}"
    ]
    lines.append(
        f"{len(documents):,} documents of {', '.join(sets)}"
        if sets
        else "mock data: samples without documents"
    )
    print_styled([((line, ""),) for line in lines])
    print()
    if not sets:
        return
    if with_text:
        _print_texts(samples, first)
        return
    rows = [
        (
            str(sample["sample"] - first),
            str(piece["document"]),
            f"{piece['first']}-{piece['end'] - 1}",
            _name(sample["data_set"], sets),
            one_line(str(piece.get("source", "-"))),
            str(piece.get("offset", "-")),
        )
        for sample in samples
        for piece in sample["pieces"]
    ]
    print_listing(("SAMPLE", "DOCUMENT", "TOKENS", "DATA SET", "SOURCE", "OFFSET"), rows, numbers=2)


def _name(prefix: str, sets: Sequence[str]) -> str:
    """Return the shortest end of a data set's path that no other one has."""
    parts = Path(prefix).parts
    for count in range(1, len(parts) + 1):
        end = parts[-count:]
        if sum(Path(other).parts[-count:] == end for other in sets) == 1:
            return str(Path(*end))
    return prefix


def _print_texts(samples: Sequence[dict[str, Any]], first: int) -> None:
    for sample in samples:
        for piece in sample["pieces"]:
            source = f", {piece['source']}:{piece['offset']}" if "source" in piece else ""
            title = (
                f"sample {sample['sample'] - first}, {sample['data_set']} document {piece['document']}, "
                f"tokens {piece['first']}-{piece['end'] - 1}{source}"
            )
            text = [((f"    {line}", ""),) for line in piece["text"].splitlines()]
            print_styled([((title, "bold"),), *text, (("", ""),)])

"""`slipway convert`: weights in one format to weights in another, on this machine by default."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.checkpoint_words import add_source, find_checkpoints, source_overrides, split_words
from launcher.cli.launch import draft_and_launch
from launcher.cli.logs import follow_to_end
from launcher.cli.requests import add_launch_options
from launcher.config.overrides import hydra_value
from launcher.errors import UserError
from launcher.jobs.launches import open_launch
from launcher.monitor.evidence import expected_outputs
from launcher.runs.manifest import read_yaml
from launcher.runs.paths import short

if TYPE_CHECKING:
    from launcher.launching import Launched

_STAGE = "conversion"
_EPILOG = """\
examples:
  slipway convert gpt3_126m                     the newest checkpoint, for Hugging Face transformers
  slipway convert gpt3_126m@2000 --dtype bfloat16 --output models/gpt3_126m
  slipway convert gpt3_126m --check             and compare its logits with the checkpoint's
  slipway convert gpt3_126m --on-cluster        as a job where the run ran
  slipway convert ~/models/gpt2 --to slipway    a checkpoint that a training starts from
  slipway convert fsdp/step-500 --to safetensors    PyTorch DCP, DeepSpeed ZeRO: one model again

SOURCE is a run, RUN@STEP, or a directory: a checkpoint, checkpoints, a model of Hugging Face, a checkpoint of
Megatron-LM, PyTorch's DCP or DeepSpeed. A checkpoint is never changed, and an output never overwritten: the
same conversion again finds it done.

exit code:
  0    the output is there; with --dry-run: the script was printed
  1    the conversion failed, or with --check differs; its log, above, says why
  2    a mistake in the command line or the configuration, before there is a job
  130  Ctrl-C; the job continues: slipway cancel RUN
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="convert a checkpoint to Hugging Face, or from it",
        description="Convert a checkpoint to Hugging Face's format, or other weights to a checkpoint.",
        epilog=_EPILOG,
    )
    add_source(parser)
    parser.add_argument(
        "--to", metavar="FORMAT", help="huggingface, slipway, safetensors or nemo (default: huggingface)"
    )
    parser.add_argument(
        "--from", dest="source_format", metavar="FORMAT", help="the source's (default: by its files)"
    )
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: as the checkpoint has it)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="a directory that is not there yet")
    parser.add_argument(
        "--check", action="store_true", help="compare logits and perplexity with the checkpoint's own model"
    )
    add_launch_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert, and show the log until the end; return the exit code."""
    word, overrides = split_words(args.overrides)
    checkpoints = find_checkpoints(word, args.base_results_dir)
    if len(checkpoints.steps) > 1:
        raise UserError(f"{word}: one step at a time", hint=f"slipway convert {word.partition(',')[0]}")
    options = [*_options(args), *overrides]
    words = source_overrides(_STAGE, checkpoints, options, on_cluster=args.on_cluster)
    for launched in draft_and_launch(args, words):
        code = follow_to_end(open_launch(launched.paths.run_dir, launched.paths.number))
        if code:
            return code
        for line in _next_lines(launched):
            print(line)
    return 0


def _options(args: argparse.Namespace) -> Iterator[str]:
    """Yield the overrides that the options stand for."""
    for key, value in (
        ("conversion", args.to),
        ("conversion.source_format", args.source_format),
        ("conversion.dtype", args.dtype),
    ):
        if value is not None:
            yield f"{key}={hydra_value(value)}"
    if args.output is not None:
        yield f"conversion.output={hydra_value(str(args.output.absolute()))}"
    if args.check:
        yield "conversion.check.enabled=True"


def _next_lines(launched: Launched) -> Iterator[str]:
    """Yield what a user types next, by what the job was told to write."""
    config = read_yaml(launched.paths.config)
    node, records = config[_STAGE], [path for path in expected_outputs(config) or () if path.is_file()]
    if not records:
        return
    output = max(records, key=lambda path: path.stat().st_mtime).parent
    where = short(output)
    yield f"\n{where}"
    if node["to"] == "slipway":
        yield f"  slipway launch training=... training.restore_from_path={shlex.quote(str(output))}"
    elif node["to"] == "safetensors":
        yield "  from safetensors.torch import load_file"
        for path in sorted(output.glob("*.safetensors")):
            yield f"  tensors = load_file({str(path)!r})"
    else:
        loader = f"AutoModelFor{'Seq2SeqLM' if _is_encoder_decoder(output) else 'CausalLM'}"
        yield f"  from transformers import {loader}, AutoTokenizer"
        yield f"  model = {loader}.from_pretrained({where!r})"
        yield f"  tokenizer = AutoTokenizer.from_pretrained({where!r})"


def _is_encoder_decoder(model: Path) -> bool:
    try:
        return bool(json.loads((model / "config.json").read_text()).get("is_encoder_decoder"))
    except (OSError, ValueError):
        return False

"""`slipway convert` and `evaluate`: checkpoints in another format, and their loss on held-out data.

Both are launches of a stage about the checkpoints that a word names, on this machine by default.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.launch import EXIT_CODES, launch_and_follow
from launcher.cli.options import Verbs, add_option, add_overrides, add_verb
from launcher.cli.requests import add_launch_options
from launcher.cli.runs import add_base_results_dir, find_one, hint_newest_runs
from launcher.config.overrides import hydra_value
from launcher.errors import UserError, escape
from launcher.monitor.evidence import expected_outputs
from launcher.runs.manifest import read_yaml
from launcher.runs.paths import LAUNCHES, display_path
from launcher.runs.trained import TrainingLaunch, newest_training
from launcher.runs.trust import why_untrusted
from launcher.secrecy import MASK

if TYPE_CHECKING:
    from launcher.jobs.launches import Launch

_CONVERT = """\
Convert a checkpoint to Hugging Face's format, or other weights to a checkpoint.

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
""" + EXIT_CODES.format(done="the output is there", failed="the conversion failed, or with --check differs")

_EVALUATE = """\
Measure a checkpoint: loss and perplexity on held-out data, and tasks of lm-eval.

examples:
  slipway evaluate gpt3_126m                    the held-out loss of the newest checkpoint
  slipway evaluate gpt3_126m@1000,2000          of two of them
  slipway evaluate gpt3_126m@2000 --tasks hellaswag,arc_easy --limit 200
  slipway evaluate gpt3_126m --tasks ./own.yaml --no-perplexity
  slipway evaluate gpt3_126m --on-cluster evaluation.perplexity.layout.tensor=1

SOURCE is a run, RUN@STEP or RUN@STEP,STEP, or a directory of checkpoints. Tasks are lm-eval's, by name or as
YAML files of your own; they run on the model converted to Hugging Face, which is made if it is not there. The
results are in RUN/evaluations/step-N.json; `slipway history RUN` and `slipway plot RUN` show them.
""" + EXIT_CODES.format(done="the results are there", failed="the evaluation failed")

# RUN@20; of an evaluation several: RUN@20,40
_AT_STEPS = re.compile(r"(?P<word>.+)@(?P<steps>\d+(?:,\d+)*)", re.ASCII)
# The overrides of a run that say where its jobs run, and in which image.
_PLACES = re.compile(
    r"\+{0,2}(cluster|container|container_mounts|container_options|images_dir|env_vars|env_files)\b|stage_cluster"
)
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=-]+")


def add_parser(verbs: Verbs) -> None:
    convert = add_verb(verbs, "convert", run_convert, text=_CONVERT)
    _add_source(convert)
    text = "huggingface (or hf), slipway, safetensors or nemo (default: huggingface)"
    add_option(convert, "--to FORMAT", text, type=_format)
    text = "the source's (default: by its files)"
    add_option(convert, "--from FORMAT", text, dest="source_format", type=_format)
    add_option(convert, "--dtype DTYPE", "float32, bfloat16 or float16 (default: as the checkpoint has it)")
    add_option(convert, "--output DIR", "a directory that is not there yet")
    add_option(convert, "--check", "compare logits and perplexity with the checkpoint's own model")
    add_launch_options(convert)
    evaluate = add_verb(verbs, "evaluate", run_evaluate, text=_EVALUATE)
    _add_source(evaluate)
    add_option(evaluate, "--tasks TASK,...", "tasks of lm-eval, by name or as YAML files")
    add_option(evaluate, "--limit N", "at most N documents of each task", type=float)
    add_option(evaluate, "--batches N", "N held-out batches")
    splits = ("validation", "test")
    add_option(evaluate, "--split {validation,test}", "which held-out data", choices=splits)
    add_option(evaluate, "--no-perplexity", "only the tasks")
    add_launch_options(evaluate)


def _format(word: str) -> str:
    return "huggingface" if word == "hf" else word


def _add_source(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser, "a run, RUN@STEP or a directory; or an override such as cluster=bcm", "SOURCE")
    text = "as a job where the run ran, in its image; cluster=... chooses another cluster"
    add_option(parser, "--on-cluster", text)
    add_base_results_dir(parser)


def run_convert(args: argparse.Namespace) -> int:
    """Convert, and show the log until the end; return the exit code."""
    output = args.output and str(args.output.absolute())
    values = {
        "conversion": args.to,
        "conversion.source_format": args.source_format,
        "conversion.dtype": args.dtype,
        "conversion.output": output,
    }
    options = [f"{key}={hydra_value(value)}" for key, value in values.items() if value is not None]
    options += ["conversion.check.enabled=True"] if args.check else []
    word, checkpoints, overrides = _words_of_source(args)
    require_one_step(word, checkpoints, "convert")
    words = _stage_overrides("conversion", checkpoints, [*options, *overrides], args.on_cluster)
    return launch_and_follow(args, words, _lines_after_conversion)


def _lines_after_conversion(launched: Launch) -> Iterator[str]:
    """Yield the commands that use the files of the job."""
    config = read_yaml(launched.paths.config)
    records = [path for path in expected_outputs(config) or () if path.is_file()]
    if not records:
        return
    output = max(records, key=lambda path: path.stat().st_mtime).parent
    where, written = display_path(output), config["conversion"]["to"]
    yield f"\n{where}"
    if written == "slipway":
        yield f"  slipway launch training=... training.restore_from_path={shlex.quote(str(output))}"
    elif written == "safetensors":
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


def run_evaluate(args: argparse.Namespace) -> int:
    """Evaluate, and show the log until the end; return the exit code."""
    tasks = ",".join(hydra_value(name) for name in (args.tasks or "").split(",") if name)
    values = {
        "lm_eval.tasks": None if args.tasks is None else f"[{tasks}]",
        "lm_eval.limit": args.limit,
        "perplexity.batches": args.batches,
        "perplexity.split": args.split,
        "perplexity.enabled": False if args.no_perplexity else None,
    }
    options = [f"evaluation.{key}={value}" for key, value in values.items() if value is not None]
    _, checkpoints, overrides = _words_of_source(args)
    words = _stage_overrides("evaluation", checkpoints, [*options, *overrides], args.on_cluster)
    training = checkpoints.training
    line = f"\nslipway history {display_path(training.paths.run_dir)}" if training is not None else None
    return launch_and_follow(args, words, lambda _: filter(None, [line]))


# --- the checkpoints that a word names


@dataclass(frozen=True, slots=True)
class NamedCheckpoints:
    """A checkpoint or a directory of them; `training` is None if no run of ours wrote them."""

    source: Path
    steps: list[str]
    training: TrainingLaunch | None


def _words_of_source(args: argparse.Namespace) -> tuple[str, NamedCheckpoints, list[str]]:
    overrides = [word for word in args.overrides if "=" in word and not Path(word).exists()]
    sources = [word for word in args.overrides if word not in overrides]
    if not sources:
        hints = ("name a run, a run's step (RUN@20), or a directory", hint_newest_runs(args.base_results_dir))
        raise UserError("no source", hint="\n".join(filter(None, hints)))
    if len(sources) > 1:
        message = f"{', '.join(map(escape, sources))}: one source at a time"
        raise UserError(message, hint="an override has the form KEY=VALUE")
    (word,) = sources
    return word, find_named_checkpoints(word, args.base_results_dir), overrides


def find_named_checkpoints(word: str, base_results_dir: Path) -> NamedCheckpoints:
    """Return the checkpoints of a word: a directory, else a run, and perhaps its steps.

    Raise UserError if it is neither, or a run that trained nothing.
    """
    match = None if Path(word).exists() else _AT_STEPS.fullmatch(word)
    name, steps = (match["word"], match["steps"].split(",")) if match else (word, [])
    steps = [str(int(step)) for step in steps]
    path = Path(name).absolute()
    if path.is_dir() and not (path / LAUNCHES).is_dir():
        return NamedCheckpoints(path, steps, newest_training(path))
    training = newest_training(find_one(name, base_results_dir).run_dir)
    if training is None:
        message = f"{escape(name)}: no launch of this run is a training's"
        raise UserError(message, hint="the run of the training, or a directory of checkpoints")
    return NamedCheckpoints(training.checkpoints, steps, training)


def require_one_step(word: str, checkpoints: NamedCheckpoints, verb: str) -> None:
    """Raise UserError if a word names several steps."""
    if len(checkpoints.steps) > 1:
        raise UserError(f"{word}: one step at a time", hint=f"slipway {verb} {word.partition(',')[0]}")


def _stage_overrides(
    stage: str, checkpoints: NamedCheckpoints, overrides: list[str], on_cluster: bool
) -> list[str]:
    """Return the overrides of a launch about some checkpoints, which the user's own follow."""
    training, words = checkpoints.training, [f"stages=[{stage}]"]
    if not on_cluster:
        words.append("cluster=local")
    elif training is not None:
        words += _places_of(training, overrides)
    model = checkpoints.source.resolve().name if training is None else training.manifest.run
    model = _UNSAFE.sub("_", model).lstrip("._+=-") or "model"
    if training is not None:
        base = hydra_value(str(training.paths.run_dir.parent))
        words += [f"engine={hydra_value(training.manifest.engine)}", f"base_results_dir={base}"]
    elif not on_cluster or not any(word.startswith("engine=") for word in overrides):
        words.append("engine=megatron")
    words.append(f"{stage}.run.name={hydra_value(f'{model}_{stage}')}")
    words.append(f"{stage}.source={hydra_value(str(checkpoints.source))}")
    if checkpoints.steps:
        steps = ",".join(checkpoints.steps)
        words.append(f"{stage}.step={f'[{steps}]' if len(checkpoints.steps) > 1 else steps}")
    return [*words, *overrides]


def _places_of(training: TrainingLaunch, overrides: list[str]) -> list[str]:
    """Return the overrides of a run for the nodes and the image that its jobs found.

    They name programs, libraries and a Slurm: raise UserError if somebody else could have written them,
    unless the user's own overrides name a cluster in their place.
    """
    why = why_untrusted(training.paths.manifest)
    if why is None:
        return [word for word in training.manifest.overrides if _PLACES.match(word) and MASK not in word]
    if any(word.startswith("cluster=") for word in overrides):
        return []
    raise UserError(
        f"--on-cluster: {escape(display_path(training.paths.manifest))}, which says where the run ran and in "
        f"what, is not trusted: {escape(why)}",
        hint="name the cluster yourself: cluster=..., and if the run had them container=... and the like; "
        f"`slipway history {escape(shlex.quote(display_path(training.paths.run_dir)))}` shows its own",
    )

"""`slipway generate`: text that the model of a checkpoint writes, on this machine."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from launcher.cli.checkpoints import NamedCheckpoints, find_named_checkpoints, require_one_step
from launcher.cli.data_lint import answers
from launcher.cli.options import Verbs, add_option, add_overrides, add_verb, whole_number
from launcher.cli.runs import add_base_results_dir
from launcher.errors import DONE, UserError, escape
from launcher.images.progress import show_progress
from launcher.ui.terminal import print_json, print_stderr

_HELP = """\
Continue texts with the model of a checkpoint of engine=megatron, in one process on this machine, on a GPU if
there is one, else on the CPU. Any training layout will do. It takes 4 bytes of memory a parameter.

examples:
  slipway generate gpt3_tiny "import "                  with the newest checkpoint of the run
  slipway generate gpt3_tiny@2000 "def main(" "class "  with that of a step; several prompts
  slipway generate gpt3_tiny "import " --temperature 0  the most probable token each time
  echo 'Once upon a time' | slipway generate gpt3_tiny - --json | jq -r '.outputs[].text'

SOURCE is a run, RUN@STEP, or a directory of checkpoints; the prompt - is all of stdin. The tokenizer is the
training's. A text ends with the token that ends documents, after --max-tokens, or where the prompt and it
fill the sequence length of the training. The same command writes the same text.

exit code:
  0    the texts were written
  2    a mistake in the command line, the checkpoint cannot be read, or a library is missing
  130  Ctrl-C
"""
_ENDS = {
    "end_of_text": "the model ended it",
    "max_tokens": "--max-tokens",
    "window": "the sequence length of the training is full",
}


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "generate", run, "write text with the model of a checkpoint", _HELP)
    parser.usage = "slipway generate [OPTION ...] SOURCE PROMPT [PROMPT ...]"
    add_overrides(parser, "a run, RUN@STEP or a directory; then the texts to continue, - for stdin", "SOURCE")
    text = "at most N tokens after each prompt (default: 100)"
    add_option(parser, "--max-tokens N", text, type=whole_number(1), default=100)
    text = "below 1 the probable tokens become more probable; 0 takes the most probable one (default: 0.8)"
    add_option(parser, "--temperature T", text, type=_number(0, math.inf), default=0.8)
    text = "draw from the most probable tokens, which have the probability P together (default: 0.95)"
    add_option(parser, "--top-p P", text, type=_number(1e-9, 1), default=0.95)
    text = "another number draws other tokens (default: 1234)"
    add_option(parser, "--seed N", text, type=whole_number(0), default=1234)
    add_option(parser, "--json", "print one object, with the continuations alone")
    text = "directory of the tokenizer (default: the training's)"
    add_option(parser, "--tokenizer DIR", text)
    add_option(parser, "--python FILE", "interpreter that has torch (default: that of slipway)", type=str)
    text = "load checkpoints of this user too, besides yours and root's"
    add_option(parser, "--trust-owner USER", text)
    add_base_results_dir(parser)


def _number(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if least <= number <= most and number < math.inf:
            return number
        expected = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {expected}")

    return parse


def run(args: argparse.Namespace) -> int:
    """Print the prompts with their continuations as they come; return the exit code."""
    word, *prompts = args.overrides or [""]
    if not prompts:
        hint = 'slipway generate RUN "a text to continue"; the prompt - is all of stdin'
        raise UserError("no prompt" if word else "no source and no prompt", hint=hint)
    checkpoints = find_named_checkpoints(word, args.base_results_dir)
    require_one_step(word, checkpoints, "generate")
    prompts = [_prompt(text) for text in prompts]
    names = ("max_tokens", "temperature", "top_p", "seed", "trust_owner")
    request = {"prompts": prompts, **{name: getattr(args, name) for name in names}}
    request["conversion"] = _conversion(checkpoints, args)
    with answers("slipway.trainer.generation", [], request, args.python or sys.executable) as lines:
        contents = map(json.loads, lines)
        with show_progress(quiet=not sys.stderr.isatty()) as progress:
            progress.step("loading the checkpoint")
            # Without an answer the program ended, and the context says why.
            first: dict[str, Any] = next(contents, {})
        outputs = [_output(prompt, contents, shown=not args.json) for prompt in prompts if first]
    if args.json:
        options = {name: request[name] for name in ("max_tokens", "temperature", "top_p", "seed")}
        print_json({**first, **options, "outputs": outputs})
    elif sys.stdout.isatty():
        _print_summary(first, outputs)
    return DONE


def _prompt(word: str) -> str:
    try:
        text = sys.stdin.buffer.read().decode().removesuffix("\n") if word == "-" else word
        text.encode()
    except UnicodeError:
        raise UserError(f"the prompt {escape(word)} is not UTF-8") from None
    return text


def _conversion(checkpoints: NamedCheckpoints, args: argparse.Namespace) -> dict[str, Any]:
    """Return the keys of a conversion that say which checkpoint, of what model and with which tokenizer."""
    training = checkpoints.training
    if training is not None and training.manifest.engine != "megatron":
        raise UserError(
            f"the run {escape(training.manifest.run)} has engine={training.manifest.engine}: our trainer's "
            "model reads checkpoints of engine=megatron"
        )
    node: dict[str, Any] = {"source": str(checkpoints.source)}
    if checkpoints.steps:
        node["step"] = int(checkpoints.steps[0])
    if args.tokenizer is not None:
        node["tokenizer_dir"] = str(args.tokenizer.absolute())
    if training is not None:
        node |= {"model": training.config.get("model"), "model_type": training.model_type}
    return node


def _output(prompt: str, contents: Iterator[Mapping[str, Any]], *, shown: bool) -> dict[str, Any]:
    """Read the continuation of a prompt; print both as they come if they are `shown`."""
    write = partial(print, end="", flush=True) if shown else str
    write(prompt)
    text = ""
    for content in contents:
        if "end" in content:
            write("\n")
            return {"prompt": prompt, "text": text, **content}
        write(content["piece"])
        text += content["piece"]
    return {"prompt": prompt, "text": text}  # as above


def _print_summary(first: Mapping[str, Any], outputs: list[dict[str, Any]]) -> None:
    tokens, seconds = (sum(output[name] for output in outputs) for name in ("tokens", "seconds"))
    ends = ", ".join(dict.fromkeys(_ENDS[output["end"]] for output in outputs))
    place = {"cpu": "CPU", "cuda": "GPU"}[first["device"]]
    rate = f", {tokens / seconds:,.1f} tokens/s on the {place}" if seconds else ""
    print_stderr(f"\n{tokens:,} tokens of step {first['step']:,}{rate}; ended by: {ends}")

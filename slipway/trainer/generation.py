"""Text that the model of a checkpoint writes: ``python -m slipway.trainer.generation``, one process.

It reads a `Request` as JSON from stdin and writes JSON lines to stdout: the checkpoint, then for each prompt
the pieces of the text as they come, and how it ended. The computation is in 32 bits, on a GPU if there is
one, with megatron-core's cache of keys and values.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from slipway.common.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from slipway.trainer import requirements
from slipway.trainer.checkpoint.choice import check_owners
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.checkpoint.files import read_mapping
from slipway.trainer.conversion.origin import describe
from slipway.trainer.conversion.spec import read_conversion
from slipway.trainer.conversion.tokenizer_files import FAST, OPTIONS, write_tokenizer
from slipway.trainer.logs import silence_warnings
from slipway.trainer.startup_cost import pause_garbage_collection

# What other verbs call the options of this one.
_OPTIONS = {
    "conversion.step=": "step ",
    "interpreter or an image that has them (cluster.python=..., container=...)": "interpreter that has them "
    "(--python FILE)",
    "conversion.tokenizer_dir=/path": "--tokenizer DIR",
    "conversion.tokenizer_dir=": "--tokenizer ",
    "conversion.tokenizer_dir": "--tokenizer",
    "training.resume.trust_owner=": "--trust-owner ",
}
# A tokenizer's replacement for bytes that are no character, or not yet a whole one.
_INCOMPLETE = "\ufffd"


@dataclass(frozen=True)
class Request:
    """The texts to be continued, and how.

    Attributes
    ----------
    conversion
        Which checkpoint, and with which tokenizer: keys of the node `conversion`.
    max_tokens
        The most tokens that follow each of them.
    temperature, top_p
        The logits are divided by the temperature, 0 takes the most probable token; and the token is one of
        the most probable ones that have the probability `top_p` together.
    seed
        Of the draws, anew for each prompt.
    trust_owner
        A user besides this one and root whose checkpoints may be loaded.
    """

    conversion: dict[str, Any]
    prompts: list[str]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    trust_owner: str | None


def main() -> int:
    """Answer the request that stdin holds; return the exit code."""
    # Libraries may print.
    answers, sys.stdout = sys.stdout, sys.stderr
    silence_warnings()
    try:
        requirements.check((*requirements.TRAINING, "tokenizers"))
        _answer(Request(**json.load(sys.stdin)), answers)
    except UserError as error:
        message = str(error)
        for key, option in _OPTIONS.items():
            message = message.replace(key, option)
        print(f"error: {message}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    return EXIT_OK


def _answer(request: Request, answers: TextIO) -> None:
    def tell(**content: object) -> None:
        print(json.dumps(content), file=answers, flush=True)

    # Importing torch and megatron-core takes seconds, after a look for them.
    with pause_garbage_collection():
        from slipway.trainer.checkpoint import reader
        from slipway.trainer.conversion.convert import choose_checkpoints
        from slipway.trainer.model.single_process import enter_single_process, load_model, settings_of

    conversion = read_conversion({**request.conversion, "to": "huggingface", "output": os.devnull})
    (checkpoint,) = choose_checkpoints(conversion)
    check_owners(checkpoint.path, None, request.trust_owner)
    description = describe(conversion, checkpoint)
    if description.encoder is not None:
        raise UserError(
            f"{checkpoint.path} is a T5, which fills gaps in a text, and cannot continue one: "
            "slipway convert makes a model of it for transformers"
        )
    tokenizer = _Tokenizer(description, conversion.tokenizer_dir)
    prompts = [tokenizer.encode(text) for text in request.prompts]
    settings, window = settings_of(description), description.decoder.seq_length
    for ids in prompts:
        if len(ids) >= window:
            raise UserError(
                f"a prompt has {len(ids):,} tokens, and the model was trained on windows of {window:,}: "
                f"expected at most {window - 1:,}"
            )
    with enter_single_process(settings) as rank_context:
        damage = reader.verify(checkpoint, rank_context)
        if damage is not None:
            raise UserError(f"the checkpoint {checkpoint.path} is damaged ({damage})")
        model = load_model(checkpoint.path, settings, description, rank_context)
        device = rank_context.device
        tell(checkpoint=str(checkpoint.path), step=checkpoint.marker.step, device=device.type)
        for ids in prompts:
            began, new = time.perf_counter(), list[int]()
            length = min(len(ids) + request.max_tokens, window)
            tokens = _tokens(model, ids, length, request, description, device)
            for piece in _pieces(tokenizer, ids, itertools.takewhile(tokenizer.is_text, tokens), new):
                tell(piece=piece)
            is_full, has_ended = length < len(ids) + request.max_tokens, len(ids) + len(new) < length
            end = "end_of_text" if has_ended else "window" if is_full else "max_tokens"
            seconds = round(time.perf_counter() - began, 3)
            tell(end=end, tokens=len(new), prompt_tokens=len(ids), seconds=seconds)


def _pieces(tokenizer: _Tokenizer, prompt: list[int], tokens: Iterable[int], new: list[int]) -> Iterator[str]:
    """Yield the text that each token adds, which goes to `new`; a character of several waits for the last."""
    shown = len(tokenizer.decode(prompt))
    for token in tokens:
        new.append(token)
        text = tokenizer.decode(prompt + new)
        if not text.endswith(_INCOMPLETE):
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(prompt + new)[shown:]


def _tokens(
    model: Any, prompt: list[int], length: int, request: Request, description: Description, device: Any
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, up to a length of both."""
    import torch
    from megatron.core.inference.contexts import StaticInferenceContext

    generator = torch.Generator().manual_seed(request.seed)
    context, read, new = StaticInferenceContext(1, length), 0, prompt
    for _ in range(length - len(prompt)):
        positions = torch.arange(read, read + len(new), device=device)[None]
        with torch.inference_mode():
            logits = model(
                input_ids=torch.tensor([new], device=device),
                position_ids=positions,
                attention_mask=None,
                inference_context=context,
                runtime_gather_output=True,
            )
        read += len(new)
        context.sequence_len_offset = read
        context.enable_decode_mode()
        new = [_draw(logits[0, -1, : description.vocabulary.size].float().cpu(), request, generator)]
        yield new[0]


def _draw(logits: Any, request: Request, generator: Any) -> int:
    """Return a token by its logits ``[vocabulary]``."""
    if not logits.isfinite().all():
        raise UserError("the model's logits are not finite: the training of this checkpoint diverged")
    if request.temperature == 0:
        return int(logits.argmax())
    probable, ids = ((logits - logits.max()) / request.temperature).softmax(-1).sort(descending=True)
    probable[probable.cumsum(-1) - probable >= request.top_p] = 0
    return int(ids[probable.multinomial(1, generator=generator)])


class _Tokenizer:
    """The training's tokenizer, as the converted model has it."""

    def __init__(self, description: Description, directory: Path | None) -> None:
        import tokenizers

        words = description.vocabulary
        with tempfile.TemporaryDirectory(prefix="slipway-") as scratch:
            if not write_tokenizer(Path(scratch), description, directory):
                raise UserError(
                    "the files of the training's tokenizer are not here: --tokenizer DIR names a directory "
                    "with them"
                )
            self._library = tokenizers.Tokenizer.from_file(str(Path(scratch, FAST)))
            options = read_mapping(Path(scratch, OPTIONS)) if Path(scratch, OPTIONS).is_file() else {}
        self._library.no_truncation()
        self._library.encode_special_tokens = bool(options.get("split_special_tokens"))
        if (size := self._library.get_vocab_size()) > words.size:
            raise UserError(f"the tokenizer has {size:,} tokens, and the model {words.size:,}: it is another")
        ends = description.imported.get("ends") or words.end_of_text
        self._ends = set(ends) if isinstance(ends, list) else {ends}
        self._start = words.end_of_text if words.start is None else words.start

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; of an empty one that with which texts begin."""
        return list(self._library.encode(text, add_special_tokens=False).ids) or [self._start]

    def is_text(self, token: int) -> bool:
        """Return False for a token that ends a text."""
        return token not in self._ends

    def decode(self, ids: list[int]) -> str:
        return str(self._library.decode(ids, skip_special_tokens=False))


if __name__ == "__main__":
    sys.exit(main())

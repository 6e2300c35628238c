"""The comparison of a converted model with ours: what both compute on real text.

Two correct programs that round in another order differ by about as much as either differs from the exact
result. Our logits in 32 bits may be `check_report.FACTOR` times as far from those of Hugging Face's model in
64 bits as Hugging Face's own in 32 bits are. Gradients are reported, and not judged.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from slipway.common.errors import UserError
from slipway.trainer import requirements
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.conversion.check_report import REPORT, TABLE, Gradient, Report, write_report
from slipway.trainer.conversion.families import rows_of
from slipway.trainer.model.single_process import enter_single_process, load_model, settings_of

_LIBRARIES = ("torch", "megatron.core", "transformers", "safetensors")
# Rounding to a type, relative to the number: half of the distance between two, at most.
_ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# The smallest number above 0 of float16.
_SMALLEST = 2.0**-24
# Tokens of a sequence: a model may have positions for far more than its logits fit into memory.
_LONGEST = 2048
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# Lincoln's address at Gettysburg (1863), which is in the public domain.
_TEXT = """\
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in \
Liberty, and dedicated to the proposition that all men are created equal.

Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and so \
dedicated, can long endure. We are met on a great battle-field of that war. We have come to dedicate a \
portion of that field, as a final resting place for those who here gave their lives that that nation might \
live. It is altogether fitting and proper that we should do this.

But, in a larger sense, we can not dedicate -- we can not consecrate -- we can not hallow -- this ground. \
The brave men, living and dead, who struggled here, have consecrated it, far above our poor power to add or \
detract. The world will little note, nor long remember what we say here, but it can never forget what they \
did here. It is for us the living, rather, to be dedicated here to the unfinished work which they who fought \
here have thus far so nobly advanced. It is rather for us to be here dedicated to the great task remaining \
before us -- that from these honored dead we take increased devotion to that cause for which they gave the \
last full measure of devotion -- that we here highly resolve that these dead shall not have died in vain -- \
that this nation, under God, shall have a new birth of freedom -- and that government of the people, by the \
people, for the people, shall not perish from the earth.
"""


def check(
    checkpoint: Path, model_dir: Path, description: Description, text: Path | None, sequences: int
) -> bool:
    """Compare a converted model with ours; print the report and write it into the model's directory.

    Parameters
    ----------
    checkpoint
        The directory of the checkpoint's files.
    model_dir
        The directory in Hugging Face's format.
    text
        A file of text to read; None for one that is built in.

    Returns
    -------
    bool
        Whether the two are the same but for rounding.

    Raises
    ------
    UserError
        If a library is missing, or the text cannot be read or is too short.
    """
    requirements.check(_LIBRARIES, extra="conversion")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if text is not None and not text.is_file():
        raise UserError(f"conversion.check.text={text}: there is no such file")
    report = compare(checkpoint, model_dir, description, text, sequences)
    print(report.table(), end="", flush=True)
    write_report(report, model_dir)
    return report.passed


def verdict(model_dir: Path, text: Path | None, sequences: int) -> bool | None:
    """Print the report of a model on this text and return its verdict; None without such a report."""
    try:
        report = json.loads((model_dir / REPORT).read_text(encoding="utf-8"))
        if (report["text_checksum"], report["sequences"]) != (_checksum(text), sequences):
            return None
        is_equal = bool(report["passed"])
        print((model_dir / TABLE).read_text(encoding="utf-8"), end="", flush=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return is_equal


def _checksum(text: Path | None) -> str:
    return hashlib.sha256(_TEXT.encode() if text is None else text.read_bytes()).hexdigest()


def compare(
    checkpoint: Path, model_dir: Path, description: Description, text: Path | None, sequences: int
) -> Report:
    """Return the comparison of a converted model with ours; both are in memory at a time."""
    settings = settings_of(description)
    with enter_single_process(settings) as rank_context:
        tokens, origin = _tokens(model_dir, description, text, sequences)
        tokens = tokens.to(rank_context.device)
        ours = load_model(checkpoint, settings, description, rank_context).requires_grad_(True)
        theirs, dtype = _load_theirs(model_dir, description)
        theirs = theirs.to(rank_context.device)
        losses = {"stored": _compute(theirs, _compute_theirs, description, tokens)[1]}
        rounded, rounding = _take_exact_weights(theirs, ours, description)
        found, losses["ours"] = _compute(ours, _compute_ours, description, tokens, backward=True)
        single, losses["theirs"] = _compute(theirs, _compute_theirs, description, tokens, backward=True)
        gradients = _gradients(ours, theirs, description)
        exact, losses["exact"] = _compute(theirs.double(), _compute_theirs, description, tokens)
    types = (dtype, "bfloat16" if description.precision == "bf16" else "float32")
    return Report(
        text=origin,
        text_checksum=_checksum(text),
        sequences=len(tokens),
        tokens=tokens.shape[1] - 1,
        ours=float((found.double() - exact).abs().max()),
        theirs=float((single.double() - exact).abs().max()),
        largest=float(exact.abs().max()),
        losses=losses,
        dtype=dtype,
        rounded=rounded,
        rounding=rounding,
        allowed_rounding=max(_ROUNDING.get(name, 0.0) for name in types),
        gradients=gradients,
    )


def _load_theirs(model_dir: Path, description: Description) -> tuple[Any, str]:
    """Return Hugging Face's model in 32 bits, and the type of the files' weights."""
    import torch
    import transformers
    from safetensors import safe_open

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = min(model_dir.glob("*.safetensors"), default=None)
    if path is None:
        raise UserError(f"{model_dir} holds no *.safetensors: it is not a model in Hugging Face's format")
    with safe_open(path, "pt") as file:
        dtype = file.get_tensor(next(iter(file.keys()))).dtype
    kind = transformers.AutoModelForSeq2SeqLM if description.encoder else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), str(dtype).removeprefix("torch.")


def _tokens(model_dir: Path, description: Description, text: Path | None, sequences: int) -> tuple[Any, str]:
    """Return ``[sequences, tokens + 1]``, and where they come from."""
    import torch
    import transformers

    shape, size = description.encoder or description.decoder, description.vocabulary.size
    longest = min(shape.seq_length, _LONGEST)
    if (model_dir / "tokenizer_config.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
        try:
            content = _TEXT if text is None else text.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"conversion.check.text={text}: expected UTF-8, but {error}") from None
        ids = torch.tensor(tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"])
        origin = "the built-in text" if text is None else str(text)
        least = 2 * sequences
        if len(ids) < least:
            raise UserError(
                f"conversion.check.text={origin}: it has {len(ids)} tokens, but "
                f"conversion.check.sequences={sequences} of them need {least} at least"
            )
    else:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(size, (sequences * (longest + 1),), generator=generator)
        origin = "random tokens: there is no tokenizer"
    length = min(longest + 1, len(ids) // sequences)
    return ids[: sequences * length].view(sequences, length), origin


def _compute(
    model: Any, logits_of: Any, description: Description, tokens: Any, backward: bool = False
) -> tuple[Any, float]:
    """Return a model's logits ``[sequences, tokens, vocabulary]`` and its loss in nats per token."""
    import torch

    with torch.enable_grad() if backward else torch.no_grad():
        logits, targets = logits_of(model, description, tokens)
        logits = logits[..., : description.vocabulary.size]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    if backward:
        loss.backward()
    return logits.detach(), float(loss)


def _compute_ours(model: Any, description: Description, tokens: Any) -> tuple[Any, Any]:
    import torch

    inputs, before, targets = _inputs(description, tokens)
    if before is not None:
        masks = dict.fromkeys(("encoder_attn_mask", "decoder_attn_mask", "encoder_decoder_attn_mask"))
        return model(encoder_input_ids=inputs, decoder_input_ids=before, **masks), targets
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    return model(input_ids=inputs, position_ids=positions, attention_mask=None), targets


def _compute_theirs(model: Any, description: Description, tokens: Any) -> tuple[Any, Any]:
    inputs, before, targets = _inputs(description, tokens)
    decoder = {} if before is None else {"decoder_input_ids": before}
    return model(input_ids=inputs, use_cache=False, **decoder).logits, targets


def _inputs(description: Description, tokens: Any) -> tuple[Any, Any, Any]:
    """Return the tokens that are read, those before the targets in a T5's decoder, and the targets."""
    if description.encoder is None:
        return tokens[:, :-1], None, tokens[:, 1:]
    written = tokens.flip(0)[:, : description.decoder.seq_length + 1]
    return tokens[:, :-1], written[:, :-1], written[:, 1:]


def _take_exact_weights(theirs: Any, ours: Any, description: Description) -> tuple[int, float]:
    """Give Hugging Face's model the checkpoint's weights where the files have them rounded.

    Returns
    -------
    tuple
        The number of those weights, and the largest difference, relative to the number itself.
    """
    import torch

    own, state, rounded, worst = _parameters(ours), theirs.state_dict(), 0, 0.0
    for row in rows_of(description):
        weight = None if row.ours is None else own[row.ours, row.layer].detach()
        for name, exact in zip(row.theirs, row.to_theirs(weight, torch.float32), strict=True):
            stored, exact = state[name], exact.to(state[name].device)
            if torch.equal(stored, exact):
                continue
            difference = ((stored - exact).abs() - _SMALLEST / 2).clamp(min=0)
            worst = max(worst, float((difference / exact.abs()).nan_to_num(0.0, math.inf).max()))
            rounded += 1
            stored.copy_(exact)
    return rounded, worst


def _gradients(ours: Any, theirs: Any, description: Description) -> dict[str, Gradient]:
    """Return the differences of all gradients by Hugging Face's names; none where we have no such weight."""
    import torch

    own, their_own, found = _parameters(ours), dict(theirs.named_parameters()), {}
    for row in rows_of(description):
        if row.ours is None or not row.theirs or row.theirs[0] not in their_own:
            continue
        gradient = own[row.ours, row.layer].grad.double()[: row.shape[0]]
        if row.fold is not None:
            # Its linear part: a fold orders numbers, or adds one.
            gradient = row.fold(gradient) - row.fold(torch.zeros_like(gradient))
        for name, part in zip(row.theirs, row.split(gradient * row.scale), strict=True):
            found[name] = _difference(part, their_own[name].grad.double())
    return found


def _difference(ours: Any, theirs: Any) -> Gradient:
    absolute, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    norms = float(ours.norm() * theirs.norm())
    return Gradient(
        absolute=absolute,
        relative=absolute / largest if largest else 0.0,
        cosine=float((ours * theirs).sum()) / norms if norms else 1.0,
    )


def _parameters(ours: Any) -> dict[tuple[str | None, int | None], Any]:
    """Return the parameters of our model by name in a checkpoint, and by layer where that stacks them."""
    parameters, found = dict(ours.named_parameters()), {}
    for name, item in ours.sharded_state_dict().items():
        match = _LAYER.search(name)
        is_stacked = match is not None and match[0] not in item.key
        if name in parameters:
            found[item.key, int(match[1]) if match and is_stacked else None] = parameters[name]
    return found

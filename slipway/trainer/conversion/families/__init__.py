"""The families of Hugging Face's models: each is a module, and a name in `FAMILIES`.

A model with a setting that Hugging Face's files cannot express is refused, naming the setting's key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slipway.common.errors import UserError, suggest
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.config.architecture import Architecture
from slipway.trainer.conversion.config_options import CONFIG, count, read_token_ids, stated
from slipway.trainer.conversion.families.family import Family
from slipway.trainer.conversion.families.gpt2 import GPT2
from slipway.trainer.conversion.families.llama import LLAMA
from slipway.trainer.conversion.families.mistral import MISTRAL
from slipway.trainer.conversion.families.qwen2 import QWEN2
from slipway.trainer.conversion.families.stablelm import STABLELM
from slipway.trainer.conversion.families.t5 import T5
from slipway.trainer.conversion.weight_map import NO_HEAD_BIAS, Row
from slipway.trainer.data.vocabulary import Vocabulary

FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, STABLELM, T5)
}
# The keys of special tokens.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def family_of(description: Description) -> Family:
    """Return the family whose models compute what a model does: an imported one's own, as long as it does.

    Raises
    ------
    UserError
        Naming the key that the nearest family does not have, and the valid values.
    """
    return _nearest(description.decoder, description.encoder, description.imported.get("family"))


def _nearest(decoder: Architecture, encoder: Architecture | None, own: str | None = None) -> Family:
    """Return the nearest family; among equally near ones `own`, or the first."""
    candidates = [
        family for family in FAMILIES.values() if family.is_encoder_decoder == (encoder is not None)
    ]
    mismatches = {family.name: list(family.mismatches(decoder, encoder)) for family in candidates}
    family = min(candidates, key=lambda family: (len(mismatches[family.name]), family.name != own))
    for key, value, expected in mismatches[family.name]:
        raise UserError(
            f"{key}={value}: Hugging Face has no model of this kind with that; expected {expected}"
        )
    return family


def check_trained(decoder: Architecture, encoder: Architecture | None) -> None:
    """Raise UserError if the model that a training with these stacks will have cannot be converted."""
    _nearest(decoder, encoder)
    if decoder.head_bias:
        raise UserError(f"model.tokens_head_bias=True: {NO_HEAD_BIAS}")


def rows_of(description: Description) -> Iterator[Row]:
    """Yield the rows of a model; raise UserError naming the key that Hugging Face's models do not have."""
    yield from family_of(description).rows(description)


def description_of(config: Mapping[str, Any], has_head: bool) -> Description:
    """Return the description of a model of Hugging Face's, with weights of 32 bits.

    Parameters
    ----------
    config
        The content of ``config.json``.
    has_head
        Whether the head has weights in addition to the embedding's.

    Raises
    ------
    UserError
        If it is of another family, or has an option that our models do not.
    """
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        valid = ", ".join(FAMILIES)
        raise UserError(f"{CONFIG}: model_type={name}: expected one of {valid}{suggest(name, FAMILIES)}")
    family = FAMILIES[name]
    decoder, encoder = family.read(stated(config, family.options), has_head)
    size, ends = count("vocab_size", config.get("vocab_size")), read_token_ids(config, "eos_token_id")
    padding = _token(config, "pad_token_id")
    start = _token(config, "decoder_start_token_id" if encoder else "bos_token_id")
    if encoder and start is None:
        start = padding
    # The vocabulary of a test may be smaller than the ids of published special tokens.
    words = Vocabulary(size, ends[0] if ends else size - 1, CONFIG, start, padding)
    tokens = {key: config[key] for key in _TOKENS if key in config}
    return Description(decoder, encoder, words, size, "fp32", imported={"family": name, "tokens": tokens})


def _token(config: Mapping[str, Any], key: str) -> int | None:
    """Return the id of a token, if there is one; the first Llamas' -1 means no padding."""
    return None if config.get(key) == -1 else next(iter(read_token_ids(config, key)), None)


def config_of(description: Description, dtype: str) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Parameters
    ----------
    dtype
        The type of its weights, such as ``bfloat16``.

    Raises
    ------
    UserError
        Naming the key that no family of Hugging Face's has.
    """
    decoder, encoder = description.decoder, description.encoder
    family = family_of(description)
    return {
        "architectures": [family.model_class],
        "model_type": family.name,
        "vocab_size": description.vocabulary.size,
        **family.write(decoder, encoder),
        **_tokens(description),
        "tie_word_embeddings": decoder.tied_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def generation_config_of(description: Description) -> dict[str, Any]:
    """Return the content of ``generation_config.json``."""
    stored: dict[str, Any] = description.imported.get("generation") or {}
    return stored or {"_from_model_config": True, **_tokens(description)}


def _tokens(description: Description) -> dict[str, Any]:
    words, is_t5 = description.vocabulary, description.encoder is not None
    tokens: dict[str, Any] = {"bos_token_id": words.start_or_end, "eos_token_id": words.end_of_text}
    if is_t5:
        # As in training (slipway.trainer.data.denoising).
        tokens["pad_token_id"] = words.padding_or_end
        tokens["decoder_start_token_id"] = words.start_or_end
    elif words.padding is not None:
        tokens["pad_token_id"] = words.padding
    if ends := description.imported.get("ends"):
        tokens["eos_token_id"] = ends
    return dict(description.imported.get("tokens", tokens))

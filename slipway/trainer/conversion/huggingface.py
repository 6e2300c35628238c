"""Hugging Face's model directories: the family of a model, its ``config.json``, and its model card.

What a model computes with and no file of Hugging Face's can say is refused by the key that says it. The forms
of rotary scaling and of the type of the weights are those that version 4 of transformers writes, which later
versions and other programs read as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slipway.common.errors import UserError
from slipway.common.files import write_atomic
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.config.architecture import Architecture
from slipway.trainer.conversion.tokenizer_files import check_tokenizer, write_tokenizer

if TYPE_CHECKING:
    import torch

CONFIG, GENERATION, CARD = "config.json", "generation_config.json", "README.md"

# The keys of special tokens.
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")

Family = Literal["gpt2", "llama", "stablelm", "t5"]

# Hugging Face's names of our functions (activations.py): its "gelu" is the exact one, and ours the tanh form.
FUNCTIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "squared-relu": "relu2"}
# Of models that Megatron-LM trained without its fused kernel.
_EXACT = {"exact-gelu": "gelu"}
GATED = {"swiglu": "silu", "geglu": "gelu_new", "reglu": "relu"}
_CLASSES: Mapping[Family, str] = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "t5": "T5ForConditionalGeneration",
}
NO_HEAD_BIAS = (
    "Hugging Face's T5 has no such bias, and without it the model would be another one; "
    "model.tokens_head_bias=False trains a model without it"
)
# Llama 3.1's, which are fixed in megatron-core (rotary_pos_embedding.py).
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_model_files(
    directory: Path,
    description: Description,
    dtype: torch.dtype,
    tokenizer_dir: Path | None,
    provenance: Mapping[str, Any],
) -> None:
    """Write all files of a model but its weights.

    Parameters
    ----------
    directory
        Of the model, and not finished.
    dtype
        The type of its weights.
    tokenizer_dir
        Where the tokenizer's files are; None: where the training had them.
    provenance
        What the card says of the training: ``run``, ``step``, ``consumed_samples``, ``checkpoint``, ``data``,
        ``git_commit``, ``versions`` and more, as far as it is known.

    Raises
    ------
    UserError
        If Hugging Face has no such model, or the tokenizer's files are another tokenizer's.
    """
    name = str(dtype).removeprefix("torch.")
    for file, content in (
        (CONFIG, config_of(description, name)),
        (GENERATION, generation_config_of(description)),
    ):
        write_atomic(directory / file, json.dumps(content, indent=2) + "\n")
    tokenizer = write_tokenizer(directory, description, tokenizer_dir)
    check_tokenizer(directory, description, tokenizer_dir)
    write_atomic(directory / CARD, model_card(description, name, tokenizer, provenance))


def model_card(
    description: Description, dtype: str, tokenizer: list[str], provenance: Mapping[str, Any]
) -> str:
    """Return the model card: what the model is, how it is loaded, and where it comes from."""
    shape = description.decoder
    family = family_of(shape, description.encoder)
    is_t5, run = description.encoder is not None, provenance.get("run") or "a model"
    kind = "AutoModelForSeq2SeqLM" if is_t5 else "AutoModelForCausalLM"
    tags = ["---", "library_name: transformers", f"pipeline_tag: {_PIPELINES[is_t5]}", "---", ""]
    layers = (
        f"{description.encoder.num_layers} + {shape.num_layers}" if description.encoder else shape.num_layers
    )
    rows = {
        "Architecture": f"{_CLASSES[family]}, {layers} layers, hidden size {shape.hidden_size}, "
        f"{shape.num_attention_heads} heads, vocabulary {description.vocabulary.size:,}",
        "Weights": dtype,
        "Training run": provenance.get("run"),
        "Step": provenance.get("step"),
        "Samples": provenance.get("consumed_samples"),
        "Checkpoint": provenance.get("checkpoint"),
        "Code": _commit(provenance),
        "Versions": ", ".join(
            f"{key} {value}" for key, value in dict(provenance.get("versions") or {}).items()
        ),
        "Tokenizer": ", ".join(tokenizer) or "none: the training's files were not at hand",
    }
    table = [f"| {name} | {_cell(value)} |" for name, value in rows.items() if value not in (None, "")]
    example = [f"from transformers import {kind}{', AutoTokenizer' if tokenizer else ''}", ""]
    example += ['tokenizer = AutoTokenizer.from_pretrained("PATH")'] if tokenizer else []
    example += [f'model = {kind}.from_pretrained("PATH")']
    parts = [
        *(*tags, f"# {run}", "", "Trained with Slipway, and converted by it.", ""),
        *("| | |", "|---|---|", *table, ""),
        *("```python", *example, "```", "", *_data(provenance), *_overrides(provenance)),
    ]
    return "\n".join(parts).rstrip() + "\n"


_PIPELINES = {False: "text-generation", True: "text2text-generation"}
# Files of data that a card lists; of more it says how many.
_LISTED = 50


def _commit(provenance: Mapping[str, Any]) -> str | None:
    commit = provenance.get("git_commit")
    return f"{commit}{' with local changes' if provenance.get('git_dirty') else ''}" if commit else None


def _data(provenance: Mapping[str, Any]) -> list[str]:
    files = [file for file in provenance.get("data") or () if isinstance(file, Mapping)]
    if not files:
        return []
    # Names alone: a card is for others, to whom the directories of this site say nothing.
    lines = [
        f"- `{Path(str(file.get('name'))).name}`, {file.get('size'):,} bytes, {file.get('checksum')}"
        for file in files
    ]
    more = [f"- and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return ["## Data", "", *lines[:_LISTED], *more, ""]


def _overrides(provenance: Mapping[str, Any]) -> list[str]:
    overrides = [str(item) for item in provenance.get("overrides") or ()]
    return ["## Configuration", "", "```", *overrides, "```", ""] if overrides else []


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def family_of(shape: Architecture, encoder: Architecture | None) -> Family:
    """Return the family of Hugging Face's models that computes what a decoder and an encoder do.

    Raises
    ------
    UserError
        Naming the key that no such family has, and what would have been valid.
    """
    if encoder is not None:
        _check_t5(encoder, shape)
        return "t5"
    if shape.position == "learned_absolute":
        _check_gpt2(shape)
        return "gpt2"
    _check("model", "position_embedding_type", shape.position, ("rope",), "learned_absolute or rope")
    if shape.normalization == "RMSNorm":
        _check_llama(shape)
        return "llama"
    _check_stablelm(shape)
    return "stablelm"


def check_trained(shape: Architecture, encoder: Architecture | None) -> None:
    """Raise UserError if the model that a training with these stacks will have cannot be converted."""
    family_of(shape, encoder)
    if shape.head_bias:
        raise UserError(f"model.tokens_head_bias=True: {NO_HEAD_BIAS}")


def _check_gpt2(shape: Architecture) -> None:
    _check("model", "activation", shape.activation, (*FUNCTIONS, *_EXACT), " or ".join(FUNCTIONS))
    _check("model", "normalization", shape.normalization, ("LayerNorm",), "layernorm or layernorm1p")
    heads = shape.num_attention_heads
    _check("model", "num_query_groups", shape.num_query_groups, (heads,))
    _check("model", "kv_channels", shape.kv_channels * heads, (shape.hidden_size,), "hidden_size / heads")


def _check_llama(shape: Architecture) -> None:
    _check("model", "activation", shape.activation, tuple(GATED))
    _check("model", "rotary_percentage", shape.rotary_percentage, (1.0,))
    _check_rope(shape)


def _check_stablelm(shape: Architecture) -> None:
    _check("model", "activation", shape.activation, tuple(GATED))
    _check("model", "bias", shape.bias, (False,))
    _check_rope(shape)
    heads = shape.num_attention_heads
    _check("model", "kv_channels", shape.kv_channels * heads, (shape.hidden_size,), "hidden_size / heads")
    if shape.rope.interleaved:
        _check("model", "rotary_percentage", shape.rotary_percentage, (1.0,))


def _check_rope(shape: Architecture) -> None:
    _check("model", "normalize_attention_scores", shape.normalize_scores, (True,))
    if shape.rope.scaling is not None:
        _check("model", "seq_len_interpolation_factor", shape.rope.interpolation, (None, 1.0))


def _check_t5(encoder: Architecture, decoder: Architecture) -> None:
    for name, shape in (("encoder", encoder), ("decoder", decoder)):
        node = f"model.{name}"
        _check(node, "position_embedding_type", shape.position, ("relative",))
        _check(node, "normalization", shape.normalization, ("RMSNorm",), "rmsnorm")
        _check(node, "bias", shape.bias, (False,))
        _check(node, "normalize_attention_scores", shape.normalize_scores, (False,))
        _check(node, "activation", shape.activation, (*FUNCTIONS, *GATED))
        _check(node, "num_query_groups", shape.num_query_groups, (shape.num_attention_heads,))
    same = {
        "ffn_hidden_size": (encoder.ffn_hidden_size, decoder.ffn_hidden_size),
        "num_attention_heads": (encoder.num_attention_heads, decoder.num_attention_heads),
        "kv_channels": (encoder.kv_channels, decoder.kv_channels),
        "activation": (encoder.activation, decoder.activation),
        "layernorm_epsilon": (encoder.norm_epsilon, decoder.norm_epsilon),
    }
    for key, (first, second) in same.items():
        _check("model.decoder", key, second, (first,), f"the encoder's {first}")


def _check(node: str, key: str, value: Any, valid: tuple[Any, ...], words: str = "") -> None:
    if value not in valid:
        expected = words or " or ".join(str(item) for item in valid)
        raise UserError(
            f"{node}.{key}={value}: Hugging Face has no model of this kind with that; expected {expected}"
        )


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
    shape, words = description.decoder, description.vocabulary
    family = family_of(shape, description.encoder)
    options = {"gpt2": _gpt2_options, "llama": _llama_options, "stablelm": _stablelm_options}
    own = _t5_options(description) if family == "t5" else options[family](shape)
    return {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "vocab_size": words.size,
        **own,
        **_tokens(description),
        "tie_word_embeddings": shape.tied_embeddings,
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


def _gpt2_options(shape: Architecture) -> dict[str, Any]:
    return {
        "n_positions": shape.max_positions,
        "n_embd": shape.hidden_size,
        "n_layer": shape.num_layers,
        "n_head": shape.num_attention_heads,
        "n_inner": shape.ffn_hidden_size,
        "activation_function": (FUNCTIONS | _EXACT)[shape.activation],
        "resid_pdrop": shape.hidden_dropout,
        "embd_pdrop": shape.hidden_dropout,
        "attn_pdrop": shape.attention_dropout,
        "layer_norm_epsilon": shape.norm_epsilon,
        "initializer_range": shape.init_std,
        "scale_attn_weights": shape.normalize_scores,
    }


def _rotary_options(shape: Architecture) -> dict[str, Any]:
    """Return what a Llama and a StableLM have in common."""
    scaling: dict[str, Any] | None = None
    if shape.rope.scaling is not None:
        scaling = {"rope_type": "llama3", "factor": shape.rope.scaling, **LLAMA3}
    elif shape.rope.interpolation not in (None, 1.0):
        scaling = {"rope_type": "linear", "factor": shape.rope.interpolation}
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "hidden_act": GATED[shape.activation],
        "max_position_embeddings": shape.max_positions,
        "initializer_range": shape.init_std,
        "attention_dropout": shape.attention_dropout,
        "rope_theta": float(shape.rotary_base),
        "rope_scaling": scaling,
    }


def _llama_options(shape: Architecture) -> dict[str, Any]:
    return {
        **_rotary_options(shape),
        "head_dim": shape.kv_channels,
        "rms_norm_eps": shape.norm_epsilon,
        "attention_bias": shape.bias,
        "mlp_bias": shape.bias,
    }


def _stablelm_options(shape: Architecture) -> dict[str, Any]:
    return {
        **_rotary_options(shape),
        "partial_rotary_factor": shape.rotary_percentage,
        "layer_norm_eps": shape.norm_epsilon,
        "hidden_dropout": shape.hidden_dropout,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    }


def _t5_options(description: Description) -> dict[str, Any]:
    encoder, shape = description.encoder, description.decoder
    assert encoder is not None
    assert shape.relative is not None
    gated = GATED.get(shape.activation)
    # T5Config reads "gated-gelu" as the tanh form.
    projection = f"gated-{gated.replace('gelu_new', 'gelu')}" if gated else FUNCTIONS[shape.activation]
    return {
        "d_model": shape.hidden_size,
        "d_kv": shape.kv_channels,
        "d_ff": shape.ffn_hidden_size,
        "num_layers": encoder.num_layers,
        "num_decoder_layers": shape.num_layers,
        "num_heads": shape.num_attention_heads,
        "relative_attention_num_buckets": shape.relative.buckets,
        "relative_attention_max_distance": shape.relative.max_distance,
        "dropout_rate": shape.hidden_dropout,
        "layer_norm_epsilon": shape.norm_epsilon,
        "feed_forward_proj": projection,
        "is_encoder_decoder": True,
    }

"""Import of weights: a directory of Hugging Face's becomes a checkpoint that a training starts from.

The checkpoint has the weights alone, at step 0. ``training.restore_from_path`` names it, and the run's own
``model`` has to be of the same shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import compatible, store
from trainer.checkpoint.description import Description, Precision
from trainer.checkpoint.files import file_checksum
from trainer.checkpoint.marker import Marker
from trainer.checkpoint.tensor_files import TensorFilesWriter
from trainer.config.architecture import Architecture, Relative, Rope
from trainer.config.tokenizer import Tokenizer
from trainer.conversion import outputs
from trainer.conversion.huggingface import CONFIG, FUNCTIONS, GATED, LLAMA3
from trainer.conversion.safetensors_files import SafetensorsFiles
from trainer.conversion.sources import identity
from trainer.conversion.spec import Conversion
from trainer.conversion.tokenizer_files import FAST, tokenizer_digest
from trainer.conversion.weight_map import Row, rows_of
from trainer.data.vocabulary import Vocabulary
from trainer.errors import UserError, suggest

_SYNONYMS = {"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# GPT-2's first files have no prefix.
_PREFIX = "transformer."
# What the files of some versions have besides: copies of tied weights, masks, and positions that no T5 uses.
_COPIES = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_UNUSED = (
    *(".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"),
    ".EncDecAttention.relative_attention_bias.weight",
)


def import_weights(conversion: Conversion, source: Path) -> Path:
    """Write the checkpoint, tensor by tensor, and return it.

    Parameters
    ----------
    conversion
        Its output, and the type of the weights.
    source
        A directory with ``config.json`` and safetensors files.

    Raises
    ------
    UserError
        If a file is missing, damaged or of another model than ``config.json`` says, our models lack one of
        its options, or the output is another conversion's.
    """
    output, tokenizer = conversion.output_of(0), conversion.tokenizer_dir or source
    has_tokenizer = (tokenizer / FAST).is_file()
    if conversion.tokenizer_dir is not None and not has_tokenizer:
        raise UserError(f"conversion.tokenizer_dir={tokenizer}: it has no {FAST}, which this needs")
    config = _read_config(source)
    with SafetensorsFiles(source) as files:
        weights = _Weights(files)
        dtype = _dtype_of(weights) if conversion.dtype is None else getattr(torch, conversion.dtype)
        precision: Precision = "bf16" if dtype == torch.bfloat16 else "fp32"
        description = description_of(config, weights.has_head(config), precision)
        rows = list(rows_of(description))
        _check_names(source, weights, rows)
        record = {
            "source": str(source),
            "config": file_checksum(source / CONFIG),
            "checkpoint": identity(files),
            "to": conversion.to,
            "dtype": conversion.dtype,
            "tokenizer": tokenizer_digest(conversion.tokenizer_dir),
        }
        if outputs.is_there(output, record):
            return output
        size = sum(info.size_bytes for info in files.tensors().values())
        with outputs.new_directory(output, record, size) as unfinished:
            if unfinished is None:
                return output
            _write(unfinished, weights, rows, dtype)
            if has_tokenizer:
                description = _with_tokenizer(description, tokenizer)
            _mark(unfinished, description)
    return output


def _write(directory: Path, weights: _Weights, rows: list[Row], dtype: torch.dtype) -> None:
    depth: dict[str, int] = {}
    for row in rows:
        if row.ours is not None and row.layer is not None:
            depth[row.ours] = max(depth.get(row.ours, 0), row.layer + 1)
    with TensorFilesWriter(directory) as writer:
        for row in rows:
            ours = row.to_ours(*(weights.read(name) for name in row.theirs))
            if row.ours is None:
                continue
            # What is scaled keeps the 64 bits that make the way back exact.
            ours = ours if row.scale != 1.0 else ours.to(dtype)
            if row.layer is None:
                for name in (row.ours, *row.copies):
                    writer.add(name, ours)
            else:
                whole = (depth[row.ours], *row.shape)
                offset = (row.layer, *(0 for _ in row.shape))
                writer.add(row.ours, ours.unsqueeze(0), whole, offset)
        writer.finish({"step": 0, "consumed_samples": 0}, json.dumps(_FORMAT).encode())


def _mark(directory: Path, description: Description) -> None:
    sizes, checksums = store.sync_part(directory, 0), store.checksum_part(directory, 0)
    Marker(
        step=0,
        consumed_samples=0,
        world_size=1,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=1,
        context_parallel_size=1,
        architecture=compatible.shapes_of(description),
        serial=1,
        files=sizes,
        checksums=checksums,
        model=description.to_json(),
    ).write(directory)


def _with_tokenizer(description: Description, directory: Path) -> Description:
    return replace(description, tokenizer=Tokenizer("huggingface", str(directory.absolute())))


class _Weights:
    """The weights of a directory, by the names that a whole model of Hugging Face's has for them."""

    def __init__(self, files: SafetensorsFiles) -> None:
        self._files = files
        names = files.tensors()
        bare = "wte.weight" in names
        self.names = {
            f"{_PREFIX}{name}" if bare and name != "lm_head.weight" else name: name for name in names
        }

    def read(self, name: str) -> Any:
        """Return a weight."""
        if name not in self.names:
            raise UserError(
                f"{self._files.directory}: it lacks {name}, which {CONFIG} makes part of the model"
            )
        return self._files.read(self.names[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a weight."""
        return self._files.tensors()[self.names[name]].dtype

    def has_head(self, config: Mapping[str, Any]) -> bool:
        """Return whether the head has weights of its own; a copy of the embedding's are none."""
        if "lm_head.weight" not in self.names:
            return False
        tied = config.get("tie_word_embeddings", config.get("model_type") in ("gpt2", "t5"))
        words = next((name for name in _EMBEDDINGS if name in self.names), None)
        if not tied or words is None:
            return True
        return not torch.equal(self.read("lm_head.weight"), self.read(words))


_EMBEDDINGS = ("transformer.wte.weight", "model.embed_tokens.weight", "shared.weight")


def _dtype_of(weights: _Weights) -> torch.dtype:
    """Return the type of the embedding; float16, in which nothing is trained here, becomes float32."""
    dtype = next((weights.dtype(name) for name in _EMBEDDINGS if name in weights.names), torch.float32)
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _check_names(source: Path, weights: _Weights, rows: list[Row]) -> None:
    wanted = {name for row in rows for name in row.theirs}
    unknown = [
        name
        for name in weights.names
        if name not in wanted and name not in _COPIES and not name.endswith(_UNUSED)
    ]
    missing = sorted(wanted - set(weights.names))
    for name in missing[:1]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{source}: it lacks {name}{more}, which {CONFIG} makes part of the model")
    for name in unknown[:1]:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UserError(f"{source}: {CONFIG} knows no {name}{more}: it would be left out")


def _read_config(source: Path) -> dict[str, Any]:
    path = source / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"conversion.source={source}: {CONFIG}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"conversion.source={source}: {CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"conversion.source={source}: {CONFIG} is not a mapping")
    return config


def description_of(config: Mapping[str, Any], has_head: bool, precision: Precision) -> Description:
    """Return the description of a model of Hugging Face's.

    Parameters
    ----------
    config
        The content of ``config.json``.
    has_head
        Whether the head's weights are beside the embedding's.
    precision
        The type of the weights.

    Raises
    ------
    UserError
        If it is of another family, or our models lack one of its options.
    """
    readers = {"gpt2": _read_gpt2, "llama": _read_llama, "stablelm": _read_stablelm, "t5": _read_t5}
    family = str(config.get("model_type"))
    if family not in readers:
        raise UserError(
            f"{CONFIG}: model_type={family}: expected one of {', '.join(readers)}{suggest(family, readers)}"
        )
    try:
        encoder, decoder = readers[family](_Options(config), has_head)
        size, end = int(config["vocab_size"]), config.get("eos_token_id")
        ends = tuple(map(int, end)) if isinstance(end, list) else ()
        end = next(iter(ends), None) if isinstance(end, list) else end
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{CONFIG} lacks an option of {family}, or it is malformed: {error!r}") from None
    start = config.get("decoder_start_token_id") if encoder else config.get("bos_token_id")
    padding = config.get("pad_token_id")
    if encoder and start is None:
        start = padding
    # The vocabulary of a test may be smaller than the ids of published special tokens.
    words = Vocabulary(size, size - 1 if end is None else int(end), CONFIG, start, padding)
    return Description(decoder, encoder, words, size, precision, ends=ends)


class _Options:
    """The options of ``config.json``, with the defaults of transformers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self._config.get(key)
        if value is None and default is None:
            raise KeyError(key)
        return default if value is None else value

    def only(self, key: str, *valid: Any) -> None:
        """Refuse an option that our models lack; the first valid value is the default."""
        value = self._config.get(key, valid[0])
        if value not in valid:
            raise UserError(f"{CONFIG}: {key}={value}: our models have no such option; expected {valid[0]}")

    def function(self, key: str, default: str, names: Mapping[str, str]) -> str:
        """Return our name of an activation."""
        value = self(key, default)
        known = {theirs: ours for ours, theirs in names.items()}
        name = known.get(_SYNONYMS.get(value, value))
        if name is None:
            valid = ", ".join([*known, *_SYNONYMS])
            raise UserError(f"{CONFIG}: {key}={value}: our models lack it; expected one of {valid}")
        return name

    def rope(self) -> tuple[int, float, Rope]:
        """Return the base, the share of the channels and the options of rotary positions."""
        scaling = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        base = float(scaling.get("rope_theta", self("rope_theta", 10000.0)))
        if base != int(base):
            raise UserError(f"{CONFIG}: rope_theta={base}: expected a whole number, as model.rotary_base")
        if kind not in ("default", "linear", "llama3"):
            raise UserError(f"{CONFIG}: rope_type={kind}: expected default, linear or llama3")
        for key, value in LLAMA3.items() if kind == "llama3" else ():
            if scaling[key] != value:
                raise UserError(
                    f"{CONFIG}: {key}={scaling[key]}: megatron-core scales with Llama 3.1's {value}"
                )
        factor = None if kind == "default" else float(scaling["factor"])
        share = scaling.get("partial_rotary_factor", self("partial_rotary_factor", -1.0))
        rope = Rope(
            interleaved=False,
            interpolation=factor if kind == "linear" else None,
            scaling=factor if kind == "llama3" else None,
            fusion=False,
        )
        return int(base), float(share), rope


_NO_ROPE = Rope(interleaved=False, interpolation=None, scaling=None, fusion=False)


def _architecture(**values: Any) -> Architecture:
    """Return an architecture; what a file of Hugging Face's does not say is a training's affair."""
    heads = values["num_attention_heads"]
    plain = {
        "num_query_groups": heads,
        "kv_channels": values["hidden_size"] // heads,
        "normalize_scores": True,
        "seq_length": values["max_positions"],
        "relative": None,
        "rotary_percentage": 1.0,
        "rotary_base": 10000,
        "rope": _NO_ROPE,
        "zero_centered_gamma": False,
        "head_bias": False,
        "vocab_divisor": 1,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_std": 0.02,
        "scaled_init": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "loss_fusion": False,
        "transformer_engine": False,
        "attention_backend": "auto",
        "recompute": None,
    }
    return Architecture(**{**plain, **values})


def _read_gpt2(option: _Options, has_head: bool) -> tuple[Architecture | None, Architecture]:
    option.only("scale_attn_by_inverse_layer_idx", False)
    option.only("add_cross_attention", False)
    hidden = int(option("n_embd", 768))
    return None, _architecture(
        num_layers=int(option("n_layer", 12)),
        hidden_size=hidden,
        ffn_hidden_size=int(option("n_inner", 4 * hidden)),
        num_attention_heads=int(option("n_head", 12)),
        max_positions=int(option("n_positions", 1024)),
        position="learned_absolute",
        activation=option.function("activation_function", "gelu_new", FUNCTIONS),
        normalization="LayerNorm",
        norm_epsilon=float(option("layer_norm_epsilon", 1e-5)),
        normalize_scores=bool(option("scale_attn_weights", True)),
        bias=True,
        tied_embeddings=not has_head,
        hidden_dropout=float(option("resid_pdrop", 0.1)),
        attention_dropout=float(option("attn_pdrop", 0.1)),
    )


def _rotary(option: _Options, has_head: bool, **more: Any) -> Architecture:
    hidden, heads = int(option("hidden_size")), int(option("num_attention_heads"))
    base, _, rope = option.rope()
    values = {
        "num_layers": int(option("num_hidden_layers")),
        "hidden_size": hidden,
        "ffn_hidden_size": int(option("intermediate_size")),
        "num_attention_heads": heads,
        "num_query_groups": int(option("num_key_value_heads", heads)),
        "kv_channels": int(option("head_dim", hidden // heads)),
        "max_positions": int(option("max_position_embeddings", 2048)),
        "position": "rope",
        "rotary_base": base,
        "rope": rope,
        "activation": option.function("hidden_act", "silu", GATED),
        "tied_embeddings": not has_head,
        "attention_dropout": float(option("attention_dropout", 0.0)),
    }
    return _architecture(**{**values, **more})


def _read_llama(option: _Options, has_head: bool) -> tuple[Architecture | None, Architecture]:
    bias = bool(option("attention_bias", False))
    option.only("mlp_bias", bias)
    if option.rope()[1] not in (-1.0, 1.0):
        option.only("partial_rotary_factor", 1.0)
    norm = {"normalization": "RMSNorm", "norm_epsilon": float(option("rms_norm_eps", 1e-6))}
    return None, _rotary(option, has_head, bias=bias, **norm)


def _read_stablelm(option: _Options, has_head: bool) -> tuple[Architecture | None, Architecture]:
    for key in ("use_qkv_bias", "qk_layernorm", "use_parallel_residual"):
        option.only(key, False)
    share = option.rope()[1]
    return None, _rotary(
        option,
        has_head,
        bias=False,
        normalization="LayerNorm",
        norm_epsilon=float(option("layer_norm_eps", 1e-5)),
        rotary_percentage=0.25 if share < 0 else share,
        hidden_dropout=float(option("hidden_dropout", 0.0)),
    )


def _read_t5(option: _Options, has_head: bool) -> tuple[Architecture | None, Architecture]:
    # The first T5 says that its head is tied, and means the factor before it too.
    scaled = option("scale_decoder_outputs", option("tie_word_embeddings", True))
    if bool(scaled) == has_head:
        raise UserError(
            f"{CONFIG}: scale_decoder_outputs={scaled} with "
            f"{'a head of its own' if has_head else 'a tied head'}: expected the first T5's, or T5 1.1's"
        )
    projection = str(option("feed_forward_proj", "relu"))
    kind, _, function = projection.rpartition("-")
    if kind not in ("", "gated"):
        raise UserError(f"{CONFIG}: feed_forward_proj={projection}: expected a function, or gated- and one")
    function = "gelu_new" if projection == "gated-gelu" else function
    names = GATED if kind else FUNCTIONS
    known = {theirs: ours for ours, theirs in names.items()}
    if function not in known:
        raise UserError(
            f"{CONFIG}: feed_forward_proj={projection}: our models lack it; expected "
            f"{' or '.join(f'gated-{name}' if kind else name for name in known)}"
        )
    dropout, layers = float(option("dropout_rate", 0.1)), int(option("num_layers", 6))
    buckets = int(option("relative_attention_num_buckets", 32))
    values: dict[str, Any] = {
        "hidden_size": int(option("d_model")),
        "ffn_hidden_size": int(option("d_ff")),
        "num_attention_heads": int(option("num_heads")),
        "kv_channels": int(option("d_kv")),
        "max_positions": int(option("n_positions", 512)),
        "position": "relative",
        "relative": Relative(buckets, int(option("relative_attention_max_distance", 128))),
        "normalize_scores": False,
        "activation": known[function],
        "normalization": "RMSNorm",
        "norm_epsilon": float(option("layer_norm_epsilon", 1e-6)),
        "bias": False,
        "tied_embeddings": not has_head,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
    }
    decoder_layers = int(option("num_decoder_layers", layers))
    return _architecture(num_layers=layers, **values), _architecture(num_layers=decoder_layers, **values)

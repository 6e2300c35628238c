"""Checkpoints of Megatron-LM in the format ``torch_dist``, which are megatron-core's as ours are.

The weights have our names. ``common.pt`` describes the model by the options of the training, an
``argparse.Namespace``. Checkpoints are directories ``iter_NNNNNNN``; ``latest_checkpointed_iteration.txt``
names one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.checkpoint.files import read_mapping
from slipway.trainer.checkpoint.marker import MARKER
from slipway.trainer.checkpoint.tensor_files import COMMON, FORMAT, INDEX_FILE, Index, TensorFiles, TensorInfo
from slipway.trainer.config.architecture import read_architecture
from slipway.trainer.config.tokenizer import Tokenizer
from slipway.trainer.config.values import Values
from slipway.trainer.conversion.foreign import checkpoint_of_step, read_tracker
from slipway.trainer.conversion.pickled_files import Unknown, load
from slipway.trainer.data.vocabulary import Vocabulary, read_vocabulary

LATEST = "latest_checkpointed_iteration.txt"
_LAYER = re.compile(r"(?P<stack>(?:.+\.)?layers)\.(?P<layer>\d+)\.(?P<rest>.+)")
# Options whose models have no counterpart here, and the only value that is converted.
_ONLY: Mapping[str, Any] = {
    "num_experts": None,
    "multi_latent_attention": False,
    "qk_layernorm": False,
    "heterogeneous_layers_config_path": None,
    "mtp_num_layers": None,
    "hybrid_override_pattern": None,
    "apply_residual_connection_post_layernorm": False,
    "quick_geglu": False,
    "window_size": None,
    "qk_l2_norm": False,
    "no_rope_freq": None,
    "softmax_type": "vanilla",
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "experimental_attention_variant": None,
}
_INSTEAD = "; conversion.to=safetensors writes the weights under Megatron-LM's names"
# Our key of each option that is a number or a switch.
_KEYS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "kv_channels",
    "seq_length": "encoder_seq_length",
    "max_position_embeddings": "max_position_embeddings",
    "position_embedding_type": "position_embedding_type",
    "rotary_percent": "rotary_percentage",
    "rotary_base": "rotary_base",
    "rotary_interleaved": "rotary_interleaved",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "use_rope_scaling": "scale_positional_embedding",
    "rope_scaling_factor": "scale_factor",
    "add_bias_linear": "bias",
    "add_qkv_bias": "qkv_bias",
    "make_vocab_size_divisible_by": "make_vocab_size_divisible_by",
}
_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


class MegatronLmFiles(TensorFiles):
    """The weights of a checkpoint under our names, with the layers of a stack as one tensor.

    Parameters
    ----------
    directory
        ``iter_NNNNNNN``, or the directory of such.
    step
        Which of several; None: the one of ``latest_checkpointed_iteration.txt``.

    Raises
    ------
    UserError
        If no checkpoint has that step, it is of another format, or its index cannot be read.
    """

    def __init__(self, directory: Path, step: int | None = None) -> None:
        super().__init__(_checkpoint(directory, step))
        everything = self._infos
        self._layers: dict[str, dict[int, str]] = {}
        for name in everything:
            if match := _LAYER.fullmatch(name):
                stacked = f"{match['stack']}.{match['rest']}"
                self._layers.setdefault(stacked, {})[int(match["layer"])] = name
        apart = {name for layers in self._layers.values() for name in layers.values()}
        self._infos = {name: info for name, info in everything.items() if name not in apart}
        for stacked, layers in self._layers.items():
            infos = {everything[name] for name in layers.values()}
            if len(infos) > 1 or sorted(layers) != list(range(len(layers))) or stacked in self._infos:
                raise UserError(
                    f"{self.directory}: the layers of {stacked} are not alike, or some are missing"
                )
            info = infos.pop()
            self._infos[stacked] = TensorInfo((len(layers), *info.shape), info.dtype)

    def read(self, name: str, index: Index = None) -> torch.Tensor:
        """Return a tensor; with a number as `index` one layer of it."""
        layers = self._layers.get(name)
        if layers is None:
            return super().read(name, index)
        if isinstance(index, int):
            return super().read(layers[index])
        whole = torch.stack([TensorFiles.read(self, layers[layer]) for layer in range(len(layers))])
        return whole if index is None else whole[index]

    def description(self, tokenizer_dir: Path | None = None) -> Description:
        """Return the description of the model, from the options of its training.

        The vocabulary is that of the tokenizer's files where they were then, or in `tokenizer_dir`; without
        them the embedding keeps its padding, whose tokens the model never saw.

        Raises
        ------
        UserError
            Naming the option of a model that is not supported.
        """
        options = _Options(self.directory)
        if any(name.startswith("encoder.") for name in self._infos):
            raise UserError(f"{self.directory}: of Megatron-LM's models the GPTs are converted{_INSTEAD}")
        shape = read_architecture(Values(_keys(options)))
        tokenizer = _tokenizer(options, tokenizer_dir)
        # Without the fused kernel megatron-core computes the exact function.
        if shape.activation == "gelu" and not options.get("bias_gelu_fusion", False):
            shape = replace(shape, activation="exact-gelu")
        padded = options.whole("padded_vocab_size")
        return Description(
            decoder=shape,
            encoder=None,
            vocabulary=_vocabulary(options, tokenizer, padded),
            padded_vocabulary=padded,
            precision="bf16" if options.get("bf16", False) else "fp32",
            tokenizer=tokenizer,
        )


class _Options:
    """The options of a training; those that its version had not yet are at their default."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / COMMON
        content = load(self.path)
        options = content.get("args") if isinstance(content, dict) else None
        if not isinstance(options, Unknown):
            raise UserError(
                f"{self.path}: no options of a training ('args') in it, so it is not Megatron-LM's; "
                f"one of Slipway's has {MARKER}, and is unfinished without it"
            )
        self._values = vars(options)

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name, default)
        return default if isinstance(value, Unknown) else value

    def whole(self, name: str) -> int:
        value = self._values.get(name)
        if type(value) is not int or value < 1:
            raise UserError(f"{self.path}: args.{name}={value!r}: expected a whole number of at least 1")
        return value


def is_legacy(directory: Path) -> bool:
    """Return whether a directory is, or has, that of a rank in Megatron-LM's format of single ranks."""
    return any(any(directory.glob(pattern)) for pattern in ("model_*rng.pt", "mp_rank_*/model_*rng.pt"))


def _checkpoint(directory: Path, step: int | None) -> Path:
    """Return the directory of a checkpoint.

    Raises
    ------
    UserError
        If no checkpoint is found, or it is in the format of single ranks.
    """
    path = directory
    if not (directory / INDEX_FILE).is_file() and not is_legacy(directory):
        tracked = read_tracker(directory / LATEST, "iter_{:07d}") if step is None else None
        path = tracked or checkpoint_of_step(directory, step)
    if is_legacy(path):
        raise UserError(
            f"{path}: it is in the format torch (mp_rank_00/model_optim_rng.pt), which is not read; its own "
            "Megatron-LM writes it as torch_dist: pretrain_gpt.py --ckpt-convert-format torch_dist "
            "--ckpt-convert-save DIRECTORY, for a model from before megatron-core after "
            "tools/checkpoint/convert.py --saver core"
        )
    if not (path / INDEX_FILE).is_file():
        raise UserError(
            f"{path}: no {INDEX_FILE}; of Megatron-LM's checkpoints --ckpt-format torch_dist is read"
        )
    kind = path / FORMAT
    if kind.is_file():
        backend = read_mapping(kind).get("sharded_backend")
        if not isinstance(backend, str):
            raise UserError(f"{kind} cannot be read: expected the name of a sharded_backend")
        if backend != "torch_dist":
            raise UserError(f"{kind}: sharded_backend={backend}: expected torch_dist")
    return path


def _keys(options: _Options) -> dict[str, Any]:
    """Return the dotted keys of our configuration of the same model.

    Raises
    ------
    UserError
        Naming an option whose model is not supported.
    """
    for name, only in _ONLY.items():
        value = options.get(name, only)
        if value != only and not (only is None and value is False):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{options.path}: {option} ({value!r}) is not supported{_INSTEAD}")
    keys = {f"model.{key}": options.get(name) for name, key in _KEYS.items()}
    grouped = options.get("group_query_attention", False)
    keys["model.num_query_groups"] = options.get("num_query_groups") if grouped else None
    keys["model.activation"] = _activation(options)
    keys["model.share_embeddings_and_output_weights"] = not options.get(
        "untie_embeddings_and_output_weights", False
    )
    keys["model.layernorm_epsilon"] = _norm_epsilon(options)
    keys["model.normalization"] = _normalization(options)
    if not options.get("use_rope_scaling", False):
        keys.pop("model.scale_factor")
    if keys["model.position_embedding_type"] != "rope":
        keys = {name: value for name, value in keys.items() if "rotary" not in name}
    return {name: value for name, value in keys.items() if value is not None}


def _normalization(options: _Options) -> str:
    # Earlier versions keep the option under the name of its flag, later ones under megatron-core's.
    one_plus = any(options.get(name) for name in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"))
    if options.get("normalization", "LayerNorm") != "RMSNorm":
        return "layernorm1p" if one_plus else "layernorm"
    if one_plus:
        raise UserError(
            f"{options.path}: --apply-layernorm-1p with --normalization RMSNorm is not supported{_INSTEAD}"
        )
    return "rmsnorm"


def _norm_epsilon(options: _Options) -> Any:
    # Earlier versions call it as its flag, --norm-epsilon.
    value = options.get("layernorm_epsilon", options.get("norm_epsilon"))
    if value is None:
        raise UserError(
            f"{options.path}: args.layernorm_epsilon is missing, and so is args.norm_epsilon{_INSTEAD}"
        )
    return value


def _activation(options: _Options) -> str:
    for name, activation in (("swiglu", "swiglu"), ("squared_relu", "squared-relu")):
        if options.get(name, False):
            return activation
    return "gelu"


def _tokenizer(options: _Options, directory: Path | None) -> Tokenizer:
    kind = str(options.get("tokenizer_type", ""))

    def file(name: str) -> Path | None:
        value = options.get(name)
        path = Path(value) if isinstance(value, str) and value else None
        return directory / path.name if path and directory and (directory / path.name).is_file() else path

    if kind in _SENTENCEPIECE:
        return Tokenizer(library="sentencepiece", model=file("tokenizer_model"))
    if kind == "HuggingFaceTokenizer":
        return Tokenizer(library="huggingface", name=str(directory or options.get("tokenizer_model")))
    return Tokenizer(library="megatron", vocab_file=file("vocab_file"), merge_file=file("merge_file"))


def _vocabulary(options: _Options, tokenizer: Tokenizer, padded: int) -> Vocabulary:
    size = options.get("vocab_size")
    if options.get("tokenizer_type") == "NullTokenizer" and isinstance(size, int):
        # One more for the end of a document.
        return Vocabulary(size + 1, size, "--vocab-size")
    try:
        vocabulary = read_vocabulary(tokenizer, mock=False)
    except UserError:
        return Vocabulary(
            padded, padded - 1, "the embedding, with padding: the tokenizer's files are not there"
        )
    if vocabulary.size > padded:
        raise UserError(
            f"{options.path}: the embedding has {padded:,} tokens, and the tokenizer {vocabulary.size:,} "
            f"({vocabulary.origin}): it is another one than the model was trained with"
        )
    return vocabulary

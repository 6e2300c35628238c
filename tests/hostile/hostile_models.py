"""Model directories that a hostile user or a broken disk could leave: strategies, and a writer of them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.monitor.hostile_runs import JUNK, ODD_VALUES, Thing, junk, odd_texts, odd_values, put, special

# The formats of a model directory, each with the format that it is converted to.
FORMS = {
    "huggingface": "slipway",
    "slipway": "huggingface",
    "slipway files": "safetensors",
    "deepspeed": "safetensors",
}
_SECRET = "secret"  # replaced by the path of a private file

_CONFIG_KEYS = [
    "architectures", "model_type", "vocab_size", "n_embd", "n_layer", "n_head", "n_positions", "n_inner",
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "rope_theta", "rope_parameters", "rope_scaling", "eos_token_id", "bos_token_id",
    "tie_word_embeddings", "torch_dtype", "dtype", "max_position_embeddings", "rms_norm_eps", "hidden_act",
    "activation_function", "attention_bias", "auto_map",
]  # fmt: skip
_MARKER_KEYS = [
    "step", "consumed_samples", "world_size", "architecture", "files", "checksums", "optimizer", "model",
    "data", "version", "tensor_model_parallel_size", "state", "tokenizer",
]  # fmt: skip
_ODD_SIZES = [10**7, 10**18, 2**63, -1, 0, 1, 10**400, 0.5, True, None, "2", [], {}, {"a": [1]}]


class _Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def _patches(target: str, name: str, value: Any) -> bytes:
    """Return a pickle that sets an attribute of a class or function: BUILD with the state of slots."""
    module, attribute = target.rsplit(".", 1)
    state = pickle.dumps((None, {name: value}), protocol=2)[2:-1]
    return b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + state + b"b."


_PICKLES = [
    pickle.dumps(_Calls(os.system, "touch canary")),
    pickle.dumps(_Calls(eval, "open('canary', 'w')")),
    pickle.dumps(_Calls(getattr, os._Environ, "pop")),
    _patches("pathlib.PurePosixPath", "name", "OWNED"),
    _patches("torch.distributed.checkpoint.metadata.Metadata", "state_dict_metadata", {}),
    _patches("collections.OrderedDict", "owned", 1),
    pickle.dumps({"a": 1}),
    pickle.dumps([[]] * 1000),
    b"\x80\x02" + b"(" * 100_000,
    b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    b"\x80\x02X\xff\xff\xff\x7f.",
    b"\x80\x02]" + b"]a" * 5000 + b".",
]
pickles = st.sampled_from(_PICKLES) | st.binary(max_size=100)


def _safetensors(header: Any, length: int | None, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text) if length is None else length) + text + data


_SHAPES = [[2, 2], [], [0], [-1], [10**12], [2**62, 2], "x", [1.5], [10**400], None]
_OFFSETS = [[0, 16], [16, 0], [-16, 0], [0, 10**12], [0], "x", [0, 10**400], None]
_NAMES = ["transformer.wte.weight", "wte.weight", "lm_head.weight", "a\x1b]0;owned\x07", "../x", "", "\ud800"]
_PATHS = ["model.safetensors", "../x", "/dev/zero", "config.json", "\x1b[2J", 1, None, "a\0b"]
_tensors = st.dictionaries(
    st.sampled_from([*_NAMES, "x" * 5000]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "F64", "F8_E4M3", "I64", "BOOL", "X\x1b[2J", 5, None]),
            "shape": st.sampled_from(_SHAPES),
            "data_offsets": st.sampled_from(_OFFSETS),
        }
    ),
    max_size=4,
)
weights = st.builds(
    lambda content: Thing("bytes", content),
    st.builds(
        _safetensors,
        _tensors | JUNK.map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.sampled_from([None, None, None, 2**63 - 1, 2**40, 0]),
        st.sampled_from([b"", bytes(16), bytes(1000)]),
    ),
)
_links = st.builds(Thing, st.just("link"), st.just(_SECRET))
_text = st.builds(Thing, st.just("text"), odd_texts)


@dataclass(frozen=True)
class JsonChanges:
    """Changes to the mapping of a JSON file; the key `WHOLE` replaces all of it."""

    values: Mapping[str, Any]


def _changed(keys: list[str]) -> st.SearchStrategy[JsonChanges]:
    values = odd_values | st.sampled_from(_ODD_SIZES)
    return st.builds(JsonChanges, st.dictionaries(st.sampled_from(keys), values, min_size=1, max_size=3))


_index = st.builds(
    lambda value: Thing("text", json.dumps(value)),
    st.fixed_dictionaries(
        {
            "weight_map": st.dictionaries(
                st.sampled_from(["wte.weight", "\x1b[2J", "a"]),
                st.sampled_from(_PATHS),
                max_size=3,
            )
            | st.sampled_from(ODD_VALUES)
        }
    ),
)
_other = junk | special | _links | _text

# The files of a directory of each form, each with the strategy of what is done to it.
_TOKENIZER = {
    "tokenizer.json": _other | _changed(["model", "normalizer", "pre_tokenizer", "added_tokens", "decoder"]),
    "tokenizer_config.json": _other | _changed(["auto_map", "tokenizer_class", "eos_token", "chat_template"]),
    "chat_template.jinja": _other,
    "special_tokens_map.json": _other,
    "additional_chat_templates": special | _links,
    "vocab.json": _other,
    "merges.txt": _other,
    "spiece.model": _other,
    "tokenizer.model": _other,
}
_FILES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "huggingface": {
        "config.json": _changed(_CONFIG_KEYS) | _changed(_CONFIG_KEYS) | _other,
        "generation_config.json": _changed(["eos_token_id", "bos_token_id", "auto_map"]) | _other,
        "model.safetensors": weights | _other,
        "model.safetensors.index.json": _index | _other,
        "pytorch_model.bin": st.builds(Thing, st.just("bytes"), pickles),
        "modeling_gpt2.py": st.just(Thing("text", "open('canary', 'w')")),
        **_TOKENIZER,
    },
    "slipway": {
        "complete.json": _changed(_MARKER_KEYS) | _other,
        ".metadata": st.builds(Thing, st.just("bytes"), pickles) | _other,
        "common.pt": st.builds(Thing, st.just("bytes"), pickles) | _other,
        "metadata.json": _other,
        "__0_0.distcp": st.builds(Thing, st.just("bytes"), pickles) | _other,
        "tokenizer": special | _links,
    },
    "deepspeed": {
        "latest": _other,
        "mp_rank_00_model_states.pt": st.builds(Thing, st.just("bytes"), pickles) | _other,
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": st.builds(Thing, st.just("bytes"), pickles) | _other,
    },
}
_FILES["slipway files"] = _FILES["slipway"]


@dataclass(frozen=True)
class HostileModel:
    """A form, and the files of it that are replaced, changed or added."""

    form: str
    files: Mapping[str, Thing | JsonChanges]

    def write(self, pristine: Path, directory: Path, secret: Path) -> None:
        """Write a copy of a sound directory with the changed files; links lead to a private file."""
        shutil.copytree(pristine, directory, symlinks=True)
        for name, change in self.files.items():
            path = directory / name
            if isinstance(change, JsonChanges):
                content = json.loads(path.read_text()) if path.is_file() else {}
                change = Thing("text", json.dumps({**content, **change.values}))
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            if change.kind == "link" and change.content == _SECRET:
                path.symlink_to(secret)
            else:
                put(path, change)


def _models(form: str) -> st.SearchStrategy[HostileModel]:
    files = _FILES[form]
    chosen = st.lists(st.sampled_from(sorted(files)), min_size=1, max_size=3, unique=True)
    changes = chosen.flatmap(lambda names: st.fixed_dictionaries({name: files[name] for name in names}))
    return st.builds(HostileModel, st.just(form), changes)


hostile_models = st.sampled_from(["huggingface", "huggingface", "slipway", *FORMS]).flatmap(_models)

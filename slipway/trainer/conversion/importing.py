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

from slipway.common.errors import UserError
from slipway.trainer.checkpoint import compatible, store
from slipway.trainer.checkpoint.description import Description, Precision
from slipway.trainer.checkpoint.files import file_checksum, read_mapping
from slipway.trainer.checkpoint.marker import Marker
from slipway.trainer.checkpoint.tensor_files import TensorFilesWriter
from slipway.trainer.config.tokenizer import Tokenizer
from slipway.trainer.conversion import outputs
from slipway.trainer.conversion.config_options import CONFIG
from slipway.trainer.conversion.families import FAMILIES, description_of, rows_of
from slipway.trainer.conversion.huggingface import GENERATION
from slipway.trainer.conversion.safetensors_files import SafetensorsFiles
from slipway.trainer.conversion.sources import identity
from slipway.trainer.conversion.spec import Conversion
from slipway.trainer.conversion.tokenizer_files import FAST
from slipway.trainer.conversion.weight_map import Row, depths_of

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# GPT-2's first files have no prefix.
_PREFIX = "transformer."
# Extra tensors in the files of some versions: copies of tied weights, masks, positions that no T5 uses.
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
        If a file is missing, damaged or of another model than ``config.json`` says, our models do not have
        one of its options, or the output is another conversion's.
    """
    output, tokenizer = conversion.output_of(0), conversion.tokenizer_dir or source
    has_tokenizer = (tokenizer / FAST).is_file()
    if conversion.tokenizer_dir is not None and not has_tokenizer:
        raise UserError(f"conversion.tokenizer_dir={tokenizer}: it has no {FAST}, which this needs")
    config = read_mapping(source / CONFIG)
    with SafetensorsFiles(source) as files:
        weights = Weights(files)
        description = description_of(config, weights.has_head(config))
        rows = list(rows_of(description))
        check_names(source, weights, rows)
        dtype = _dtype_of(source, weights, rows) if not conversion.dtype else getattr(torch, conversion.dtype)
        precision: Precision = "bf16" if dtype == torch.bfloat16 else "fp32"
        generation = read_mapping(source / GENERATION) if (source / GENERATION).exists() else {}
        imported = {**description.imported, "generation": generation}
        description = replace(description, precision=precision, imported=imported)
        config_checksum = file_checksum(source / CONFIG)
        record = outputs.record_of(conversion, 0, source, identity(files), config=config_checksum)
        if outputs.is_there(output, record):
            return output
        size = sum(info.size_bytes for info in files.tensors().values())
        with outputs.create_directory(output, record, size) as unfinished:
            if unfinished is None:
                return output
            _write(unfinished, weights, rows, dtype)
            if has_tokenizer:
                words = Tokenizer("huggingface", str(tokenizer.absolute()))
                description = replace(description, tokenizer=words)
            _mark(unfinished, description)
    return output


def _write(directory: Path, weights: Weights, rows: list[Row], dtype: torch.dtype) -> None:
    depths = depths_of(rows)
    with TensorFilesWriter(directory) as writer:
        for row in rows:
            ours = row.to_ours(*(weights.read(name) for name in row.theirs))
            if row.ours is None:
                continue
            # A scaled weight keeps the 64 bits that make the way back exact.
            ours = ours if row.scale != 1.0 else ours.to(dtype)
            if row.layer is None:
                for name in (row.ours, *row.copies):
                    writer.add(name, ours)
            else:
                whole = (depths[row.ours], *row.shape)
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


class Weights:
    """The weights of a directory, by the names that a whole model of Hugging Face's has for them."""

    def __init__(self, files: SafetensorsFiles) -> None:
        self._files = files
        names = files.tensors()
        bare = "wte.weight" in names
        self.names = {
            f"{_PREFIX}{name}" if bare and name != "lm_head.weight" else name: name for name in names
        }

    def read(self, name: str) -> Any:
        """Return a weight that is there."""
        return self._files.read(self.names[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a weight."""
        return self._files.tensors()[self.names[name]].dtype

    def has_head(self, config: Mapping[str, Any]) -> bool:
        """Return whether the head has weights that are not a copy of the embedding's."""
        family = FAMILIES.get(str(config.get("model_type")))
        tied = config.get("tie_word_embeddings", family is not None and family.is_tied)
        if not isinstance(tied, bool):
            raise UserError(f"{CONFIG}: tie_word_embeddings={tied!r}: expected true or false")
        if "lm_head.weight" not in self.names:
            # One that is missing is not the embedding's.
            return not tied
        if not tied or family is None or family.words not in self.names:
            return True
        return not torch.equal(self.read("lm_head.weight"), self.read(family.words))


def _dtype_of(source: Path, weights: Weights, rows: list[Row]) -> torch.dtype:
    """Return the type that holds all weights: bfloat16 if all are of it, or float32.

    Raises
    ------
    UserError
        If a weight has more bits, or is no number in floating point.
    """
    types = {name: weights.dtype(name) for row in rows for name in row.theirs}
    wide = [
        name for name, dtype in types.items() if torch.promote_types(dtype, torch.float32) != torch.float32
    ]
    if wide := wide or [name for name, dtype in types.items() if not dtype.is_floating_point]:
        kind = str(types[wide[0]]).removeprefix("torch.")
        raise UserError(
            f"{source}: {_name_first(wide)}: {kind} does not fit our weights; "
            "conversion.dtype=float32 or bfloat16 rounds it"
        )
    if set(types.values()) == {torch.bfloat16}:
        return torch.bfloat16
    if len(set(types.values())) > 1:
        names = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in types.values()}))
        print(f"the weights are {names}: float32 holds them all; conversion.dtype names another", flush=True)
    return torch.float32


def check_names(source: Path, weights: Weights, rows: list[Row]) -> None:
    """Raise UserError unless a directory has exactly the weights that its ``config.json`` asks for."""
    wanted = {name for row in rows for name in row.theirs}
    unknown = [
        name
        for name in weights.names
        if name not in wanted and name not in _COPIES and not name.endswith(_UNUSED)
    ]
    if missing := sorted(wanted - set(weights.names)):
        raise UserError(f"{source}: it lacks {_name_first(missing)}, which {CONFIG} makes part of the model")
    if unknown:
        raise UserError(f"{source}: {CONFIG} knows no {_name_first(unknown)}: it would be left out")


def _name_first(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]

"""Conversions: from the weights of a source to the requested directories."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipway.common.errors import UserError
from slipway.common.sections import WeightsFormat
from slipway.trainer.checkpoint import store
from slipway.trainer.checkpoint.description import Description, description_from_json, model_keys
from slipway.trainer.checkpoint.files import file_checksum
from slipway.trainer.checkpoint.marker import MARKER
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.checkpoint.tensor_files import TensorFiles
from slipway.trainer.conversion import export, huggingface, outputs, safetensors_files, sources
from slipway.trainer.conversion.foreign import step_of
from slipway.trainer.conversion.importing import import_weights
from slipway.trainer.conversion.megatron_lm import MegatronLmFiles
from slipway.trainer.conversion.origin import describe, provenance
from slipway.trainer.conversion.safetensors_files import Entry
from slipway.trainer.conversion.spec import Conversion

# Of a training that saves faster than its checkpoints are read.
_ATTEMPTS = 3


@dataclass(frozen=True)
class Result:
    """The result of a conversion: a directory, which was written now or was there already.

    `is_equal` is False if the comparison with our model found another one.
    """

    output: Path
    is_new: bool
    is_equal: bool = True


def convert(conversion: Conversion) -> list[Result]:
    """Convert the checkpoints of a source, which is not changed.

    Raises
    ------
    UserError
        If there is no source of this kind, it is damaged, Hugging Face has no such model, or the output
        cannot be written, or is another conversion's.
    """
    source_format = _source_format(conversion)
    if conversion.check.enabled and (source_format, conversion.to) != ("slipway", "huggingface"):
        raise UserError(
            "conversion.check.enabled=True: a checkpoint of ours is compared with its conversion to "
            f"huggingface; expected False with conversion.to={conversion.to} of {source_format}"
        )
    if conversion.to == "slipway":
        return [_import(conversion, source_format)]
    if source_format == "slipway" and conversion.every:
        return _convert_all(conversion)
    if source_format == "slipway":
        return [_convert_chosen(conversion)]
    return [_convert_source(conversion, source_format)]


def _convert_chosen(conversion: Conversion) -> Result:
    """Convert a checkpoint, or if a training removes it meanwhile the one that is the newest by then."""
    (checkpoint,) = choose_checkpoints(conversion)
    for _ in range(_ATTEMPTS):
        try:
            return convert_checkpoint(conversion, checkpoint)
        except (UserError, FileNotFoundError):
            before, (checkpoint,) = checkpoint, choose_checkpoints(conversion)
            if checkpoint.path == before.path:
                raise
            print(f"{before.path}: removed by the training meanwhile", flush=True)
    return convert_checkpoint(conversion, checkpoint)


def _convert_all(conversion: Conversion) -> list[Result]:
    """Convert all checkpoints that a training has so far, while it may save and remove others."""
    results, errors = [], []
    # Of a step that was trained twice the later one.
    for checkpoint in {
        checkpoint.marker.step: checkpoint for checkpoint in choose_checkpoints(conversion)
    }.values():
        try:
            results.append(convert_checkpoint(conversion, checkpoint))
        except outputs.AnotherResult as error:
            # The training went back, and came to this step again: the earlier conversion stays.
            print(f"{checkpoint.path}: not converted: {error}", flush=True)
        except (UserError, FileNotFoundError) as error:
            if checkpoint.path.exists():
                errors.append(str(error))
            else:
                print(f"{checkpoint.path}: removed by the training meanwhile", flush=True)
    if errors:
        raise UserError("; ".join(errors))
    return results


def _source_format(conversion: Conversion) -> WeightsFormat:
    if conversion.source_format != "auto":
        return conversion.source_format
    # Behind a training, which may have no checkpoint yet.
    return "slipway" if conversion.every else sources.recognise(conversion.source)


def _import(conversion: Conversion, source_format: WeightsFormat) -> Result:
    """Make a checkpoint of ours of a Hugging Face directory."""
    if source_format != "huggingface":
        raise UserError(
            f"conversion.to=slipway: {conversion.source} ({source_format}) is not Hugging Face's; "
            + (
                "training.restore_from_path takes it as it is"
                if source_format == "slipway"
                else "expected conversion.to=huggingface first"
            )
        )
    if conversion.step:
        raise UserError(
            f"conversion.step={conversion.step}: {conversion.source} is a single model of Hugging Face's, "
            "whose checkpoint is of step 0"
        )
    was_there = (conversion.output_of(0) / outputs.RECORD).exists()
    result = Result(import_weights(conversion, conversion.source), is_new=not was_there)
    marker = store.open_named(result.output).marker
    description = description_from_json(marker.model, str(result.output))
    if description.encoder is None:
        # Launched by hand: `++` sets a key whether a training's tree has it or not.
        keys = model_keys(description.decoder).items()
        print("its model:", *(f"++training.model.{key}={value}" for key, value in keys), flush=True)
    return result


def _convert_source(conversion: Conversion, source_format: WeightsFormat) -> Result:
    """Convert a checkpoint of another program."""
    with sources.open_source(conversion.source, source_format, conversion.step) as source:
        origin, step, dtype = str(source.directory), step_of(source.directory) or 0, dtype_of(conversion)
        record = outputs.record_of(conversion, step, source.directory, sources.identity(source))
        if outputs.is_there(conversion.output_of(step), record):
            return Result(conversion.output_of(step), is_new=False)
        if conversion.to == "safetensors":
            is_megatron_core = isinstance(source, MegatronLmFiles)
            return _write(conversion, record, export.plain_entries(source, dtype, is_megatron_core))
        if source_format == "huggingface":
            raise UserError(
                f"conversion.to=huggingface: {origin} is one of its directories already; expected "
                "conversion.to=slipway, or safetensors for other shards or another type"
            )
        if not isinstance(source, MegatronLmFiles):
            raise UserError(
                f"conversion.to={conversion.to}: {origin} ({source_format}) names no model; "
                "expected conversion.to=safetensors, which keeps their names"
            )
        description = source.description(conversion.tokenizer_dir)
        entries = export.model_entries(source, description, dtype, origin)
        return _write(conversion, record, entries, description, {"step": step, "checkpoint": origin})


def choose_checkpoints(conversion: Conversion) -> list[Checkpoint]:
    """Return the checkpoints of ours that are to be converted, the newest last.

    Raises
    ------
    UserError
        If the source has no checkpoint, or not that of the step, or the requested one is damaged.
    """
    source, step = conversion.source, conversion.step
    if conversion.every:
        # There may be none yet.
        return store.list_complete(source)
    if step is None:
        return [store.open_named(source)]
    single, _ = store.open_checkpoint(source)
    known = store.list_complete(source) if single is None else [single]
    matching = [checkpoint for checkpoint in known if checkpoint.marker.step == step]
    if not matching:
        steps = ", ".join(map(str, sorted({checkpoint.marker.step for checkpoint in known}))) or "none"
        raise UserError(f"conversion.step={step}: {source} has no complete checkpoint of it; it has {steps}")
    return [store.open_named(matching[-1].path)]


def convert_checkpoint(conversion: Conversion, checkpoint: Checkpoint) -> Result:
    """Convert a checkpoint of ours, and compare the result with it if so asked.

    Raises
    ------
    UserError
        As :func:`convert`.
    """
    result = _convert_checkpoint(conversion, checkpoint)
    if not conversion.check.enabled or conversion.to != "huggingface":
        return result
    # Imported late: a conversion without it needs neither transformers nor megatron-core.
    from slipway.trainer.conversion import check

    text, sequences = conversion.check.text, conversion.check.sequences
    # There may be a report of the same text already.
    is_equal = check.verdict(result.output, text, sequences)
    if is_equal is None:
        description = describe(conversion, checkpoint)
        is_equal = check.check(checkpoint.path, result.output, description, text, sequences)
    return replace(result, is_equal=is_equal)


def _convert_checkpoint(conversion: Conversion, checkpoint: Checkpoint) -> Result:
    marker, model = checkpoint.marker, None
    if conversion.to == "huggingface" and not marker.model:
        content = json.dumps(describe(conversion, checkpoint).to_json(), sort_keys=True)
        model = hashlib.sha256(content.encode()).hexdigest()[:12]
    identity, output = file_checksum(checkpoint.path / MARKER), conversion.output_of(marker.step)
    record = outputs.record_of(conversion, marker.step, checkpoint.path, identity, model=model)
    if outputs.is_there(output, record):
        return Result(output, is_new=False)
    size = sum(marker.files.get(name, 0) for name in marker.checksums)
    with outputs.Progress(f"{checkpoint.path.name}: checking", size) as progress:
        store.check_content(checkpoint, progress.add)
    dtype = dtype_of(conversion)
    # An earlier version's checkpoint has no checksums of files: each tensor is held against torch's.
    with TensorFiles(checkpoint.path, is_checked=bool(marker.checksums)) as files:
        note = export.note_masters(files, dtype)
        if conversion.to == "safetensors":
            if note:
                print(f"{checkpoint.path.name}: {note}", flush=True)
            return _write(conversion, record, export.plain_entries(files, dtype, is_megatron_core=True))
        description = describe(conversion, checkpoint)
        entries = export.model_entries(files, description, dtype, str(checkpoint.path))
        if note:
            print(f"{checkpoint.path.name}: {note}", flush=True)
        return _write(conversion, record, entries, description, provenance(conversion, checkpoint))


def _write(
    conversion: Conversion,
    record: Mapping[str, Any],
    entries: list[Entry],
    description: Description | None = None,
    origin: Mapping[str, Any] | None = None,
) -> Result:
    """Write the output of a step.

    Parameters
    ----------
    description
        The model, if Hugging Face's files are written too.
    origin
        The model card's facts about the training.
    """
    output, size = conversion.output_of(record["step"]), export.total_bytes(entries)
    with outputs.create_directory(output, record, size) as unfinished:
        if unfinished is None:
            return Result(output, is_new=False)
        if description is not None:
            dtype, tokenizer = entries[0].info.dtype, conversion.tokenizer_dir
            # First what may be refused, and takes no time.
            huggingface.write_model_files(unfinished, description, dtype, tokenizer, origin or {})
        with outputs.Progress(f"{output.name}: writing", size) as progress:
            safetensors_files.write(unfinished, entries, conversion.shard_bytes, progress.add)
    return Result(output, is_new=True)


def dtype_of(conversion: Conversion) -> torch.dtype | None:
    """Return the type of the result; None: as the weights are."""
    return None if conversion.dtype is None else getattr(torch, conversion.dtype)

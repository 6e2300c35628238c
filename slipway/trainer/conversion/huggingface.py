"""Hugging Face's model directories: all files but the weights, among them the model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.common.files import write_atomic
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.conversion.config_options import CONFIG
from slipway.trainer.conversion.families import config_of, family_of, generation_config_of
from slipway.trainer.conversion.tokenizer_files import check_tokenizer, write_tokenizer

if TYPE_CHECKING:
    import torch

GENERATION, CARD = "generation_config.json", "README.md"


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
    tokenizer_dir
        Where the tokenizer's files are; None: where the training had them.
    provenance
        The known facts about the training: ``run``, ``step``, ``consumed_samples``, ``checkpoint``, ``data``,
        ``git_commit``, ``versions`` and more.

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
    """Return the model card: the model's description, the code that loads it, and its origin."""
    shape = description.decoder
    family = family_of(description)
    is_t5, run = description.encoder is not None, provenance.get("run") or "a model"
    kind = "AutoModelForSeq2SeqLM" if is_t5 else "AutoModelForCausalLM"
    tags = ["---", "library_name: transformers", f"pipeline_tag: {_PIPELINES[is_t5]}", "---", ""]
    layers = (
        f"{description.encoder.num_layers} + {shape.num_layers}" if description.encoder else shape.num_layers
    )
    rows = {
        "Architecture": f"{family.model_class}, {layers} layers, hidden size {shape.hidden_size}, "
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

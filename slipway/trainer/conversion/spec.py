"""The conversion that a configuration asks for: its root key `conversion`, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from slipway.common.errors import UserError, suggest
from slipway.trainer.config.load import load_yaml
from slipway.trainer.config.values import Values

ROOT = "conversion"
SOURCE_FORMATS = ("auto", "slipway", "huggingface", "megatron_lm", "dcp", "deepspeed")
TARGETS = ("huggingface", "slipway", "safetensors")
# What NeMo's own scripts write (nemo.py).
NEMO = "nemo"
DTYPES = ("float32", "bfloat16", "float16")
# Replaced in `output` by the step of a checkpoint.
STEP = "{step}"


@dataclass(frozen=True)
class Check:
    """The comparison of a converted model with ours.

    Attributes
    ----------
    enabled
        Whether it is done.
    text
        A file of text for it; None: one that comes with Slipway.
    sequences
        How many sequences.
    """

    enabled: bool = False
    text: Path | None = None
    sequences: int = 8


@dataclass(frozen=True)
class Conversion:
    """A conversion of weights.

    Attributes
    ----------
    source
        A checkpoint, a directory of checkpoints, or a directory of another program.
    to
        One of :data:`TARGETS`.
    output
        The directory that is written; :data:`STEP` in it is the checkpoint's step.
    step
        Which of a directory of checkpoints; None: the newest complete one.
    source_format
        One of :data:`SOURCE_FORMATS`.
    dtype
        One of :data:`DTYPES`; None: as the source has the weights.
    shard_bytes
        The size of safetensors files.
    tokenizer_dir
        The tokenizer's files; None: those that the training used.
    model, model_type
        For checkpoints that do not describe their model: the ``model`` node of the training, or the file of
        its configuration; and ``gpt`` or ``t5``.
    training
        ``run`` and ``directory`` of the training, for the model card.
    check
        The comparison with our model afterwards.
    every
        Whether all complete checkpoints of a directory are converted that are not yet.
    """

    source: Path
    to: str
    output: Path
    step: int | None = None
    source_format: str = "auto"
    dtype: str | None = None
    shard_bytes: int = 5_000_000_000
    tokenizer_dir: Path | None = None
    model: Mapping[str, Any] | Path | None = None
    model_type: str | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    check: Check = Check()
    every: bool = False

    def output_of(self, step: int) -> Path:
        """Return the directory for a checkpoint of a step."""
        return Path(str(self.output).replace(STEP, str(step)))


def load_conversion(directory: Path, name: str) -> Conversion:
    """Read the conversion of a configuration file, whose name may lack ``.yaml``.

    Raises
    ------
    UserError
        If there is no such file, or no node `conversion` in it, or as :func:`read_conversion`.
    """
    path = directory / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    content: Any = load_yaml(path)
    node = content.get(ROOT) if isinstance(content, Mapping) else None
    if not isinstance(node, Mapping):
        hint = suggest(ROOT, map(str, content)) if isinstance(content, Mapping) else ""
        raise UserError(f"configuration {path}: missing root key '{ROOT}'{hint}")
    return read_conversion(node)


def read_conversion(node: Mapping[str, Any]) -> Conversion:
    """Read the node `conversion` of a configuration.

    Raises
    ------
    UserError
        Naming the key that is unknown, missing or invalid, its value, and what is valid.
    """
    check_node = node.get("check") or {}
    _check_names(node, Conversion, ROOT)
    if not isinstance(check_node, Mapping) or not isinstance(node.get("training") or {}, Mapping):
        raise UserError(
            f"{ROOT}: expected mappings for check={check_node!r}, training={node.get('training')!r}"
        )
    _check_names(check_node, Check, f"{ROOT}.check")
    values = Values(
        {f"{ROOT}.{name}": str(value) if isinstance(value, Path) else value for name, value in node.items()}
        | {f"{ROOT}.check.{name}": value for name, value in check_node.items()}
    )
    conversion = Conversion(
        source=Path(values.text(f"{ROOT}.source")).absolute(),
        to=values.choice(f"{ROOT}.to", (*TARGETS, NEMO)),
        output=Path(values.text(f"{ROOT}.output")).absolute(),
        step=_whole(values, "step", 0),
        source_format=values.choice(f"{ROOT}.source_format", SOURCE_FORMATS, "auto"),
        dtype=_choice(values, "dtype", DTYPES),
        shard_bytes=values.integer(f"{ROOT}.shard_bytes", 5_000_000_000, minimum=1),
        tokenizer_dir=_path(values, "tokenizer_dir"),
        model=_model(values),
        model_type=_choice(values, "model_type", ("gpt", "t5")),
        training=dict(values.raw(f"{ROOT}.training") or {}),
        check=Check(
            values.flag(f"{ROOT}.check.enabled", False),
            _path(values, "check.text"),
            values.integer(f"{ROOT}.check.sequences", 8, minimum=1),
        ),
        every=_whole(values, "every", 1) is not None,
    )
    if conversion.every and STEP not in str(conversion.output):
        every = values.raw(f"{ROOT}.every")
        raise UserError(f"{ROOT}.output={conversion.output}: with {ROOT}.every={every} it needs {STEP}")
    return conversion


def _check_names(node: Mapping[str, Any], kind: type, prefix: str) -> None:
    valid = [item.name for item in fields(kind)]
    for name in node:
        if name not in valid:
            hint = suggest(str(name), valid)
            raise UserError(f"{prefix}.{name}: there is no such key; valid are {', '.join(valid)}{hint}")


def _whole(values: Values, name: str, minimum: int) -> int | None:
    key = f"{ROOT}.{name}"
    return values.integer(key, minimum=minimum) if values.is_set(key) else None


def _choice(values: Values, name: str, valid: tuple[str, ...]) -> str | None:
    key = f"{ROOT}.{name}"
    return values.choice(key, valid) if values.is_set(key) else None


def _path(values: Values, name: str) -> Path | None:
    key = f"{ROOT}.{name}"
    return Path(values.text(key)).absolute() if values.is_set(key) else None


def _model(values: Values) -> Mapping[str, Any] | Path | None:
    value = values.raw(f"{ROOT}.model")
    if value is None or isinstance(value, Mapping):
        return value
    if isinstance(value, str):
        return _path(values, "model")
    return values.fail(f"{ROOT}.model", "the node `model` of a training, or its configuration")

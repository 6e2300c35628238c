"""The conversion that a configuration asks for: its root key `conversion`, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trainer.config.load import load_yaml
from trainer.errors import UserError, suggest

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
    valid = [item.name for item in fields(Conversion)]
    _check_names(node, valid, ROOT)
    every = _whole(node, "every", None)
    conversion = Conversion(
        source=_path(node, "source", required=True),
        to=_choice(node, "to", (*TARGETS, NEMO), None) or "",
        output=_path(node, "output", required=True),
        step=_whole(node, "step", None, least=0),
        source_format=_choice(node, "source_format", SOURCE_FORMATS, "auto") or "",
        dtype=_choice(node, "dtype", (*DTYPES, None), None),
        shard_bytes=_whole(node, "shard_bytes", 5_000_000_000) or 0,
        tokenizer_dir=_optional_path(node, "tokenizer_dir"),
        model=_model(node.get("model")),
        model_type=_choice(node, "model_type", ("gpt", "t5", None), None),
        training=dict(_mapping(node, "training")),
        check=_check(_mapping(node, "check")),
        every=every is not None,
    )
    if conversion.every and STEP not in str(conversion.output):
        raise UserError(f"{ROOT}.output={conversion.output}: with {ROOT}.every={every} it needs {STEP}")
    return conversion


def _check(node: Mapping[str, Any]) -> Check:
    _check_names(node, [item.name for item in fields(Check)], f"{ROOT}.check")
    enabled = node.get("enabled", False)
    if not isinstance(enabled, bool):
        raise UserError(f"{ROOT}.check.enabled={enabled!r}: expected True or False")
    sequences = _whole(node, "sequences", 8, prefix=f"{ROOT}.check")
    return Check(enabled, _optional_path(node, "text", f"{ROOT}.check"), sequences or 8)


def _check_names(node: Mapping[str, Any], valid: list[str], prefix: str) -> None:
    for name in node:
        if name not in valid:
            raise UserError(
                f"{prefix}.{name}: there is no such key; valid are {', '.join(valid)}"
                f"{suggest(str(name), valid)}"
            )


def _choice(
    node: Mapping[str, Any], name: str, valid: tuple[str | None, ...], default: str | None
) -> str | None:
    value = node.get(name, default)
    if value not in valid:
        words = ", ".join(str(item) for item in valid if item is not None)
        raise UserError(
            f"{ROOT}.{name}={value}: valid are {words}{suggest(str(value), [str(item) for item in valid])}"
        )
    return None if value is None else str(value)


def _whole(
    node: Mapping[str, Any], name: str, default: int | None, least: int = 1, prefix: str = ROOT
) -> int | None:
    value = node.get(name, default)
    if value is not None and (type(value) is not int or value < least):
        raise UserError(f"{prefix}.{name}={value!r}: expected a whole number of at least {least}")
    return value


def _path(node: Mapping[str, Any], name: str, required: bool) -> Path:
    value = _optional_path(node, name)
    if value is None:
        raise UserError(f"{ROOT}.{name}=null: expected a path")
    return value


def _optional_path(node: Mapping[str, Any], name: str, prefix: str = ROOT) -> Path | None:
    value = node.get(name)
    if value is None:
        return None
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise UserError(f"{prefix}.{name}={value!r}: expected a path")
    return Path(value).absolute()


def _mapping(node: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = node.get(name) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"{ROOT}.{name}={value!r}: expected a mapping")
    return value


def _model(value: Any) -> Mapping[str, Any] | Path | None:
    if value is None or isinstance(value, Mapping):
        return value
    if isinstance(value, str | Path):
        return Path(value).absolute()
    raise UserError(f"{ROOT}.model={value!r}: expected the node `model` of a training, or its configuration")

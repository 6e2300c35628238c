"""Checkpoints of other programs: the names of their parameters, and of the directories of their steps."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.files import read_inside

# torch.compile, FSDP, activation checkpointing; anywhere in a name.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# DistributedDataParallel and DeepSpeed; in front of all names.
_OUTERMOST = "module."
_FLAT = "_flat_param"
_STEP = re.compile(r"(?:global_step|step|iter|checkpoint)?[-_=]?(\d+)")


def step_of(directory: Path) -> int | None:
    """Return the step that the name of a checkpoint's directory ends in."""
    match = _STEP.fullmatch(directory.name)
    return int(match[1]) if match else None


def read_tracker(tracker: Path, iteration: str = "{}") -> Path | None:
    """Return the checkpoint that a file next to it names; None if there is no such file.

    Parameters
    ----------
    iteration
        The form of the name of an iteration, where the file has its number alone.

    Raises
    ------
    UserError
        If it names nothing here.
    """
    if not tracker.is_file():
        return None
    text = read_inside(tracker).decode(errors="replace").strip()
    is_number = text.isdecimal() and text.isascii() and len(text) < 20
    tag = iteration.format(int(text)) if is_number else text
    is_name = Path(tag).name == tag and tag not in ("", "..")
    if not is_name or not os.path.isdir(tracker.parent / tag):  # noqa: PTH112 - any name may be asked for
        raise UserError(f"{tracker} names '{tag[:80]}', and there is no such directory next to it")
    return tracker.parent / tag


def checkpoint_of_step(directory: Path, step: int | None) -> Path:
    """Return the checkpoint of a step in a directory, or that of the last one; raise UserError without it."""
    paths = [path for path in directory.iterdir() if path.is_dir()]
    steps = {number: path for path in paths if (number := step_of(path)) is not None}
    if step is None and steps:
        return steps[max(steps)]
    if step is None:
        raise UserError(f"{directory} is no checkpoint, and contains no checkpoint of a step")
    if step not in steps:
        valid = ", ".join(map(str, sorted(steps))) or "none"
        raise UserError(f"conversion.step={step}: the steps of {directory} are {valid}")
    return steps[step]


def plain_names(names: Iterable[str], directory: Path) -> dict[str, str]:
    """Return each name's plain one.

    Raises
    ------
    UserError
        If two names become one, or a name is of FSDP's flat parameters, whose content is unknown.
    """
    plain = {}
    for name in names:
        if name.rpartition(".")[2] == _FLAT:
            raise UserError(
                f"{directory}: {name} is a flat parameter of FSDP's, whose parameters it does not name; "
                "save with StateDictType.SHARDED_STATE_DICT, or with get_model_state_dict"
            )
        plain[name] = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    while plain and all(name.startswith(_OUTERMOST) for name in plain.values()):
        plain = {name: short.removeprefix(_OUTERMOST) for name, short in plain.items()}
    owners: dict[str, str] = {}
    for name, short in plain.items():
        if short in owners:
            raise UserError(
                f"{directory}: {owners[short]} and {name} are both {short} without their wrappers"
            )
        owners[short] = name
    return plain

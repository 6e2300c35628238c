"""The formats of weights that a conversion reads, recognised by the files of a directory."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from slipway.common.errors import UserError
from slipway.common.sections import WeightsFormat
from slipway.trainer.checkpoint.marker import MARKER
from slipway.trainer.checkpoint.tensor_files import COMMON, INDEX_FILE, TensorFiles
from slipway.trainer.conversion.dcp import DcpFiles
from slipway.trainer.conversion.deepspeed import LATEST, DeepSpeedFiles
from slipway.trainer.conversion.foreign import step_of
from slipway.trainer.conversion.megatron_lm import LATEST as MEGATRON_LATEST
from slipway.trainer.conversion.megatron_lm import MegatronLmFiles, is_legacy
from slipway.trainer.conversion.safetensors_files import SafetensorsFiles

# Weights that are read one by one, under the names that their model has for them.
Source = TensorFiles | SafetensorsFiles | DeepSpeedFiles
_OPENED: Mapping[str, Callable[[Path, int | None], Source]] = {
    "huggingface": lambda directory, _: SafetensorsFiles(directory),
    "deepspeed": DeepSpeedFiles,
    "megatron_lm": MegatronLmFiles,
    "dcp": DcpFiles,
}


def recognise(directory: Path) -> WeightsFormat:
    """Return the format of a checkpoint, or of the checkpoints that a directory holds.

    Raises
    ------
    UserError
        If there is no such directory, or nothing in it is of a known format.
    """
    _check_directory(directory)
    known = _format(directory)
    # Users may name our checkpoints, so every directory that could be one is examined.
    if known is None:
        paths = [path for path in sorted(directory.iterdir()) if not path.name.startswith(".")]
        directories = (path for path in paths if path.is_dir() and not path.is_symlink())
        # As a disk's lost+found, another may be somebody else's.
        formats = [_format(path) for path in directories if os.access(path, os.R_OK | os.X_OK)]
        # One of ours that is not finished has no marker.
        known = "slipway" if "slipway" in formats else next(filter(None, formats), None)
    if known is None:
        raise UserError(
            f"conversion.source={directory}: no weights of a known format; expected a checkpoint of Slipway "
            f"({MARKER}), Hugging Face (config.json), Megatron-LM ({COMMON}, {INDEX_FILE}), "
            f"PyTorch DCP ({INDEX_FILE}) or DeepSpeed (*_model_states.pt), or a directory of such checkpoints"
        )
    return known


def open_source(directory: Path, source_format: WeightsFormat, step: int | None = None) -> Source:
    """Open the weights of another program.

    Parameters
    ----------
    directory
        A checkpoint, or a directory of checkpoints.
    step
        Which of several; None: the newest.

    Raises
    ------
    UserError
        If it is not of this format, is damaged, has no such step, or is a checkpoint of another one.
    """
    _check_directory(directory)
    source = _OPENED[source_format](directory, step)
    own = step_of(source.directory) or 0
    if step is not None and own != step:
        raise UserError(
            f"conversion.step={step}: {source.directory} is a single checkpoint, of step {own} by its name; "
            "expected that step, or the directory of all checkpoints as conversion.source"
        )
    return source


def identity(source: Source) -> str:
    """Return a checksum of the names, sizes and times of a checkpoint's files."""
    digest = hashlib.sha256()
    for path in sorted(source.directory.iterdir()):
        # A link that leads nowhere is a file as well.
        status = path.stat() if path.exists() else path.lstat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise UserError(f"conversion.source={directory}: there is no such directory")
    if not os.access(directory, os.R_OK | os.X_OK):
        raise UserError(f"conversion.source={directory}: {os.strerror(errno.EACCES)}")


def _format(directory: Path) -> WeightsFormat | None:
    names = {path.name for path in directory.iterdir()}
    if MARKER in names:
        return "slipway"
    if "config.json" in names:
        return "huggingface"
    # Ours is a link to a checkpoint. Megatron-DeepSpeed's have Megatron-LM's file as well.
    if any(name.endswith("_model_states.pt") for name in names) or (directory / LATEST).is_file():
        return "deepspeed"
    if MEGATRON_LATEST in names or {INDEX_FILE, COMMON} <= names or is_legacy(directory):
        return "megatron_lm"
    return "dcp" if INDEX_FILE in names else None

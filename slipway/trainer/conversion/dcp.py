"""Checkpoints of torch.distributed.checkpoint (DCP), such as FSDP's, read tensor by tensor.

The index has all tensors of a nested dictionary under names with dots, and the keys that lead to each. A
training saves more than its model; the keys separate them: ``{"model": {...}, "optimizer": {...}}`` or, as
torchtitan writes it, ``"optimizer"`` among the model's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.tensor_files import INDEX_FILE, Index, TensorFiles
from slipway.trainer.conversion.foreign import checkpoint_of_step, plain_names

# The keys under which programs save a model, and those under which they save anything else.
_MODEL = ("model", "module", "state_dict", "model_state_dict", "net", "network")
_OTHERS = frozenset(
    [
        "optim",
        "optimizer",
        "optimizers",
        "optimizer_state_dict",
        "optim_state_dict",
        "scheduler",
        "lr_scheduler",
        "lr_schedulers",
        "train_state",
        "dataloader",
        "ema",
        "rng",
        "rng_state",
        "extra_state",
    ]
)
_Keys = tuple[str | int, ...]


class DcpFiles(TensorFiles):
    """The weights of a model in a DCP directory, under the model's names.

    Parameters
    ----------
    directory
        What :func:`torch.distributed.checkpoint.save` wrote, or the directory of such.
    step
        Which of several; None: the last one.

    Raises
    ------
    UserError
        If the index cannot be read, or it is not clear which of the tensors are the model's.
    """

    def __init__(self, directory: Path, step: int | None = None) -> None:
        is_single = (directory / INDEX_FILE).is_file()
        super().__init__(directory if is_single else checkpoint_of_step(directory, step))
        everything = self._infos
        if not everything:
            raise UserError(f"{self.directory} holds no tensor")
        keys = _model_keys({name: self.keys(name) for name in everything}, self.directory)
        plain = plain_names(keys.values(), self.directory)
        self._names = {plain[key]: name for name, key in keys.items()}
        self._infos = {short: everything[name] for short, name in self._names.items()}

    def read(self, name: str, index: Index = None) -> torch.Tensor:
        """Return one of :meth:`tensors`, or a part of it."""
        return super().read(self._names[name], index)


def _model_keys(paths: Mapping[str, _Keys], directory: Path) -> dict[str, str]:
    """Return the name in the model of each of its tensors.

    Raises
    ------
    UserError
        If several of the saved objects may be the model.
    """
    others = {name for name, path in paths.items() if _OTHERS & set(path[:-1])}
    paths = {name: path for name, path in paths.items() if name not in others}
    models = {name: _model_depth(path) for name, path in paths.items()}
    if any(models.values()):
        paths = {name: path for name, path in paths.items() if models[name]}
    parents = {path[: models[name] or -1] for name, path in paths.items()}
    if len(parents) != 1:
        found = (
            ", ".join(sorted(".".join(map(str, parent)) or "(no key)" for parent in parents))
            or "an optimizer's"
        )
        raise UserError(f"{directory}: which tensors are the model's is not clear; they are below {found}")
    depth = len(parents.pop())
    return {name: ".".join(map(str, path[depth:])) for name, path in paths.items()}


def _model_depth(path: _Keys) -> int:
    """Return how many keys lead to the model, the model's own with them; 0 if none of them is a model's."""
    return next((depth for depth, key in enumerate(path[:-1], start=1) if key in _MODEL), 0)

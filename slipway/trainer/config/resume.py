"""The changes to a training that continues: the root node ``resume``, which is ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slipway.trainer.config.values import Values


@dataclass(frozen=True)
class Resume:
    """An intervention into a training.

    It is made once: by the first launch whose newest checkpoint was trained with another `resume`. Launches
    after that just continue.

    Attributes
    ----------
    checkpoint
        Name or path of the checkpoint to go back to; None for the newest.
    load_optimizer
        Whether the optimizer's states come from there too; otherwise they start anew.
    lr_scale
        The whole schedule of the learning rate is multiplied by it, for as long as it is given.
    data_generation
        Another one is another order of the data, for as long as it is given.
    trust_owner
        The user, by name or number, whose checkpoints are loaded as if they were the caller's; None for
        nobody. It is no part of the intervention.
    """

    checkpoint: str | None = None
    load_optimizer: bool = True
    lr_scale: float = 1.0
    data_generation: int = 0
    trust_owner: str | None = None

    def record(self) -> dict[str, Any]:
        """Return the intervention as a marker records it."""
        return {name: value for name, value in asdict(self).items() if name != "trust_owner"}

    def was_made(self, recorded: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint was trained with this; `recorded` is its marker's, of any version."""
        return self.record() == {**Resume().record(), **recorded}


def read_resume(values: Values) -> Resume:
    """Read the node; by default nothing is changed.

    Raises
    ------
    UserError
        If a value is invalid, or contradicts another.
    """
    key, default = "resume.checkpoint", Resume()
    checkpoint = values.text(key) if values.is_set(key) else None
    if checkpoint is not None and not _is_one(checkpoint):
        values.fail(key, "the name or the absolute path of one checkpoint, or null for the newest")
    if checkpoint is not None and not values.flag("exp_manager.resume_if_exists", False):
        values.fail(key, "null with exp_manager.resume_if_exists=False, which starts at step 0")
    lr_scale = values.number("resume.lr_scale", default.lr_scale, minimum=0.0)
    if lr_scale == 0.0:
        values.fail("resume.lr_scale", "a number above 0")
    return Resume(
        checkpoint=checkpoint,
        load_optimizer=values.flag("resume.load_optimizer", default.load_optimizer),
        lr_scale=lr_scale,
        data_generation=values.integer("resume.data_generation", default.data_generation, minimum=0),
        trust_owner=_owner(values),
    )


def _owner(values: Values) -> str | None:
    key = "resume.trust_owner"
    if not values.is_set(key):
        return None
    value = values.raw(key)
    return str(value) if type(value) is int and value >= 0 else values.text(key)


def _is_one(checkpoint: str) -> bool:
    # A launch's own directory is not the next one's, nor is `latest` always the same.
    directory, _, name = checkpoint.rpartition("/")
    return (
        name not in ("", "latest")
        and not name.startswith(".")
        and (checkpoint.startswith("/") or not directory)
    )

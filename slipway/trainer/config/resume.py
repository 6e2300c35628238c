"""The changes to a training that continues: the root node ``resume``, which is ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

from slipway.trainer.config.rows import COUNT, NUMBER, ON, Row, optional, read_rows
from slipway.trainer.config.values import Values


def _owner(values: Values, key: str) -> str:
    value = values.raw(key)
    return str(value) if type(value) is int and value >= 0 else values.text(key)


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
        The user, by name or number, whose checkpoints are loaded as if they were the caller's, if any.
        It is no part of the intervention.
    """

    checkpoint: Annotated[str | None, Row("resume.checkpoint", optional(Values.text))] = None
    load_optimizer: Annotated[bool, Row("resume.load_optimizer", ON)] = True
    lr_scale: Annotated[float, Row("resume.lr_scale", partial(NUMBER, default=1.0))] = 1.0
    data_generation: Annotated[int, Row("resume.data_generation", COUNT)] = 0
    trust_owner: Annotated[str | None, Row("resume.trust_owner", optional(_owner))] = None

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
    resume, key = read_rows(Resume, values), "resume.checkpoint"
    if resume.checkpoint is not None and not _is_one(resume.checkpoint):
        values.fail(key, "the name or the absolute path of one checkpoint, or null for the newest")
    if resume.checkpoint is not None and not values.flag("exp_manager.resume_if_exists", False):
        values.fail(key, "null with exp_manager.resume_if_exists=False, which starts at step 0")
    if resume.lr_scale == 0.0:
        values.fail("resume.lr_scale", "a number above 0")
    return resume


def _is_one(checkpoint: str) -> bool:
    # A launch's own directory is not the next one's, nor is `latest` always the same.
    directory, _, name = checkpoint.rpartition("/")
    return (
        name not in ("", "latest")
        and not name.startswith(".")
        and (checkpoint.startswith("/") or not directory)
    )

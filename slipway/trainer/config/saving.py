"""NeMo's ``checkpoint_callback_params``: the place, the times and the retention of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipway.trainer.checkpoint.naming import FIELDS, check_template
from slipway.trainer.config.values import Values

_NODE = "exp_manager.checkpoint_callback_params"
DEFAULT_FILENAME = "megatron_gpt--{val_loss:.2f}-{step}-{consumed_samples}"


@dataclass(frozen=True)
class Saving:
    """The settings of saving.

    Attributes
    ----------
    enabled
        Whether any is written.
    directory, name
        Where, and the template of their names.
    every
        Steps from one to the next; 0 for one at the end alone.
    background
        Whether the training goes on while the files are written.
    keep, monitor, mode
        The best `keep` by a value of which less ("min") or more ("max") is better; -1 for all.
    """

    enabled: bool
    directory: Path
    name: str
    every: int
    background: bool
    keep: int
    monitor: str
    mode: Literal["min", "max"]


def read_saving(values: Values, log_dir: Path, val_interval: int) -> Saving:
    """Read the node; by default a checkpoint follows each validation, and NeMo keeps the best three.

    Raises
    ------
    UserError
        If a value is invalid.
    """
    dirpath = f"{_NODE}.dirpath"
    name = values.text(f"{_NODE}.filename", DEFAULT_FILENAME)
    check_template(name)
    mode = values.choice(f"{_NODE}.mode", ("min", "max"), "min")
    return Saving(
        enabled=values.flag("exp_manager.create_checkpoint_callback", True),
        directory=Path(values.text(dirpath)) if values.is_set(dirpath) else log_dir / "checkpoints",
        name=name,
        every=values.integer(f"{_NODE}.every_n_train_steps", val_interval, minimum=0),
        background=values.flag(f"{_NODE}.async_save", True),
        keep=values.integer(f"{_NODE}.save_top_k", 3, minimum=-1),
        monitor=values.choice(f"{_NODE}.monitor", FIELDS, "val_loss"),
        mode="min" if mode == "min" else "max",
    )

"""NeMo's ``checkpoint_callback_params``: the place, the times and the retention of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from slipway.trainer.checkpoint.naming import FIELDS, check_template
from slipway.trainer.config.rows import ON, Row, read_rows
from slipway.trainer.config.values import Values

_NODE = "exp_manager.checkpoint_callback_params"
DEFAULT_FILENAME = "megatron_gpt--{val_loss:.2f}-{step}-{consumed_samples}"


@dataclass(frozen=True)
class Saving:
    """The settings of saving.

    Attributes
    ----------
    directory, name
        Where, and the template of their names.
    every
        Steps from one to the next; 0 for one at the end alone.
    background
        Whether the training goes on while the files are written.
    keep, monitor, mode
        The best `keep` by a value that is best when low ("min") or high ("max"); -1 for all.
    """

    enabled: Annotated[bool, Row("exp_manager.create_checkpoint_callback", ON)]
    directory: Path
    name: Annotated[str, Row(f"{_NODE}.filename", partial(Values.text, default=DEFAULT_FILENAME))]
    every: int
    background: Annotated[bool, Row(f"{_NODE}.async_save", ON)]
    keep: Annotated[int, Row(f"{_NODE}.save_top_k", partial(Values.integer, default=3, minimum=-1))]
    monitor: Annotated[str, Row(f"{_NODE}.monitor", partial(Values.choice, valid=FIELDS, default="val_loss"))]
    mode: Annotated[
        Literal["min", "max"],
        Row(f"{_NODE}.mode", partial(Values.choice, valid=("min", "max"), default="min")),
    ]


def read_saving(values: Values, log_dir: Path, val_interval: int) -> Saving:
    """Read the node; by default a checkpoint follows each validation, and NeMo keeps the best three.

    Raises
    ------
    UserError
        If a value is invalid.
    """
    dirpath = f"{_NODE}.dirpath"
    saving = read_rows(
        Saving,
        values,
        directory=Path(values.text(dirpath)) if values.is_set(dirpath) else log_dir / "checkpoints",
        every=values.integer(f"{_NODE}.every_n_train_steps", val_interval, minimum=0),
    )
    check_template(saving.name)
    return saving

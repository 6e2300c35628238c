"""The disk space of checkpoints: of one, and of all that lie there at a time."""

from __future__ import annotations

from typing import NamedTuple

from launcher.estimates.model import ModelSize
from launcher.estimates.values import Values, is_whole

_CALLBACK = "exp_manager.checkpoint_callback_params"
KEEP = f"{_CALLBACK}.save_top_k"

# Bytes of a parameter. Adam has two moments in fp32 (Kingma and Ba 2015, arXiv 1412.6980); beside weights in
# 16 bits there is a master copy in fp32 (Micikevicius et al. 2018, arXiv 1710.03740).
_MOMENTS = 4 + 4
_MASTER = 4


class Checkpoints(NamedTuple):
    """Checkpoints of a training.

    `size` is that of one, in bytes. `kept` counts those that lie there at most, None where all are kept;
    `beside` of them are not among the best: the newest, and one that is being written before an older one
    goes. `saves` counts those that are written from the first step to the last.
    """

    size: int
    kept: int | None
    beside: int
    saves: int

    @property
    def most(self) -> int:
        """The most checkpoints that lie there at a time."""
        return self.saves if self.kept is None else min(self.kept, self.saves)


def checkpoints_of(values: Values, model: ModelSize, engine: str) -> Checkpoints | None:
    """Return the checkpoints of a training; None if it saves nothing, or that is unknown."""
    steps = values.whole("trainer.max_steps")
    saves = _saves(values, steps) if steps is not None else None
    if saves is None:
        return None
    best, beside = _best(values, engine), _beside(values, engine)
    kept = None if best is None else best + beside
    return Checkpoints(_size(values, model, engine), kept, beside, saves)


def _size(values: Values, model: ModelSize, engine: str) -> int:
    """Return the bytes of weights, Adam's moments, and master weights where there are any.

    NeMo without `megatron_amp_O2` computes in 16 bits on weights in 32, which ours and Megatron-LM never do.
    """
    is_full = str(values.raw("trainer.precision")).startswith("32")
    has_master = not is_full and (engine != "nemo" or values.flag("model.megatron_amp_O2"))
    weights = 2 if has_master else 4
    if engine == "nemo" and values.flag(f"{_CALLBACK}.save_weights_only"):
        return model.parameters * weights
    return model.parameters * (weights + _MOMENTS + (_MASTER if has_master else 0))


def _best(values: Values, engine: str) -> int | None:
    """Return `save_top_k`, by default 3; None for all of them, as Megatron-LM removes none."""
    best = values.raw(KEEP)
    best = 3 if best is None else best
    if engine == "megatron_lm" or not is_whole(best) or best < 0:
        return None
    return int(best)


def _beside(values: Values, engine: str) -> int:
    """Return the checkpoints beside the best ones.

    Our trainer: trainer/checkpoint/retention.py; NeMo's `save_last`: exp_manager.py, CallbackParams.
    """
    has_last = engine != "nemo" or values.flag(f"{_CALLBACK}.save_last", default=True)
    return 2 if has_last else 1


def _saves(values: Values, steps: int) -> int | None:
    """Count the saves: one after each validation, or by `every_n_train_steps`, and one at the end."""
    if not values.flag("exp_manager.create_checkpoint_callback", default=True):
        return None
    every = values.raw(f"{_CALLBACK}.every_n_train_steps")
    every = values.raw("trainer.val_check_interval") if every is None else every
    if not is_whole(every) or every < 1:
        return 1
    return -(-steps // int(every))

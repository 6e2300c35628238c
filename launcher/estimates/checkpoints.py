"""The disk space of checkpoints, of one and of all that lie there at a time, and the memory of a save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from launcher.estimates.memory import bytes_per_parameter
from launcher.estimates.model import ModelSize
from launcher.estimates.training import parameters_of, stages_of, training_of
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


def bytes_of_save(config: Mapping[str, Any], nodes: int, engine: str) -> int | None:
    """Return the bytes of a node's memory that a save takes: of our trainer, on the fullest node.

    Each rank copies its share of the state to the host, and of a GPU nothing more is taken
    (trainer/checkpoint/async_save.py, `take_snapshot`). Ranks that hold the same weights and optimizer states
    have equal shares of them (megatron-core's FullyParallelSaveStrategyWrapper, exchange_utils.py,
    `distribute_shards_to_ranks`), those of a sharded optimizer have their own. PyTorch's allocator of pinned
    memory rounds each tensor up to a power of two (CachingHostAllocator.h): that is not counted.

    None for other engines, and where the memory of a GPU is unknown.
    """
    training = training_of(config, nodes, engine) if engine == "megatron" else None
    stages = stages_of(training) if training is not None else None
    if training is None or stages is None:
        return None
    each, tensor = bytes_per_parameter(training), training.parallel.tensor
    largest = max(parameters_of(training.parts, stage).on_rank(tensor) for stage in stages)
    copies = training.data * training.parallel.context
    return training.parallel.devices * -(-largest * (each.weight + each.optimizer) // copies)


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

"""Parallel sizes: the numbers of processes that share a model, for each way of sharing it."""

from __future__ import annotations

from dataclasses import dataclass

from slipway.common.errors import UserError
from slipway.trainer.config.values import Values

PIPELINE = "model.pipeline_model_parallel_size"
VIRTUAL = "model.virtual_pipeline_model_parallel_size"


@dataclass(frozen=True)
class Timeouts:
    """Limits of the time that a collective waits for another rank.

    Attributes
    ----------
    start
        Minutes, until the first step is done: reading data and checkpoints is slow on a busy file system.
    after_start
        Seconds, from then on; None for as long as before.
    """

    start: int = 30
    after_start: int | None = None


@dataclass(frozen=True)
class Overlap:
    """Communication of the data-parallel ranks beside the computation, as NeMo's ``model.optim`` asks for it.

    Attributes
    ----------
    gradients
        Whether a bucket of gradients is reduced as soon as the backward pass has filled it, rather than all
        gradients after it.
    parameters
        Whether a bucket of weights is gathered when the next forward pass needs it, rather than all weights
        after the optimizer's step. Only the distributed optimizer gathers weights.
    bucket_size
        Parameters of a bucket; None for megatron-core's choice, the larger of 40 million and 1 million for
        each rank.
    align_gradients, align_parameters
        Whether all pipeline stages reduce, or gather, at the same time rather than each as soon as it can.
    average
        Whether the reduction takes the mean, where the backend has one (NCCL), rather than the sum of
        gradients that were divided before.
    """

    gradients: bool
    parameters: bool
    bucket_size: int | None
    align_gradients: bool
    align_parameters: bool
    average: bool


@dataclass(frozen=True)
class Parallel:
    """Parallel sizes, as in Megatron; 1 means not at all.

    Attributes
    ----------
    tensor, pipeline, context
        Ranks that share a layer, the layers, a sequence.
    virtual
        Chunks of layers on each pipeline stage.
    sequence
        Whether norms and dropouts are shared among the tensor-parallel ranks too (Korthikanti et al. 2022).
    overlap_p2p
        Whether stages compute while they exchange; for virtual stages on CUDA.
    overlap_tensor
        Whether the tensor-parallel ranks exchange while they multiply, by Transformer Engine; it needs
        `sequence`.
    """

    tensor: int
    pipeline: int
    virtual: int
    context: int
    sequence: bool
    overlap_p2p: bool
    overlap_tensor: bool

    @property
    def model(self) -> int:
        """Ranks that share one copy of the model and one of its sequences."""
        return self.tensor * self.pipeline * self.context


def read_parallel(values: Values) -> Parallel:
    """Read and cross-check the sizes.

    Raises
    ------
    UserError
        If a value is invalid, or two values contradict each other.
    """
    tensor = values.integer("model.tensor_model_parallel_size", 1, minimum=1)
    pipeline = values.integer(PIPELINE, 1, minimum=1)
    virtual = values.integer(VIRTUAL, 1, minimum=1)
    if virtual > 1 and pipeline == 1:
        raise UserError(
            f"{VIRTUAL}={virtual}: virtual stages are parts of pipeline stages, but {PIPELINE}=1; "
            "expected null, or more pipeline stages"
        )
    sequence = values.flag("model.sequence_parallel", False)
    return Parallel(
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        context=values.integer("model.context_parallel_size", 1, minimum=1),
        # It shares what tensor parallelism leaves whole: NeMo switches it off too where there is none.
        sequence=sequence and tensor > 1,
        overlap_p2p=values.flag("model.overlap_p2p_comm", False),
        overlap_tensor=values.flag("model.ub_tp_comm_overlap", False),
    )


def read_overlap(values: Values) -> Overlap:
    """Read NeMo's keys, with NeMo's defaults.

    Raises
    ------
    UserError
        If weights are gathered early and gradients are not reduced early, which megatron-core cannot do.
    """
    node = "model.optim"
    gradients = values.flag(f"{node}.overlap_grad_sync", False)
    parameters = values.flag(f"{node}.overlap_param_sync", False)
    if parameters and not gradients:
        values.fail(f"{node}.overlap_param_sync", f"False, or {node}.overlap_grad_sync=True beside it")
    size = f"{node}.ddp_bucket_size"
    return Overlap(
        gradients=gradients,
        parameters=parameters,
        bucket_size=values.integer(size, minimum=1) if values.is_set(size) else None,
        align_gradients=values.flag(f"{node}.align_grad_reduce", True),
        align_parameters=values.flag(f"{node}.align_param_gather", False),
        average=values.flag(f"{node}.average_in_collective", True),
    )


def read_timeouts(values: Values) -> Timeouts:
    """Read Megatron-LM's two timeouts.

    Raises
    ------
    UserError
        If one is no whole number above 0.
    """
    after = "model.distributed_timeout_seconds_after_init"
    return Timeouts(
        start=values.integer("model.distributed_timeout_minutes", Timeouts.start, minimum=1),
        after_start=values.integer(after, minimum=1) if values.is_set(after) else None,
    )

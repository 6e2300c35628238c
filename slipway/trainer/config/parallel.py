"""Parallel sizes: the numbers of processes that share a model, for each way of sharing it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from slipway.common.errors import UserError
from slipway.trainer.config.rows import OFF, ON, SIZE, Reader, Row, optional, read_rows
from slipway.trainer.config.values import Values

PIPELINE = "model.pipeline_model_parallel_size"
VIRTUAL = "model.virtual_pipeline_model_parallel_size"
_RANKS: Reader = partial(Values.integer, default=1, minimum=1)
_NO_GATHER = "only the distributed optimizer gathers weights, and every rank has whole optimizer states"


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

    start: Annotated[int, Row("model.distributed_timeout_minutes", partial(SIZE, default=30))] = 30
    after_start: Annotated[
        int | None, Row("model.distributed_timeout_seconds_after_init", optional(SIZE))
    ] = None


@dataclass(frozen=True)
class Overlap:
    """Overlap of the data-parallel ranks' communication with computation, by NeMo's ``model.optim``.

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

    gradients: Annotated[bool, Row("model.optim.overlap_grad_sync", OFF)]
    parameters: Annotated[bool, Row("model.optim.overlap_param_sync", OFF, on_cpu=_NO_GATHER)]
    bucket_size: Annotated[int | None, Row("model.optim.ddp_bucket_size", optional(SIZE))]
    align_gradients: Annotated[bool, Row("model.optim.align_grad_reduce", ON)]
    align_parameters: Annotated[bool, Row("model.optim.align_param_gather", OFF, on_cpu=_NO_GATHER)]
    average: Annotated[bool, Row("model.optim.average_in_collective", ON, on_cpu="gloo has sums alone")]


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

    tensor: Annotated[int, Row("model.tensor_model_parallel_size", _RANKS)]
    pipeline: Annotated[int, Row(PIPELINE, _RANKS)]
    virtual: Annotated[int, Row(VIRTUAL, _RANKS)]
    context: Annotated[int, Row("model.context_parallel_size", _RANKS)]
    sequence: Annotated[bool, Row("model.sequence_parallel", OFF)]
    overlap_p2p: Annotated[
        bool,
        Row("model.overlap_p2p_comm", OFF, on_cpu="gloo exchanges between pipeline stages one after another"),
    ]
    overlap_tensor: Annotated[
        bool, Row("model.ub_tp_comm_overlap", OFF, on_cpu="Transformer Engine's exchanges need CUDA")
    ]

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
    parallel = read_rows(Parallel, values)
    if parallel.virtual > 1 and parallel.pipeline == 1:
        raise UserError(
            f"{VIRTUAL}={parallel.virtual}: virtual stages are parts of pipeline stages, but {PIPELINE}=1; "
            "expected null, or more pipeline stages"
        )
    # It divides the rest of a tensor-parallel layer: NeMo switches it off too without tensor parallelism.
    return replace(parallel, sequence=parallel.sequence and parallel.tensor > 1)


def read_overlap(values: Values) -> Overlap:
    """Read NeMo's keys, with NeMo's defaults.

    Raises
    ------
    UserError
        If weights are gathered early and gradients are not reduced early, which megatron-core cannot do.
    """
    overlap = read_rows(Overlap, values)
    if overlap.parameters and not overlap.gradients:
        values.fail(
            "model.optim.overlap_param_sync",
            "False, or True with model.optim.overlap_grad_sync=True",
        )
    return overlap

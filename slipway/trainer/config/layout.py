"""Layout of the processes that share a model and a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipway.arithmetic.layout import (
    ParallelConfig,
    cuts_sequence,
    divides_batch,
    divides_world,
    interleaves,
    shares_sequence,
)
from slipway.common.errors import UserError
from slipway.trainer.config.distillation import NODE, TEACHER
from slipway.trainer.config.fp8 import check_shapes
from slipway.trainer.config.parallel import PIPELINE, VIRTUAL
from slipway.trainer.config.settings import COMPILE, Settings
from slipway.trainer.config.t5 import DECODER, ENCODER, check_tensor


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions, and micro batches that each data-parallel rank does in a step.

    `data` counts the copies of the model that see other samples; `virtual` is 1 where a pipeline stage holds
    one chunk of layers.
    """

    world: int
    tensor: int
    pipeline: int
    virtual: int
    context: int
    data: int
    micro_batches: int

    @property
    def group(self) -> int:
        """Micro batches that virtual stages take at a time."""
        return self.pipeline if self.virtual > 1 else 1


def make_layout(settings: Settings, world: int) -> Layout:
    """Divide `world` processes into tensor-, pipeline-, context- and data-parallel groups.

    Raises
    ------
    UserError
        If the sizes do not divide each other.
    """
    parallel, sizes = settings.parallel, _sizes(settings, world)
    _check_world(settings, world)
    if not divides_world(sizes, nodes=1):
        raise UserError(f"{_named_sizes(settings)}: expected a divisor of the {world} processes")
    check_tensor(parallel.tensor, "model", settings.architecture, {})
    _check_stages(settings)
    _check_sequence(settings)
    _check_fp8(settings)
    if settings.distillation:
        check_teacher(settings, settings.distillation.sizes)
    if settings.compile_layers == "True" and (obstacle := find_compile_obstacle(settings)):
        raise UserError(f"{COMPILE}=True: {obstacle}; expected auto or False")
    data = sizes.data(nodes=1)
    if not divides_batch(sizes, nodes=1):
        raise UserError(
            f"model.global_batch_size={settings.global_batch}: expected a multiple of model.micro_batch_size="
            f"{settings.micro_batch} times the data-parallel size {data} = {settings.micro_batch * data}"
        )
    _check_interleaving(settings, sizes)
    _check_rampup(settings, sizes)
    return Layout(
        world=world,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual,
        context=parallel.context,
        data=data,
        micro_batches=sizes.micro_batches(nodes=1),
    )


def _sizes(settings: Settings, world: int) -> ParallelConfig:
    """Return the sizes with all processes as those of one node: where they are has no part in the rules."""
    parallel = settings.parallel
    return ParallelConfig(
        devices=world,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual if parallel.virtual > 1 else None,
        context=parallel.context,
        expert=1,
        expert_tensor=parallel.tensor,
        group=parallel.pipeline,
        micro=settings.micro_batch,
        batch=settings.global_batch,
    )


def _named_sizes(settings: Settings) -> str:
    parallel = settings.parallel
    sizes = {
        "tensor_model": parallel.tensor,
        "pipeline_model": parallel.pipeline,
        "context": parallel.context,
    }
    named = [f"model.{name}_parallel_size={size}" for name, size in sizes.items() if size > 1]
    return named[0] if len(named) == 1 else f"{' times '.join(named)} = {parallel.model}"


def _check_world(settings: Settings, world: int) -> None:
    nodes, devices = settings.nodes, settings.devices
    if devices is None:
        return
    if nodes is None:
        if world % devices:
            raise UserError(
                f"trainer.devices={devices}: {world} processes were started (WORLD_SIZE), which is no "
                "multiple of it"
            )
    elif nodes * devices != world:
        raise UserError(
            f"trainer.num_nodes={nodes} times trainer.devices={devices} is "
            f"{nodes * devices} processes, but {world} were started (WORLD_SIZE)"
        )


def _check_stages(settings: Settings) -> None:
    parallel, layers = settings.parallel, settings.architecture.num_layers
    chunks = parallel.pipeline * parallel.virtual
    if layers % chunks:
        virtual = f" times {VIRTUAL}={parallel.virtual} = {chunks}" if parallel.virtual > 1 else ""
        raise UserError(
            f"model.num_layers={layers}: expected a multiple of {PIPELINE}={parallel.pipeline}{virtual}"
        )


def _check_sequence(settings: Settings) -> None:
    parallel, length = settings.parallel, settings.architecture.seq_length
    if parallel.sequence and not shares_sequence(length, parallel.tensor, parallel.context):
        raise UserError(
            f"model.encoder_seq_length={length}: expected a multiple of model.tensor_model_parallel_size="
            f"{parallel.tensor} times model.context_parallel_size={parallel.context}, among which "
            "model.sequence_parallel=True shares it"
        )
    if not cuts_sequence(length, parallel.context):
        raise UserError(
            f"model.encoder_seq_length={length}: expected a multiple of 2 times "
            f"model.context_parallel_size={parallel.context}: each rank has a chunk from either end"
        )


def _check_fp8(settings: Settings) -> None:
    if settings.fp8 is None:
        return
    stacks = {"model": settings.architecture}
    if settings.encoder:
        stacks = {ENCODER: settings.encoder, DECODER: settings.architecture}
    for node, shape in stacks.items():
        check_shapes(settings.fp8, node, shape, settings.micro_batch, settings.parallel)


def check_teacher(settings: Settings, sizes: Mapping[str, int]) -> None:
    """Hold the known sizes of a teacher against its student's and the layout, which both have.

    Parameters
    ----------
    sizes
        By NeMo's keys; `max_position_embeddings` is that of learned positions.

    Raises
    ------
    UserError
        If the teacher does not fit.
    """
    distillation, parallel, shape = settings.distillation, settings.parallel, settings.architecture
    assert distillation is not None
    chunks, length = parallel.pipeline * parallel.virtual, shape.seq_length
    own = {name: getattr(shape, name) for name in sizes if hasattr(shape, name)}

    def fail(name: str, expected: str) -> None:
        raise UserError(f"{TEACHER}={distillation.teacher}: its {name} is {sizes[name]}: expected {expected}")

    if sizes.get("num_layers", 0) % chunks:
        fail("num_layers", f"a multiple of the {chunks} parts of the student's pipeline")
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        if sizes.get(name, 0) % parallel.tensor:
            fail(name, f"a multiple of model.tensor_model_parallel_size={parallel.tensor}")
    if sizes.get("max_position_embeddings", length) < length:
        fail("max_position_embeddings", f"at least model.encoder_seq_length={length}")
    if distillation.cosine and sizes.get("hidden_size", own.get("hidden_size")) != own.get("hidden_size"):
        fail("hidden_size", f"the student's {shape.hidden_size}, or {NODE}.cosine=0")
    if not distillation.starts_from_teacher:
        return
    if sizes.get("num_layers", shape.num_layers) < shape.num_layers:
        fail("num_layers", f"at least the student's {shape.num_layers}, or {NODE}.start_from_teacher=False")
    for name in own:
        if name != "num_layers" and sizes[name] != own[name]:
            fail(name, f"the student's {own[name]}, or {NODE}.start_from_teacher=False")


def find_compile_obstacle(settings: Settings) -> str | None:
    """Return why whole layers cannot be compiled in any process; None if they can."""
    parallel, shape = settings.parallel, settings.architecture
    for key, ranks in (("tensor_model", parallel.tensor), ("context", parallel.context)):
        if ranks > 1:
            return (
                f"model.{key}_parallel_size={ranks}: torch.compile cannot trace the exchanges within "
                "megatron-core's layers (NVIDIA/Megatron-LM issue 2598)"
            )
    if shape.transformer_engine and settings.accelerator != "cpu":
        return "model.transformer_engine=True: the layers are Transformer Engine's own kernels"
    if shape.attention_backend not in ("auto", "sdpa"):
        return f"model.attention_backend={shape.attention_backend}: only sdpa can be traced"
    return None


def _check_interleaving(settings: Settings, sizes: ParallelConfig) -> None:
    parallel = settings.parallel
    if not interleaves(sizes, nodes=1):
        raise UserError(
            f"{VIRTUAL}={parallel.virtual}: its schedule takes micro batches in groups of {PIPELINE}="
            f"{parallel.pipeline}, but a step has {sizes.micro_batches(nodes=1)} "
            "(global batch / micro batch / data parallel); expected null, or another batch size"
        )


def _check_rampup(settings: Settings, sizes: ParallelConfig) -> None:
    if settings.rampup is not None:
        factors = "micro batch x data parallel" + (" x pipeline stages" if sizes.is_interleaved else "")
        settings.rampup.check(sizes.rampup_multiple(nodes=1), factors)

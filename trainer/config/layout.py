"""How the processes share the model and the batch."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.settings import Settings
from trainer.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions, and micro batches that each data-parallel rank does in a step."""

    world: int
    tensor: int
    data: int
    micro_batches: int


def make_layout(settings: Settings, world: int) -> Layout:
    """Divide `world` processes into tensor- and data-parallel groups.

    Raises
    ------
    UserError
        If the sizes do not divide each other.
    """
    tensor = settings.tensor_parallel
    _check_world(settings, world)
    if world % tensor:
        raise UserError(
            f"model.tensor_model_parallel_size={tensor}: expected a divisor of the {world} processes"
        )
    _check_tensor(settings, tensor)
    data = world // tensor
    per_pass = settings.micro_batch * data
    if settings.global_batch % per_pass:
        raise UserError(
            f"model.global_batch_size={settings.global_batch}: expected a multiple of model.micro_batch_size="
            f"{settings.micro_batch} times the data-parallel size {data} = {per_pass}"
        )
    return Layout(world, tensor, data, settings.global_batch // per_pass)


def padded_vocabulary(size: int, divisor: int, tensor: int) -> int:
    """Round a vocabulary size up to a multiple of ``divisor * tensor``, as NeMo and Megatron do."""
    multiple = divisor * tensor
    return -(-size // multiple) * multiple


def _check_world(settings: Settings, world: int) -> None:
    if settings.devices is not None and settings.nodes * settings.devices != world:
        raise UserError(
            f"trainer.num_nodes={settings.nodes} times trainer.devices={settings.devices} is "
            f"{settings.nodes * settings.devices} processes, but {world} were started (WORLD_SIZE)"
        )


def _check_tensor(settings: Settings, tensor: int) -> None:
    shape = settings.architecture
    divided = {
        "model.num_attention_heads": shape.num_attention_heads,
        "model.num_query_groups": shape.num_query_groups,
        "model.ffn_hidden_size": shape.ffn_hidden_size,
    }
    for key, value in divided.items():
        if value % tensor:
            raise UserError(
                f"{key}={value}: expected a multiple of model.tensor_model_parallel_size={tensor}"
            )

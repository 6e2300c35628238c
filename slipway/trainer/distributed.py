"""Process groups: joining, agreeing and leaving."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slipway.common.errors import UserError
from slipway.trainer.config.layout import Layout
from slipway.trainer.config.parallel import Timeouts
from slipway.trainer.device import choose_device, compare_devices
from slipway.trainer.world import World

T = TypeVar("T")

_TIMEOUTS = Timeouts()


@dataclass(frozen=True)
class RankContext:
    """The place of this process in the layout, and its device."""

    world: World
    layout: Layout
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    device: Any

    @property
    def is_main(self) -> bool:
        """Return whether this is the process that reports."""
        return self.world.is_main


@contextlib.contextmanager
def process_group(world: World, accelerator: str, timeouts: Timeouts = _TIMEOUTS) -> Iterator[Any]:
    """Join the process group and yield this process's device; leave the group when all went well.

    After an exception the group is left alone: destroying it would wait for ranks that are stuck in a
    collective, and the caller ends the process at once.

    Raises
    ------
    UserError
        If this process has not the device that `accelerator` asks for, or another kind than rank 0.
    """
    device = choose_device(world, accelerator)
    torch.set_num_threads(world.threads(os.environ))
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = world.address, str(world.port)
    timeout = timedelta(minutes=timeouts.start)
    store, rank, size = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
    # On a port that another training has as well, its ranks and ours wait for other keys, and never meet.
    store = dist.PrefixStore(world.name, store)
    compare_devices(store, world, device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    yield device
    # All is done by now: a rank that has left before, at a signal, takes nothing from that.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
        dist.destroy_process_group()


def make_rank_context(
    world: World, layout: Layout, device: Any, timeouts: Timeouts = _TIMEOUTS
) -> RankContext:
    """Create megatron-core's groups for the layout."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        # Nothing here communicates over them, and each is one more connection that may fail.
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeouts.start,
    )
    return RankContext(
        world=world,
        layout=layout,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        device=device,
    )


def run_on_all_ranks(action: Callable[[], T]) -> T:
    """Run `action` on every rank; a mistake of any rank is raised on all, so that it is reported once.

    Raises
    ------
    UserError
        The first rank's, on every rank.
    """
    result: T | None = None
    message: str | None = None
    try:
        result = action()
    except UserError as error:
        message = str(error)
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    for rank, text in enumerate(messages):
        if text is not None:
            raise UserError(text if rank == 0 or len(messages) == 1 else f"{text} (on rank {rank})")
    return result  # type: ignore[return-value]


def broadcast_from_rank0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only and return its result on every rank."""
    box: list[Any] = [run_on_all_ranks(action if dist.get_rank() == 0 else lambda: None)]
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[no-any-return]


def is_any_set(flag: bool, device: Any) -> bool:
    """Return whether `flag` is set on any rank."""
    tensor = torch.tensor([float(flag)], device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return bool(tensor.item() > 0)


def shorten_timeouts(timeouts: Timeouts) -> None:
    """Let collectives wait for less from now on, if the settings say so; every rank calls this once."""
    if timeouts.after_start is None:
        return
    timeout = timedelta(seconds=timeouts.after_start)
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timeout, group)

"""Groups of gloo with the shim; run by test_groups.py, two ranks, from a warm process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import _coalescing_manager

from slipway.trainer.distributed import process_group
from slipway.trainer.world import World


def main(_: list[str]) -> int:
    world = World.from_environment(os.environ)
    with process_group(world, "cpu"):
        pair, *alone = (dist.new_group(ranks) for ranks in ([0, 1], [0], [1]))
        sums, handed_over = {}, {}
        for name, group in {"alone": alone[world.rank], "pair": pair, "world": None}.items():
            tensor = torch.tensor([1.5 + world.rank])
            numbered = group or dist.group.WORLD
            before = numbered._get_sequence_number_for_group()
            dist.all_reduce(tensor, group=group)
            handed_over[name] = numbered._get_sequence_number_for_group() - before
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)
            work.wait()
            with _coalescing_manager(group):
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
            sums[name] = tensor.item()
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    gloo_threads = threads.count("gloo_tcp_loop")
    print(json.dumps({"sums": sums, "handed_over": handed_over, "gloo_threads": gloo_threads}))
    return 0

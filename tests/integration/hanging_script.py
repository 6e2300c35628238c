"""A plain torch script whose ranks sum up a number: one of them hangs, or a step is slow."""

import os
import sys
import time

import torch
import torch.distributed as dist

RANK, KIND, WHICH = int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2])


def load(step: int) -> None:
    if step == 20 and KIND == "loader" and WHICH == RANK:
        time.sleep(3600)


def evaluate(step: int) -> None:
    if step == 20 and KIND == "skip" and WHICH == RANK:
        time.sleep(3600)


def pause(step: int) -> None:
    if step == 20 and KIND == "slow":
        for _ in range(40):
            time.sleep(0.5)
            spend()


def spend() -> None:
    time.sleep(0.5)


dist.init_process_group("gloo")
total = torch.ones(4)
for number in range(60 if KIND == "slow" else 10**9):
    load(number)
    evaluate(number)
    dist.all_reduce(total)
    total /= dist.get_world_size()
    pause(number)
    if RANK == 0 and number % 10 == 0:
        print("number", number, flush=True)
    time.sleep(0.02)

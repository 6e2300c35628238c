"""A plain torch script whose ranks sum up a number: one of them hangs in some way, or a step is slow.

Called as ``script.py KIND RANK STEP [FILE]``; the moment of the hang is written into FILE.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

RANK, KIND, WHICH, STEP = int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def load() -> None:
    time.sleep(3600)


def evaluate() -> None:
    time.sleep(3600)


def hold_the_lock() -> None:
    sum(iter(int, 1))


def read_a_dead_mount() -> None:
    """Wait in the kernel: for a child that waits for a file, as the kernel waits for a file server."""
    fifo = tempfile.mkdtemp() + "/fifo"
    os.mkfifo(fifo)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])


def be_slow() -> None:
    for _ in range(25):
        time.sleep(0.5)
        be_slower()


def be_slower() -> None:
    time.sleep(0.5)


HANGS = {"loader": load, "skip": evaluate, "lock": hold_the_lock, "mount": read_a_dead_mount}

dist.init_process_group("gloo")
total = torch.ones(4)
for number in range(2 * STEP if KIND == "slow" else 10**9):
    if number == STEP and KIND in HANGS and RANK == WHICH:
        if len(sys.argv) > 4:
            Path(sys.argv[4]).write_text(str(time.time()))
        HANGS[KIND]()
    if number == STEP and KIND == "slow":
        be_slow()
    dist.all_reduce(total)
    total /= dist.get_world_size()
    if RANK == 0 and number % 10 == 0:
        print("number", number, flush=True)
    time.sleep(0.02)
dist.barrier()
time.sleep(1)  # a rank that leaves early ends the last messages of others

"""Logging of one process: a file per rank, rank 0 also on stdout, and one file for errors of any rank."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

from slipway.common.errors import UserError
from slipway.trainer import failures
from slipway.trainer.world import World

LOGGER = logging.getLogger("trainer")
ERROR_LOG = "nemo_error_log.txt"

# True of every run of this kind, and nothing its user could change.
_NOISE = re.compile(
    r"Transformer Engine and Apex are not installed"
    r"|Apex is not installed"
    r"|CPU RNG state changed within GPU RNG context"
    r"|is deprecated"
    r"|will be deprecated"
    r"|Setting up optimizer with config"
    r"|Redirects are currently not supported"
)


def rank_log_name(world: World) -> str:
    """Return NeMo's name for a rank's log file."""
    return f"nemo_log_globalrank-{world.rank}_localrank-{world.local_rank}.txt"


def silence_warnings() -> None:
    """Keep the libraries' warnings off the terminal; call it before importing them."""
    warnings.filterwarnings("ignore")
    logging.captureWarnings(True)


def start_logging(log_dir: Path, world: World) -> None:
    """Log this process to its file in `log_dir` (created if need be), rank 0 to stdout as well.

    Warnings of megatron-core and torch, and debug messages, go to the file only.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(log_dir / rank_log_name(world), encoding="utf-8")
    to_file.setFormatter(logging.Formatter(f"[%(asctime)s %(levelname)s rank {world.rank}] %(message)s"))
    to_file.addFilter(lambda record: not _NOISE.search(record.getMessage()))
    logging.getLogger().addHandler(to_file)
    logging.getLogger().setLevel(logging.WARNING)
    LOGGER.setLevel(logging.DEBUG)
    if world.is_main:
        to_stdout = logging.StreamHandler(sys.stdout)
        to_stdout.setLevel(logging.INFO)
        to_stdout.setFormatter(_Plain())
        LOGGER.addHandler(to_stdout)


def record_failure(log_dir: Path | None, world: World, error: Exception, peers: failures.Peers) -> None:
    """Write an exception's traceback, with this rank's name, to stderr and to both log files.

    Where it only says that another rank was lost, or what another rank has said before, one line is enough
    there; the rank's own log always has the traceback.

    Parameters
    ----------
    log_dir
        The directory of logs; None if it is not known yet.
    peers
        The other processes, if they are known yet.
    """
    name = f"rank {world.rank} (local rank {world.local_rank})"
    trace = "".join(traceback.format_exception(error))
    text = f"{name} failed:\n{trace}"
    if log_dir is None or not log_dir.is_dir():
        print(text, file=sys.stderr, flush=True)
        return
    _append(log_dir, [rank_log_name(world)], text)
    line = _describe_other(log_dir, world, error, peers)
    if line is None:
        print(text, file=sys.stderr, flush=True)
        _append(log_dir, [ERROR_LOG], text)
    elif world.local_rank == 0:
        # One of a node is enough: thousands would bury the message.
        print(f"{name}: {line}", file=sys.stderr, flush=True)
        _append(log_dir, [ERROR_LOG], f"{name}: {line}\n")
    if line is not None:
        _append(log_dir, [rank_log_name(world)], f"{name}: {line}\n")


def _describe_other(log_dir: Path, world: World, error: Exception, peers: failures.Peers) -> str | None:
    """Return the line about another rank's failure; None if this rank's failure has another cause."""
    if world.size > 1 and failures.is_lost_peer(error):
        return failures.describe(failures.find_cause(log_dir, world, peers), error)
    mine = failures.make(world, error, rank_log_name(world))
    before = failures.find_first(log_dir, world.size)
    mine.write(log_dir)
    if before and before.rank != mine.rank and before.error == mine.error:
        return f"the same as rank {before.rank}: {mine.error}"
    return None


# Longer than ranks differ in reaching the same mistake; the reporter's exit ends the wait.
REPORT_SECONDS = 10.0


def record_mistake(log_dir: Path | None, world: World, error: UserError) -> None:
    """Report the user's mistake on stderr and in the error log: once, or from each node or rank with it."""
    is_reporter = {"job": world.is_main, "node": world.local_rank == 0, "rank": True}
    if is_reporter[error.found_by]:
        text = f"error: {error}"
        print(text, file=sys.stderr, flush=True)
        if log_dir is not None and log_dir.is_dir():
            _append(log_dir, [ERROR_LOG, rank_log_name(world)], f"{text}\n")
            failures.make(world, error, ERROR_LOG).write(log_dir)
        return
    # The first rank to leave ends the others: leaving before the reporter would silence it.
    time.sleep(REPORT_SECONDS)


def _append(log_dir: Path, names: list[str], text: str) -> None:
    for name in names:
        with (log_dir / name).open("a", encoding="utf-8") as file:
            file.write(text)


def end_at_once(code: int) -> NoReturn:
    """End this process without waiting for anything: the other ranks may be in a collective with it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"

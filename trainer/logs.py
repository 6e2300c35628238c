"""Logging of one process: a file per rank, rank 0 also on stdout, and one file for errors of any rank."""

from __future__ import annotations

import logging
import re
import sys
import time
import traceback
import warnings
from pathlib import Path

from trainer.errors import UserError
from trainer.world import World

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


def quiet() -> None:
    """Keep the libraries' warnings off the terminal; call it before importing them."""
    warnings.filterwarnings("ignore")
    logging.captureWarnings(True)


def start_logging(log_dir: Path, world: World) -> None:
    """Log this process to its file in `log_dir` (created if need be), rank 0 to stdout as well.

    Warnings of megatron-core and torch go to the file only.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(log_dir / rank_log_name(world), encoding="utf-8")
    to_file.setFormatter(logging.Formatter(f"[%(asctime)s %(levelname)s rank {world.rank}] %(message)s"))
    to_file.addFilter(_is_signal)
    logging.getLogger().addHandler(to_file)
    logging.getLogger().setLevel(logging.WARNING)
    LOGGER.setLevel(logging.INFO)
    if world.is_main:
        to_stdout = logging.StreamHandler(sys.stdout)
        to_stdout.setFormatter(_Plain())
        LOGGER.addHandler(to_stdout)


def record_failure(log_dir: Path | None, world: World) -> None:
    """Write the current exception's traceback, with this rank's name, to stderr and to both log files."""
    text = f"rank {world.rank} (local rank {world.local_rank}) failed:\n{traceback.format_exc()}"
    print(text, file=sys.stderr, flush=True)
    _append(log_dir, world, text)


# Longer than ranks differ in reaching the same mistake; the teller's exit ends the wait.
TELLING_SECONDS = 10.0


def record_mistake(log_dir: Path | None, world: World, error: UserError) -> None:
    """Tell the user's mistake once on stderr and in the error log, or where it alone is known."""
    is_teller = {"job": world.is_main, "node": world.local_rank == 0, "rank": True}
    if is_teller[error.found_by]:
        text = f"error: {error}"
        print(text, file=sys.stderr, flush=True)
        _append(log_dir, world, f"{text}\n")
        return
    # The first rank to leave ends the others: leaving before the one that tells would silence it.
    time.sleep(TELLING_SECONDS)


def _append(log_dir: Path | None, world: World, text: str) -> None:
    if log_dir is None or not log_dir.is_dir():
        return
    for name in (ERROR_LOG, rank_log_name(world)):
        with (log_dir / name).open("a", encoding="utf-8") as file:
            file.write(text)


def flush() -> None:
    """Flush everything buffered, before a process ends without cleaning up."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def _is_signal(record: logging.LogRecord) -> bool:
    return not _NOISE.search(record.getMessage())

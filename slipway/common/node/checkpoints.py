"""The newest checkpoint of a training by its trainer's own order, and if it is newer than the one before.

Not by the highest step: a training that went back from step 1000 to 200 gets on with 400 and 600.

===============  ==================================================  ===========================
engine           newest                                              number
===============  ==================================================  ===========================
``megatron``     the one with the highest serial in its marker       the serial
``megatron_lm``  the one that the tracker file names                 the iteration in the tracker
``nemo``         the ``-last`` from which it continues, or a whole   the step in its name
                 one that was saved after it
===============  ==================================================  ===========================

A newer checkpoint has another step, and comes later in that order or in time: the clocks of two nodes may
differ, and a number goes back when a training does, or when its newest checkpoint was damaged and set aside.
"""

import json
import os
import re
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from slipway.common.files import names_in, read_bytes, read_int

MARKER = "complete.json"
TRACKER = "latest_checkpointed_iteration.txt"
UNFINISHED = "-unfinished"
LAST = "-last"
_MARKER_BYTES = 1 << 26
_TRACKER_BYTES = 1 << 10
_STEP = r"(?:^|[^A-Za-z0-9_])step=([0-9]{1,15})"
_RANK_DIRECTORY = r"(?:mp|tp)_rank_"
# Later than all of a mark without a time.
_LATEST = (1 << 63) - 1


class Progress(NamedTuple):
    """The newest checkpoint.

    Attributes
    ----------
    step
        Its step, as users know it.
    order
        Its place in its trainer's own order.
    time
        Time at which it was completed, by its files, in Unix nanoseconds.
    """

    step: int
    order: int
    time: int

    def fields(self) -> Dict[str, int]:
        """Return it as fields of a mark."""
        return {"checkpoint": self.step, "checkpoint_order": self.order, "checkpoint_time": self.time}


def from_fields(mark: Dict[str, Any]) -> Optional[Progress]:
    """Return the progress in a mark; ``None`` if there was no checkpoint."""
    step, order, time = (
        read_int(mark.get(name), 0) for name in ("checkpoint", "checkpoint_order", "checkpoint_time")
    )
    if step is None:
        return None
    return Progress(step, step if order is None else order, _LATEST if time is None else time)


def is_newer(now: Optional[Progress], before: Optional[Progress]) -> bool:
    """Return True if a checkpoint was saved since `before`."""
    if now is None or before is None:
        return now is not None
    if now.step == before.step:  # saved again, as by a training that fails right where it began
        return False
    return now.order > before.order or now.time > before.time


def progress(directory: Optional[str], engine: str) -> Optional[Progress]:
    """Return the newest whole checkpoint of a directory, or ``None``."""
    if not directory:
        return None
    if engine == "megatron":
        return _read_markers(directory)
    if engine == "megatron_lm":
        return _read_tracker(directory)
    newest = find_newest_nemo(directory)
    return Progress(newest.step, newest.step, newest.time) if newest and newest.step >= 0 else None


# --- our own trainer ---


def _read_markers(directory: str) -> Optional[Progress]:
    newest: Optional[Progress] = None
    for name in names_in(directory):
        if name.startswith("."):
            continue
        path = os.path.join(directory, name, MARKER)
        content = _read(path, _MARKER_BYTES)
        try:
            marker = json.loads(content.decode("utf-8")) if content else None
        except (ValueError, RecursionError):
            continue
        if not isinstance(marker, dict):
            continue
        step, serial = read_int(marker.get("step"), 0), read_int(marker.get("serial", 0), 0)
        if step is None or serial is None:
            continue
        marked = Progress(step, serial, _time(path))
        # Markers of the first version have no serial.
        if newest is None or (marked.order, marked.step) > (newest.order, newest.step):
            newest = marked
    return newest


# --- Megatron-LM ---


def _read_tracker(directory: str) -> Optional[Progress]:
    path = os.path.join(directory, TRACKER)
    text = _read(path, _TRACKER_BYTES).decode("latin-1").strip()
    if not re.match("[0-9]{1,15}$", text):
        return None
    return Progress(int(text), int(text), _time(path))


# --- NeMo ---


class NemoCheckpoint(NamedTuple):
    """A whole checkpoint of NeMo's; `step` is -1 if its name has no step."""

    path: str
    step: int
    time: int

    @property
    def is_last(self) -> bool:
        return _stem(self.path).endswith(LAST)


def find_newest_nemo(directory: str) -> Optional[NemoCheckpoint]:
    """Return the checkpoint that NeMo ought to continue from: its ``-last``, or a later one.

    NeMo keeps the best by their loss too: one with a higher step than the ``-last`` that was saved before it
    is of a way that the training has gone back from.
    """
    every = find_whole_nemo(directory)
    last = max((saved for saved in every if saved.is_last), key=_sort_key, default=None)
    others = [saved for saved in every if not saved.is_last]
    if last is None:
        return max(others, key=lambda saved: (saved.time, saved.step), default=None)
    later = [saved for saved in others if saved.step > last.step and saved.time >= last.time]
    return max(later, key=_sort_key, default=last)


def find_whole_nemo(directory: str) -> List[NemoCheckpoint]:
    """Return NeMo's checkpoints that are not marked unfinished, also those of single ranks."""
    return list(_iterate_whole_nemo(directory))


def _iterate_whole_nemo(directory: str) -> Iterator[NemoCheckpoint]:
    names = names_in(directory)
    unfinished = {name[: -len(UNFINISHED)] for name in names if name.endswith(UNFINISHED)}
    for name in names:
        path = os.path.join(directory, name)
        inside = (
            [os.path.join(path, part) for part in names_in(path)] if re.match(_RANK_DIRECTORY, name) else []
        )
        for candidate in [path, *inside]:
            stem = _stem(candidate)
            if stem.startswith(".") or stem.endswith(UNFINISHED) or stem in unfinished:
                continue
            if "step=" not in stem and not stem.endswith(LAST):
                continue
            if os.path.exists(candidate):
                yield NemoCheckpoint(candidate, step_of(candidate), _time(candidate))


def step_of(path: str) -> int:
    """Return the step in a checkpoint's name, -1 without one."""
    match = re.search(_STEP, _stem(path))
    return int(match.group(1)) if match else -1


def _sort_key(checkpoint: NemoCheckpoint) -> Tuple[int, int]:
    return checkpoint.step, checkpoint.time


def _stem(path: str) -> str:
    name = os.path.basename(path)
    return name[: -len(".ckpt")] if name.endswith(".ckpt") else name


# --- files ---


def _read(path: str, limit: int) -> bytes:
    """Return the content of a regular file; empty if it is missing, or larger than `limit`."""
    try:
        return read_bytes(path, limit)
    except OSError:
        return b""


def _time(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0

"""The look at the ranks of a node, for ``supervisor.pyz stacks TAG``: where each stands, and if it moves."""

import json
import os
import re
import subprocess
import time
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from slipway.common.files import names_in
from slipway.supervisor.node_answers import NodeAnswers, print_answer

# As in `templates/python/sitecustomize.py`.
ANSWER_SIGNAL, ANSWER_NAME = 57, "slipway-rank-"

# Seconds for an answer, the looks at each rank, and seconds between two of them.
_ANSWER_SECONDS, _LOOKS, _BETWEEN_SECONDS = 2.0, 6, 0.4
_PY_SPY_SECONDS = 5.0
_MOST_FRAMES, _LONGEST_STACKS, _LONGEST_LINE = 40, 16000, 300
_PREFIX = "slipway-ranks"
_PROC = "/proc"

# File, line and function, the innermost first.
Frame = Tuple[str, int, str]


class _Process(NamedTuple):
    """A process of a rank; `file` is the number of its file for answers, `pipe` wakes its thread."""

    pid: int
    rank: int
    began: int
    is_elastic: bool
    file: Optional[int] = None
    pipe: Optional[int] = None

    def open(self, number: Optional[int], flags: int) -> int:
        return os.open(f"{_PROC}/{self.pid}/fd/{number}", flags)


def print_ranks(tag: str) -> None:
    """Print where the ranks of a launch on this node stand, for `read_answers`."""
    print_answer(_PREFIX, look_at_ranks(tag))


def read_answers(output: str) -> Dict[str, List[Dict[str, Any]]]:
    """Return by node the ranks that `print_ranks` has printed there; a node that was cut off has none."""
    answers = NodeAnswers(_PREFIX)
    for line in output.splitlines():
        answers.take(line)
    return answers.contents


def look_at_ranks(tag: str) -> List[Dict[str, Any]]:
    """Return what is seen of each rank of a launch on this node, lowest rank first."""
    processes = find_ranks(tag)
    looks = [_ask(processes, processes)]
    # An interpreter that has not answered is not waited for again.
    willing = [each for each in processes if looks[0][each.pid]["collectives"] is not None]
    for _ in range(_LOOKS - 1):
        time.sleep(_BETWEEN_SECONDS)
        looks.append(_ask(processes, willing))
    return [_describe(each, [look[each.pid] for look in looks]) for each in processes]


def find_ranks(tag: str) -> List[_Process]:
    """Return the process of each rank: the oldest that answers, else the oldest."""
    found: Dict[int, List[_Process]] = {}
    for name in names_in(_PROC):
        process = _read_process(int(name), tag) if name.isdigit() else None
        if process:
            found.setdefault(process.rank, []).append(process)
    if any(each.is_elastic for own in found.values() for each in own):  # torchrun's workers, not its agents
        found = {rank: [each for each in own if each.is_elastic] for rank, own in found.items()}
    chosen = [min(own, key=lambda each: (each.file is None, each.began)) for own in found.values() if own]
    return sorted(chosen, key=lambda each: each.rank)


def _read_process(pid: int, tag: str) -> Optional[_Process]:
    """Return a process if it is a rank's, or a helper's, of this user's launch on this node."""
    directory = f"{_PROC}/{pid}"
    try:
        if pid == os.getpid() or os.stat(directory).st_uid != os.getuid():
            return None
        with open(directory + "/environ", "rb") as stream:
            entries = stream.read().split(b"\0")
        environment = dict(entry.partition(b"=")[::2] for entry in entries)
        node = os.environ.get("SLURMD_NODENAME", "").encode()  # a machine may be several nodes
        rank = environment.get(b"RANK", b"")
        is_elsewhere = node and environment.get(b"SLURMD_NODENAME", node) != node
        if environment.get(b"SLIPWAY_TAG") != tag.encode() or not rank.isdigit() or is_elsewhere:
            return None
        began = int(_read(directory + "/stat").rpartition(") ")[2].split()[19])
        process = _Process(pid, int(rank), began, b"TORCHELASTIC_RUN_ID" in environment)
        for number in map(int, names_in(directory + "/fd")):
            link = _try(partial(os.readlink, f"{directory}/fd/{number}")) or ""  # it may just be closed
            match = re.match(rf"/memfd:{ANSWER_NAME}([0-9]+) ", link)
            if match and _catches(directory):
                return process._replace(file=number, pipe=int(match.group(1)))
        return process
    except (OSError, ValueError, IndexError):  # it has ended
        return None


def _catches(directory: str) -> bool:
    """Return True if the process handles the signal: it would end any other."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _read(directory + "/status"), re.M)
    return bool(caught and int(caught.group(1), 16) >> (ANSWER_SIGNAL - 1) & 1)


# --- questions


def _ask(processes: List[_Process], willing: List[_Process]) -> Dict[int, Dict[str, Any]]:
    """Ask all processes at once for their stacks, and the willing ones for their collectives."""
    # A stopped process, or one in the kernel's hands, would answer later.
    asked = [each for each in processes if each.file is not None and _state(each.pid) not in "TtD"]
    for process in asked:
        _try(partial(_signal, process))
    stacks = _wait(asked, lambda text: "(most recent call first)" in text)
    also = [each for each in asked if each in willing]
    for process in also:
        _try(partial(_wake, process))
    texts = _wait(also, lambda text: re.search(rf"^{ANSWER_NAME}\{{.*\}}$", text, re.M) is not None)
    return {
        each.pid: {
            "state": _state(each.pid),
            "stacks": stacks.get(each.pid, ""),
            "collectives": _find_collectives(texts.get(each.pid, "")),
        }
        for each in processes
    }


def _signal(process: _Process) -> None:
    descriptor = process.open(process.file, os.O_RDWR)
    try:
        os.ftruncate(descriptor, 0)  # bounded, however often it is asked
    finally:
        os.close(descriptor)
    if _catches(f"{_PROC}/{process.pid}"):  # it may be another by now
        os.kill(process.pid, ANSWER_SIGNAL)


def _wake(process: _Process) -> None:
    descriptor = process.open(process.pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(descriptor, b"1")
    finally:
        os.close(descriptor)


def _wait(processes: List[_Process], is_whole: Callable[[str], bool]) -> Dict[int, str]:
    """Return what the processes have written, once it is whole and grows no more, or the time is over."""
    texts: Dict[int, str] = {}
    left, end = list(processes), time.monotonic() + _ANSWER_SECONDS
    while left and time.monotonic() < end:
        time.sleep(0.1)
        for process in list(left):
            text = _try(partial(_read_answer, process)) or ""
            if is_whole(text) and text == texts.get(process.pid):
                left.remove(process)
            texts[process.pid] = text
    return texts


def _read_answer(process: _Process) -> str:
    with open(process.open(process.file, os.O_RDONLY), "rb") as stream:
        return stream.read(1 << 20).decode("utf-8", "replace")


def _try(action: Callable[[], Any]) -> Any:
    """Return what an action returns, ``None`` where its process has ended or cannot be reached."""
    try:
        return action()
    except (OSError, ValueError):
        return None


# --- answers


def _describe(process: _Process, looks: List[Dict[str, Any]]) -> Dict[str, Any]:
    last, stacks = looks[-1], [look["stacks"] for look in looks if look["stacks"]]
    records = [look["collectives"] for look in looks if look["collectives"] is not None]
    frames = find_main_stack(stacks[-1]) if stacks else []
    if not frames and last["state"] in ("R", "S"):
        frames = _ask_py_spy(process.pid)
    # The functions, not their lines.
    outlines = {tuple((file, name) for file, _, name in find_main_stack(text)) for text in stacks}
    # One that says nothing, as before its Python has started, may do something while it runs.
    runs = not stacks and any(look["state"] == "R" or look["state"] != last["state"] for look in looks)
    answer: Dict[str, Any] = {
        "rank": process.rank,
        "pid": process.pid,
        "state": last["state"] if all(look["state"] == last["state"] for look in looks) else "R",
        "answers": bool(stacks) or process.file is None,
        "moves": runs or len(outlines) > 1 or records[:1] != records[-1:],
        "frames": frames,
        "collectives": records[-1] if records else {},
    }
    if answer["state"] == "D":
        words = (_read_if_allowed(process.pid, name) for name in ("stack", "wchan"))  # the first is root's
        answer["kernel"] = next(filter(None, words), "")[:500]
    if stacks:
        answer["stacks"] = stacks[-1][:_LONGEST_STACKS]
    return answer


def find_main_stack(stacks: str) -> List[Frame]:
    """Return the frames of the main thread in faulthandler's stacks.

    It is the one that took the signal, ``Current thread``; else the oldest, which comes last.
    """
    blocks = re.split(r"^(?=(?:Current thread|Thread) 0x)", stacks, flags=re.M)
    threads = [block for block in blocks if re.match("(Current t|T)hread 0x", block)]
    main = next((block for block in threads if block.startswith("Current")), threads[-1] if threads else "")
    found = re.findall(r'^  File "(.*)", line ([0-9]+) in (.*)$', main, re.M)
    return [(file[-_LONGEST_LINE:], int(line), name[:80]) for file, line, name in found[:_MOST_FRAMES]]


def _find_collectives(text: str) -> Optional[Dict[str, List[Any]]]:
    """Return by its group the collectives that a rank has begun and done, and what it waits in.

    ``None`` if its interpreter did not answer.
    """
    lines = re.findall(rf"^{ANSWER_NAME}(\{{.*\}})$", text, re.M)
    try:
        content = json.loads(lines[-1]) if lines else None
    except ValueError:
        content = None
    if content is None:
        return None
    return {
        str(name)[:80]: [int(value[0]), int(value[1]), str(value[2])[:80]]
        for name, value in list(content.items())[:64]
        if isinstance(value, list) and len(value) == 3
    }


def _ask_py_spy(pid: int) -> List[Frame]:
    """Return the main thread's frames from py-spy, where it is there and allowed to look."""
    command = ["py-spy", "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_PY_SPY_SECONDS
        )
        threads = json.loads(done.stdout.decode())
        main = next(each for each in threads if each.get("thread_name") == "MainThread")
        frames = main["frames"][:_MOST_FRAMES]
        return [(each["filename"][-_LONGEST_LINE:], int(each["line"]), each["name"][:80]) for each in frames]
    except (OSError, ValueError, KeyError, TypeError, StopIteration, subprocess.SubprocessError):
        return []


def _state(pid: int) -> str:
    """Return the kernel's letter for the main thread: T is stopped, D waits for a device or a file server."""
    try:
        return _read(f"{_PROC}/{pid}/stat").rpartition(") ")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _read_if_allowed(pid: int, name: str) -> str:
    return str(_try(partial(_read, f"{_PROC}/{pid}/{name}")) or "").strip()


def _read(path: str) -> str:
    with open(path, "rb") as stream:
        return stream.read(1 << 16).decode("utf-8", "replace")

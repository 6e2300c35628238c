"""The judgement of a hang: which rank the others wait for, by what the ranks and NCCL say of themselves."""

import os
from collections import Counter
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Set, Tuple

from slipway.supervisor.hang_probe import Frame
from slipway.supervisor.nccl_ras import Communicator, find_ranks

# Directories of code that is not the training's own.
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
# A main thread with one of these near its top waits for other ranks.
_WAITING = ("/torch/distributed/", "/pipeline_parallel/p2p_communication.py", "/torch/cuda/nccl.py")
_TOP_FRAMES = 12
# All ranks are members of PyTorch's first group.
_FIRST_GROUP = "0"
_MOST_NAMED = 8


class Rank(NamedTuple):
    """A rank as its node's probe saw it.

    Attributes
    ----------
    state
        The kernel's letter for its main thread in both looks; ``""`` if it has no process.
    answers
        It wrote its stack, or nothing in it could have.
    moves
        Its functions or collectives were others in the second look.
    frames
        Its main thread's, the innermost first.
    collectives
        By the name of a process group: the last that it began, the last that was done, its word.
    kernel
        The functions that it waits in, if the kernel says.
    """

    rank: int
    host: str
    pid: int = 0
    state: str = ""
    answers: bool = True
    moves: bool = False
    frames: Tuple[Frame, ...] = ()
    collectives: Mapping[str, Sequence[Any]] = {}
    kernel: str = ""


class Hang(NamedTuple):
    """A judgement.

    Attributes
    ----------
    why
        Which ranks the others wait for and where they stand, a sentence without its full stop.
    suspects
        These ranks; none where no rank stands out.
    hosts
        Their host, if all of them are on one; the hosts that did not answer.
    moves
        Some rank still does something: it may be slow, and no hang.
    """

    why: str
    suspects: Tuple[int, ...]
    hosts: Tuple[str, ...]
    moves: bool


def judge(
    ranks: Sequence[Rank], silent: Mapping[str, Sequence[int]], communicators: Sequence[Communicator] = ()
) -> Hang:
    """Return which ranks the others wait for: of several signs the surest counts.

    Parameters
    ----------
    silent
        The ranks of nodes that did not answer.
    communicators
        What NCCL says.
    """
    moves = any(rank.moves for rank in ranks)
    if silent:
        words = "; ".join(_name(own) for own in list(silent.values())[:_MOST_NAMED])
        numbers = tuple(rank for own in silent.values() for rank in own)
        verb = "does" if len(silent) == 1 else "do"
        return Hang(f"{', '.join(silent)} {verb} not answer ({words})", numbers, tuple(silent), moves)
    for find in (find_halted, find_behind_in_nccl, find_behind, find_odd):
        suspects = find(ranks, communicators)
        if 0 < len(suspects) < max(len(ranks), 2):
            chosen = [rank for rank in ranks if rank.rank in suspects]
            hosts = tuple(dict.fromkeys(rank.host for rank in chosen))
            others = [rank for rank in ranks if rank.rank not in suspects]
            return Hang(
                _describe(chosen, others), tuple(sorted(suspects)), hosts if len(hosts) == 1 else (), moves
            )
    groups = "; ".join(_describe(group, ()) for group in group_by_stack(ranks)[:_MOST_NAMED])
    return Hang(f"{groups}: no rank stands out" if groups else "no rank was found", (), (), moves)


# --- signs, the surest first


def find_halted(ranks: Sequence[Rank], communicators: Sequence[Communicator]) -> Set[int]:
    """Return the ranks without a process, that are stopped, that the kernel holds, or that do not answer."""
    return {each.rank for each in ranks if each.state in ("", "T", "t", "D", "Z", "X") or not each.answers}


def find_behind_in_nccl(ranks: Sequence[Rank], communicators: Sequence[Communicator]) -> Set[int]:
    """Return the ranks of which NCCL misses all, else those that have launched the fewest collectives."""
    processes: Dict[str, Dict[int, int]] = {}
    for each in ranks:
        processes.setdefault(each.host, {})[each.pid] = each.rank
    numbers = find_ranks(list(communicators), processes) or {}
    missing = {numbers[each] for own in communicators for each in own.missing if each in numbers}
    if missing:
        return missing
    return _find_awaited(
        [
            {numbers[member]: (count, True) for member, count in own.launched.items() if member in numbers}
            for own in communicators
        ]
    )


def find_behind(ranks: Sequence[Rank], communicators: Sequence[Communicator]) -> Set[int]:
    """Return the ranks that have not begun a collective that others wait in, by PyTorch's flight recorder."""
    groups: Dict[str, Dict[int, Tuple[int, bool]]] = {}
    for each in ranks:
        for name, (begun, done, _) in each.collectives.items():
            groups.setdefault(name, {})[each.rank] = (begun, begun > done)
    for each in ranks:
        if _FIRST_GROUP in groups:
            groups[_FIRST_GROUP].setdefault(each.rank, (0, False))
    return _find_awaited(list(groups.values()))


def _find_awaited(groups: Sequence[Mapping[int, Tuple[int, bool]]]) -> Set[int]:
    """Return the ranks that others wait for in some group, and that wait for nobody themselves.

    A group has the number of collectives that each rank has begun, and whether it waits in the last one.
    """
    awaited: Dict[int, Set[int]] = {}
    for group in groups:
        for rank, (begun, waits) in group.items():
            behind = {other for other, (count, _) in group.items() if count < begun}
            if waits and behind:
                awaited.setdefault(rank, set()).update(behind)
    return {rank for behind in awaited.values() for rank in behind} - set(awaited)


def find_odd(ranks: Sequence[Rank], communicators: Sequence[Communicator]) -> Set[int]:
    """Return the ranks that do not wait for others while some do; else those outside the largest group."""
    waiting = {each.rank for each in ranks if waits_for_others(each.frames)}
    if waiting and len(waiting) < len(ranks):
        return {each.rank for each in ranks} - waiting
    odd = {each.rank for group in group_by_stack(ranks)[1:] for each in group}
    return odd if 2 * len(odd) < len(ranks) else set()


def waits_for_others(frames: Sequence[Frame]) -> bool:
    """Return True if the innermost frames are of a collective, or of a message to another rank."""
    return any(part in file for file, _, _ in frames[:_TOP_FRAMES] for part in _WAITING)


def group_by_stack(ranks: Sequence[Rank]) -> List[List[Rank]]:
    """Return the ranks that stand at equal places, the largest group first."""
    groups: Dict[Any, List[Rank]] = {}
    for each in ranks:
        groups.setdefault((each.state in "TtD" and each.state, each.frames), []).append(each)
    return sorted(groups.values(), key=len, reverse=True)


# --- words


def _describe(ranks: Sequence[Rank], others: Sequence[Rank]) -> str:
    """Return where ranks are and stand, and what the others do meanwhile."""
    parts = []
    for group in group_by_stack(ranks)[:_MOST_NAMED]:
        hosts = list(dict.fromkeys(each.host for each in group))
        where = ", ".join(hosts[:_MOST_NAMED]) + (", ..." if len(hosts) > _MOST_NAMED else "")
        parts.append(f"{_name([each.rank for each in group])} on {where} {_stand(group)}")
    if others:
        group = group_by_stack(others)[0]
        verb = "waits" if len(others) == 1 else "wait"
        parts[-1] += f" while {_count(others)} {verb} in {_wait_word(group)}"
    return "; ".join(parts)


def _name(numbers: Sequence[int]) -> str:
    words = ", ".join(map(str, numbers[:_MOST_NAMED])) + (", ..." if len(numbers) > _MOST_NAMED else "")
    return f"rank {words}" if len(numbers) == 1 else f"ranks {words}"


def _count(ranks: Sequence[Rank]) -> str:
    return "1 rank" if len(ranks) == 1 else f"{len(ranks):,} ranks"


def _stand(group: Sequence[Rank]) -> str:
    each, s = group[0], "s" if len(group) == 1 else ""
    if not each.state:
        return "has no process any more" if s else "have no process any more"
    if each.state in "Tt":
        return "is stopped (state T)" if s else "are stopped (state T)"
    if each.state == "D":
        function = f", {_kernel(each)}" if each.kernel else ""
        return f"wait{s} for the kernel: a file server or a device (state D{function})"
    if not each.frames:
        return (
            f"run{s} (state {each.state}) and say{s} nothing"
            if each.answers
            else f"do{s and 'es'} not answer"
        )
    return f"stand{s} in {find_place(each.frames)}"


def _kernel(rank: Rank) -> str:
    """Return the innermost function of a kernel's stack: ``[<0>] rpc_wait_bit_killable+0x1e/0xa0``."""
    return rank.kernel.splitlines()[0].rpartition("] ")[2].partition("+")[0][:60]


def find_place(frames: Sequence[Frame]) -> str:
    """Return the innermost line of the training's own code, and the function that it has called."""
    inner = frames[0]
    file, line, name = next(
        (each for each in frames if not any(part in each[0] for part in _LIBRARIES)), inner
    )
    called = f", in {inner[2]}" if (file, line, name) != inner else ""
    return f"{os.path.basename(file)}:{line} ({name}{called})"


def _wait_word(group: Sequence[Rank]) -> str:
    """Return the collective that ranks wait in, if one of them says so, or else where they stand."""
    words = Counter(
        str(word)
        for each in group
        for begun, done, word in each.collectives.values()
        if begun > done and word
    )
    if words:
        return words.most_common(1)[0][0].rpartition(":")[2]
    frames = group[0].frames
    if not frames:
        return "some call"
    inner = [name for file, _, name in frames[:_TOP_FRAMES] if any(part in file for part in _WAITING)]
    return next((name for name in inner if name != "wrapper"), "") or find_place(frames)

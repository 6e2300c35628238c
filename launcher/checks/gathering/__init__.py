"""Facts about files, this machine and the cluster, found out by reading alone.

A function that finds out a field of `Facts` enters itself into the table here; `gate.gather` runs over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import NamedTuple, TypeVar

from launcher.drafting import Draft

_Answer = TypeVar("_Answer")


class Gatherer(NamedTuple):
    """A function that finds out a field of `Facts`, of all drafts that are checked together.

    Unless it `looks` at files, at this machine or at the cluster, it is asked in a dry run too.
    """

    field: str
    gather: Callable[[Sequence[Draft]], Sequence[object]]
    looks: bool = True


GATHERERS: list[Gatherer] = []


def gathers(
    field: str, *, looks: bool = True, same: Callable[[Draft], object] = id
) -> Callable[[Callable[[Draft], _Answer]], Callable[[Draft], _Answer]]:
    """Enter a function into the table of gatherers; drafts with the `same` share an answer.

    Of two for one field the later is asked, if it may look.
    """

    def register(find: Callable[[Draft], _Answer]) -> Callable[[Draft], _Answer]:
        @wraps(find)
        def gather(drafts: Sequence[Draft]) -> list[_Answer]:
            answers: dict[object, _Answer] = {}
            for draft in drafts:
                if same(draft) not in answers:
                    answers[same(draft)] = find(draft)
            return [answers[same(draft)] for draft in drafts]

        GATHERERS.append(Gatherer(field, gather, looks))
        return find

    return register

"""A program that takes all the CPU time that it gets, or waits for ever, or takes memory."""

from __future__ import annotations

import time
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    while arguments[0] == "spin":
        pass
    while arguments[0] == "wait":
        time.sleep(60)
    return len(b"x" * int(arguments[1])) % 2

"""A seeded permutation that needs no memory and no start-up time, however many samples there are."""

from __future__ import annotations

from trainer.data.seeds import mix

_MASK = (1 << 64) - 1
_ROUNDS = 6


class Permutation:
    """A pseudo-random bijection of ``range(size)``.

    A balanced Feistel network over the next even number of bits, walked until it lands below `size` (cycle
    walking; Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Each value costs at most a
    handful of rounds, so that any position of a run can be looked up at once.

    Parameters
    ----------
    size
        Number of elements, at least 1.
    seed, stream
        Two numbers that choose the permutation; a run uses its seed and the epoch.
    """

    def __init__(self, size: int, seed: int, stream: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} elements")
        self._size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        key = mix(mix(seed & _MASK) ^ (stream & _MASK))
        self._keys = [key := mix(key + number) for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._size:
            raise IndexError(index)
        value = self._encrypt(index)
        while value >= self._size:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half, value & self._low
        for key in self._keys:
            left, right = right, left ^ (mix(right ^ key) & self._low)
        return left << self._half | right

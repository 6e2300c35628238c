"""The GPUs that estimates know: how much memory they have, and how fast they multiply matrices.

`memory` is what the driver reports in total (nvidia-smi), in bytes, not what the box says. `peak` is dense
bf16 on tensor cores in FLOP/s (fp16 where a GPU has no bf16), without sparsity, from NVIDIA's data sheets.
`capability` is CUDA's compute capability (developer.nvidia.com/cuda-gpus).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_MIB = 2**20


class Gpu(NamedTuple):
    """A type of GPU."""

    name: str
    memory: int
    peak: float
    capability: tuple[int, int]

    @property
    def has_bf16(self) -> bool:
        """NVIDIA A100 white paper (2020): new in its tensor cores."""
        return self.capability >= (8, 0)

    @property
    def has_fp8(self) -> bool:
        """Transformer Engine, check_fp8_support: 8.9 or higher."""
        return self.capability >= (8, 9)


def _gpu(name: str, mib: int, teraflops: float, capability: tuple[int, int]) -> tuple[str, Gpu]:
    return name, Gpu(name, mib * _MIB, teraflops * 1e12, capability)


GPUS: Mapping[str, Gpu] = dict(
    (
        _gpu("v100-16gb", 16_160, 125, (7, 0)),
        _gpu("v100-32gb", 32_510, 125, (7, 0)),
        _gpu("a100-40gb", 40_960, 312, (8, 0)),
        _gpu("a100-80gb", 81_920, 312, (8, 0)),
        _gpu("h100-80gb", 81_559, 989.4, (9, 0)),
        _gpu("h200-141gb", 143_771, 989.4, (9, 0)),
    )
)

# What the shipped sizes are for, where nobody says which GPU there is.
ASSUMED = GPUS["a100-80gb"]

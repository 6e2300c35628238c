"""How much memory this process uses."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch


def used_bytes(device: Any) -> int:
    """Return the most bytes that tensors ever took on a GPU; on a CPU, what the process has in memory now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # The second field counts resident pages: proc(5).
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()

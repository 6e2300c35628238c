"""Needless work: imports of torch and TensorBoard that no training uses, garbage, and idle threads of gloo.

It does not change a training's results.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection during imports, whose objects stay: they take a third less time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def skip_s3() -> None:
    """Have TensorBoard do without boto3, a quarter of a second: its files are on a file system here."""
    sys.modules.setdefault("botocore", None)  # type: ignore[arg-type]


def skip_compiler() -> None:
    """Have the optimizers do without ``torch._dynamo``, where nothing is compiled."""
    import torch

    if "torch._dynamo" not in sys.modules:
        sys.modules["torch._dynamo"] = torch._dynamo = _NoCompiler("torch._dynamo")


@functools.cache  # once in a process
def share_gloo_thread() -> None:
    """Have one thread look after the connections of all groups of gloo.

    megatron-core makes 21 groups; each has a thread that wakes up 100 times a second, in all 5 % of a core.
    """
    import torch.distributed as dist

    make_group = dist.ProcessGroupGloo.__init__
    devices: list[Any] = []

    def make_group_of_shared_devices(group: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        if not devices:  # the first group chooses them, as GLOO_SOCKET_IFNAME says
            make_group(group, store, rank, size, timeout=timeout)
            devices.extend(getattr(getattr(group, "options", None), "_devices", ()))
            return
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
        make_group(group, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = make_group_of_shared_devices


@functools.cache  # once in a process
def skip_reductions_of_one() -> None:
    """Leave out reductions over a group of one rank, which gloo hands to a thread all the same."""
    import torch.distributed as dist

    reduce, collecting = dist.all_reduce, dist.distributed_c10d._world.pg_coalesce_state

    @functools.wraps(reduce)
    def all_reduce(
        tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        is_alone = isinstance(group, dist.ProcessGroup) and group.size() == 1
        # Whoever collects reductions, to begin them together, waits for at least one.
        if is_alone and not async_op and group not in collecting:
            return None
        return reduce(tensor, op, group, async_op)

    dist.all_reduce = all_reduce


class _NoCompiler(types.ModuleType):
    """The part of ``torch._dynamo`` that uncompiled code calls; the module itself if more is asked for.

    torch imports it, half a second, when a process group is made or an optimizer takes its first step.
    """

    trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def disable(function: Any = None, *_: Any, **__: Any) -> Any:
        """Return a function as it is: nothing would compile it."""
        return function if function is not None else (lambda inner: inner)

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Do nothing: no graph is recorded."""

    def __getattr__(self, name: str) -> Any:
        # `inspect` asks every module for its file; a submodule is looked for on the path.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            import torch

            del sys.modules[self.__name__]
            torch._dynamo = importlib.import_module(self.__name__)
        return getattr(sys.modules[self.__name__], name)

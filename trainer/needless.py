"""Needless work of a start: what torch and TensorBoard import though no training here uses it, and garbage.

None of it changes what a training computes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Look for no garbage while modules are imported, in two thirds of the time: what they make stays."""
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

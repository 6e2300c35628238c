"""Functions that run right after a module was imported."""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Patch = Callable[[ModuleType], None]

_waiting: dict[str, list[Patch]] = defaultdict(list)


def after_import(*names: str) -> Callable[[Patch], Patch]:
    """Let the decorated function change each of the modules `names` once it is imported."""

    def register(patch: Patch) -> Patch:
        for name in names:
            _waiting[name].append(patch)
        return patch

    return register


def install() -> None:
    sys.meta_path.insert(0, _Finder())


def forget(name: str) -> None:
    """Change nothing of one module."""
    _waiting.pop(name, None)


def forget_all() -> None:
    """Change nothing from now on."""
    _waiting.clear()


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        patches = _waiting.pop(fullname, None)
        if patches is None:
            return None
        spec = importlib.util.find_spec(fullname)  # by the finders after this one
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            for patch in patches:
                patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec

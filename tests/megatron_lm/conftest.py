"""Checkouts of Megatron-LM outside the repository, and the interpreter that runs their scripts."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CPU = (HERE / "cpu", HERE.parent / "nemo" / "cpu")

_VARIABLE = "SLIPWAY_MEGATRON_LM_SOURCE"
_SOURCES = [Path(path).absolute() for path in os.environ.get(_VARIABLE, "").split(os.pathsep) if path]


@dataclass(frozen=True)
class MegatronLm:
    """A checkout, and the interpreter that has what it imports (requirements.txt beside this file)."""

    source: Path
    python: Path

    @property
    def python_path(self) -> str:
        """Return the path of the package that lets it run without a GPU, and of itself."""
        return os.pathsep.join(map(str, (*CPU, self.source)))


@pytest.fixture(scope="session", params=_SOURCES or [None], ids=[path.name for path in _SOURCES] or ["none"])
def megatron_lm(request: pytest.FixtureRequest) -> MegatronLm:
    if request.param is None:
        pytest.skip(f"needs a checkout of Megatron-LM: {_VARIABLE}=/path, or several with a colon between")
    python = Path(os.environ.get("SLIPWAY_MEGATRON_LM_PYTHON", sys.executable)).absolute()
    return MegatronLm(request.param, python)

"""Probes: modules that examine models in processes forked from the warm one, and print JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.warm import WarmPool


def run_probe(
    pool: WarmPool,
    module: str,
    arguments: list[str],
    directory: Path,
    environments: tuple[dict[str, str], ...] = ({},),
) -> Any:
    """Run a probe in one process for each environment; return the JSON of the first one's last line."""
    name = module.rpartition(".")[2]
    files = [
        (directory / f"{name}{rank}.out", directory / f"{name}{rank}.err")
        for rank in range(len(environments))
    ]
    processes = [
        pool.start(arguments, environment, output, module, errors)
        for environment, (output, errors) in zip(environments, files, strict=True)
    ]
    codes = [process.wait() for process in processes]
    assert codes == [0] * len(codes), "\n".join(errors.read_text() for _, errors in files)
    return json.loads(files[0][0].read_text().splitlines()[-1])

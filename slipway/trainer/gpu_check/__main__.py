"""Check the computations of one machine's GPUs: ``python -m slipway.trainer.gpu_check --directory DIR``.

Small trainings run as in a job, a process a rank, and their numbers are compared: the device with the CPU,
bf16 with fp32, each layout with one rank, a killed training with a whole one. The last check trains the model
of a configuration that the launcher wrote, and measures. The rows are in ``DIR/gpu_check.json``. Where there
is no GPU, the layouts run on two CPU ranks. Exit codes: 0 nothing failed, 1 something did, 2 a mistake in the
arguments.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipway.common.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER_ERROR, UserError
from slipway.common.files import write_atomic
from slipway.trainer import requirements
from slipway.trainer.gpu_check.checks import CHECKS, NAMES, Check, Row, check_throughput
from slipway.trainer.gpu_check.machine import Machine, describe, described

RESULT = "gpu_check.json"
PATIENCE_SECONDS = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return the exit code."""
    options = _parse(arguments)
    if options.describe:
        print(json.dumps(describe()))
        return EXIT_OK
    try:
        requirements.check(requirements.TRAINING)
        chosen = _chosen(options.only)
        config = _config(options)
        machine = Machine(options.directory.absolute(), described(), options.patience)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    # Its trainings end with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    options.directory.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    checks = {**CHECKS, "throughput": lambda machine: check_throughput(machine, config)}
    try:
        for name in chosen:
            for row in _rows(name, checks[name], machine):
                rows.append(row)
                print(f"{row.state:7} {row.check}: {row.detail}", flush=True)
                _write(options.directory / RESULT, machine, rows)
    finally:
        machine.kill_all()
    # Last: a table without it is of checks that were ended on their way.
    _write(options.directory / RESULT, machine, rows, finished=True)
    return EXIT_FAILURE if any(row.state == "failed" for row in rows) else EXIT_OK


def _rows(name: str, check: Check, machine: Machine) -> Iterator[Row]:
    """Run a check; one that breaks is a row too, and does not keep the others from running."""
    try:
        yield from check(machine)
    except Exception as error:
        yield Row(
            name, "failed", f"{type(error).__name__}: {error}", "a fault of the check itself: report it"
        )


def _write(path: Path, machine: Machine, rows: Sequence[Row], finished: bool = False) -> None:
    described, results = dict(machine.described), [asdict(row) for row in rows]
    content = {"machine": described, "rows": results, "finished": finished}
    write_atomic(path, json.dumps(content, indent=1), sync=False)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slipway.trainer.gpu_check", description=__doc__.split(": ")[0]
    )
    parser.add_argument("--directory", type=Path, default=Path("gpu_check"), help="what the trainings write")
    parser.add_argument("--only", metavar="CHECK,...", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--config-path", type=Path, help="directory of the configuration for the throughput")
    parser.add_argument("--config-name", help="its file name")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_SECONDS, help="seconds that a training may take"
    )
    parser.add_argument("--describe", action="store_true", help="print versions and devices, and end")
    return parser.parse_args(arguments)


def _chosen(only: str | None) -> list[str]:
    names = list(NAMES) if only is None else only.split(",")
    for name in names:
        if name not in NAMES:
            raise UserError(f"--only {name}: expected one of {', '.join(NAMES)}")
    return names


def _config(options: argparse.Namespace) -> dict[str, Any] | None:
    from slipway.trainer.config.load import load_config

    return load_config(options.config_path, options.config_name) if options.config_path else None


if __name__ == "__main__":
    sys.exit(main())

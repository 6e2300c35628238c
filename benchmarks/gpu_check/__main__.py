"""Check the results of this machine's GPUs by small trainings: ``python -m benchmarks.gpu_check``.

Small trainings run as in a job, a process a rank, and their numbers are compared: the device with the CPU,
bf16 with fp32, each layout with one rank, a killed training with a whole one. The last check trains the model
of the overrides, and measures. The rows are in ``DIR/gpu_check.json`` too. Where there is no GPU, the layouts
run on two CPU ranks. Exit codes: 0 nothing failed, 1 something did, 2 a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from benchmarks.gpu_check.checks import CHECKS, NAMES, Check, Row, State, check_throughput
from benchmarks.gpu_check.machine import Machine, describe, described
from slipway.common.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER_ERROR, UserError, escape
from slipway.common.files import write_atomic
from slipway.trainer import requirements

RESULT = "gpu_check.json"
PATIENCE_SECONDS = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return the exit code."""
    options = _parse(arguments)
    if options.describe:
        print(json.dumps(describe()))
        return EXIT_OK
    directory = options.directory.absolute()
    try:
        requirements.check(requirements.TRAINING)
        chosen = _chosen(options.only)
        config, estimate = _model(options.overrides) if "throughput" in chosen else (None, {})
        if (directory / RESULT).exists():
            raise UserError(f"--directory {directory}: it holds an earlier check: choose another")
        machine = Machine(directory, described(), options.patience)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    # Its trainings end with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    directory.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    checks = {**CHECKS, "throughput": lambda machine: check_throughput(machine, config)}
    # stdout is for the object of --json.
    lines = sys.stderr if options.json else sys.stdout
    try:
        for name in chosen:
            for row in _rows(name, checks[name], machine):
                rows.append(row)
                print("\n".join(row_lines(row, estimate)), file=lines, flush=True)
                _write(directory / RESULT, machine, rows, estimate)
    finally:
        machine.kill_all()
    # Last: a table without it is of checks that were ended on their way.
    content = _write(directory / RESULT, machine, rows, estimate, finished=True)
    print(f"{verdict(rows, bool(machine.gpus))}\nfiles: {directory}", file=lines)
    if options.json:
        print(json.dumps(content, indent=1))
    return EXIT_FAILURE if any(row.state == "failed" for row in rows) else EXIT_OK


def row_lines(row: Row, estimate: Mapping[str, Any]) -> list[str]:
    """Return the lines of a row: check, state and detail, and below a failed one its remedy."""
    detail = row.detail
    if "step_seconds" in row.numbers and estimate:
        parts = [f"{estimate['step_seconds']:.3f} s a step"] if "step_seconds" in estimate else []
        parts += [f"peak {estimate['peak_bytes'] / 2**30:.2f} GiB"] if "peak_bytes" in estimate else []
        detail += f"; estimated for {estimate.get('gpu', 'its GPU')}: {', '.join(parts)}"
    width = len("transformer_engine")
    remedy = [f"{'':{width}}  {'':7}  -> {escape(row.fix)}"] if row.state == "failed" and row.fix else []
    return [f"{row.check:{width}}  {row.state:7}  {escape(detail)}", *remedy]


def verdict(rows: Sequence[Row], has_gpus: bool) -> str:
    """Return the last line of the table: the counts and their meaning."""
    failed = [row.check for row in rows if row.state == "failed"]
    if failed:
        meaning = f"fix first: {', '.join(failed)}"
    elif has_gpus:
        meaning = "the GPUs passed these checks: docs/gpu.md names the gaps"
    else:
        meaning = "no GPU was checked: these are the checks that a CPU can run"
    counts = (f"{sum(row.state == state for row in rows)} {state}" for state in get_args(State))
    return f"{', '.join(counts)}; {meaning}"


def _rows(name: str, check: Check, machine: Machine) -> Iterator[Row]:
    """Run a check; one that breaks is a row too, and does not keep the others from running."""
    try:
        yield from check(machine)
    except Exception as error:
        yield Row(
            name, "failed", f"{type(error).__name__}: {error}", "a fault of the check itself: report it"
        )


def _write(
    path: Path, machine: Machine, rows: Sequence[Row], estimate: Mapping[str, Any], finished: bool = False
) -> dict[str, Any]:
    content = {
        "ok": finished and all(row.state != "failed" for row in rows),
        "finished": finished,
        "machine": dict(machine.described),
        "rows": [asdict(row) for row in rows],
        "estimate": dict(estimate),
        "directory": str(path.parent),
    }
    write_atomic(path, json.dumps(content, indent=1), sync=False)
    return content


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__.partition(": ")[0]
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="the model whose throughput is measured, such as training=llama/llama3_8b"
        " training.trainer.devices=8 (default: training=gpt3/126m on one GPU); cluster.gpu=h100-80gb names"
        " the GPU of the estimate",
    )
    default = Path("results/gpu_check") / f"{datetime.now():%Y%m%d-%H%M%S}"
    parser.add_argument(
        "--directory", type=Path, default=default, help="of their files (default: results/gpu_check/DATE)"
    )
    parser.add_argument("--only", metavar="CHECK,...", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--json", action="store_true", help="print an object; the table goes to stderr")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_SECONDS, help="seconds that a training may take"
    )
    parser.add_argument("--describe", action="store_true", help="print versions and devices, and end")
    return parser.parse_intermixed_args(arguments)


def _chosen(only: str | None) -> list[str]:
    names = list(NAMES) if only is None else only.split(",")
    for name in names:
        if name not in NAMES:
            raise UserError(f"--only {name}: expected one of {', '.join(NAMES)}")
    return names


def _model(overrides: Sequence[str]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the configuration to measure and its estimate; None in an interpreter without Hydra."""
    try:
        from benchmarks.gpu_check import model
        from launcher.errors import UserError as LaunchError
    except ModuleNotFoundError as error:
        print(f"throughput cannot be measured: {error}", file=sys.stderr)
        return None, {}
    try:
        composed = model.compose(overrides)
    except LaunchError as error:
        raise UserError(str(error)) from error
    return composed.config, composed.estimate


if __name__ == "__main__":
    sys.exit(main())

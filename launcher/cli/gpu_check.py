"""`slipway gpu-check`: check what the GPUs of a machine compute, before a training relies on them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.requests import add_examining_verb, request_of
from launcher.errors import UserError, one_line

if TYPE_CHECKING:
    from launcher.doctor.gpu_check import GpuReport

_DESCRIPTION = """\
Check what the GPUs of a machine compute, by small trainings with engine=megatron: versions, GPU against CPU,
bf16 against fp32, each layout that there are GPUs for against one GPU, a training that is killed and resumed,
with the peak memory of a save, and the throughput of one model beside its estimate. With cluster=local the
checks run here, else on one whole node of the cluster, by srun, in the interpreter of the nodes
(cluster.python): the cluster's container is not used. Without a GPU it says so, and runs what a CPU can:
docs/gpu.md."""

_EPILOG = """\
examples:
  slipway gpu-check cluster=local                            this machine
  slipway gpu-check cluster=bcm cluster.partition=gpu        one node of the cluster
  slipway gpu-check cluster=local training=llama/llama3_8b training.trainer.devices=8   the model to measure
  slipway gpu-check cluster=local --only versions,devices    a minute
  slipway gpu-check cluster=local --json | jq -r '.rows[] | select(.state == "failed") | .fix'

exit code:
  0  all checks ran, and none failed
  1  a check failed, or the checks were ended before the last
  2  a mistake in the arguments, or nothing could be started
"""

_FAILED = 1
_MINUTES = 60
_OURS = (
    "training=gpt3/126m",
    "engine=megatron",
    "training.trainer.num_nodes=1",
    "training.trainer.devices=1",
    # The checks run in the interpreter of the nodes.
    "container=null",
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = add_examining_verb(
        subparsers,
        "gpu-check",
        run,
        help="check what the GPUs of a machine compute, by small trainings",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        overrides="such as cluster=local",
    )
    parser.add_argument(
        "--only", metavar="CHECK,...", help="some of the checks: versions, devices, parity, ..."
    )
    message = "the directory of their files (default: gpu_check/DATE in base_results_dir)"
    parser.add_argument("--directory", type=Path, metavar="DIR", help=message)
    message = f"the time limit of the job (default: {_MINUTES})"
    parser.add_argument("--minutes", type=int, default=_MINUTES, metavar="N", help=message)


def run(args: argparse.Namespace) -> int:
    """Check and print the table; return the exit code."""
    if args.minutes < 1:
        raise UserError(f"--minutes {args.minutes}: a number of minutes, from 1 on")
    from launcher.doctor.gpu_check import batch_overrides, check_gpus
    from launcher.drafting import draft

    names = {text.partition("=")[0] for text in args.overrides}
    ours = [text for text in _OURS if text.partition("=")[0] not in names]
    launch = draft(request_of(args, [*ours, *args.overrides]))
    batch = [text for text in batch_overrides(launch.plan.job.config) if text.partition("=")[0] not in names]
    if batch:
        # The measured batch and the estimated one are the same.
        launch = draft(request_of(args, [*ours, *args.overrides, *batch]))
    default = (
        Path(launch.composition.config.base_results_dir) / "gpu_check" / f"{datetime.now():%Y%m%d-%H%M%S}"
    )
    report = check_gpus(launch, (args.directory or default).absolute(), args.only, args.minutes)
    if args.json:
        print(json.dumps(content(report), indent=2))
    else:
        print("\n".join(table(report)))
    return 0 if report.ok else _FAILED


def content(report: GpuReport) -> dict[str, Any]:
    """Return the report for programs."""
    return {
        "ok": report.ok,
        "finished": report.finished,
        "machine": dict(report.machine),
        "rows": [asdict(row) for row in report.rows],
        "estimate": dict(report.estimate),
        "directory": str(report.directory),
    }


def table(report: GpuReport) -> Iterator[str]:
    """Yield the table's lines: a check, its state, and below a failed one its remedy."""
    from launcher.doctor.gpu_check import STATES, beside_estimate

    width = max((len(row.check) for row in report.rows), default=0)
    for row in report.rows:
        yield f"{row.check:{width}}  {row.state:7}  {one_line(beside_estimate(row, report.estimate))}"
        if row.state == "failed" and row.fix:
            yield f"{'':{width}}  {'':7}  -> {one_line(row.fix)}"
    counts = {state: sum(row.state == state for row in report.rows) for state in STATES}
    yield f"{', '.join(f'{count} {state}' for state, count in counts.items())}; {_verdict(report)}"
    yield f"all that they wrote: {report.directory}"


def _verdict(report: GpuReport) -> str:
    if not report.finished:
        return "FAILED: the checks were ended before the last of them: see what they said above"
    if report.failed:
        return f"mend first: {', '.join(report.failed)}"
    if not report.machine.get("gpus"):
        return "no GPU was checked: this is the half that a CPU can do"
    return "the GPUs compute what they should, as far as these checks see: docs/gpu.md has what they do not"

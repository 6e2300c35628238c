"""The trainer's step on one GPU without Transformer Engine, in turn with that of a GPT by hand.

    python benchmarks/perf/gpu_step.py [--minutes N] [--directory DIR] [--only CASE] [--smoke]

Both train the same parameters on the same tokens with the same dropout. By hand is a GPT over PyTorch's
attention, compiled as a whole, with fp32 weights under autocast, fused AdamW and clipping. Ours is the
trainer's model, schedule and optimizer, as configured by default. Cases run in processes of their own, the
most important first; those for which no time is left are skipped. DIR/gpu_step-CARD.json holds all rows.
Exit codes: 0 measured, 1 a case failed, 2 no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_case import BY_HAND, OURS
from programs import Shape

from benchmarks.gpu_check.machine import described
from slipway.common.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER_ERROR, UserError
from slipway.common.files import write_atomic

_SHORTEST_CASE = 20.0
_TURN_SECONDS = 0.8
_ALL = (BY_HAND, *OURS)
_HEADS = (
    f"{'tokens/s':>10}{'ratio':>7}{'ms/step':>9}{'min-max':>16}{'MFU':>7}{'causal':>8}{'GiB':>7}{'kernels':>9}"
    f"{'busy':>8}"
)
_LEGEND = """
ratio: of the tokens/s to those by hand; above 1 is faster.   MFU: attention in full; causal: half of it.
GiB: the program's own peak.   kernels: launches of one step.   busy: the part of a step in which one ran."""


@dataclass(frozen=True)
class Case:
    """A shape, and the programs that train it, together in each process."""

    shape: Shape
    processes: tuple[tuple[str, ...], ...] = ((BY_HAND, "ours"),)


def _gpt3_126m(micro_batch: int, dropout: float = 0.0) -> Shape:
    return Shape(12, 768, 12, 2048, 50304, micro_batch, 16 // micro_batch, dropout)


CASES = {
    "126m, micro batch 4": Case(_gpt3_126m(4), (_ALL,)),
    "126m, micro batch 16": Case(_gpt3_126m(16)),
    "1.3b": Case(Shape(24, 2048, 16, 2048, 50304, 4, 4)),
    # Both do not fit into 80 GB: weights, gradients and optimizer states take 31 and 35 GB.
    "llama 8b, 4 layers": Case(
        Shape(4, 4096, 32, 8192, 128256, 1, 4, is_llama=True, ffn=14336, groups=8), ((BY_HAND,), ("ours",))
    ),
    # The dropout of training=gpt3/126m.
    "126m, dropout 0.2": Case(_gpt3_126m(4, 0.2)),
}
SMOKE_CASES = {
    "gpt, dropout 0.1": Case(Shape(2, 32, 4, 32, 512, 2, 2, 0.1), (_ALL,)),
    "llama": Case(Shape(2, 32, 4, 32, 512, 1, 2, is_llama=True, ffn=64, groups=2)),
}


def main() -> int:
    """Measure all cases; return the exit code."""
    options = _parse()
    deadline = time.monotonic() + 60 * options.minutes
    # Its processes end with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        machine = described()
        if not machine["gpus"] and not options.smoke:
            raise UserError(f"no GPU: {machine['no_cuda']}; --smoke runs on a CPU")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    card = machine["gpus"][0]["name"] if machine["gpus"] else "cpu"
    options.directory.mkdir(parents=True, exist_ok=True)
    path = options.directory / f"gpu_step-{re.sub('[^a-z0-9]+', '-', card.lower())}.json"
    facts = {"card": card, **_versions(machine), "limits": _card_limits(), "commit": _commit()}
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value))
    report: dict[str, Any] = {**facts, "cases": {}, "skipped": [], "failed": {}}
    for name, case in _chosen(options).items():
        _run_case(name, case, deadline, report, smoke=options.smoke)
        write_atomic(path, json.dumps(report, indent=1) + "\n", sync=False)
    print(_LEGEND)
    if report["skipped"]:
        print(f"skipped, as {options.minutes:g} minutes are over: {'; '.join(report['skipped'])}")
    print(f"file: {path}")
    return EXIT_FAILURE if report["failed"] else EXIT_OK


def _chosen(options: argparse.Namespace) -> dict[str, Case]:
    cases = SMOKE_CASES if options.smoke else CASES
    return {name: case for name, case in cases.items() if options.only in (None, name)}


def _run_case(name: str, case: Case, deadline: float, report: dict[str, Any], smoke: bool) -> None:
    """Run the processes of a case, print its table and add it to the report."""
    rows: dict[str, Any] = {}
    print(f"\n{name}: {case.shape}", flush=True)
    for programs in case.processes:
        left, what = deadline - time.monotonic(), f"{name} ({', '.join(programs)})"
        if left < _SHORTEST_CASE:
            report["skipped"].append(what)
            continue
        try:
            rows |= _run_process(case.shape, programs, left, smoke)
        except subprocess.TimeoutExpired:
            report["skipped"].append(what)
        except RuntimeError as error:
            report["failed"][what] = str(error)
            print(f"failed: {', '.join(programs)}: {error}", flush=True)
    if rows:
        report["cases"][name] = {"shape": asdict(case.shape), "rows": rows}
        print("\n".join(table(rows)), flush=True)


def _run_process(shape: Shape, programs: Sequence[str], seconds: float, smoke: bool) -> dict[str, Any]:
    """Return the rows of programs that take turns in a process, which ends with all that it started.

    Raises
    ------
    RuntimeError
        With the end of its output, if it fails.
    """
    case = {"shape": asdict(shape), "programs": programs, "on_cpu": smoke}
    case["turn_seconds"] = 0.0 if smoke else _TURN_SECONDS
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "case.json").write_text(json.dumps(case))
        command = [sys.executable, str(Path(__file__).with_name("gpu_case.py")), name]
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            try:
                code = process.wait(seconds)
            finally:
                # The compilers work in processes of their own.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if code:
            lines = (directory / "log").read_text(errors="replace").strip().splitlines()
            raise RuntimeError("\n".join([f"exit code {code}", *lines[-15:]]))
        rows: dict[str, Any] = json.loads((directory / "result.json").read_text())
        return rows


def table(rows: Mapping[str, Any]) -> list[str]:
    """Return the lines of a case: its programs, and the kernels of each."""
    lines = [f"{'':26}{_HEADS}"]
    for name, row in rows.items():
        pace, peer = row["speed"], rows.get(BY_HAND)
        ratio = f"{pace['tokens_per_second'] / peer['speed']['tokens_per_second']:.2f}" if peer else "-"
        spread = f"{1e3 * pace['fastest']:.1f}-{1e3 * pace['slowest']:.1f}"
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
        lines.append(
            f"{name:26}{pace['tokens_per_second']:>10,.0f}{ratio:>7}"
            f"{1e3 * pace['step_seconds']:>9.1f}{spread:>16}"
            f"{_percent(pace['mfu']):>7}{_percent(pace['mfu_causal']):>8}{peak:>7}"
            f"{row['profile']['kernels']:>9}{_percent(row['busy']):>8}"
        )
    for name, row in rows.items():
        attention = [_short(kernel) for kernel in row["profile"]["attention"][:2]]
        lines.append(f"  {name}: attention by {', '.join(attention) or 'no kernel of a known name'}")
        for kernel, launches, seconds in row["profile"]["longest"]:
            lines.append(f"  {1e3 * seconds:9.2f} ms {launches:5} x {_short(kernel)}")
    for name, row in rows.items():
        lines.append(
            f"  {name}: started in {row['start_seconds']:.1f} s; where the host's time goes, profiled:"
        )
        for function, calls, seconds in row["host"]:
            lines.append(f"  {1e3 * seconds:9.2f} ms {calls:5.0f} x {function[-90:]}")
    return lines


def _short(kernel: str) -> str:
    return kernel if len(kernel) <= 90 else f"{kernel[:87]}..."


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _versions(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: machine.get(name) for name in ("python", "torch", "cuda", "cudnn", "megatron-core", "driver")
    }


def _card_limits() -> str | None:
    """Return the card's highest clock and its power limit; None without nvidia-smi."""
    return _output("nvidia-smi", "--query-gpu=clocks.max.sm,power.limit", "--format=csv,noheader")


def _commit() -> str | None:
    return _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def _parse() -> argparse.Namespace:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--minutes", type=float, default=9.0, help="for all cases (default: 9)")
    default = Path(__file__).with_name("results")
    parser.add_argument("--directory", type=Path, default=default, help="of the rows (default: perf/results)")
    parser.add_argument("--only", choices=[*CASES, *SMOKE_CASES], metavar="CASE", help="one of the cases")
    parser.add_argument("--smoke", action="store_true", help="tiny cases on the CPU, to see that all runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""The checks of a machine's GPUs: the rows of compared trainings, and one check as it runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import checks
from benchmarks.gpu_check.__main__ import row_lines, verdict
from benchmarks.gpu_check.checks import (
    LAYOUTS,
    Row,
    check_devices,
    check_versions,
    compared,
    drawn,
    measured,
    resumed,
)
from benchmarks.gpu_check.machine import SMALL, Machine, Trained, _free_port
from benchmarks.gpu_check.model import batch_overrides, compose
from slipway.trainer.config.check import check_keys
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings
from tests.trainer.conftest import REPOSITORY

pytestmark = pytest.mark.trainer

H100 = {"name": "NVIDIA H100 80GB HBM3", "memory": 80 << 30, "capability": "9.0"}


def make_training(*losses: float, saved: int = 2, **fields: Any) -> Trained:
    """Return a training that reported these losses and saved after its second step; it warms up for 14."""
    steps = [
        {
            "kind": "train",
            "step": number,
            "loss": loss,
            "grad_norm": 1.0,
            "step_time": 0.5 if 15 <= number <= 40 else 5.0,
            "data_wait": 0.01,
            "memory_bytes": (2 + (number > saved)) << 30,
            "tflops_per_gpu": 400.0,
            "mfu": 0.4,
            "mfu_causal": 0.38,
        }
        for number, loss in enumerate(losses, 1)
    ]
    start = {"kind": "start", "step": 2, "tokens_per_step": 1000, "parameters": 5}
    save = {"kind": "checkpoint", "step": saved, "seconds": 1.5}
    phases = [
        {"kind": "phases", "last_step": step, "phases": {"optimizer": {"max": 0.001 * step}}}
        for step in range(10, len(losses) + 1, 10)
    ]
    return replace(Trained([0], [start, *steps, *phases, save], ""), **fields)


def machine(tmp_path: Path, **description: Any) -> Machine:
    plain = {"gpus": [], "no_cuda": "no NVIDIA driver", "driver": None, "transformer_engine": None}
    return Machine(tmp_path, {**plain, "transformer_engine_problem": "ImportError", **description}, 60.0)


def test_different_numbers_fail_with_a_fix() -> None:
    limits = (1e-6, 1e-4)
    same = compared("x", "a from b", make_training(5.0, 4.0), make_training(5.0, 4.0002), limits, "mend it")
    assert (same.state, same.fix) == ("passed", None)
    assert "2 steps 5.0e-05 (limit 1e-04)" in same.detail
    late = compared("x", "a from b", make_training(5.0, 4.0), make_training(5.0, 4.1), limits, "mend it")
    first = compared("x", "a from b", make_training(5.0, 4.0), make_training(5.0001, 4.0), limits, "mend it")
    nan = compared(
        "x", "a from b", make_training(5.0, float("nan")), make_training(5.0, 4.0), limits, "mend it"
    )
    assert [row.state for row in (late, first, nan)] == ["failed"] * 3
    assert late.fix == "mend it"
    broken = compared(
        "x", "a", make_training(codes=[0, 1], output="a\nCUDA error"), make_training(5.0), limits, "mend it"
    )
    assert (broken.state, broken.detail) == ("failed", "exit codes [0, 1]: a | CUDA error")


def test_resumed_training_equals_the_whole_one_bitwise() -> None:
    whole = make_training(5.0, 4.0, 3.0)
    good = resumed(whole, make_training(5.0, 4.0, 3.0), was_running=True, is_gpu=True)
    assert good.state == "passed"
    assert "peak 2.00 GiB before a save, 3.00 GiB after it" in good.detail
    other = resumed(whole, make_training(5.0, 4.0, 3.0000001), was_running=True, is_gpu=True)
    assert other.state == "failed"
    assert other.detail == "resumed at step 2; other numbers from step 3 on"
    assert resumed(whole, make_training(5.0, 4.0), was_running=True, is_gpu=False).state == "failed"
    assert resumed(whole, whole, was_running=False, is_gpu=False).state == "failed"


def test_throughput_is_that_of_steady_steps_without_a_save_between() -> None:
    row = measured(make_training(*[5.0] * 42, saved=40))
    assert row.state == "passed"
    expected = {
        "step_seconds": 0.5,
        "slowest": 0.5,
        "tokens_per_second": 2000.0,
        "mfu": 0.4,
        "mfu_causal": 0.38,
        "data_wait": 0.01,
        "phases": {"optimizer": 0.04},
        "peak_before_save": 2 << 30,
        "peak_after_save": 3 << 30,
    }
    assert {name: row.numbers[name] for name in expected} == expected
    assert row.detail.startswith(
        "0.500 s a step (0.500-0.500), 2,000 tokens/s, MFU 40.0 %; peak 2.00 GiB before a save"
    )


@pytest.mark.parametrize(
    ("description", "states", "message"),
    [
        (
            {},
            {"versions": "passed", "transformer_engine": "skipped", "devices": "skipped"},
            "no NVIDIA driver",
        ),
        (
            {"driver": "535.0", "no_cuda": "the NVIDIA driver on your system is too old"},
            {"versions": "passed", "transformer_engine": "skipped", "devices": "failed"},
            "too old",
        ),
        (
            {
                "gpus": [H100, H100],
                "transformer_engine": "2.9",
                "transformer_engine_problem": "OSError: cudnn",
            },
            {"versions": "passed", "transformer_engine": "failed", "devices": "passed"},
            "2 x NVIDIA H100 80GB HBM3",
        ),
    ],
)
def test_machine_is_described_by_its_rows(
    tmp_path: Path, description: dict[str, Any], states: dict[str, str], message: str
) -> None:
    gpu_machine = machine(tmp_path, **description)
    rows = [*check_versions(gpu_machine), *check_devices(gpu_machine)]
    assert {row.check: row.state for row in rows} == states
    assert message in rows[-1].detail


def test_versions_are_those_of_all_that_decide_what_is_computed(tmp_path: Path) -> None:
    versions = {name: f"{number}.0" for number, name in enumerate(("torch", "megatron-core", "apex"))}
    row = next(check_versions(machine(tmp_path, **versions)))
    assert row.detail.startswith("torch 0.0, megatron-core 1.0, apex 2.0")


def test_trainer_accepts_each_layout(tmp_path: Path) -> None:
    base = flatten({**SMALL, "exp_manager": {**SMALL["exp_manager"], "explicit_log_dir": str(tmp_path)}})
    for ranks, changes in LAYOUTS.values():
        flat = {**base, **changes, "trainer.devices": ranks, "trainer.accelerator": "gpu"}
        check_keys(flat)
        assert make_layout(read_settings(flat), ranks).world == ranks


@pytest.mark.parametrize(
    ("gpus", "run", "needed"), [(0, 5, "4 need more than two"), (4, 8, "1 need more than 4 GPUs")]
)
def test_layouts_without_enough_gpus_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, run: int, needed: str
) -> None:
    monkeypatch.setattr(Machine, "train", lambda *_: make_training(5.0))
    *rows, skipped = checks.check_layouts(machine(tmp_path, gpus=[H100] * gpus))
    assert [row.state for row in rows] == ["passed"] * run
    assert (skipped.state, skipped.detail[: len(needed)]) == ("skipped", needed)


def test_throughput_is_skipped_without_a_gpu(tmp_path: Path) -> None:
    (row,) = checks.check_throughput(machine(tmp_path), {"trainer": {"devices": 1}})
    assert row == Row("throughput", "skipped", "no GPU to measure")
    (row,) = checks.check_throughput(machine(tmp_path, gpus=[H100]), {"trainer": {"devices": 8}})
    assert row == Row("throughput", "skipped", "trainer.devices=8 and 1 visible")


@pytest.mark.parametrize("problem", ["ImportError", None])
def test_throughput_is_measured_without_transformer_engine_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str | None
) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(Machine, "start", lambda _, name, changes, *__: started.update(changes) or [])
    monkeypatch.setattr(Machine, "finish", lambda *_: make_training(*[5.0] * 42, saved=40))
    config = {"trainer": {"devices": 1}, "model": {"transformer_engine": True}}
    one = machine(tmp_path, gpus=[H100], transformer_engine_problem=problem)
    (row,) = checks.check_throughput(one, config)
    assert row.state == "passed"
    assert row.detail.startswith("without Transformer Engine: 0.500 s") == bool(problem)
    assert started.get("model.transformer_engine", True) == (problem is None)


def test_wrong_masks_fail() -> None:
    """Draws that four neighbours share, and a recomputed mask of its own, as torch 2.13 made them on CUDA."""
    import torch

    from benchmarks.gpu_check.dropout import summarize_masks

    generator = torch.Generator().manual_seed(1)
    shape = (256, 2, 64)
    tokens = torch.zeros(256, 2, dtype=torch.bool)
    tokens[::8] = True

    def draw(keep: float = 0.5) -> Any:
        return torch.rand(shape, generator=generator) < keep

    def row(first: Any, second: Any, backward: Any) -> Row:
        gradients = tuple(2 * mask[tokens].sum(0) for mask in (backward, second))
        return drawn({"f": asdict(summarize_masks(first, first, gradients, tokens))})

    good, other = draw(), draw()
    shared = good[..., ::4].repeat_interleave(4, -1)
    seldom = draw(0.45)
    assert row(good, good, good).state == "passed"
    for masks, fault in (
        ((shared, shared, shared), "f: four neighbours vary "),
        ((seldom, seldom, seldom), "f keeps 0.4"),
        ((good, good, other), "f: the backward pass has another mask"),
        ((good, other, good), "f: recomputation has another mask"),
    ):
        failed = row(*masks)
        assert (failed.state, failed.detail[: len(fault)]) == ("failed", fault)


def test_a_check_runs_as_a_job_would(
    tmp_path: Path, warm_python: Path, run_check: Callable[..., Any]
) -> None:
    """Its processes are forks; `test_other_megatron_core_is_a_failure` starts a new process."""
    options = ["--directory", str(tmp_path), "--only", "devices,dropout,resume"]
    result = run_check(*options, interpreter=warm_python)
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [(row["check"], row["state"]) for row in content["rows"]] == [
        ("devices", "skipped"),
        ("dropout", "passed"),
        ("dropout recompute", "passed"),
        ("resume", "passed"),
    ]
    assert content["finished"] is True
    # Killed after step 4; a slow look may see it after the next save.
    assert content["rows"][-1]["numbers"]["resumed_at"] in (3, 6)
    assert content["rows"][2]["numbers"]["all"] == 0.0
    assert result.stdout.splitlines()[3].startswith(
        "resume              passed   killed with SIGKILL, resumed"
    )
    # Evidence is never overwritten.
    again = run_check(*options)
    assert (again.returncode, again.stdout) == (2, "")
    assert "it holds an earlier check" in again.stderr


def test_training_that_takes_too_long_is_reported(tmp_path: Path) -> None:
    problem = Machine(tmp_path, {"gpus": []}, 0.0).train("late", {}).problem()
    assert problem is not None
    assert problem.endswith("took longer than 0 s")


def test_ranks_that_were_started_end_with_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may come between two of them."""
    processes: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def start_one(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if processes:
            raise SystemExit(143)
        processes.append(start(*arguments, **options))
        return processes[0]

    gpu_machine = machine(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", start_one)
        with pytest.raises(SystemExit):
            gpu_machine.start("two", {}, ranks=2)
    gpu_machine.kill_all()
    assert processes[0].returncode == -signal.SIGKILL


def test_other_megatron_core_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Describing a machine does not need what an old version lacks."""
    versions = {"torch": "2.9.0", "megatron-core": "0.17.0", "transformer_engine": "2.9", "apex": "1"}
    code = (
        "import json, sys; from importlib import metadata; sys.modules['megatron.core'] = None; "
        f"real = metadata.version; metadata.version = lambda name: {versions}.get(name) or real(name); "
        "from benchmarks.gpu_check.machine import describe; print(json.dumps(describe()))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    (row,) = check_versions(Machine(tmp_path, json.loads(result.stdout), 60.0))
    assert (row.check, row.state) == ("versions", "failed")
    assert "has megatron-core 0.17.0: engine=megatron is written for 0.16" in str(row.fix)


def test_table_has_remedies_and_estimates() -> None:
    failed = Row("layout pipeline 2", "failed", "3.1e-02", "see NCCL")
    assert [line.split() for line in row_lines(failed, {})] == [
        ["layout", "pipeline", "2", "failed", "3.1e-02"],
        ["->", "see", "NCCL"],
    ]
    speed = Row("throughput", "passed", "1.500 s a step", None, {"step_seconds": 1.5})
    estimate = compose(["cluster.gpu=h100"]).estimate
    (line,) = row_lines(speed, estimate)
    assert "passed   1.500 s a step; estimated for h100-80gb: " in line
    assert " s a step, peak " in line.partition("estimated")[2]
    assert verdict([failed, speed], True) == "1 passed, 1 failed, 0 skipped; fix first: layout pipeline 2"
    assert "no GPU was checked" in verdict([speed], False)


def test_a_measured_training_takes_few_micro_batches() -> None:
    # In place of a global batch of 256.
    model = compose([]).config["model"]
    assert model["global_batch_size"] == 4 * model["micro_batch_size"]
    assert compose(["training.model.global_batch_size=32"]).config["model"]["global_batch_size"] == 32


@pytest.mark.parametrize(
    ("changes", "batch"),
    [
        ({}, ["training.model.global_batch_size=64"]),
        ({"tensor_model_parallel_size": 4}, ["training.model.global_batch_size=16"]),
        ({"pipeline_model_parallel_size": 8}, ["training.model.global_batch_size=16"]),
        ({"global_batch_size": 32}, []),
        (
            {"global_batch_size": 32, "rampup_batch_size": [16, 16, 320]},
            ["training.model.rampup_batch_size=null"],
        ),
    ],
)
def test_a_measured_step_takes_a_few_micro_batches(changes: dict[str, Any], batch: list[str]) -> None:
    model = {"micro_batch_size": 2, "global_batch_size": 2048, **changes}
    assert batch_overrides({"trainer": {"devices": 8}, "model": model}) == batch


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.trainer.device=1"], "training.trainer.device"),
        (["engine=nemo", "container=/x.sqsh"], "stages=[training] and engine=megatron"),
    ],
)
def test_mistakes_in_overrides_end_in_one_message(
    tmp_path: Path, run_check: Callable[..., Any], words: list[str], message: str
) -> None:
    result = run_check("--directory", str(tmp_path / "a"), *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert not (tmp_path / "a").exists()


def test_an_unknown_check_is_named(tmp_path: Path, run_check: Callable[..., Any]) -> None:
    result = run_check("--directory", str(tmp_path), "--only", "devises")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --only devises: expected one of versions, devices")


@pytest.fixture
def run_check() -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str, interpreter: Path | None = None) -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [sys.executable, "-m", "benchmarks.gpu_check", *arguments]
        if interpreter:
            code = "import sys; sys.executable = sys.argv.pop(1); "
            code += "from benchmarks.gpu_check.__main__ import main; sys.exit(main())"
            command[1:3] = ["-c", code, interpreter]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)

    return run


def test_ports_are_below_those_of_outgoing_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < _free_port() < first for _ in range(50))

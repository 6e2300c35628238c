"""What a training tells of its speed: operations, peaks, the time to the end; and where its code is from."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config.architecture import Architecture
from trainer.config.load import flatten
from trainer.config.settings import read_settings
from trainer.device import used_bytes
from trainer.report import flops
from trainer.report.flops import layer_flops, model_flops, peak_flops, unknown_peak
from trainer.report.progress import Pace, step_line
from trainer.report.provenance import write_git_info, write_packages

pytestmark = pytest.mark.trainer


@pytest.fixture
def shape(configuration: Callable[[dict[str, Any]], dict[str, Any]]) -> Architecture:
    config = configuration({"exp_manager.explicit_log_dir": "/absent", "model.data.data_impl": "mock"})
    return read_settings(flatten(config)).architecture


def gpt(shape: Architecture, layers: int, hidden: int, heads: int, length: int) -> Architecture:
    return replace(
        shape,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        seq_length=length,
        activation="gelu",
    )


def test_a_gpt_with_grouped_queries_and_a_gated_mlp(shape: Architecture) -> None:
    small = replace(
        gpt(shape, 2, 8, 2, 4), num_query_groups=1, kv_channels=4, ffn_hidden_size=16, activation="swiglu"
    )
    queries_and_output, keys_and_values, scores_and_values, mlp = 1024, 512, 512, 3072
    assert layer_flops(small, 4) == queries_and_output + keys_and_values + scores_and_values + mlp
    logits = 2048
    assert model_flops(small, vocabulary=32) == 3 * (2 * 5120 + logits) == 36864


def test_a_t5_with_cross_attention(shape: Architecture) -> None:
    decoder = replace(gpt(shape, 1, 8, 2, 3), ffn_hidden_size=16)
    encoder = replace(gpt(shape, 1, 8, 2, 6), ffn_hidden_size=16)
    assert layer_flops(encoder, 6) == 1536 + 1536 + 1152 + 3072
    own, cross, mlp = 768 + 768 + 288, 768 + 1536 + 576, 1536
    assert layer_flops(decoder, 3, context=6) == own + cross + mlp
    assert model_flops(decoder, vocabulary=16, encoder=encoder) == 3 * (7296 + 6240 + 768)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "batch", "gpus", "seconds", "mfu"),
    [
        (48, 6144, 64, 4, 8, 1.10, 41.5),
        (96, 12288, 96, 64, 64, 13.75, 51.4),
        (105, 20480, 128, 280, 280, 37.83, 56.0),
        (128, 25600, 160, 512, 512, 71.49, 56.3),
    ],
)
def test_the_published_mfu(
    shape: Architecture,
    layers: int,
    hidden: int,
    heads: int,
    batch: int,
    gpus: int,
    seconds: float,
    mfu: float,
) -> None:
    """Korthikanti et al. 2022, table 5: 22B to 1T on A100s; the seconds have three digits."""
    peak = peak_flops("NVIDIA A100-SXM4-80GB", "bf16")
    assert peak == 312e12
    flops = model_flops(gpt(shape, layers, hidden, heads, 2048), vocabulary=51200)
    assert 100 * flops * batch / seconds / gpus / peak == pytest.approx(mfu, rel=5e-3)


def test_formula_3_of_narayanan(shape: Architecture) -> None:
    """For 175B: 96 B s l h² (1 + s/6h + V/16lh), which also counts that all layers are recomputed."""
    large = gpt(shape, 96, 12288, 96, 2048)
    recomputed = model_flops(large, 51200) + 96 * layer_flops(large, 2048)
    told = 96 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288))
    assert recomputed == pytest.approx(told, rel=1e-12)
    # Section 5.1: at 140 TFLOP/s on each of 1,024 GPUs, 300 billion tokens take 34 days.
    assert recomputed / 2048 * 300e9 / (1024 * 140e12) / 86400 == pytest.approx(34, abs=1)


def test_nemos_formula_for_llama(shape: Architecture) -> None:
    """NeMo 2.4, flops_formulas.llama2, for the 7b."""
    llama = replace(gpt(shape, 32, 4096, 32, 4096), ffn_hidden_size=11008, activation="swiglu")
    told = 4096 * 32 * 4096**2 * (12 + 12 + 18 * 11008 / 4096 + 12 + 6 * 32000 / (32 * 4096))
    assert model_flops(llama, 32000) == pytest.approx(told, rel=1e-12)


@pytest.mark.parametrize(
    ("device", "teraflops"),
    [
        ("Tesla V100-SXM2-32GB", None),  # it has no bf16
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA GH200 144G HBM3e", 989.4),
        ("NVIDIA H800", 989.4),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GB300", 2500),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 480),
        ("NVIDIA A40", 149.7),
        ("NVIDIA A30", 165),
        ("NVIDIA L4", 121),
        # Better not told than guessed: an A10 is no A100, and a seventh of one is none either.
        ("NVIDIA A10", None),
        ("NVIDIA L40", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H20-3e", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_of_a_gpu_by_the_name_that_torch_tells(device: str, teraflops: float | None) -> None:
    peak = peak_flops(device, "bf16")
    assert peak == (teraflops * 1e12 if teraflops is not None else None)
    told = unknown_peak(device, "bf16")
    assert told is None if peak is not None else told is not None and device in told and "no MFU" in told


def test_the_peaks_of_a_sites_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"name": "mi300x", "names": "(amd instinct )?mi300x", "peak_tflops": {"bf16": 1307}}
    changed = {"name": "h100-80gb", "names": "h100 80gb hbm3", "peak_tflops": {"bf16": 900}}
    monkeypatch.setenv("SLIPWAY_GPUS", json.dumps([own, changed]))
    flops._gpus.cache_clear()
    try:
        peaks = [peak_flops(name, "bf16") for name in ("AMD Instinct MI300X", "NVIDIA H100 80GB HBM3")]
        assert peaks == [1307e12, 900e12]
        assert peak_flops("NVIDIA H200", "bf16") == 989.4e12
    finally:
        flops._gpus.cache_clear()


def test_a_peak_without_tensor_cores() -> None:
    assert peak_flops("NVIDIA A100-SXM4-40GB", "fp32") == 19.5e12
    assert peak_flops("Tesla V100-SXM2-32GB", "fp32") == 15.7e12


def test_the_time_to_the_end_after_a_resume_counts_the_steps_that_remain() -> None:
    pace = Pace(100)
    pace.add(2.0)
    assert pace.eta(51) == 98.0
    assert pace.eta(100) == 0.0
    assert pace.eta(101) == 0.0


def test_the_share_of_the_peak_is_told_where_it_is_known() -> None:
    line = step_line(1, 2, 3.0, 1e-3, 0.5, 10.0, 0.25, 1.0, 0.4321)
    assert line.endswith("| 0.25 s/step | MFU 43.2 % | eta 0:01")


def test_memory_on_a_cpu_is_what_is_resident() -> None:
    before = used_bytes(torch.device("cpu"))
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    assert before + (60 << 20) < used_bytes(torch.device("cpu"))
    assert before > 10 << 20


def test_git_info_of_a_checkout_has_the_commit_and_the_changes(tmp_path: Path) -> None:
    code, elsewhere = tmp_path / "checkout" / "trainer", tmp_path / "checkout" / "results"
    code.mkdir(parents=True)
    elsewhere.mkdir()

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        command = ["git", "-C", str(code), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (code / "a.py").write_text("one = 1\n")
    git("init", "--quiet", "..")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    write_git_info(tmp_path, code)
    commit = git("rev-parse", "HEAD")
    assert (tmp_path / "git-info.log").read_text() == f"commit hash: {commit}\n"
    (code / "a.py").write_text("one = 2\n")
    write_git_info(tmp_path, code)
    told = (tmp_path / "git-info.log").read_text()
    assert told.startswith(f"commit hash: {commit}\ndiff --git")
    assert "-one = 1\n+one = 2" in told
    # A copy that lies in somebody's checkout is not of it.
    write_git_info(elsewhere, elsewhere)
    assert not (elsewhere / "git-info.log").exists()


@pytest.mark.parametrize(
    ("manifest", "told"),
    [
        (
            {"git_commit": "abc", "git_dirty": True},
            "commit hash: abc\nwith changes that were not committed; ",
        ),
        ({"git_commit": "abc", "git_dirty": False}, "commit hash: abc\nwithout changes; "),
        ({"git_commit": None, "git_dirty": None}, None),
        (["no manifest"], None),
    ],
)
def test_git_info_of_a_launch_is_what_its_manifest_says(
    tmp_path: Path, manifest: Any, told: str | None
) -> None:
    code = tmp_path / "code" / "trainer"
    code.mkdir(parents=True)
    (tmp_path / "launcher.json").write_text(json.dumps(manifest))
    write_git_info(tmp_path, code)
    path = tmp_path / "git-info.log"
    assert (path.read_text() if path.exists() else None) == (told and f"{told}the code as it ran: {code}\n")


def test_the_versions_that_a_training_ran_with(tmp_path: Path) -> None:
    write_packages(tmp_path)
    found = json.loads((tmp_path / "packages.json").read_text())
    assert found["torch"] == torch.__version__
    assert {"python", "megatron-core", "numpy"} <= set(found)
    assert "apex" not in found

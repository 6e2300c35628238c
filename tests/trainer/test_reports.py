"""The reports of a training: operations, peaks, the time to the end, and the origin of its code."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipway.trainer.config.architecture import Architecture
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings
from slipway.trainer.device import measure_used_bytes
from slipway.trainer.report.flops import device_peak, model_flops, note_unknown_peak
from slipway.trainer.report.progress import step_line
from slipway.trainer.report.provenance import write_git_info, write_packages

pytestmark = pytest.mark.trainer


@pytest.fixture
def gpt(configuration: Callable[[dict[str, Any]], dict[str, Any]]) -> Architecture:
    config = configuration({"exp_manager.explicit_log_dir": "/absent", "model.data.data_impl": "mock"})
    return read_settings(flatten(config)).architecture


def test_flops_are_those_of_the_configuration(gpt: Architecture) -> None:
    """Narayanan et al. 2021 has 72 B s l h² (1 + s/6h + V/12lh), for an MLP of four times the width."""
    layers, hidden, length = gpt.num_layers, gpt.hidden_size, gpt.seq_length
    gpt = replace(gpt, ffn_hidden_size=4 * hidden, activation="gelu")
    formula = 72 * length * layers * hidden**2 * (1 + length / (6 * hidden) + 304 / (12 * layers * hidden))
    assert model_flops(gpt, 304) == pytest.approx(formula, rel=1e-12)
    scores = 4 * length**2 * gpt.num_attention_heads * gpt.kv_channels
    assert model_flops(gpt, 304) - model_flops(gpt, 304, causal=True) == 3 * layers * scores // 2


def test_flops_of_a_t5_count_both_stacks(gpt: Architecture) -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 2}
    decoder = replace(gpt, **sizes, kv_channels=4, ffn_hidden_size=16, activation="gelu", seq_length=3)
    encoder = replace(decoder, seq_length=6)
    assert model_flops(decoder, vocabulary=16, encoder=encoder) == 3 * (7296 + 6240 + 768)


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
        # No peak is better than a guess: an A10 is no A100, and neither is a seventh of one.
        ("NVIDIA A10", None),
        ("NVIDIA L40", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H20-3e", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peak_of_a_gpu_follows_from_its_name(device: str, teraflops: float | None) -> None:
    peak = device_peak(device, "bf16")
    assert peak == (teraflops * 1e12 if teraflops is not None else None)
    warning = note_unknown_peak(device, "bf16")
    assert (
        warning is None
        if peak is not None
        else warning is not None and device in warning and "no MFU" in warning
    )


def test_site_adds_and_changes_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"name": "mi300x", "names": "(amd instinct )?mi300x", "peak_tflops": {"bf16": 1307}}
    changed = {"name": "h100-80gb", "names": "h100 80gb hbm3", "peak_tflops": {"bf16": 900}}
    monkeypatch.setenv("SLIPWAY_GPUS", json.dumps([own, changed]))
    peaks = [device_peak(name, "bf16") for name in ("AMD Instinct MI300X", "NVIDIA H100 80GB HBM3")]
    assert peaks == [1307e12, 900e12]
    assert device_peak("NVIDIA H200", "bf16") == 989.4e12


def test_peak_in_fp32_is_without_tensor_cores() -> None:
    assert device_peak("NVIDIA A100-SXM4-40GB", "fp32") == 19.5e12
    assert device_peak("Tesla V100-SXM2-32GB", "fp32") == 15.7e12


def test_share_of_the_peak_is_printed_where_it_is_known() -> None:
    line = step_line(1, 2, 3.0, 1e-3, 0.5, 10.0, 0.25, 1.0, (0.4321, 0.4))
    assert line.endswith("| 0.25 s/step | MFU 43.2 %, causal 40.0 % | eta 0:01")


def test_memory_on_a_cpu_is_the_resident_memory() -> None:
    before = measure_used_bytes(torch.device("cpu"))
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    assert before + (60 << 20) < measure_used_bytes(torch.device("cpu"))
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
    text = (tmp_path / "git-info.log").read_text()
    assert text.startswith(f"commit hash: {commit}\ndiff --git")
    assert "-one = 1\n+one = 2" in text
    # A copy that lies in somebody's checkout is not of it.
    write_git_info(elsewhere, elsewhere)
    assert not (elsewhere / "git-info.log").exists()


@pytest.mark.parametrize(
    ("manifest", "expected"),
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
def test_git_info_of_a_launch_comes_from_its_manifest(
    tmp_path: Path, manifest: Any, expected: str | None
) -> None:
    code = tmp_path / "code" / "trainer"
    code.mkdir(parents=True)
    (tmp_path / "launcher.json").write_text(json.dumps(manifest))
    write_git_info(tmp_path, code)
    path = tmp_path / "git-info.log"
    assert (path.read_text() if path.exists() else None) == (
        expected and f"{expected}the code as it ran: {code}\n"
    )


def test_versions_of_the_packages_are_written(tmp_path: Path) -> None:
    write_packages(tmp_path)
    versions = json.loads((tmp_path / "packages.json").read_text())
    assert versions["torch"] == torch.__version__
    assert {"python", "megatron-core", "numpy"} <= set(versions)
    assert "apex" not in versions

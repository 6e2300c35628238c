"""The table of GPUs: its rows, the names that Slurm and NVML give them, and the GPUs that a site adds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launcher.checks.facts import Facts
from launcher.config.compose import compose
from launcher.config.schema import ClusterConfig, RunConfig, parse
from launcher.errors import UserError
from launcher.estimates.parallelism import gpu_of
from launcher.plan import Resources
from launcher.slurm.cluster import ClusterFacts
from launcher.stages import common
from launcher.stages.planning import plan_launch
from slipway.arithmetic.gpus import GPUS, find_gpus, gres_type

TABLE = json.loads((Path(__file__).parents[2] / "slipway" / "arithmetic" / "gpus.json").read_text())
KINDS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
ADDED_GPU = {"memory_mib": 196_608, "peak_tflops": {"bf16": 1307}, "memory_gb_s": 5300}


@cache
def stock_config() -> RunConfig:
    return compose(()).config


def resources(**changes: Any) -> Resources:
    """Return the resources that a job requests with other keys of the cluster."""
    config = stock_config()
    cluster = parse(ClusterConfig, {**config.cluster.model_dump(), **changes}, "cluster")
    assert config.training is not None
    return common.resources(cluster, config.training.run, nodes=1, tasks=8)


def gpus_named(name: str) -> list[str]:
    return [gpu.name for gpu in find_gpus(name, GPUS)]


@pytest.mark.parametrize("row", TABLE["gpus"], ids=lambda row: row["name"])
def test_row_has_all_figures_with_their_sources(row: dict[str, Any]) -> None:
    figures = ("memory_mib", "peak_tflops", "capability", "memory_gb_s", "nvlink_gb_s")
    cited = [row["sources"][figure] for figure in figures] + row["sources"]["nodes"]
    assert set(cited) <= set(TABLE["sources"])
    assert bool(row["nodes"]) == bool(row["sources"]["nodes"]) == (row["nic_gbit_s"] is not None)
    assert row["nic_gbit_s"] in (None, next(iter(row["nodes"].values()), None))
    peaks = [row["peak_tflops"][kind] for kind in KINDS if kind in row["peak_tflops"]]
    assert set(row["peak_tflops"]) <= set(KINDS) and peaks == sorted(peaks)
    assert ("bf16" in row["peak_tflops"]) == (row["capability"] >= [8, 0])
    assert ("fp8" in row["peak_tflops"]) == (row["capability"] >= [8, 9])
    assert ("fp4" in row["peak_tflops"]) == (row["capability"] >= [10, 0])
    assert (row["nvlink_gb_s"] > 0) == (row["nvlink_gpus"] > 1) or row["name"].startswith("gh200")
    # A marketing size of GB is a little more than the GiB that the driver has, or a little less.
    size = float(re.search(r"(\d+)gb$", row["name"])[1])  # type: ignore[index]
    assert 0.9 < row["memory_mib"] / 1024 / size < 1.05
    assert gpus_named(row["name"]) == [row["name"]]


def test_sources_have_an_address_and_a_day() -> None:
    for source in TABLE["sources"].values():
        assert source["url"].startswith("https://") and source["title"]
        assert source["seen"] is None or re.fullmatch(r"20\d\d-\d\d-\d\d", source["seen"])
    used = {key for row in TABLE["gpus"] for value in row["sources"].values() for key in _list(value)}
    assert used == set(TABLE["sources"])


def test_page_has_the_figures_of_the_table(repository: Path) -> None:
    page = (repository / "docs" / "memory.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "gb` |" in line]
    printed = {cells[0].strip("`"): cells[1:] for cells in rows}
    assert list(printed) == [row["name"] for row in TABLE["gpus"]]
    for row in TABLE["gpus"]:
        memory, bf16, fp8, fp4, bandwidth, nvlink, nic = printed[row["name"]]
        peaks = row["peak_tflops"]
        assert (memory, bandwidth) == (f"{row['memory_mib']:,}", f"{row['memory_gb_s']:,}")
        assert bf16 == _format(peaks.get("bf16")) or bf16 == f"– (fp16 {_format(peaks['fp16'])})"
        assert (fp8, fp4, nic) == tuple(map(_format, (peaks.get("fp8"), peaks.get("fp4"), row["nic_gbit_s"])))
        links = f"{_format(row['nvlink_gb_s'])} × {row['nvlink_gpus']}"
        assert nvlink == (links if row["nvlink_gb_s"] else "–")


def _format(figure: float | None) -> str:
    return f"{figure:g}" if figure is not None else "–"


def test_the_clusters_of_aws_have_their_own_network() -> None:
    for name, gbits in (("p4d", 50), ("p4de", 50), ("p5", 400), ("p5en", 400)):
        job = plan_launch(compose([f"cluster={name}"]).config, number=1, tag="x").job
        gpu = gpu_of(job.resources).gpu
        assert gpu.nic == gbits * 1e9 / 8
        assert gpu.nodes[f"AWS {name}"] == gpu.nic


def _list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def test_figures_are_in_bytes_and_operations_a_second() -> None:
    h100, gb200 = GPUS["h100-80gb"], GPUS["gb200-186gb"]
    assert (h100.memory, h100.peak, h100.peaks["fp8"]) == (81_559 * 2**20, 989.4e12, 1978.9e12)
    assert (h100.memory_bandwidth, h100.nvlink, h100.nic) == (3.35e12, 450e9, 50e9)
    assert h100.nodes["GCP a3-highgpu-8g"] == 12.5e9
    assert (gb200.nvlink, gb200.nvlink_gpus) == (900e9, 72)
    assert GPUS["a40-48gb"].nic is None
    assert (GPUS["v100-32gb"].peak, GPUS["v100-32gb"].has_bf16) == (125e12, False)
    assert GPUS["l40s-48gb"].has_fp8 and not GPUS["a40-48gb"].has_fp8


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        # As AutoDetect=nvml writes the types: lower case, blanks as underscores.
        ("nvidia_h100_80gb_hbm3", ["h100-80gb"]),
        ("nvidia_a100-sxm4-80gb", ["a100-80gb"]),
        ("nvidia_a100_80gb_pcie", ["a100-pcie-80gb"]),
        ("nvidia_h100_nvl", ["h100-nvl-94gb"]),
        ("nvidia_h100_pcie", ["h100-pcie-80gb"]),
        ("nvidia_h200", ["h200-141gb"]),
        ("nvidia_h200_nvl", ["h200-nvl-141gb"]),
        ("nvidia_gh200", ["gh200-96gb"]),
        ("nvidia_gh200_480gb", ["gh200-96gb"]),
        ("nvidia_gh200_144g_hbm3e", ["gh200-144gb"]),
        ("nvidia_b300_sxm6_ac", ["b300-270gb"]),
        ("tesla_v100-sxm2-32gb", ["v100-32gb"]),
        ("nvidia_rtx_pro_6000_blackwell_server_edition", ["rtx-pro-6000-96gb"]),
        # As people write them, and parts of the names, which Slurm accepts too.
        ("H100", ["h100-80gb"]),
        ("h100_sxm", ["h100-80gb"]),
        ("a100-sxm4-80gb", ["a100-80gb"]),
        ("A100_40G", ["a100-40gb"]),
        ("B200", ["b200-180gb"]),
        ("gb300", ["gb300-279gb"]),
        ("l40s", ["l40s-48gb"]),
        ("Tesla T4", ["t4-16gb"]),
        ("nvidia_a10g", ["a10g-24gb"]),
        # Ambiguous types, and those that the table lacks: a slice of MIG is no A100.
        ("a100", ["a100-40gb", "a100-80gb"]),
        ("v100", ["v100-16gb", "v100-32gb"]),
        ("nvidia_a100_1g.5gb", []),
        ("h100_80gb_hbm3_1g.10gb", []),
        ("h20-3e", []),
        ("l40", []),
        ("mi300x", []),
    ],
)
def test_types_of_slurm_name_their_gpus(name: str, gpus: list[str]) -> None:
    assert gpus_named(name) == gpus


@pytest.mark.parametrize(
    ("gres", "gpu_type"),
    [
        ("gpu:8", None),
        ("gpu", None),
        ("gpu:b200:8", "b200"),
        ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1)", "nvidia_h100_80gb_hbm3"),
        ("nvme:1,gpu:h100_nvl:4", "h100_nvl"),
        ("gres/gpu:a100", "a100"),
        ("gpu:1g.5gb:2", "1g.5gb"),
        ("nvme:fast:1", None),
        (None, None),
    ],
)
def test_type_is_read_from_a_gres(gres: str | None, gpu_type: str | None) -> None:
    assert gres_type(gres) == gpu_type


def test_gpu_comes_from_the_key_the_gres_or_the_cluster() -> None:
    no_facts, cluster = Facts(), Facts(cluster=ClusterFacts(gpu_types=("nvidia_h100_nvl",)))
    by_gres = Resources(1, 8, gpu_type="b200")
    by_key = replace(by_gres, gpu="l4-24gb")
    assert gpu_of(by_key, cluster.gpu_types)[:3] == (GPUS["l4-24gb"], "cluster.gpu", False)
    assert gpu_of(by_gres, cluster.gpu_types)[:3] == (GPUS["b200-180gb"], "cluster.gres=gpu:b200", False)
    assert gpu_of(Resources(1, 8), cluster.gpu_types).gpu.name == "h100-nvl-94gb"
    assumed = gpu_of(Resources(1, 8), no_facts.gpu_types)
    assert (assumed.gpu.name, assumed.is_assumed, assumed.is_unclear) == ("a100-80gb", True, False)
    unknown = gpu_of(Resources(1, 8), ("mi300x",))
    assert unknown.is_assumed and unknown.is_unclear
    assert unknown.source == "assumed: the cluster's mi300x is no GPU that is known here"


def test_gpu_is_known_by_any_of_its_names() -> None:
    assert resources(gpu="b200").gpu == "b200-180gb"
    assert resources(gpu="NVIDIA_H100_NVL").gpu == "h100-nvl-94gb"
    requested = resources(gres="gpu:b200:8")
    # The job asks by node, without a type; estimates count with the type all the same.
    assert (requested.gpus_per_node, requested.gres, requested.gpu_type) == (8, None, "b200")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": "h101-80gb"}, ["cluster.gpu='h101-80gb': not a GPU that is known", "mean h100-80gb?"]),
        (
            {"gpu": "h10"},
            ["did you mean h100?", "valid: v100-", "'+cluster.gpu_types.h10={memory_mib: "],
        ),
        ({"gpu": "b20"}, ["did you mean b200?"]),
        ({"gpu": "g100-80gb"}, ["did you mean "]),
        ({"gpu": "gtx1080"}, ["cluster.gpu='gtx1080': not a GPU that is known here\n  valid: v100-16gb, "]),
        ({"gpu": "k80"}, ["cluster.gpu='k80': not a GPU that is known here\n  valid: v100-16gb, "]),
        (
            {"gpu": "a100"},
            ["cluster.gpu='a100': a100-40gb or a100-80gb", "cluster.gpu=a100-40gb or cluster.gpu=a100-80gb"],
        ),
        (
            {"gpus_per_node": "h100:8"},
            ["expected a whole number; cluster.gres=gpu:h100:8 and cluster.gpu_request=gres ask for a type"],
        ),
        (
            {"gpu_types": {"h100": {"nic_gbit_s": 200}}},
            ["cluster.gpu_types.h100: not in the table, and without", "did you mean h100-80gb?"],
        ),
        (
            {"gpu_types": {"h100-80gb": {"nic": 200}}},
            ["cluster.gpu_types.h100-80gb.nic: there is no such key", "nic_gbit_s"],
        ),
        (
            {"gpu_types": {"mi300x": {**ADDED_GPU, "peak_tflops": None}}},
            ["cluster.gpu_types.mi300x: not in the table, and without peak_tflops"],
        ),
        (
            {"gpu_types": {"mi300x": {**ADDED_GPU, "peak_tflops": {"fp8": 2614}}}},
            ["cluster.gpu_types.mi300x: not in the table, and without peak_tflops.bf16"],
        ),
        (
            {"gpu_types": {"h100-80gb": {"peak_tflops": {"bf16": -1}}}},
            ["cluster.gpu_types.h100-80gb.peak_tflops.bf16=-1", "above 0"],
        ),
        ({"gpu_types": {"h100-80gb": {"names": "h100("}}}, ["not a regular expression"]),
    ],
)
def test_mistakes_about_gpus_say_what_is_valid(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        resources(**changes)
    message = f"{raised.value}\n{raised.value.hint}"
    for word in words:
        assert word in message


def test_site_changes_a_gpu_and_adds_one() -> None:
    changes = {"nic_gbit_s": 100, "peak_tflops": {"bf16": 900}}
    site = {"h100-80gb": changes, "mi300x": ADDED_GPU}
    requested = resources(gpu_types=site, gres="gpu:MI300X:8")
    h100, added = requested.gpu_types["h100-80gb"], requested.gpu_types["mi300x"]
    assert (h100.nic, h100.peak, h100.peaks["fp8"]) == (12.5e9, 900e12, 1978.9e12)
    assert h100.memory == GPUS["h100-80gb"].memory
    assert (added.peak, added.nvlink, added.nic) == (1307e12, 0.0, None)
    assert (added.capability, added.has_fp8) == (None, False)  # CUDA's is not demanded of AMD's GPUs
    assert gpu_of(requested)[:2] == (added, "cluster.gres=gpu:MI300X")
    assert gpu_of(replace(requested, gpu="h100-80gb")).gpu is h100
    assert resources(gpu_types=site, gpu="mi300x").gpu == "mi300x"


def test_trainer_gets_gpus_that_its_table_lacks() -> None:
    words = ["engine=megatron", "container=null", "+cluster.gpu_types.h100-80gb.nic_gbit_s=200"]
    job = plan_launch(compose(words).config, number=1, tag="x").job
    assert "SLIPWAY_GPUS" not in job.environment  # the trainer counts with no network
    words.append(f"+cluster.gpu_types.mi300x={json.dumps(ADDED_GPU).replace(chr(34), '')}")
    job = plan_launch(compose(words).config, number=1, tag="x").job
    assert json.loads(job.environment["SLIPWAY_GPUS"]) == [
        {"name": "mi300x", "names": "mi300x", "peak_tflops": {"bf16": 1307}}
    ]


def test_gpus_of_a_site_are_composed_with_the_table() -> None:
    words = ["+cluster.gpu_types.h100-80gb.nic_gbit_s=200", "cluster.gpu=h100"]
    words.append("+stage_cluster.training.gpu_types.h100-80gb.memory_mib=65536")
    job = plan_launch(compose(words).config, number=1, tag="x").job
    assert job.resources.gpu == "h100-80gb"
    assert job.resources.gpu_types["h100-80gb"].memory == 64 * 2**30

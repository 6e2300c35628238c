"""Types of GPU: their memory, how fast they multiply matrices, and their links.

The table is `gpus.json`, with the sources of each figure. A site adds GPUs to it, or changes some, with
`cluster.gpu_types`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

_MIB = 2**20
_GBIT = 1e9 / 8
_TABLE = Path(__file__).resolve().with_name("gpus.json")
_NEEDED = ("memory_mib", "peak_tflops", "memory_gb_s")
_NEW: Mapping[str, Any] = {"nvlink_gb_s": 0, "nvlink_gpus": 1}
# gpu:h100:8, gpu:a100:8(S:0-1), in a list; a type may begin with a digit, such as MIG's 1g.5gb.
_GRES_TYPE = re.compile(r"(?:^|,)(?:gres[/:])?gpu:(?P<type>[^:,()\s]*[A-Za-z_][^:,()\s]*)(?=[:,(\s]|$)")
_MAKERS = re.compile(r"^(?:(?:nvidia|tesla) )+")


class Gpu(NamedTuple):
    """A type of GPU.

    Attributes
    ----------
    memory
        Bytes that the driver reports in total (nvidia-smi).
    peaks
        Dense FLOP/s by the type of the operands: ``fp32`` (CUDA cores), ``tf32``, ``fp16``, ``bf16``, ``fp8``
        and ``fp4``, as far as it has them.
    capability
        CUDA's compute capability; None for a GPU without CUDA.
    memory_bandwidth
        Bytes per second.
    nvlink
        Bytes per second in one direction, 0.0 without NVLink.
    nvlink_gpus
        GPUs that NVLink connects: 8 in a DGX, 72 in an NVL72, 2 by a bridge, 1 without NVLink.
    nic
        A GPU's share of the network in bytes per second, as in NVIDIA's own machines; None where it is not
        published.
    nodes
        The same by well-known machine, such as ``AWS p5``.
    names
        A regular expression of the names that Slurm, NVML and torch give it; see `normalize`.
    """

    name: str
    memory: int
    peaks: Mapping[str, float]
    capability: tuple[int, int] | None
    memory_bandwidth: float
    nvlink: float
    nvlink_gpus: int
    nic: float | None
    nodes: Mapping[str, float]
    names: str

    @property
    def peak(self) -> float:
        """Dense FLOP/s in bf16, or fp16 where a GPU has no bf16."""
        return self.peaks["bf16"] if "bf16" in self.peaks else self.peaks["fp16"]

    @property
    def has_bf16(self) -> bool:
        """Return True for tensor cores with bf16: new in the A100 (NVIDIA A100 white paper, 2020)."""
        return "bf16" in self.peaks

    @property
    def has_fp8(self) -> bool:
        """Return True from compute capability 8.9 on (Transformer Engine, check_fp8_support)."""
        return self.capability >= (8, 9) if self.capability is not None else "fp8" in self.peaks

    @property
    def generation(self) -> str:
        """The first word of the name: ``h100``."""
        return self.name.partition("-")[0]


def gpu_from(name: str, row: Mapping[str, Any]) -> Gpu:
    """Return the GPU of a valid row of the table."""
    nic = row.get("nic_gbit_s")
    capability = row.get("capability")
    return Gpu(
        name=name,
        memory=row["memory_mib"] * _MIB,
        peaks=MappingProxyType({kind: value * 1e12 for kind, value in row["peak_tflops"].items()}),
        capability=tuple(capability) if capability is not None else None,
        memory_bandwidth=row["memory_gb_s"] * 1e9,
        nvlink=row["nvlink_gb_s"] * 1e9,
        nvlink_gpus=row["nvlink_gpus"],
        nic=nic * _GBIT if nic is not None else None,
        nodes=MappingProxyType({node: value * _GBIT for node, value in row.get("nodes", {}).items()}),
        names=row.get("names", re.escape(normalize(name))),
    )


def add_site(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Gpu]:
    """Return the GPUs that a site adds or changes; figures that it leaves out are those of the table.

    Raises
    ------
    MissingFigures
        If a GPU outside the table has no value for a required column.
    """
    gpus = {}
    for name, row in rows.items():
        known = ROWS.get(name)
        merged = {**(known or _NEW), **row}
        if known is not None and "peak_tflops" in row:
            merged["peak_tflops"] = {**known["peak_tflops"], **row["peak_tflops"]}
        missing = [key for key in _NEEDED if key not in merged]
        if not missing and not {"bf16", "fp16"} & set(merged["peak_tflops"]):
            missing = ["peak_tflops.bf16"]
        if missing:
            raise MissingFigures(name, missing)
        gpus[name] = gpu_from(name, merged)
    return gpus


class MissingFigures(Exception):
    """A site's GPU without figures that every estimate needs."""

    def __init__(self, name: str, keys: list[str]) -> None:
        super().__init__(name)
        self.name, self.keys = name, keys


def trainer_rows(gpus: Mapping[str, Gpu]) -> list[dict[str, Any]]:
    """Return the names and peaks of a site's GPUs that differ from the table, for the trainer."""
    rows = []
    for name, gpu in gpus.items():
        known = GPUS.get(name)
        if known is None or (known.names, known.peaks) != (gpu.names, gpu.peaks):
            peaks = {kind: value / 1e12 for kind, value in gpu.peaks.items()}
            rows.append({"name": name, "names": gpu.names, "peak_tflops": peaks})
    return rows


def peak_flops(device: str, operands: str, site: Sequence[Mapping[str, Any]] = ()) -> float | None:
    """Return the dense peak of a GPU in FLOP/s; None if it is not known.

    Parameters
    ----------
    device
        Its name, as ``torch.cuda.get_device_name`` returns it.
    operands
        A key of `Gpu.peaks`. That of ``fp32`` is the CUDA cores' rate, because torch multiplies fp32 matrices
        in fp32 and not in TF32 unless asked to.
    site
        The site's own GPUs, as `trainer_rows` returns them; they replace those of the same name.
    """
    replaced, plain = {row["name"] for row in site}, normalize(device)
    rows = [*site, *(row for name, row in ROWS.items() if name not in replaced)]
    # A name may leave the memory open, which is all the same here.
    peaks = {row["peak_tflops"].get(operands) for row in rows if re.fullmatch(row["names"], plain)}
    peak = peaks.pop() if len(peaks) == 1 else None
    return peak * 1e12 if peak is not None else None


def normalize(name: str) -> str:
    """Return a GPU's name as `Gpu.names` describes it: ``NVIDIA_A100-SXM4-80GB`` is ``a100 sxm4 80gb``."""
    words = " ".join(re.findall(r"[a-z0-9]+", name.lower()))
    return _MAKERS.sub("", words)


def find_gpus(name: str, table: Mapping[str, Gpu]) -> list[Gpu]:
    """Return the GPUs that a name may mean: none for an unknown name, several for an ambiguous one."""
    if name in table:
        return [table[name]]
    plain = normalize(name)
    return [gpu for gpu in table.values() if re.fullmatch(gpu.names, plain)]


def gres_type(gres: str | None) -> str | None:
    """Return the type of GPU that a value of `--gres` names: ``h100`` of ``gpu:h100:8``."""
    match = _GRES_TYPE.search(gres or "")
    return match["type"] if match is not None else None


_rows = json.loads(_TABLE.read_text(encoding="utf-8"))["gpus"]
ROWS: Mapping[str, Mapping[str, Any]] = MappingProxyType({row["name"]: row for row in _rows})
GPUS: Mapping[str, Gpu] = MappingProxyType({name: gpu_from(name, row) for name, row in ROWS.items()})

# The GPU that the shipped sizes are for, where the configuration names none.
ASSUMED = GPUS["a100-80gb"]

"""DeepSpeed's checkpoints: recorded ones against its own conversion, others against their tensors."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipway.common.errors import UserError
from slipway.trainer.conversion.deepspeed import DeepSpeedFiles

pytestmark = pytest.mark.trainer

RECORDED = Path(__file__).with_name("recorded") / "deepspeed"
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def weights(directory: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Return all tensors, after a check of the listed shapes and types."""
    with DeepSpeedFiles(directory, step) as files:
        tensors = {name: files.read(name) for name in files.tensors()}
        infos = {name: (info.shape, info.dtype) for name, info in files.tensors().items()}
    assert infos == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return tensors


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORDED / "zero2", tmp_path / "zero2"))


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3", "zero1-bf16"])
def test_weights_are_those_of_deepspeeds_own_conversion(stage: str) -> None:
    reference, converted = load_file(RECORDED / f"{stage}.safetensors"), weights(RECORDED / stage)
    # With stage 1 DeepSpeed's conversion leaves out what was not trained; it is in the model's file.
    if "frozen" not in reference:
        reference["frozen"] = torch.linspace(1, 2, 15).reshape(5, 3).to(converted["frozen"].dtype)
    assert equal(converted, reference)
    assert torch.equal(converted["head.weight"], converted["embedding.weight"])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_partitions_of_any_number_of_ranks_are_joined(
    stage: int, padded: bool, ranks: int, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(ranks)
    shapes: list[dict[str, tuple[int, ...]]] = [
        {"a": (3, 5), "b": (1,), "c": (2, 2, 3)},
        {"d": (7,), "e": ()},
    ]
    names = [name for group in shapes for name in group]
    model = {
        name: torch.randn(shape, generator=generator) for group in shapes for name, shape in group.items()
    }
    if stage == 3:
        write_stage3(tmp_path, model, shapes, ranks)
    else:
        write_stage2(tmp_path, model, shapes, ranks, padded)
    converted = weights(tmp_path)
    assert list(converted) == names
    assert equal(converted, model)


def write_stage2(
    directory: Path, model: dict[str, torch.Tensor], shapes: list[Any], ranks: int, padded: bool
) -> None:
    """Write stage 2's files; without padding the last parts are shorter, or empty."""
    vectors = [torch.cat([model[name].flatten() for name in group]) for group in shapes]
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for vector in vectors:
        size = 2 * -(-len(vector) // (2 * ranks))
        padded_vector = torch.cat([vector, torch.full((size * ranks - len(vector),), math.nan)])
        for rank, part in enumerate((padded_vector if padded else vector).split(size)):
            parts[rank].append(part.clone())
        for rank in range(-(-len(vector) // size), ranks if not padded else 0):
            parts[rank].append(torch.empty(0))
    write(directory, {}, shapes, "single_partition_of_fp32_groups", parts, [MODEL])


def write_stage3(directory: Path, model: dict[str, torch.Tensor], shapes: list[Any], ranks: int) -> None:
    """Write stage 3's files, in two vectors whose border is within a parameter."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for tensor in model.values():
        size = -(-tensor.numel() // ranks)
        padded_vector = torch.cat([tensor.flatten(), torch.full((size * ranks - tensor.numel(),), math.nan)])
        for rank, part in enumerate(padded_vector.split(size)):
            parts[rank].append(part)
    vectors = [list(torch.cat(part).tensor_split([2])) for part in parts]
    names = [f"zero_pp_rank_{rank}_{MODEL}" for rank in range(ranks)]
    write(directory, {}, shapes, "fp32_flat_groups", [[v.clone() for v in part] for part in vectors], names)


def write(
    directory: Path, module: dict[str, Any], shapes: list[Any], key: str, parts: list[Any], models: list[str]
) -> None:
    sizes = [{name: torch.Size(shape) for name, shape in group.items()} for group in shapes]
    for name in models:
        torch.save({"module": module, "buffer_names": [], "param_shapes": sizes}, directory / name)
    for rank, part in enumerate(parts):
        state = {key: part, "partition_count": [len(parts)] * len(shapes)}
        torch.save({"optimizer_state_dict": state}, directory / OPTIMIZER.format(rank))


def test_reading_takes_memory_for_the_requested_tensor_alone(tmp_path: Path) -> None:
    shapes: list[Any] = [{"a": (1 << 20,), "b": (1 << 20,)}]
    vector = torch.arange(2 << 20, dtype=torch.float32)
    write(tmp_path, {}, shapes, "single_partition_of_fp32_groups", [[vector]], [MODEL])
    before = resident_bytes()
    with DeepSpeedFiles(tmp_path) as files:
        assert resident_bytes() - before < 4 << 20
        assert files.read("b")[0] == 1 << 20


def resident_bytes() -> int:
    """Return the memory of this process that is in use, mapped pages of files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_wrappers_are_left_out_of_names(tmp_path: Path) -> None:
    shapes: list[Any] = [
        {"module._orig_mod.a.weight": (2,), "module.b._checkpoint_wrapped_module.weight": (1,)}
    ]
    write(tmp_path, {}, shapes, "single_partition_of_fp32_groups", [[torch.arange(3.0)]], [MODEL])
    assert {name: tensor.tolist() for name, tensor in weights(tmp_path).items()} == {
        "a.weight": [0.0, 1.0],
        "b.weight": [2.0],
    }


def test_step_is_chosen_by_number_or_by_the_file_latest(copy: Path) -> None:
    shutil.copytree(copy / "global_step3", copy / "global_step12")
    assert equal(weights(copy), weights(copy, 12))
    with pytest.raises(UserError, match=r"conversion\.step=4: the steps of .* are 3, 12"):
        DeepSpeedFiles(copy, 4)
    for tag in ("../elsewhere", "..", "", "a" * 5000, "a\0b"):
        (copy / "latest").write_text(tag)
        with pytest.raises(UserError, match="latest names '"):
            DeepSpeedFiles(copy)


def test_missing_rank_is_named(copy: Path) -> None:
    (copy / "global_step3" / OPTIMIZER.format(1)).unlink()
    with pytest.raises(UserError, match="1 of 2 "):
        DeepSpeedFiles(copy)


def test_files_of_another_model_are_refused(copy: Path) -> None:
    shapes: list[Any] = [{"a": (3,)}, {"b": (2,)}]
    write(copy / "global_step3", {}, shapes, "unused", [], [MODEL])
    with pytest.raises(UserError, match="are not of one checkpoint"):
        DeepSpeedFiles(copy)


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER.format(1)])
@pytest.mark.parametrize("part", [0, 100, 0.5, 0.99])
def test_truncated_file_is_refused_by_name(name: str, part: float, copy: Path) -> None:
    path = copy / "global_step3" / name
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content)) if part < 1 else int(part)])
    with pytest.raises(UserError, match=name):
        DeepSpeedFiles(copy)


def test_tensor_parallel_checkpoint_is_refused(copy: Path) -> None:
    step = copy / "global_step3"
    shutil.copy(step / MODEL, step / "mp_rank_01_model_states.pt")
    with pytest.raises(UserError, match="tensor and pipeline parallelism"):
        DeepSpeedFiles(copy)


class Hostile:
    """An object whose pickle writes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_nothing_that_a_file_names_is_executed(copy: Path) -> None:
    step, trace = copy / "global_step3", copy / "executed"
    torch.save({"optimizer_state_dict": {"loss_scaler": Hostile(trace)}}, step / OPTIMIZER.format(0))
    with pytest.raises(UserError, match=OPTIMIZER.format(0)):
        DeepSpeedFiles(copy)
    assert not trace.exists()

"""Files in torch's distributed format, read and written without a model: chunks, parts, and damage."""

from __future__ import annotations

import itertools
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from slipway.common.errors import UserError
from slipway.trainer.checkpoint import tensor_files
from slipway.trainer.checkpoint.tensor_files import TensorFiles, TensorFilesWriter, TensorInfo

WHOLE = torch.arange(4 * 6 * 8, dtype=torch.float32).reshape(4, 6, 8)
ROWS = torch.randn(4, 64).bfloat16()


@pytest.fixture(params=["copied", "direct"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read chunks as small ones are, and as large ones are."""
    monkeypatch.setattr(tensor_files, "_DIRECT_BYTES", 0 if request.param == "direct" else 1 << 40)
    monkeypatch.setattr(tensor_files, "_BLOCK_BYTES", 100)


def write_chunks(directory: Path) -> Path:
    """Write stacked layers in chunks of a layer and a half of its columns, and a vector in bf16."""
    directory.mkdir()
    with TensorFilesWriter(directory) as writer:
        for layer, half in itertools.product(range(4), range(2)):
            chunk = WHOLE[layer : layer + 1, :, 4 * half : 4 * half + 4]
            writer.add("layers", chunk, WHOLE.shape, (layer, 0, 4 * half))
        writer.add("rows", ROWS[:1], ROWS.shape, (0, 0))
        writer.add("rows", ROWS[1:], ROWS.shape, (1, 0))
        writer.add("bias", torch.ones(3, dtype=torch.bfloat16))
        writer.finish({"step": 3}, b"{}")
    return directory


def test_tensors_are_read_whole_by_layer_and_in_part(tmp_path: Path) -> None:
    with TensorFiles(write_chunks(tmp_path / "c")) as files:
        assert files.tensors() == {
            "layers": TensorInfo((4, 6, 8), torch.float32),
            "rows": TensorInfo((4, 64), torch.bfloat16),
            "bias": TensorInfo((3,), torch.bfloat16),
        }
        assert torch.equal(files.read("layers"), WHOLE)
        assert torch.equal(files.read("rows"), ROWS)
        assert torch.equal(files.read("rows", (slice(0, 3),)), ROWS[:3])
        assert torch.equal(files.read("layers", 2), WHOLE[2])
        part = (slice(1, 3), slice(None), slice(3, 7))
        assert torch.equal(files.read("layers", part), WHOLE[part])
        assert torch.equal(files.read("bias", (slice(1, None),)), torch.ones(2, dtype=torch.bfloat16))


def test_views_are_written_without_the_rest_of_their_storage(tmp_path: Path) -> None:
    directory = write_chunks(tmp_path / "c")
    (shard,) = directory.glob("*.distcp")
    assert shard.stat().st_size < 11 * (6 * 4 * 4 + 2000)


def test_torch_reads_our_files_and_we_read_torchs(tmp_path: Path) -> None:
    target = {"layers": torch.zeros_like(WHOLE)}
    reader = dcp.FileSystemReader(str(write_chunks(tmp_path / "ours")))
    _load_state_dict(target, storage_reader=reader, no_dist=True)
    assert torch.equal(target["layers"], WHOLE)
    # The path as an object, which torch keeps in the index.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"weight": WHOLE, "step": 3}}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with TensorFiles(tmp_path / "theirs") as files:
        assert list(files.tensors()) == ["model.weight"]
        assert torch.equal(files.read("model.weight"), WHOLE)


def flip_byte(directory: Path) -> None:
    (shard,) = directory.glob("*.distcp")
    content = bytearray(shard.read_bytes())
    # Within the elements of a chunk.
    position = content.index(WHOLE[2, 0, :4].numpy().tobytes())
    content[position] ^= 1
    shard.write_bytes(content)


def truncate(directory: Path) -> None:
    (shard,) = directory.glob("*.distcp")
    os.truncate(shard, shard.stat().st_size // 2)


def remove(directory: Path) -> None:
    next(directory.glob("*.distcp")).unlink()


def empty_index(directory: Path) -> None:
    (directory / ".metadata").write_bytes(b"")


def hostile_index(directory: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {directory}/executed",)

    (directory / ".metadata").write_bytes(pickle.dumps(Hostile()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_byte, "layers cannot be read"),
        (truncate, "layers cannot be read"),
        (remove, "__0_0.distcp is missing"),
        (empty_index, ".metadata cannot be read"),
        (hostile_index, "system is nothing that a checkpoint holds"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    directory = write_chunks(tmp_path / "c")
    damage(directory)
    with pytest.raises(UserError, match=message), TensorFiles(directory) as files:
        files.read("layers")
    assert not (directory / "executed").exists()


def test_damage_of_a_chunk_of_rows_is_named(tmp_path: Path) -> None:
    directory = write_chunks(tmp_path / "c")
    (shard,) = directory.glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[content.index(ROWS[2].view(torch.uint8).numpy().tobytes())] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match="rows cannot be read"), TensorFiles(directory) as files:
        files.read("rows")


def test_index_without_a_chunk_is_refused(tmp_path: Path) -> None:
    directory = write_chunks(tmp_path / "c")
    index = pickle.loads((directory / ".metadata").read_bytes())
    del index.state_dict_metadata["layers"].chunks[3]
    (directory / ".metadata").write_bytes(pickle.dumps(index))
    with TensorFiles(directory) as files:
        assert torch.equal(files.read("layers", 0), WHOLE[0])
        with pytest.raises(UserError, match="the chunks of layers do not make up the tensor"):
            files.read("layers", 1)


def test_index_that_leads_out_of_its_directory_is_refused(tmp_path: Path) -> None:
    directory = write_chunks(tmp_path / "c")
    index = pickle.loads((directory / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.relative_path = f"../c/{info.relative_path}"
    (directory / ".metadata").write_bytes(pickle.dumps(index))
    with TensorFiles(directory) as files, pytest.raises(UserError, match="names a file of another directory"):
        files.read("layers")

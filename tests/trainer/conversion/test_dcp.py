"""Checkpoints of torch.distributed.checkpoint, saved by FSDP on two ranks."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from slipway.common.errors import UserError
from slipway.trainer.conversion.convert import convert
from slipway.trainer.conversion.dcp import DcpFiles
from slipway.trainer.conversion.sources import open_source, recognise
from slipway.trainer.conversion.spec import Conversion
from tests.trainer.conftest import environment, free_port
from tests.trainer.probing import run_probe
from tests.warm import WarmPool

pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture(scope="module")
def fsdp_output(pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output, port = tmp_path_factory.mktemp("fsdp"), free_port()
    ranks = tuple(environment(rank, 2, port) for rank in range(2))
    run_probe(pool, "tests.trainer.conversion.probe_fsdp", [str(output)], output, ranks)
    return output


def weights(directory: Path) -> dict[str, torch.Tensor]:
    with DcpFiles(directory) as files:
        return {name: files.read(name) for name in files.tensors()}


@pytest.mark.parametrize("name", ["nested", "stateful", "plain", "beside", "compiled", "fsdp1"])
def test_weights_of_fsdp_are_whole_and_under_the_models_names(name: str, fsdp_output: Path) -> None:
    expected = torch.load(fsdp_output / "weights.pt", weights_only=True)[
        "fsdp1" if name == "fsdp1" else "fsdp2"
    ]
    converted = weights(fsdp_output / name)
    assert converted.keys() == expected.keys()
    for key, weight in expected.items():
        assert converted[key].dtype == weight.dtype
        assert torch.equal(converted[key], weight)


def test_formats_are_recognised_by_their_files(fsdp_output: Path, tmp_path: Path) -> None:
    zero3 = Path(__file__).with_name("recorded") / "deepspeed" / "zero3"
    assert recognise(fsdp_output / "plain") == recognise(fsdp_output) == "dcp"
    assert recognise(zero3) == recognise(zero3 / "global_step3") == "deepspeed"
    shutil.copytree(fsdp_output / "plain", tmp_path / "step-3")
    shutil.copytree(fsdp_output / "fsdp1", tmp_path / "step-12")
    with open_source(tmp_path, "dcp") as newest, open_source(tmp_path, "dcp", 3) as third:
        assert len(newest.tensors()) == 2
        assert len(third.tensors()) == 8
    with pytest.raises(UserError, match=r"conversion\.step=4: the steps of .* are 3, 12"):
        open_source(tmp_path, "dcp", 4)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no weights of a known format; expected"):
        recognise(tmp_path / "empty")
    with pytest.raises(UserError, match="there is no such directory"):
        recognise(tmp_path / "absent")


def test_conversion_writes_the_tensors_under_their_names(fsdp_output: Path, tmp_path: Path) -> None:
    shutil.copytree(fsdp_output / "nested", tmp_path / "saved" / "step-3")
    conversion = Conversion(
        tmp_path / "saved", to="safetensors", output=tmp_path / "{step}", dtype="bfloat16"
    )
    (result,) = convert(conversion)
    expected = torch.load(fsdp_output / "weights.pt", weights_only=True)["fsdp2"]
    converted = load_file(tmp_path / "3" / "model.safetensors")
    assert converted.keys() == expected.keys()
    assert torch.equal(converted["0.weight"], expected["0.weight"].bfloat16())
    assert torch.equal(converted["2.num_batches_tracked"], expected["2.num_batches_tracked"])
    assert result.is_new
    assert not convert(conversion)[0].is_new
    with pytest.raises(
        UserError, match=r"conversion\.to=huggingface: .* expected conversion\.to=safetensors"
    ):
        convert(replace(conversion, to="huggingface", output=tmp_path / "other"))


def test_step_of_a_single_checkpoint_is_compared_with_its_name(tmp_path: Path) -> None:
    dcp.save({"model": {"a.w": torch.ones(2)}}, checkpoint_id=tmp_path / "step-5", no_dist=True)
    global_step3 = Path(__file__).with_name("recorded") / "deepspeed" / "zero3" / "global_step3"
    with open_source(tmp_path / "step-5", "dcp", 5), open_source(global_step3, "deepspeed", 3):
        pass
    with pytest.raises(UserError, match=r"conversion\.step=9: .*step-5 is a single checkpoint, of step 5"):
        open_source(tmp_path / "step-5", "dcp", 9)
    with pytest.raises(UserError, match=r"conversion\.step=9: the steps of .*global_step3 are none"):
        open_source(global_step3, "deepspeed", 9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"generator": {"w": torch.ones(2)}, "critic": {"w": torch.ones(2)}}, "below critic, generator"),
        ({"model": {"a._orig_mod.w": torch.ones(2), "a.w": torch.ones(2)}}, "both a.w"),
        ({"model": {"_fsdp_wrapped_module._flat_param": torch.ones(2)}}, "flat parameter"),
        ({"optimizer": {"state": {"exp_avg": torch.ones(2)}}}, "an optimizer's"),
        ({"step": 3}, "holds no tensor"),
    ],
)
def test_unclear_content_is_refused(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    dcp.save(content, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(UserError, match=message):
        DcpFiles(tmp_path)


class Hostile:
    """An object whose pickle writes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_index_that_names_a_function_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "executed")))
    with pytest.raises(UserError, match=r"\.metadata cannot be read"):
        DcpFiles(tmp_path)
    assert not (tmp_path / "executed").exists()

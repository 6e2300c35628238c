"""Checkpoints become safetensors: values, shards, types, and the same bytes from all layouts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.tensor_files import TensorFiles, TensorFilesWriter, TensorInfo
from slipway.trainer.conversion import __main__ as program
from slipway.trainer.conversion import check
from slipway.trainer.conversion.check_report import Report, write_report
from slipway.trainer.conversion.convert import convert, convert_checkpoint
from slipway.trainer.conversion.export import plain_entries
from slipway.trainer.conversion.families import rows_of
from slipway.trainer.conversion.outputs import RECORD
from slipway.trainer.conversion.safetensors_files import INDEX, Entry, SafetensorsFiles, write
from slipway.trainer.conversion.spec import Conversion, read_conversion
from tests.trainer.conversion.checkpoints import Shape, digest, grid, weights_of, write_checkpoint
from tests.trainer.conversion.test_weight_map import QWEN2, STABLELM, description
from tests.trainer.parity.test_parity import FAMILIES

pytestmark = pytest.mark.trainer

HALF = {**FAMILIES["gpt2"], "trainer.precision": "bf16", "model.megatron_amp_O2": True}
MODELS = {**FAMILIES, "qwen2": QWEN2, "stablelm": STABLELM, "gpt2_bf16": HALF}


def conversion(source: Path, output: Path, **changes: Any) -> Conversion:
    node = {"source": str(source), "to": "huggingface", "output": str(output), **changes}
    return read_conversion(node)


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("family", MODELS)
def test_every_weight_is_exported_without_padding(tmp_path: Path, family: str) -> None:
    model = description(MODELS[family])
    checkpoint = write_checkpoint(tmp_path / "checkpoints", model)
    ours = weights_of(model)
    expected = {}
    for row in rows_of(model):
        weight = None if row.ours is None else ours[row.ours]
        layer = weight if weight is None or row.layer is None else weight[row.layer]
        dtype = ours["embedding.word_embeddings.weight"].dtype
        expected |= dict(zip(row.theirs, row.to_theirs(layer, dtype), strict=True))
    (result,) = convert(conversion(tmp_path / "checkpoints", tmp_path / "out"))
    assert result.is_new
    tensors = load_tensors(tmp_path / "out")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    assert len({value.dtype for value in tensors.values()}) == 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == model.vocabulary.size
    assert checkpoint.path.is_dir()


@settings(deadline=None, max_examples=12)
@given(
    tensor=st.sampled_from((1, 2, 4)),
    pieces=st.sampled_from((1, 2, 3)),
    stacked=st.booleans(),
    family=st.sampled_from(("gpt2", "llama", "t5_v1_1")),
)
def test_output_is_the_same_however_the_tensors_were_cut(
    tmp_path_factory: pytest.TempPathFactory, tensor: int, pieces: int, stacked: bool, family: str
) -> None:
    def cut(name: str, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
        """Cut layers apart, or not; rows by tensor parallelism; and columns, as no layout does."""
        parts = [1] * len(shape)
        is_layered = ".layers." in name
        if is_layered and not stacked:
            parts[0] = shape[0]
        if len(shape) > is_layered:
            parts[is_layered] = math.gcd(tensor, shape[is_layered])
        if len(shape) > is_layered + 1:
            parts[-1] = math.gcd(pieces, shape[-1])
        return grid(shape, tuple(parts))

    root = tmp_path_factory.mktemp("cut")
    model = description(FAMILIES[family])
    whole = write_checkpoint(root / "whole", model)
    other = write_checkpoint(root / "other", model, chunks=cut)
    convert_checkpoint(conversion(whole.path, root / "a"), whole)
    convert_checkpoint(conversion(other.path, root / "b"), other)
    assert digest(root / "a") == digest(root / "b")


def test_shards_and_their_index_are_as_transformers_writes_them(tmp_path: Path) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    model = description(FAMILIES["llama"])
    write_checkpoint(tmp_path / "checkpoints", model)
    convert(conversion(tmp_path / "checkpoints", tmp_path / "one"))
    convert(conversion(tmp_path / "checkpoints", tmp_path / "many", shard_bytes=45_000))
    whole = load_tensors(tmp_path / "one")
    assert (tmp_path / "one" / "model.safetensors").is_file()
    names = [row_name for row in rows_of(model) for row_name in row.theirs]
    plan = split_torch_state_dict_into_shards(
        {name: whole[name] for name in names},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=45_000,
    )
    assert len(plan.filename_to_tensors) > 3
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"]["total_size"] == plan.metadata["total_size"]
    assert index["weight_map"] == plan.tensor_to_filename
    assert {name: value.tolist() for name, value in load_tensors(tmp_path / "many").items()} == {
        name: value.tolist() for name, value in whole.items()
    }
    with SafetensorsFiles(tmp_path / "many") as files:
        assert files.tensors()["model.norm.weight"] == TensorInfo(
            tuple(whole["model.norm.weight"].shape), torch.float32
        )
        assert all(torch.equal(files.read(name), value) for name, value in whole.items())
    for path in (tmp_path / "many").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_types_are_converted_and_overflow_of_float16_is_refused(tmp_path: Path) -> None:
    model = description(FAMILIES["gpt2"])
    write_checkpoint(tmp_path / "checkpoints", model)
    convert(conversion(tmp_path / "checkpoints", tmp_path / "whole"))
    convert(conversion(tmp_path / "checkpoints", tmp_path / "half", dtype="bfloat16"))
    whole, half = load_tensors(tmp_path / "whole"), load_tensors(tmp_path / "half")
    assert all(torch.equal(half[name], value.bfloat16()) for name, value in whole.items())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    large = torch.tensor([[1.0, float("inf")], [70_000.0, 1.0]])
    entry = Entry("weight", TensorInfo((2, 2), torch.float16), lambda: large)
    with pytest.raises(UserError, match=r"conversion.dtype=float16: weight has values .* such as inf|70000"):
        write(tmp_path, [entry], 1 << 30)
    fine = Entry("weight", TensorInfo((2,), torch.float16), lambda: large[0])
    (tmp_path / "fine").mkdir()
    write(tmp_path / "fine", [fine], 1 << 30)
    assert load_tensors(tmp_path / "fine")["weight"].tolist() == [1.0, float("inf")]


def test_tensors_of_mixed_types_and_odd_sizes_are_read_by_the_library(tmp_path: Path) -> None:
    tensors = {
        "byte": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "turned": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t(),
        "none": torch.zeros(0, 4),
        "long": torch.arange(5),
        "flag": torch.tensor([True, False, True]),
    }
    entries = [
        Entry(name, TensorInfo(tuple(value.shape), value.dtype), lambda value=value: value)  # type: ignore[misc]
        for name, value in tensors.items()
    ]
    sizes: list[int] = []
    write(tmp_path, entries, 1 << 30, sizes.append)
    read_back = load_tensors(tmp_path)
    assert all(
        torch.equal(read_back[name], value) and read_back[name].dtype == value.dtype
        for name, value in tensors.items()
    )
    assert sum(sizes) == sum(value.nbytes for value in tensors.values())


def test_32_bit_masters_are_taken_where_32_bits_are_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = description(HALF)
    weights = weights_of(model)
    masters = {name: value.float() + 2**-12 for name, value in weights.items()}
    checkpoint = write_checkpoint(tmp_path / "checkpoints", model, masters=masters)
    convert_checkpoint(conversion(checkpoint.path, tmp_path / "kept"), checkpoint)
    convert_checkpoint(conversion(checkpoint.path, tmp_path / "precise", dtype="float32"), checkpoint)
    name = "transformer.h.1.ln_1.weight"
    ours = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    assert torch.equal(load_tensors(tmp_path / "kept")[name], weights[ours][1])
    assert torch.equal(load_tensors(tmp_path / "precise")[name], masters[ours][1])
    assert capsys.readouterr().out.count("the weights are the optimizer's 32-bit masters") == 1
    plain = conversion(checkpoint.path, tmp_path / "plain", to="safetensors", dtype="float32")
    convert_checkpoint(plain, checkpoint)
    assert capsys.readouterr().out.count("the weights are the optimizer's 32-bit masters") == 1
    assert all(
        torch.equal(load_tensors(tmp_path / "plain")[name], master) for name, master in masters.items()
    )
    bare = write_checkpoint(tmp_path / "bare", model)
    convert_checkpoint(conversion(bare.path, tmp_path / "bare_out", dtype="float32"), bare)
    assert "the weights are the model's, in bf16" in capsys.readouterr().out
    assert torch.equal(load_tensors(tmp_path / "bare_out")[name], weights[ours][1].float())


def test_tensors_are_written_under_their_own_names(tmp_path: Path) -> None:
    model = description(FAMILIES["gpt2"])
    write_checkpoint(tmp_path / "checkpoints", model)
    convert(conversion(tmp_path / "checkpoints", tmp_path / "out", to="safetensors"))
    tensors, ours = load_tensors(tmp_path / "out"), weights_of(model)
    assert tensors.keys() == ours.keys()
    assert all(torch.equal(tensors[name], value) for name, value in ours.items())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [RECORD, "model.safetensors"]


def test_tensors_of_other_programs_are_kept_under_any_name(tmp_path: Path) -> None:
    names = ["optimizer.weight", "random.weight", "random_features.weight", "rng_state"]
    source = tmp_path / "source"
    source.mkdir()
    save_file({name: torch.ones(2) for name in names}, source / "model.safetensors")
    convert(conversion(source, tmp_path / "out", to="safetensors", source_format="huggingface"))
    assert sorted(load_tensors(tmp_path / "out")) == names
    with TensorFilesWriter(tmp_path) as writer:
        for name in names:
            writer.add(name, torch.ones(2))
        writer.finish({}, b"{}")
    with TensorFiles(tmp_path) as files:
        entries = plain_entries(files, None, is_megatron_core=True)
    assert [entry.name for entry in entries] == ["random_features.weight"]


@pytest.mark.parametrize("weight_map", [{}, [], {"a": 3}, {"a": ""}, {"a": ".."}, {"a": "directory"}])
def test_index_that_names_no_files_is_refused(weight_map: Any, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"holds no tensor|is no index|directory cannot be read"):
        SafetensorsFiles(tmp_path)


def test_type_that_safetensors_lack_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    entry = Entry(
        "rotations", TensorInfo((2,), torch.complex64), lambda: torch.ones(2, dtype=torch.complex64)
    )
    with pytest.raises(UserError, match="rotations is of the type complex64"):
        write(tmp_path, [entry], 1 << 30)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("source_format", ["dcp", "deepspeed", "megatron_lm", "huggingface"])
def test_missing_source_is_named(source_format: str, tmp_path: Path) -> None:
    missing = conversion(tmp_path / "absent", tmp_path / "out", to="safetensors", source_format=source_format)
    with pytest.raises(UserError, match=r"conversion\.source=.*/absent: there is no such directory"):
        convert(missing)


def test_step_of_an_import_is_refused(tmp_path: Path) -> None:
    imported = conversion(tmp_path, tmp_path / "out", to="slipway", source_format="huggingface", step=9)
    with pytest.raises(UserError, match=r"conversion\.step=9: .* is a single model of Hugging Face's"):
        convert(imported)


def test_link_that_leads_nowhere_does_not_stop_a_conversion(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"weight": torch.ones(2)}, source / "model.safetensors")
    (source / "tokenizer.json").symlink_to(tmp_path / "absent")
    convert(conversion(source, tmp_path / "out", to="safetensors", source_format="huggingface"))
    assert list(load_tensors(tmp_path / "out")) == ["weight"]


def test_text_of_the_comparison_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes("für".encode("latin-1"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    with pytest.raises(UserError, match=r"conversion\.check\.text=.*latin1\.txt: expected UTF-8"):
        check._tokens(tmp_path, description(FAMILIES["gpt2"]), path, 1)


def test_each_checkpoint_is_converted_once_with_every(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = description(FAMILIES["gpt2"])
    source = tmp_path / "checkpoints"
    every = conversion(source, tmp_path / "hf" / "step-{step}", every=1)
    assert convert(every) == []
    write_checkpoint(source, model, step=2)
    write_checkpoint(source, model, step=4, seed=1)
    assert [result.is_new for result in convert(every)] == [True, True]
    write_checkpoint(source, model, step=6, seed=2)
    assert [result.is_new for result in convert(every)] == [False, False, True]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["step-2", "step-4", "step-6"]
    # The training went back to step 4 and came to step 6 again; then a checkpoint is damaged.
    again = write_checkpoint(source, model, step=6, seed=3)
    assert [result.is_new for result in convert(every)] == [False, False]
    assert "step-6: the result of another conversion is there" in capsys.readouterr().out
    damaged = write_checkpoint(source, model, step=8)
    os.truncate(damaged.path / "common.pt", 1)
    write_checkpoint(source, model, step=10)
    with pytest.raises(UserError, match=r"step=8 is damaged: common\.pt"):
        convert(every)
    assert (tmp_path / "hf" / "step-10").is_dir()
    assert again.path.name == "megatron_gpt--step=6-v1"
    (chosen,) = convert(conversion(source, tmp_path / "{step}", step=4))
    assert digest(chosen.output) == digest(tmp_path / "hf" / "step-4")


def test_program_prints_plain_lines_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "checkpoints", description(FAMILIES["gpt2"]))
    arguments = ["export", str(tmp_path / "checkpoints"), "--to", str(tmp_path / "out-{step}")]
    assert program.main(arguments) == 0
    assert program.main(arguments) == 0
    output = capsys.readouterr().out
    assert "\r" not in output
    assert "out-2: writing 100 %" in output
    assert output.splitlines()[-2:] == [
        f"{tmp_path}/out-2: written",
        f"{tmp_path}/out-2: is there already",
    ]


def test_terminal_shows_a_progress_bar(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoints", description(FAMILIES["gpt2"]))
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, contextlib.redirect_stdout(terminal):
        convert(conversion(tmp_path / "checkpoints", tmp_path / "out"))
        terminal.flush()
        output = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "\rout: writing ██████████████████████████████ 100 %" in output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtyp": "float32"}, r"conversion.dtyp: there is no such key; did you mean 'dtype'\?"),
        (
            {"dtype": "float33"},
            r"conversion.dtype='float33': expected one of float32, bfloat16, float16; did",
        ),
        (
            {"to": "hugingface"},
            r"conversion.to='hugingface': expected one of .*; did you mean 'huggingface'\?",
        ),
        ({"step": -1}, r"conversion.step=-1: expected a whole number, 0 or more"),
        ({"shard_bytes": 0}, r"conversion.shard_bytes=0: expected a whole number, 1 or more"),
        ({"source": None}, r"conversion.source is missing"),
        ({"every": 2}, r"conversion.output=/x/out: with conversion.every=2 it needs \{step\}"),
        ({"check": {"enable": True}}, r"conversion.check.enable: there is no such key; .*'enabled'"),
        ({"model": 3}, r"conversion.model=3: expected the path of a YAML file, or keys"),
    ],
)
def test_mistakes_in_the_configuration_are_named(changes: dict[str, Any], message: str) -> None:
    node = {"source": "/x/in", "to": "huggingface", "output": "/x/out", **changes}
    with pytest.raises(UserError, match=message):
        read_conversion(node)


def test_report_holds_for_its_text_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("alpha beta")
    report = Report(
        text=str(text),
        text_checksum=hashlib.sha256(text.read_bytes()).hexdigest(),
        sequences=8,
        tokens=4,
        ours=1e-6,
        theirs=1e-6,
        largest=1.0,
        losses={"ours": 1.0, "theirs": 1.0, "exact": 1.0, "stored": 1.0},
        dtype="float32",
        rounded=0,
        rounding=0.0,
        allowed_rounding=0.0,
        gradients={},
    )
    write_report(report, tmp_path)
    assert check.verdict(tmp_path, text, 8) is True
    assert capsys.readouterr().out == report.table()
    assert check.verdict(tmp_path, text, 4) is None
    assert check.verdict(tmp_path, None, 8) is None
    text.write_text("alpha gamma")
    assert check.verdict(tmp_path, text, 8) is None
    assert capsys.readouterr().out == ""

"""Checkpoints of Megatron-LM's own pretrain_gpt.py, held against the logits that it computes with them."""

from __future__ import annotations

import argparse
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.tensor_files import TensorFiles, TensorFilesWriter
from slipway.trainer.conversion.convert import convert
from slipway.trainer.conversion.megatron_lm import MegatronLmFiles
from slipway.trainer.conversion.pickled_files import Unknown, load
from slipway.trainer.conversion.sources import open_source
from slipway.trainer.conversion.spec import Conversion

pytestmark = pytest.mark.trainer

RECORDED = Path(__file__).with_name("recorded") / "megatron_lm"


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recorded")
    for name in ("gpt2", "llama"):
        with tarfile.open(RECORDED / f"{name}.tar.xz") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
            archive.extractall(root / name)
    return root


Copy = Callable[[str], Path]


@pytest.fixture
def copy(recordings: Path, tmp_path: Path) -> Copy:
    return lambda name: Path(shutil.copytree(recordings / name / "checkpoints", tmp_path / "checkpoints"))


# Two ranks saved: pipeline parallel the GPT-2, with padding of its vocabulary, tensor parallel the Llama.
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_converted_model_computes_megatron_lms_logits(name: str, recordings: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    (result,) = convert(
        Conversion(recordings / name / "checkpoints", to="huggingface", output=tmp_path / "{step}")
    )
    assert result.output == tmp_path / "2"
    model: Any = AutoModelForCausalLM.from_pretrained(result.output)
    reference = load_file(recordings / name / "logits.safetensors")
    with torch.no_grad():
        logits = model.eval()(reference["tokens"]).logits
    assert reference["logits"].std() > 0.1
    torch.testing.assert_close(logits, reference["logits"][..., :64], atol=2e-6, rtol=2e-5)


def test_iteration_is_chosen_by_number_or_by_the_tracker(copy: Copy) -> None:
    directory = copy("llama")
    shutil.copytree(directory / "iter_0000002", directory / "iter_0000010")
    with MegatronLmFiles(directory) as tracked, MegatronLmFiles(directory, 10) as tenth:
        assert (tracked.directory.name, tenth.directory.name) == ("iter_0000002", "iter_0000010")
    with pytest.raises(UserError, match=r"conversion\.step=3: the steps of .* are 2, 10"):
        MegatronLmFiles(directory, 3)
    with pytest.raises(UserError, match=r"conversion\.step=10: .*iter_0000002 is a single checkpoint"):
        open_source(directory / "iter_0000002", "megatron_lm", 10)
    (directory / "latest_checkpointed_iteration.txt").write_text("../../elsewhere")
    with pytest.raises(UserError, match=r"names '\.\./\.\./elsewhere', and there is no"):
        MegatronLmFiles(directory)


def test_gelu_is_the_exact_one_without_the_fused_kernel(copy: Copy) -> None:
    directory = copy("gpt2") / "iter_0000002"
    with MegatronLmFiles(directory) as files:
        assert files.description().decoder.activation == "gelu"
        _change_options(directory / "common.pt", {"bias_gelu_fusion": False})
        assert files.description().decoder.activation == "exact-gelu"


def _change_options(path: Path, options: dict[str, Any], removed: tuple[str, ...] = ()) -> None:
    content = vars(load(path)["args"])
    values = {name: value for name, value in content.items() if not isinstance(value, Unknown)}
    for name in ("arguments", *removed):
        values.pop(name)
    torch.save({"args": argparse.Namespace(**{**values, **options})}, path)


@pytest.mark.parametrize("option", ["layernorm_zero_centered_gamma", "apply_layernorm_1p"])
def test_zero_centred_scales_are_exported_plus_one(option: str, copy: Copy, tmp_path: Path) -> None:
    directory = copy("gpt2") / "iter_0000002"
    removed = () if option == "layernorm_zero_centered_gamma" else ("layernorm_zero_centered_gamma",)
    _change_options(directory / "common.pt", {option: True}, removed)
    convert(Conversion(directory, to="huggingface", output=tmp_path / "converted"))
    exported = load_file(tmp_path / "converted" / "model.safetensors")
    with MegatronLmFiles(directory) as files:
        expected = 1 + files.read("decoder.final_layernorm.weight")
    torch.testing.assert_close(exported["transformer.ln_f.weight"], expected, atol=0, rtol=0)


def test_norm_epsilon_of_an_earlier_version_is_read(copy: Copy) -> None:
    directory = copy("llama") / "iter_0000002"
    _change_options(directory / "common.pt", {"norm_epsilon": 3e-5}, ("layernorm_epsilon",))
    with MegatronLmFiles(directory) as files:
        assert files.description().decoder.norm_epsilon == 3e-5
        _change_options(directory / "common.pt", {}, ("norm_epsilon",))
        with pytest.raises(UserError, match=r"args\.layernorm_epsilon is missing, and so is args\.norm_eps"):
            files.description()


def test_options_of_a_training_are_read_without_its_program(copy: Copy) -> None:
    directory = copy("llama") / "iter_0000002"
    # megatron-core allows such classes to all readers of a process that has imported it.
    with torch.serialization.safe_globals([argparse.Namespace]):
        options = vars(load(directory / "common.pt")["args"])
    assert options["rotary_base"] == 50000
    assert isinstance(options["attention_backend"], Unknown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 8}, "--num-experts .8. is not supported; conversion.to=safetensors"),
        ({"qk_layernorm": True}, "--qk-layernorm"),
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p with --normalization RMSNorm"),
        ({"window_size": (128, 0)}, r"--window-size \(\(128, 0\)\) is not supported"),
        ({"qk_l2_norm": True}, "--qk-l2-norm"),
        ({"no_rope_freq": 4}, "--no-rope-freq"),
        ({"softmax_type": "off-by-one"}, "--softmax-type"),
        ({"activation_func_clamp_value": 7.0}, "--activation-func-clamp-value"),
        ({"glu_linear_offset": 1.0}, "--glu-linear-offset"),
        ({"experimental_attention_variant": "dsa"}, "--experimental-attention-variant"),
        ({"add_qkv_bias": True}, r"has no decoder\.layers\.self_attention\.linear_qkv\.bias"),
        ({"padded_vocab_size": None}, "args.padded_vocab_size=None"),
        ({"hidden_size": 32}, "another architecture"),
        ({"vocab_size": 99}, "has 100 tokens"),
    ],
)
def test_model_that_cannot_be_converted_is_refused(
    options: dict[str, Any], message: str, copy: Copy, tmp_path: Path
) -> None:
    directory = copy("llama")
    _change_options(directory / "iter_0000002" / "common.pt", options)
    output = tmp_path / "converted"
    with pytest.raises(UserError, match=message):
        convert(Conversion(directory, to="huggingface", output=output))
    assert not output.exists()
    convert(Conversion(directory, to="safetensors", output=output))
    assert "decoder.layers.mlp.linear_fc2.weight" in load_file(output / "model.safetensors")


def test_layers_that_are_saved_apart_are_the_stacked_ones(copy: Copy, tmp_path: Path) -> None:
    whole, apart = copy("llama") / "iter_0000002", tmp_path / "iter_0000007"
    apart.mkdir()
    with TensorFiles(whole) as files, TensorFilesWriter(apart) as writer:
        for name in files.tensors():
            tensor = files.read(name)
            layers = enumerate(tensor) if ".layers." in name else [(0, tensor)]
            for layer, part in layers:
                writer.add(name.replace(".layers.", f".layers.{layer}."), part)
        writer.finish({}, (whole / "metadata.json").read_bytes())
    shutil.copy(whole / "common.pt", apart)
    outputs = [tmp_path / "first", tmp_path / "second"]
    for source, output in zip((whole, apart), outputs, strict=True):
        convert(Conversion(source, to="huggingface", output=output))
    first, second = ((output / "model.safetensors").read_bytes() for output in outputs)
    assert first == second


def test_other_formats_of_megatron_lm_are_refused_by_name(copy: Copy) -> None:
    directory = copy("llama")
    checkpoint = directory / "iter_0000002"
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(UserError, match="sharded_backend=zarr"):
        MegatronLmFiles(directory)
    (checkpoint / ".metadata").unlink()
    with pytest.raises(UserError, match="--ckpt-format torch_dist"):
        MegatronLmFiles(directory)

"""The arguments that a job adds to those of NeMo's own script; tests/nemo run the script itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from slipway.common.errors import UserError
from slipway.trainer.conversion.nemo import SCRIPT, TO_HUGGINGFACE, find_checkpoint, fit_hparams

pytestmark = pytest.mark.trainer

NAME = "megatron_gpt--val_loss=9.02-step={}-consumed_samples={}.0"
# The stand-in writes its arguments and the requested file; it leaves the file if it fails.
STAND_IN = """\
import json, os, sys
from pathlib import Path
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
file = Path(options["--nemo_file_path"])
Path(os.environ["TOLD"] + os.environ["RANK"]).write_text(json.dumps(options))
if os.environ["RANK"] == "0":
    file.write_text("weights")
sys.exit(int(os.environ.get("CODE", "0")))
"""


def make_checkpoint(directory: Path, step: int, suffix: str = "") -> Path:
    path = directory / (NAME.format(step, 2 * step) + suffix)
    path.mkdir(parents=True)
    (path / "common.pt").write_bytes(b"%d" % step)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run of NeMo's, with its script and a configuration of a conversion."""
    directory = tmp_path / "run"
    for step, suffix in ((2, ""), (10, ""), (10, "-last")):
        make_checkpoint(directory / "checkpoints", step, suffix)
    script = tmp_path / "nemo" / SCRIPT
    script.parent.mkdir(parents=True)
    script.write_text(STAND_IN)
    (directory / "results").mkdir()
    hparams = {"cfg": {"precision": "bf16-mixed", "tensor_model_parallel_size": 4, "hidden_size": 64}}
    (directory / "results" / "hparams.yaml").write_text(yaml.safe_dump(hparams))
    node = {
        "source": str(directory / "checkpoints"),
        "to": "nemo",
        "output": str(tmp_path / "out" / "{step}"),
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"conversion": node}))
    return directory


def convert(run: Path, rank: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    options = [
        "--config-path",
        str(run.parent),
        "--config-name",
        "job.yaml",
        "--nemo-path",
        str(run.parent / "nemo"),
    ]
    sizes = ["--tensor_model_parallel_size", "2", "--pipeline_model_parallel_size", "1"]
    return subprocess.run(
        [sys.executable, "-m", "slipway.trainer.conversion.nemo", *options, *sizes, "--gpus_per_node", "2"],
        env={
            **os.environ,
            "RANK": str(rank),
            "TOLD": str(run.parent / "told"),
            "SLURM_JOB_ID": "7",
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def script_arguments(run: Path, rank: int) -> dict[str, Any]:
    return dict(json.loads((run.parent / f"told{rank}").read_text()))


def test_script_gets_the_newest_checkpoint_and_its_result_the_name(run: Path) -> None:
    output = run.parent / "out"
    assert convert(run, rank=1).returncode == 0
    assert not (output / "10").exists()
    # A killed job of this output left the first; the others belong to outputs with longer names.
    other_outputs = [".nemo-10-6", ".nemo-10-hf-7", ".nemo-10-weights"]
    for name in other_outputs:
        (output / name).mkdir()
    result = convert(run)
    assert (result.returncode, result.stderr) == (0, "")
    assert (output / "10" / "10.nemo").read_text() == "weights"
    assert sorted(path.name for path in output.iterdir()) == [*other_outputs[1:], "10"]
    first, second = script_arguments(run, 0), script_arguments(run, 1)
    assert first["--nemo_file_path"] == second["--nemo_file_path"]
    assert first["--checkpoint_folder"] == str(run / "checkpoints")
    assert first["--checkpoint_name"] == NAME.format(10, 20)
    assert (first["--precision"], first["--gpus_per_node"]) == ("bf16-mixed", "2")
    assert "is there already" in convert(run).stdout


def test_failure_of_the_script_is_the_jobs_and_leaves_nothing(run: Path) -> None:
    other_output = run.parent / "out" / ".nemo-10-6"
    other_output.mkdir(parents=True)
    result = convert(run, CODE="3")
    assert result.returncode == 3
    # Another job may be writing there.
    assert list((run.parent / "out").iterdir()) == [other_output]


def test_missing_script_is_named(run: Path) -> None:
    (run.parent / "nemo" / SCRIPT).unlink()
    result = convert(run)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert "megatron_ckpt_to_nemo.py" in result.stderr


def test_unfinished_checkpoints_are_left_out(tmp_path: Path) -> None:
    for step in (2, 4):
        make_checkpoint(tmp_path, step)
    (tmp_path / (NAME.format(4, 8) + "-unfinished")).touch()
    assert find_checkpoint(tmp_path, None)[1] == 2
    assert find_checkpoint(tmp_path / NAME.format(2, 4), None)[1] == 2
    with pytest.raises(UserError, match=r"conversion\.step=4; its steps are 2"):
        find_checkpoint(tmp_path, 4)
    (tmp_path / NAME.format(2, 4) / "common.pt").unlink()
    with pytest.raises(UserError, match="megatron-core's format"):
        find_checkpoint(tmp_path, None)


def test_hyperparameters_fit_the_conversion(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").touch()
    hyperparameters = {
        "tensor_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "activations_checkpoint_granularity": "selective",
        "optim": {"name": "mcore_distributed_optim", "lr": 1},
        "tokenizer": {"vocab_file": "/data/vocab.json", "merge_file": None, "type": "GPT2BPETokenizer"},
        "precision": 32,
    }
    content, precision = fit_hparams({"cfg": hyperparameters}, tmp_path, (1, 1), tmp_path)
    assert precision == "32-true"
    assert content["cfg"] == {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "sequence_parallel": False,
        "activations_checkpoint_granularity": None,
        "optim": {"name": "fused_adam", "lr": 1},
        "tokenizer": {**hyperparameters["tokenizer"], "vocab_file": str(tmp_path / "vocab.json")},  # type: ignore[dict-item]
        "precision": 32,
    }
    with pytest.raises(UserError, match=r"expected the hyperparameters"):
        fit_hparams({"hidden_size": 4}, tmp_path, (1, 1), None)
    hyperparameters["tokenizer"] = {"model": "/data/absent.model"}
    with pytest.raises(UserError, match=r"it has no absent\.model"):
        fit_hparams({"cfg": hyperparameters}, tmp_path, (1, 1), tmp_path)


# The stand-in saves the weights that lie beside it, as the script that makes a Llama does.
HUGGING_FACE = """\
import os, shutil, sys
from pathlib import Path
options = dict(zip(sys.argv[1:5:2], sys.argv[2:6:2]))
assert Path(options["--input_name_or_path"]).read_text() == "weights"
assert sys.argv[5:] == ["--cpu-only"]
assert not [name for name in os.environ if name in ("RANK", "WORLD_SIZE") or name.startswith("SLURM_")]
shutil.copy(Path(__file__).with_name("llama.bin"), options["--output_path"])
"""
LLAMA = {
    "encoder_seq_length": 16,
    "max_position_embeddings": 16,
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "normalization": "rmsnorm",
    "activation": "fast-swiglu",
    "position_embedding_type": "rope",
    "bias": False,
    "share_embeddings_and_output_weights": False,
    "override_vocab_size": 60,
    "data": {"data_impl": "mock"},
}


def test_llama_of_nemos_script_becomes_a_directory_of_hugging_face(run: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=16,
        rms_norm_eps=1e-5,
    )
    reference: Any = AutoModelForCausalLM.from_config(config)
    script = run.parent / "nemo" / TO_HUGGINGFACE
    script.parent.mkdir(parents=True)
    script.write_text(HUGGING_FACE)
    torch.save(OrderedDict(reference.state_dict()), script.with_name("llama.bin"))
    node = yaml.safe_load((run.parent / "job.yaml").read_text())["conversion"]
    node |= {"to": "huggingface", "model": LLAMA, "model_type": "gpt"}
    (run.parent / "job.yaml").write_text(yaml.safe_dump({"conversion": node}))
    result = convert(run)
    assert result.returncode == 0, result.stderr
    model: Any = AutoModelForCausalLM.from_pretrained(run.parent / "out" / "10")
    tokens = torch.arange(12)[None] * 5
    with torch.no_grad():
        difference = model(tokens).logits - reference(tokens).logits[..., :60]
    assert model.config.vocab_size == 60
    assert difference.abs().max() == 0.0

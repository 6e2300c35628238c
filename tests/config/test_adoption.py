"""`slipway adopt`: what a NeMo launcher's tree meant stays, and no change of it is silent."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from launcher.cli.app import main
from launcher.config.nemo_launcher import OTHER_SCRIPTS, STAGES, way
from tests.config.old_launcher import CLUSTER, FILES, size, write_old_tree

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the conf/ of an old launcher; the shell stands beside it, with the variables that it uses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORK", "/lustre/work")
    monkeypatch.setenv("IMAGE", "/apps/nemo.sqsh")
    return write_old_tree(tmp_path)


def output(capsys: Capsys, *words: str, check: int = 0) -> str:
    assert main(list(words)) == check
    captured = capsys.readouterr()
    return captured.out if check == 0 else captured.err


def script(capsys: Capsys, *words: str) -> str:
    return output(capsys, "launch", "--dry-run", "stages=[training]", *words)


def trainer_of(text: str) -> str:
    match = re.search(r"\S+/(megatron_\w+\.py)", text)
    assert match, text
    return match[1]


def test_in_two_commands_to_the_script(old: Path, capsys: Capsys) -> None:
    text = output(capsys, "adopt", str(old.parents[1]))
    assert "slipway launch --config-dir adopted --dry-run" in text
    for name, trainer in (
        ("bert/110m", "megatron_bert_pretraining.py"),
        ("gpt3/ours", "megatron_gpt_pretraining.py"),
        ("gpt3/plain", "megatron_gpt_pretraining.py"),
        ("t5/ours", "megatron_t5_pretraining.py"),
    ):
        text = script(capsys, "--config-dir", "adopted", f"training={name}")
        assert trainer_of(text) == trainer
        assert "--container-image=/apps/nemo.sqsh" in text
        assert "#SBATCH --partition=long" in text
        assert "--output=/lustre/work/results/" in text
        assert "export NCCL_IB_TIMEOUT=22" in text and "export TRANSFORMERS_OFFLINE=1" in text
        assert "LD_LIBRARY_PATH" not in text  # each task expands it
        # A variable that only the shipped root sets.
        assert "NCCL_NVLS_ENABLE" not in text
        assert "/lustre:/lustre" in text
    text = script(capsys, "--config-dir", "adopted", "training=bert/110m", "cluster=night")
    assert {"#SBATCH --partition=night", "#SBATCH --wckey=llm", "#SBATCH --nice=10"} <= set(text.splitlines())


def test_every_value_of_a_size_stays(old: Path, capsys: Capsys) -> None:
    output(capsys, "adopt", str(old))
    for name in ("gpt3/ours", "bert/110m"):
        written = yaml.safe_load(FILES[f"training/{name}.yaml"])
        words = ("show", "--config-dir", "adopted", f"training={name}", "training")
        training = yaml.safe_load(output(capsys, *words))["training"]
        for node in ("trainer", "model"):
            for key, value in written[node].items():
                if "$" not in str(value) and not isinstance(value, dict):
                    assert training[node][key] == value, (name, key)
        assert training["model"]["ffn_hidden_size"] == 1024
    # What a part holds that a size names.
    words = ("show", "--config-dir", "adopted", "training=gpt3/ours", "training.model.ub_tp_comm_overlap_cfg")
    assert yaml.safe_load(output(capsys, *words))["training"]["model"]["ub_tp_comm_overlap_cfg"] == {
        "qkv_dgrad": {"method": "bulk", "num_sm": 4}
    }
    assert "# a comment of its user's" in Path("adopted/training/gpt3/ours.yaml").read_text()
    assert "overlap" not in output(capsys, "list", "--config-dir", "adopted")


def test_what_is_left_out_is_said_and_written(old: Path, capsys: Capsys) -> None:
    notes = {note["what"]: note for note in json.loads(output(capsys, "adopt", str(old), "--json"))}
    for what, word in {
        "cluster/k8s.yaml": "Kubernetes",
        "cluster/cluster/": "inside",
        "stages: evaluation": "engine=nemo",
        "stages: peft": "megatron_gpt_finetuning.py",
        "peft/ (1)": "megatron_gpt_finetuning.py",
        "training/vit/ (1)": "megatron_vit_classification_pretrain.py",
        "training/gpt3/broken": "duplicate key",
        "api_log": "no such key",
        "data_preparation=gpt3/download_gpt3_pile": "data_preparation.inputs",
    }.items():
        assert notes[what]["outcome"] == "left out" and word in notes[what]["why"], what
    assert notes["numa_mapping"]["outcome"] == "changed"
    report = Path("adopted/ADOPTED.md").read_text()
    assert all(f"| `{what}` |" in report for what in notes)
    assert "stages=[training,conversion]" in notes["stages"]["why"]
    words = ("--config-dir", "adopted", "--dry-run", "training=gpt3/plain", "stages=[training,conversion]")
    assert "slipway.trainer.conversion.nemo" in output(capsys, "launch", *words)


def test_nothing_is_overwritten_and_nothing_stays_after_a_failure(old: Path, capsys: Capsys) -> None:
    Path("adopted").mkdir()
    Path("adopted/mine").touch()
    assert "adopted exists already" in output(capsys, "adopt", str(old), check=2)
    assert "no configuration tree" in output(capsys, "adopt", "/etc/ssl", "-o", "new", check=2)
    (old / "config.yaml").write_text("a: [")
    assert "not valid YAML" in output(capsys, "adopt", str(old), "-o", "new", check=2)
    assert sorted(os.listdir()) == ["adopted", "launcher_scripts"]  # noqa: PTH208


def test_hostile_names_do_no_harm(old: Path, capsys: Capsys) -> None:
    (old / "training/gpt3/a\x1b[31mb.yaml").write_text(size("x"))
    (old / "cluster/$(id).yaml").write_text(CLUSTER)
    (old / "training/gpt3/quoted.yaml").write_text(size("'$(id) `id`'"))
    text = output(capsys, "adopt", str(old))
    assert "\x1b" not in text
    assert text.count("such a name is no choice") == 2
    assert sorted(path.name for path in Path("adopted/cluster").iterdir()) == ["bcm.yaml", "night.yaml"]


# --- a tree in front, as it is


def test_a_tree_in_front_changes_no_trainer(old: Path, capsys: Capsys) -> None:
    (old / "config.yaml").unlink()
    (old / "cluster/cluster/bcm.yaml").unlink()
    (old / "cluster/cluster").rmdir()
    for name, trainer in (("bert/110m", "bert"), ("gpt3/plain", "gpt"), ("t5/ours", "t5")):
        text = script(capsys, "--config-dir", str(old), f"training={name}", "cluster=bcm")
        assert trainer_of(text) == f"megatron_{trainer}_pretraining.py"
        assert "nvidia/nemo:" in text and "#SBATCH --partition=long" in text
    error = output(capsys, "launch", "--config-dir", str(old), "training=vit/b", "--dry-run", check=2)
    assert "megatron_vit_classification_pretrain.py" in error and "stages=[command]" in error


def test_a_cluster_of_the_old_launcher_leads_to_nemo(old: Path, capsys: Capsys) -> None:
    """Under a name that is not shipped it builds on nothing, and the hint is the container's cluster."""
    (old / "config.yaml").unlink()
    (old / "cluster/cluster/bcm.yaml").unlink()
    (old / "cluster/cluster").rmdir()
    words = ("launch", "--config-dir", str(old), "cluster=night", "training=gpt3/126m", "--dry-run")
    assert "defaults: [bcm, _self_]" in output(capsys, *words, check=2)


def test_a_nested_folder_is_refused(old: Path, capsys: Capsys) -> None:
    (old / "config.yaml").unlink()
    words = ("launch", "--config-dir", str(old), "training=gpt3/126m", "--dry-run")
    assert "conf/cluster/cluster: a copy of the folder inside itself" in output(capsys, *words, check=2)


def test_the_root_in_front_leads_to_adopt(old: Path, capsys: Capsys) -> None:
    error = output(capsys, "launch", "--config-dir", str(old), "--dry-run", check=2)
    assert error.count("\n") == 2 and "slipway adopt launcher_scripts/conf" in error


def test_a_bert_of_ones_own_family_is_a_bert(old: Path, capsys: Capsys) -> None:
    (old / "training/ours").mkdir()
    (old / "training/ours/b.yaml").write_text(FILES["training/bert/110m.yaml"])
    words = ("--config-dir", str(old), "training=ours/b", "cluster=bcm", "engine=nemo")
    (old / "config.yaml").unlink()
    (old / "cluster/cluster/bcm.yaml").unlink()
    (old / "cluster/cluster").rmdir()
    assert trainer_of(script(capsys, *words)) == "megatron_bert_pretraining.py"
    error = output(capsys, "launch", "--dry-run", *words, "+training.run.model_type=gpt", check=2)
    assert "training.model has bert_binary_head" in error


# --- the old launcher's words


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        *((f"stages=[{stage}]", text) for stage, text in STAGES.items()),
        ("stages=[data_preparation] data_preparation=gpt3/download_gpt3_pile", "data_preparation.inputs"),
        ("stages=[conversion] conversion=gpt3/convert_gpt3", "conversion=nemo"),
        ("stages=[evaluation] evaluation=gpt3/evaluate_all", "evaluation.lm_eval.tasks"),
        ("training_config=gpt3/5b", "training=…"),
        ("auto_resume=True", "resilience.links"),
        ("peft=llama/squad", "megatron_gpt_finetuning.py"),
        ("peft.run.name=x", "megatron_gpt_finetuning.py"),
        ("training=gpt3/126m --config-path=/conf", "--config-dir"),
        ("training=gpt3/126m --config-name config", "--config-dir"),
        ("training=gpt3/126m -cn config", "--config-dir"),
        ("training=gpt3/126m --multirun", "slipway sweep"),
        ("training=gpt3/126m -m", "slipway sweep"),
        ("training=gpt3/126m --cfg job", "slipway show"),
        ("stages=[training,conversion] training=gpt3/126m cluster=bcm", "conversion=nemo"),
        ("stages=[training,evaluation] training=gpt3/126m cluster=bcm", "stages=[command]"),
    ],
)
def test_words_of_the_old_launcher_lead_on(words: str, hint: str, capsys: Capsys) -> None:
    error = output(capsys, "launch", "--dry-run", *words.split(), check=2)
    assert hint in error and "Traceback" not in error


def test_the_tables_have_no_overlap() -> None:
    assert way("training") is None and way("cluster", "a/b") is None
    assert "gpt3" not in OTHER_SCRIPTS

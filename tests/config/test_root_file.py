"""A `config.yaml` of the user's own, such as the NeMo launcher's: named with its lines, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.compose import CONF_DIR, compose
from launcher.errors import UserError

# An excerpt of NeMo-Framework-Launcher's file.
NEMO = """\
defaults:
  - _self_
  - cluster: bcm
  - data_preparation: gpt3/download_gpt3_pile
  - quality_filtering: heuristic/english
  - training: gpt3/126m
  - conversion: gpt3/convert_gpt3
  - fine_tuning: null
  - export: gpt3/export_gpt3
  - override hydra/job_logging: stdout

hydra:
  output_subdir: null

debug: False
stages: [training]
cluster_type: bcm
launcher_scripts_path: /fsx
data_dir: ${launcher_scripts_path}/data
base_results_dir: ${launcher_scripts_path}/results
container_mounts: [null]
container: null
env_vars: {}
export_config: ${hydra:runtime.choices.export}
"""


def messages_of(text: str, directory: Path, *overrides: str) -> list[str]:
    (directory / "config.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        compose(overrides, (directory,))
    return [str(mistake) for mistake in caught.value.mistakes]


def test_root_file_of_the_nemo_launcher_is_reported_by_line(tmp_path: Path) -> None:
    *messages, missing = messages_of(NEMO, tmp_path)
    file = tmp_path / "config.yaml"
    curator = "  NVIDIA's NeMo Curator does it; slipway data prepare cleans text and removes duplicates"
    export = "  conversion=huggingface makes what TensorRT-LLM and vLLM read"
    assert messages == [
        f"quality_filtering=heuristic/english: there is no such group\n  from {file}:5\n{curator}",
        f"export=gpt3/export_gpt3: there is no such group\n  from {file}:9\n{export}",
        f"export_config: there is no such key\n  from {file}:24\n{export}",
    ]
    assert missing.startswith(f"{file}: evaluation, workspace, command, images_dir, engine, nemo_path, ")
    assert missing.endswith("conf/config.yaml; to build on that: defaults: [config, _self_]")


def test_unknown_group_is_named_with_its_line(tmp_path: Path) -> None:
    ours = (CONF_DIR / "config.yaml").read_text()
    text = ours.replace("  - _self_\n", "  - export: gpt3/export_gpt3\n  - _self_\n")
    (message,) = messages_of(text, tmp_path)
    assert message.startswith("export=gpt3/export_gpt3: there is no such group\n  from ")
    line = text.splitlines().index("  - export: gpt3/export_gpt3") + 1
    assert f"{tmp_path}/config.yaml:{line}\n" in message


def test_similar_group_is_suggested(tmp_path: Path) -> None:
    ours = (CONF_DIR / "config.yaml").read_text()
    messages = messages_of(ours.replace("- training: gpt3/126m", "- trainings: gpt3/126m"), tmp_path)
    assert "trainings=gpt3/126m: there is no such group" in messages[0]
    assert "did you mean 'training'?" in messages[0]


@pytest.mark.parametrize("line", ["override hydra/job_logging: disabled", "override /hydra/launcher: basic"])
def test_copy_of_ours_may_choose_files_of_hydras(line: str, tmp_path: Path) -> None:
    ours = (CONF_DIR / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(ours.replace("  - _self_\n", f"  - _self_\n  - {line}\n"))
    overrides = ["base_results_dir=/results"]
    assert compose(overrides, (tmp_path,)).config == compose(overrides).config


def test_file_of_a_group_may_not_choose_files_of_hydras(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    text = "defaults:\n  - gpt3/126m\n  - override /hydra/job_logging@hydra.job_logging: disabled\n"
    (tmp_path / "training/mine.yaml").write_text(text)
    with pytest.raises(UserError, match=r"Did you mean to override hydra/job_logging\?"):
        compose(["training=mine", "base_results_dir=/results"], (tmp_path,))


def test_copy_of_the_shipped_file_composes_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((CONF_DIR / "config.yaml").read_text())
    assert compose([], (tmp_path,)).config == compose([]).config


def test_other_mistakes_are_reported_as_usual(tmp_path: Path) -> None:
    messages = messages_of((CONF_DIR / "config.yaml").read_text(), tmp_path, "cluster.partion=x")
    assert messages[0].startswith("cluster.partion=x: there is no such key")

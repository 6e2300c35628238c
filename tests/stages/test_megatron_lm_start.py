"""templates/megatron_lm.py: it finds Megatron-LM's script, and gives it what its release takes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from launcher.rendering.render import TEMPLATE_DIR

START = TEMPLATE_DIR / "megatron_lm.py"

# Options by which the releases differ, and where T5's script is.
RELEASES = {
    "core_v0.12.3": (["--encoder-pipeline-model-parallel-size"], "pretrain_t5.py"),
    "core_v0.16.1": (["--legacy-tokenizer"], "pretrain_t5.py"),
    "core_v0.18.0": ([], "examples/t5/pretrain_t5.py"),
}


def load_start() -> ModuleType:
    """Import the file that a launch copies."""
    spec = importlib.util.spec_from_file_location("megatron_lm_start", START)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checkout(root: Path, release: str) -> Path:
    """Write the parts of a release that matter here."""
    options, script = RELEASES[release]
    parser = root / "megatron" / "training" / "arguments.py"
    parser.parent.mkdir(parents=True)
    parser.write_text("".join(f"    group.add_argument('{option}',\n" for option in options))
    for name in ("pretrain_gpt.py", script):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import sys\nprint(sys.argv)\n")
    return root


@pytest.mark.parametrize("release", RELEASES)
def test_the_script_is_where_the_release_has_it(release: str, tmp_path: Path) -> None:
    root = checkout(tmp_path, release)
    for model_type, script in (("gpt", "pretrain_gpt.py"), ("t5", RELEASES[release][1])):
        command = load_start().command(root, model_type, ["--bf16"])
        assert command == [sys.executable, "-u", str(root / script), "--bf16"]


@pytest.mark.parametrize("release", RELEASES)
def test_files_of_a_vocabulary_are_read_where_the_release_would_ask_a_hub(
    release: str, tmp_path: Path
) -> None:
    options = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "/d/vocab.json"]
    command = load_start().command(checkout(tmp_path, release), "gpt", options)
    assert ("--legacy-tokenizer" in command) is (release == "core_v0.16.1")


def test_a_pipelined_t5_is_refused_by_a_release_without(tmp_path: Path) -> None:
    options = ["--encoder-pipeline-model-parallel-size", "1"]
    with pytest.raises(SystemExit) as caught:
        load_start().command(checkout(tmp_path / "new", "core_v0.16.1"), "t5", options)
    assert "training.model.pipeline_model_parallel_size=1" in str(caught.value)
    assert load_start().command(checkout(tmp_path / "old", "core_v0.12.3"), "t5", options)[3:] == options


def test_the_process_becomes_the_script(tmp_path: Path) -> None:
    command = [sys.executable, START, checkout(tmp_path, "core_v0.16.1"), "gpt", "--log-interval", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str([str(tmp_path / "pretrain_gpt.py"), "--log-interval", "1"])


def test_a_directory_without_the_script_is_explained(tmp_path: Path) -> None:
    command = [sys.executable, START, tmp_path, "bert"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    places = f"{tmp_path}/pretrain_bert.py and no {tmp_path}/examples/bert/pretrain_bert.py"
    assert done.stderr == f"megatron_lm_path={tmp_path}: there is no {places}\n"

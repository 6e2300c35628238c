"""An interpreter that lacks the libraries of a training."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.common.errors import UserError
from slipway.common.sections import LmEval
from slipway.trainer.evaluation.harness import Tasks
from tests.trainer.conftest import free_port

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.trainer


def run(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a module in an interpreter that sees no installed library but those of PYTHONPATH."""
    return subprocess.run(
        [sys.executable, "-S", "-m", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def check_one_line(result: subprocess.CompletedProcess[str], lacks: str, extra: str = "train") -> None:
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {sys.executable} lacks {lacks}: ")
    assert f"[{extra}]" in line
    assert "cluster.python=" in line


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """Return a directory with links to all installed libraries, for a test to take some away."""
    directory = tmp_path / "installed"
    directory.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        (directory / entry.name).symlink_to(entry)
    return directory


def test_a_bare_interpreter_cannot_train_and_says_what_it_lacks() -> None:
    result = run(["slipway.trainer.pretrain", "--config-path", "/absent", "--config-name", "x"])
    check_one_line(result, "torch, megatron-core, numpy, psutil, pyyaml")


def test_a_bare_interpreter_cannot_tokenize_and_says_what_it_lacks() -> None:
    result = run(["slipway.corpus", "run", "--config-path", "/absent", "--config-name", "x"])
    check_one_line(result, "numpy, pyyaml, tokenizers", extra="data")


def test_help_needs_no_library() -> None:
    for module in ("slipway.trainer.pretrain", "slipway.corpus"):
        assert run([module, "--help"]).returncode == 0


def test_missing_library_is_reported_before_the_training(libraries: Path) -> None:
    """The start reports it, not the first checkpoint that needs it."""
    (libraries / "psutil").unlink()
    arguments = ["slipway.trainer.pretrain", "--config-path", "/absent", "--config-name", "x"]
    check_one_line(run(arguments, PYTHONPATH=str(libraries)), "psutil")


def test_tensorboard_is_needed_only_for_its_logger(
    configuration: Any, libraries: Path, tmp_path: Path
) -> None:
    (libraries / "tensorboard").unlink()
    logger = "exp_manager.create_tensorboard_logger"
    changes = {
        "exp_manager.explicit_log_dir": str(tmp_path / "log"),
        "exp_manager.create_checkpoint_callback": False,
        "model.data.data_impl": "mock",
        "trainer.limit_val_batches": 0,
        "trainer.max_steps": 1,
    }
    for name, logger_keys in (("with", {}), ("without", {logger: False})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(configuration({**changes, **logger_keys})))
    arguments = ["slipway.trainer.pretrain", "--config-path", str(tmp_path), "--config-name"]
    result = run([*arguments, "with"], PYTHONPATH=str(libraries))
    check_one_line(result, "tensorboard")
    assert f"{logger}=False" in result.stderr
    result = run([*arguments, "without"], PYTHONPATH=str(libraries), MASTER_PORT=str(free_port()))
    assert result.returncode == 0, result.stderr


def test_a_module_of_ours_that_is_missing_is_a_bug(tmp_path: Path, libraries: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (path for path in (REPOSITORY / "slipway").rglob("*.*") if path.suffix in (".py", ".json")):
        target = copy / path.relative_to(REPOSITORY)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    (copy / "slipway" / "trainer" / "config" / "check.py").unlink()
    command = [
        sys.executable,
        "-m",
        "slipway.trainer.pretrain",
        "--config-path",
        "/absent",
        "--config-name",
        "x",
    ]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "No module named 'slipway.trainer.config.check'" in result.stderr
    assert "Traceback" in result.stderr


def test_a_missing_library_of_lm_eval_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    message = r"lacks lm_eval: install them there \(.* -m pip install -e .*\[evaluation\]"
    with pytest.raises(UserError, match=message):
        Tasks(LmEval(["hellaswag"]))

"""`slipway render`: the files of the next launch, as a launch writes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.cli.app import main
from launcher.errors import UserError

Capsys = pytest.CaptureFixture[str]

# The job does nothing: the tests look at its files.
LOCAL = [
    "cluster=local",
    "cluster.python=/bin/true",
    "training=gpt3/tiny",
    "training.model.data.data_impl=mock",
]


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_rendered_script_is_the_one_that_a_launch_writes(cwd: Path, capsys: Capsys) -> None:
    assert main(["launch", *LOCAL]) == 0
    launch = cwd / "results/gpt3_tiny/launches/1"
    tag = (launch / "launcher_cmd.log").read_text().strip().rpartition("--tag=")[2]
    replay = ["--launch-number=1", f"--tag={tag}"]
    written = {
        "--config": "gpt3_tiny_hydra.yaml",
        "--task": "task.sh",
        None: "nemo-megatron-gpt3_tiny_submission.sh",
    }
    for option, name in written.items():
        capsys.readouterr()
        assert main(["render", *LOCAL, *replay, *([option] if option else [])]) == 0
        assert capsys.readouterr().out == (launch / name).read_text()
    assert [path.name for path in launch.parent.iterdir()] == ["1"]


def test_the_script_is_that_of_a_dry_run(cwd: Path, capsys: Capsys) -> None:
    words = ["training=gpt3/126m", "--tag=t"]
    assert main(["launch", *words, "--dry-run"]) == main(["render", *words]) == 0
    out = capsys.readouterr().out
    assert out[: len(out) // 2] == out[len(out) // 2 :]
    assert list(cwd.iterdir()) == []


def test_the_configuration_of_a_data_preparation_is_printed(capsys: Capsys) -> None:
    words = ["stages=[data_preparation]", "data_preparation.inputs=[/x]", "cluster=local"]
    assert main(["render", *words]) == 0
    assert "    slipway.corpus \\\n    run \\\n" in capsys.readouterr().out
    assert main(["render", *words, "--config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data_preparation"]["inputs"] == ["/x"]


def test_only_one_file_is_rendered_at_a_time() -> None:
    with pytest.raises((SystemExit, UserError)):
        main(["render", "--task", "--config"])


MODULES = """
import sys
from launcher.cli.app import main
code = main(sys.argv[1:])
print(*sorted({name.removeprefix("slipway.").partition(".")[0] for name in sys.modules}), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("verb", ["render", "show", "list"])
def test_in_a_pipe_no_verb_imports_rich_or_submitit(verb: str) -> None:
    done = subprocess.run([sys.executable, "-c", MODULES, verb], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"rich", "submitit", "torch", "trainer", "numpy"} & set(done.stderr.split())

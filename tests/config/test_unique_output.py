"""A results directory for each launch: `unique_output_dir`, and the variable that wrappers set."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.app import main
from launcher.config.compose import CONF_DIR, BatchComposer, compose
from launcher.errors import UserError
from tests.integration.conftest import SLIPWAY, run_command

STAMP = r"\d{8}-\d{6}-\d{3}"


@pytest.mark.parametrize(
    ("variable", "overrides", "is_unique"),
    [
        (None, [], False),
        ("0", [], False),
        ("", [], False),
        ("1", [], True),
        ("true", [], True),
        ("1", ["unique_output_dir=false"], False),
        ("0", ["unique_output_dir=1"], True),
        (None, ["+unique_output_dir=True"], True),
    ],
)
def test_key_or_variable_makes_the_directory_unique(
    variable: str | None, overrides: list[str], is_unique: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNIQUE_OUTPUT_DIR", raising=False)
    if variable is not None:
        monkeypatch.setenv("UNIQUE_OUTPUT_DIR", variable)
    arguments = [*overrides, "base_results_dir=/r/results"]
    for config in (compose(arguments).config, BatchComposer(arguments[:-1]).compose(arguments[-1:]).config):
        assert config.unique_output_dir == is_unique
        assert re.fullmatch(f"/r/results-{STAMP}" if is_unique else "/r/results", config.base_results_dir)
        assert config.training is not None
        assert config.training.run.results_dir == f"{config.base_results_dir}/gpt3_126m"


def test_compositions_of_one_process_share_a_directory() -> None:
    assert len({compose(["unique_output_dir=true"]).config.base_results_dir for _ in range(2)}) == 1


def test_stamped_directory_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper may stamp the directory itself, and a launch is rendered again into it."""
    monkeypatch.setenv("UNIQUE_OUTPUT_DIR", "1")
    for stamped in (
        "/r/results-20251122-123325",
        "/r/results-20251122-123325-001",
        "/r/x-20251122-123325utc-7",
    ):
        assert compose([f"base_results_dir={stamped}"]).config.base_results_dir == stamped


@pytest.mark.parametrize("value", ["maybe", "2"])
def test_another_value_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIQUE_OUTPUT_DIR", value)
    with pytest.raises(
        UserError, match=f"unique_output_dir='{value}': expected true .* UNIQUE_OUTPUT_DIR decides"
    ):
        compose([])


def test_variable_works_with_a_root_file_older_than_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = (CONF_DIR / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(re.sub("unique_output_dir: .*\n", "", root))
    monkeypatch.setenv("UNIQUE_OUTPUT_DIR", "1")
    assert re.search(f"/results-{STAMP}$", compose([], (tmp_path,)).config.base_results_dir)


VERBS = [
    [SLIPWAY, "launch", "--dry-run"],
    [sys.executable, "@repository/launcher/main.py", "--dry-run"],
    [SLIPWAY, "render"],
    [SLIPWAY, "launch", "--dry-run", "resilience.links=3"],
    [SLIPWAY, "launch", "--dry-run", "stages=[data_preparation,training]", "data_preparation.inputs=[/x]"],
    [SLIPWAY, "sweep", "--dry-run", "training.model.optim.lr=1e-4,3e-4"],
]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(map(str, verb[1:]))[-40:])
@pytest.mark.parametrize("by_key", [True, False], ids=["key", "variable"])
def test_every_launching_verb_stamps_the_directory(
    verb: list[str], by_key: bool, repository: Path, tmp_path: Path
) -> None:
    command = [str(word).replace("@repository", str(repository)) for word in verb]
    overrides = ["unique_output_dir=true"] if by_key else []
    variables = {} if by_key else {"UNIQUE_OUTPUT_DIR": "1"}
    done = run_command(*command, *overrides, "cluster=bcm", cwd=tmp_path, **variables)
    stamps = set(re.findall(rf"{re.escape(str(tmp_path))}/results-({STAMP})/", done.stdout))
    assert len(stamps) == 1, done.stdout
    assert f"{tmp_path}/results/" not in done.stdout


def test_launch_is_found_in_its_stamped_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = [
        "cluster=local",
        "training=gpt3/tiny",
        "cluster.python=/bin/true",
        "--no-check=space.checkpoints",
    ]
    mock = "training.model.data.data_impl=mock"
    done = run_command(SLIPWAY, "launch", *local, mock, cwd=tmp_path, UNIQUE_OUTPUT_DIR="1")
    (results,) = tmp_path.glob("results-*")
    assert f"{results.name}/gpt3_tiny" in done.stdout
    assert (results / "gpt3_tiny/launches/1/launcher.json").is_file()
    monkeypatch.chdir(tmp_path)
    assert main(["status", "gpt3_tiny"]) == 0
    script = next((results / "gpt3_tiny").glob("*_submission.sh")).read_text()
    assert str(results) in script
    subprocess.run(["bash", "-n", next((results / "gpt3_tiny").glob("*_submission.sh"))], check=True)

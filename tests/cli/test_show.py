"""`slipway show`: the composed tree, and the source of each value."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import yaml

from launcher.cli.app import main
from launcher.config import sources
from launcher.config.compose import CONF_DIR, compose

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def show(capsys: Capsys, *words: str, check: int = 0) -> str:
    assert main(["show", *words]) == check
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [[], ["training=gpt3/5b", "cluster=local"], ["+training.model.x='a: b #c'"]]
)
def test_printed_text_is_the_configuration(capsys: Capsys, words: list[str]) -> None:
    text = show(capsys, *words)
    assert yaml.safe_load(text) == compose(words).config.model_dump(exclude_unset=True)
    assert "\x1b" not in text
    assert "data_preparation" not in text, "a stage that was not asked for"


def test_sampled_keys_name_the_file_that_holds_them(capsys: Capsys) -> None:
    """The named line sets the key, in a file of these choices."""
    items = json.loads(show(capsys, "--json", "training=gpt3/5b", "cluster=bcm"))
    of_files = [item for item in items if re.search(r"\.yaml:\d+$", item["source"] or "")]
    assert len(of_files) == len(items)
    for item in random.Random(5).sample(of_files, 20):
        path, _, line = item["source"].rpartition(":")
        text = Path(path).read_text().splitlines()[int(line) - 1]
        # A value that refers to another key has that key's source.
        assert text.split(":")[0].strip() == item["key"].rpartition(".")[2] or item["key"].count(".") == 0, (
            item
        )
        assert Path(path).is_relative_to(CONF_DIR)


def test_the_file_that_decides_is_named(capsys: Capsys, cwd: Path) -> None:
    (cwd / "conf/cluster").mkdir(parents=True)
    (cwd / "conf/cluster/ours.yaml").write_text("defaults: [bcm, _self_]\n\npartition: p5\n")
    words = ["--config-dir=conf", "cluster=ours", "training.trainer.num_nodes=3", "env_vars.A=1"]
    items = {item["key"]: item for item in json.loads(show(capsys, "--json", *words))}
    assert items["cluster.partition"]["source"] == "conf/cluster/ours.yaml:3"
    assert items["cluster.gpus_per_node"]["source"].startswith(str(CONF_DIR / "cluster/bcm.yaml:"))
    assert items["training.trainer.num_nodes"] == {
        "key": "training.trainer.num_nodes",
        "value": 3,
        "source": "the command line: training.trainer.num_nodes=3",
    }
    assert items["env_vars.A"]["value"] == "1"
    assert items["training.model.num_layers"]["source"].startswith(str(CONF_DIR / "training/gpt3/126m.yaml:"))


def test_keys_select_parts_of_the_tree(capsys: Capsys) -> None:
    text = show(capsys, "cluster.mem", "training.trainer", "training.trainer.num_nodes=7", "env_vars")
    tree = yaml.safe_load(text)
    assert set(tree) == {"cluster", "training", "env_vars"}
    assert (tree["cluster"], set(tree["training"])) == ({"mem": "0"}, {"trainer"})
    assert re.search(r"^    num_nodes: 7 +# from the command line: training.trainer.num_nodes=7$", text, re.M)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("training.modle", "did you mean 'training.model'"),
        ("num_nodes", "did you mean 'training.trainer.num_nodes'"),
        ("cluster.mem.x", "there is no such key"),
        ("run.model_type", "did you mean 'training.run.model_type'"),
        ("training.model.hidden_siz", "did you mean 'training.model.hidden_size'"),
        # A key that this model does not have, and that resembles others by chance.
        ("training.model.normalization", "slipway show ... training.model shows those that are there"),
        ("nope", "valid: stages, "),
    ],
)
def test_an_unknown_key_is_refused(capsys: Capsys, key: str, hint: str) -> None:
    assert main(["show", key]) == 2
    output = capsys.readouterr()
    assert (output.out, hint in output.err) == ("", True), output.err


def test_all_unknown_keys_are_named(capsys: Capsys) -> None:
    assert main(["show", "training.modle", "cluster.mem", "clustre.mem"]) == 2
    message = capsys.readouterr().err
    assert "training.modle: there is no such key" in message
    assert "clustre.mem: there is no such key" in message
    assert "cluster.mem:" not in message


def test_odd_values_stay_in_one_line(capsys: Capsys) -> None:
    text = show(capsys, "+training.model.odd={a: {}, b: [], c: null, d: '', e: '# x'}", "training.model.odd")
    expected = {"a": {}, "b": [], "c": None, "d": "", "e": "# x"}
    assert yaml.safe_load(text)["training"]["model"]["odd"] == expected
    assert len(text.splitlines()) == 3 + len(expected)


def test_each_file_is_parsed_once(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of keys to locate does not matter."""
    parsed: list[str] = []
    compose_yaml = yaml.compose

    def counting(text: str) -> object:
        parsed.append(text)
        return compose_yaml(text)

    monkeypatch.setattr(sources.yaml, "compose", counting)
    show(capsys)
    assert len(parsed) == len(set(parsed)) < 12


@pytest.mark.parametrize(
    ("stage", "key", "file"),
    [
        ("command", "argv", "command/default.yaml"),
        ("data_preparation", "inputs", "data_preparation/_base.yaml"),
    ],
)
def test_a_value_that_a_launch_needs_is_shown_as_missing(
    capsys: Capsys, stage: str, key: str, file: str
) -> None:
    assert main(["show", f"stages=[{stage}]", stage]) == 0
    assert re.search(rf"^  {key}: \?\?\? +# from .*{file}:\d+$", capsys.readouterr().out, re.MULTILINE)
    assert main(["render", f"stages=[{stage}]"]) == 2
    assert f"{stage}.{key}=???: a value is needed" in capsys.readouterr().err

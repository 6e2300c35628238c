"""Several trees: of the command line, of the variable, of the machine; files that build on each other."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from launcher.cli.app import VerbParser, _accept_trees, add_verbs, main
from launcher.cli.completion import candidates
from launcher.config import site_trees
from launcher.config.compose import CONF_DIR, compose
from launcher.config.site_trees import VARIABLE, find_config_dirs
from launcher.errors import UserError

Capsys = pytest.CaptureFixture[str]
Tree = Callable[[str, dict[str, str]], Path]

ON_OURS = "defaults:\n  - config\n  - _self_\n"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(site_trees, "MACHINE_TREE", tmp_path / "etc")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    def write(name: str, files: dict[str, str]) -> Path:
        for file, text in files.items():
            path = tmp_path / name / f"{file}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / name

    return write


@pytest.fixture
def site(tree: Tree) -> Path:
    root = f"{ON_OURS}  - override cluster: ours\nimages_dir: /shared/images\n"
    cluster = "defaults: [bcm, _self_]\naccount: ml\n"
    return tree("site", {"config": root, "cluster/ours": cluster, "cluster/bcm": f"{cluster}qos: long\n"})


def test_a_root_file_of_a_few_lines_builds_on_ours(site: Path) -> None:
    composition = compose([], (site,))
    assert composition.choices["cluster"] == "ours"
    assert composition.config.images_dir == "/shared/images"
    assert composition.config.cluster.qos == "long"
    assert composition.config.resilience.links == 1
    assert compose(["cluster=local", "stages=[training,conversion]"], (site,)).config.cluster.account is None


def test_a_file_builds_on_the_one_that_it_hides_in_the_trees_behind(site: Path, tree: Tree) -> None:
    sizes = ("defaults: [126m, _self_]", "defaults: [/training/gpt3/126m@_here_, _self_]")
    for number, size in enumerate(sizes):
        files = {
            "config": f"{ON_OURS}data_dir: /data\n",
            "cluster/ours": "defaults: [ours, _self_]\npartition: mine\n",
            "training/gpt3/126m": f"{size}\nmodel: {{num_layers: 2}}\n",
        }
        config = compose([], (tree(f"user{number}", files), site)).config
        assert (config.data_dir, config.images_dir) == ("/data", "/shared/images")
        cluster, training = config.cluster, config.training
        assert (cluster.partition, cluster.account, cluster.qos) == ("mine", "ml", "long")
        assert training is not None
        assert training.model["num_layers"] == 2
        assert training.model["hidden_size"] == 768


def test_mistakes_in_root_files_behind_the_first_are_found(site: Path, tree: Tree) -> None:
    user = tree("user", {"config": f"{ON_OURS}"})
    (site / "config.yaml").write_text(f"{ON_OURS}engin: nemo\n")
    with pytest.raises(UserError, match="engin: there is no such key"):
        compose([], (user, site))
    (site / "config.yaml").write_text("engine: nemo\n")
    with pytest.raises(UserError, match="missing") as error:
        compose([], (user, site))
    assert "defaults: [config, _self_]" in str(error.value)


def test_the_order_of_the_trees(tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    names = ("first", "second", "of_variable", "also", "etc")
    for number, name in enumerate(names):
        # Each tree has the files of those behind it too.
        text = f"defaults: [bcm, _self_]\ncomment: {name}\n"
        tree(name, {f"cluster/{below}": text for below in names[number:]})
    monkeypatch.setenv(VARIABLE, f"{Path.cwd()}/of_variable::{Path.cwd()}/also")
    words = ["show", "--config-dir", "first", "--config-dir=second"]
    for name in names:
        assert main([*words, "cluster=etc", "cluster.comment"]) == 0
        out = capsys.readouterr().out
        assert yaml.safe_load(out)["cluster"]["comment"] == name
        Path(name, "cluster/etc.yaml").unlink()
    assert f"trees (earlier ones win): first, second, of_variable, also, etc, {CONF_DIR}" in out


def test_a_wrapper_may_put_its_tree_in_front_of_every_verb(site: Path, tree: Tree, capsys: Capsys) -> None:
    own = tree("own", {"cluster/ours": "defaults: [bcm, _self_]\naccount: own\n"})
    front = [f"--config-dir={site}", "--config-dir", str(site)]
    assert main([*front, "show", "cluster.account"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["cluster"]["account"] == "ml"
    assert main([*front, "show", "cluster.account", "--config-dir", str(own)]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["cluster"]["account"] == "own"
    assert main([*front, "status"]) == 0
    assert main([*front, "completion", "bash"]) == 0


def test_every_verb_takes_a_tree() -> None:
    parser = VerbParser(prog="slipway")
    add_verbs(parser.add_subparsers())
    _accept_trees(parser)
    parsers = [parser]
    for each in parsers:
        assert "--config-dir" in each._option_string_actions, each.prog
        groups = [
            action.choices for action in each._actions if isinstance(action, argparse._SubParsersAction)
        ]
        parsers += [below for group in groups for below in group.values()]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("conf", "SLIPWAY_CONFIG_PATH: conf: not a whole path"),
        ("/no/such", "SLIPWAY_CONFIG_PATH /no/such: no such"),
    ],
)
def test_a_wrong_variable_is_refused(
    value: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert main(["show", "stages"]) == 2
    assert message in capsys.readouterr().err
    assert main(["status"]) == 0  # reads no tree


def test_a_directory_below_the_home_need_not_be_there(monkeypatch: pytest.MonkeyPatch, site: Path) -> None:
    monkeypatch.setenv("HOME", str(site.parent))
    monkeypatch.setenv(VARIABLE, f"{site.parent}/nothing:{site}")
    assert find_config_dirs([]) == (site,)
    assert find_config_dirs([site]) == (site,)


def test_a_tree_that_others_may_write_is_told(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, str(site))
    site.parent.chmod(0o755)
    find_config_dirs([])
    assert not caplog.messages
    for path in (site, site / "cluster", site / "cluster/ours.yaml"):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        find_config_dirs([])
        assert f"everybody may write {path}, a part of" in caplog.messages.pop()
        caplog.clear()
        path.chmod(mode)
    (site / "nowhere.yaml").symlink_to("nothing")
    find_config_dirs([site])  # the user's own choice
    assert not caplog.messages


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_tree_of_somebody_else_is_told(site: Path) -> None:
    os.chown(site / "config.yaml", 65534, 65534)
    assert site_trees.why_open(site) == f"{site}/config.yaml belongs to nobody"


def test_completion_knows_the_trees(site: Path, tree: Tree) -> None:
    user = tree("user", {"config": ON_OURS, "cluster/ours": "defaults: [ours, _self_]\nmine: {here: 1}\n"})
    assert "cluster=ours" in candidates("cluster=", [], [site, CONF_DIR])
    assert candidates("cluster.mine", [], [user, site, CONF_DIR]) == ["cluster.mine."]
    assert candidates("cluster.par", [], [user, site, CONF_DIR]) == ["cluster.partition="]


def test_completion_reads_the_variable(site: Path) -> None:
    words = [sys.executable, "-m", "launcher.cli.app", "completion", "words", "overrides", "cluster=ou"]
    environment = {**os.environ, VARIABLE: str(site)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "cluster=ours\n"


def test_init_builds_on_the_site(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    assert main(["init", "typed", "--config-dir", "site"]) == 0
    assert f'--config-dir "$here/conf" --config-dir {site} ' in Path("typed/launch.sh").read_text()
    monkeypatch.setenv(VARIABLE, str(site))
    assert main(["init", "mine"]) == 0
    assert f"They build on site, and on Slipway's own: {CONF_DIR}" in capsys.readouterr().out
    assert "--config-dir /" not in Path("mine/launch.sh").read_text()
    cluster = compose(["cluster=mine", "training=gpt3/mine"], (Path("mine/conf"), site)).config.cluster
    assert cluster.account == "ml"

"""The GPUs of a node, set once: tasks, ``gres`` and the world follow, unless the user sets them too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.config.compose import BatchComposer, compose
from launcher.config.stored import config_text
from launcher.drafting import Draft, Request, draft
from launcher.errors import UserError

DEVICES = "training.trainer.devices"
GPUS = "cluster.gpus_per_node"


def draft_launch(*overrides: str, config_dirs: tuple[Path, ...] = ()) -> Draft:
    return draft(Request(list(overrides), ["slipway", "launch"], config_dirs=config_dirs))


def layout(draft: Draft) -> tuple[int | None, str | None, int, Any]:
    """Return the GPUs of a node, gres, tasks of a node, and the devices that the trainer reads."""
    cluster, resources = draft.composition.config.cluster, draft.plan.job.resources
    assert draft.plan.job.config is not None
    devices = yaml.safe_load(config_text(draft.plan.job.config))["trainer"]["devices"]
    return cluster.gpus_per_node, cluster.gres, resources.tasks_per_node, devices


def tree(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        path = tmp_path / "conf" / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "conf"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (8, "gpu:8", 8, 8)),
        ([f"{GPUS}=4"], (4, "gpu:4", 4, 4)),
        ([f"++{GPUS}=4"], (4, "gpu:4", 4, 4)),
        ([f"{GPUS}=2", f"{GPUS}=4"], (4, "gpu:4", 4, 4)),
        ([f"{GPUS}=4", "training=gpt3/tiny"], (4, "gpu:4", 4, 4)),
        ([f"{GPUS}=1", "training=gpt3/tiny", "cluster=sandbox"], (1, None, 1, 1)),
        ([f"{GPUS}=4", "cluster=p5"], (4, "gpu:4", 4, 4)),
        ([f"{GPUS}=4", "cluster=local"], (4, None, 4, 4)),
        ([f"{GPUS}=4", "cluster.gpu_request=gres"], (4, "gpu:4", 4, 4)),
        (["cluster=sandbox"], (2, None, 2, 2)),
        (["cluster=local"], (None, None, 8, 8)),
        ([f"{GPUS}=null"], (None, "gpu:8", 8, 8)),
        ([f"{GPUS}=null", "cluster.gres=gpu:a100:4"], (None, "gpu:a100:4", 4, 4)),
        # Set in both places: both stay as they are.
        ([f"{GPUS}=8", f"{DEVICES}=4"], (8, "gpu:8", 4, 4)),
        ([f"{DEVICES}=4"], (8, "gpu:8", 4, 4)),
        (["training.trainer={devices: 4}"], (8, "gpu:8", 4, 4)),
        ([f"{GPUS}=4", "cluster.gres=gpu:a100:4"], (4, "gpu:a100:4", 4, 4)),
    ],
    ids=str,
)
def test_gpus_of_a_node_are_set_in_one_place(overrides: list[str], expected: tuple[Any, ...]) -> None:
    assert layout(draft_launch(*overrides)) == expected
    assert BatchComposer([]).compose(overrides) == compose(overrides)
    # The overrides of a point, after those that all points share.
    assert BatchComposer(overrides[:1]).compose(overrides[1:]) == compose(overrides)


def test_gpus_of_a_users_own_cluster_are_enough(tmp_path: Path) -> None:
    mine = "defaults: [bcm, _self_]\ngpus_per_node: 4\n"
    assert layout(draft_launch("cluster=mine", config_dirs=(tree(tmp_path, cluster__mine=mine),))) == (
        4,
        "gpu:4",
        4,
        4,
    )
    typed = "defaults: [_base, _self_]\nengine: nemo\ncontainer: x/y:1\ngres: gpu:a100:4\n"
    conf = tree(tmp_path, cluster__typed=typed)
    assert layout(draft_launch("cluster=typed", config_dirs=(conf,))) == (None, "gpu:a100:4", 4, 4)


def test_a_tree_that_writes_the_numbers_follows_the_command_line(tmp_path: Path) -> None:
    conf = tree(
        tmp_path,
        cluster__mine="defaults: [bcm, _self_]\ngpus_per_node: 8\ngres: gpu:a100:8\n",
        training__mine="defaults: ['/training/gpt3/126m@_here_', _self_]\ntrainer:\n  devices: 8\n",
    )
    chosen = ("cluster=mine", "training=mine")
    assert layout(draft_launch(*chosen, config_dirs=(conf,))) == (8, "gpu:a100:8", 8, 8)
    assert layout(draft_launch(*chosen, f"{GPUS}=4", config_dirs=(conf,))) == (4, "gpu:a100:4", 4, 4)


def test_the_script_asks_for_as_many_tasks_as_gpus() -> None:
    script = draft_launch(f"{GPUS}=4", "training.trainer.num_nodes=2").script
    assert "#SBATCH --gpus-per-node=4\n" in script
    assert "#SBATCH --ntasks-per-node=4\n" in script


def test_source_of_a_derived_value_is_the_typed_override() -> None:
    sources = compose([f"{GPUS}=4"]).sources()
    for key in (GPUS, DEVICES, "cluster.gres"):
        assert sources.locate(key) == f"from the command line: {GPUS}=4"
    assert re.search(r"_common\.yaml:\d+$", str(compose([]).sources().locate(DEVICES)))


def test_all_contradictions_are_reported_together() -> None:
    with pytest.raises(UserError) as raised:
        draft_launch(f"{GPUS}=4", "cluster.gres=gpu:8", f"{DEVICES}=8")
    gres, tasks = raised.value.mistakes
    assert "cluster.gres='gpu:8' and cluster.gpus_per_node=4 contradict each other" in str(gres)
    assert f"{DEVICES}=8 and cluster.gpus_per_node=4 contradict each other" in str(tasks)
    for mistake in (gres, tasks):
        assert f"{GPUS}=4" in str(mistake.source)
    assert tasks.hint == f"{DEVICES}=4"


@pytest.mark.parametrize("value", ["-1", "four", "0", "[4]", "True"])
def test_invalid_number_of_gpus_is_reported_by_its_key(value: str) -> None:
    try:
        composition = compose([f"{GPUS}={value}"])
    except UserError as error:
        assert all(mistake.key == GPUS for mistake in error.mistakes), error
    else:
        assert value == "0"
        assert composition.config.training is not None
        assert composition.config.training.trainer["devices"] == 8

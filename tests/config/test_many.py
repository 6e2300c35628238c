"""The batch composer composes as Hydra does: the same configurations, and the same mistakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from launcher.config.compose import BatchComposer, Composition, compose
from launcher.config.stored import stored_text
from launcher.errors import UserError

pytestmark = pytest.mark.usefixtures("composed_anew")

BASE = ["training=gpt3/tiny", "base_results_dir=/nowhere/results"]

# Overrides of every kind, for any mix: other keys refer to some, and some are mistakes only beside others.
OVERRIDES = [
    # groups
    "training=gpt3/126m",
    "training=gpt3/5b",
    "cluster=bcm",
    "cluster=local",
    "cluster=sandbox",
    "stages=[training]",
    "stages=[data_preparation]",
    # values
    "training.trainer.num_nodes=4",
    "training.model.optim.lr=1e-3",
    "training.model.optim.betas=[0.9,0.99]",
    "training.exp_manager.wandb_logger_kwargs={project: mine}",
    "training.model.data.data_prefix=[]",
    "training.model.data.data_prefix=[1.0,/d/a,2.0,'${data_dir}/b']",
    "training.model.data.data_prefix.0=/d/first",
    "training.model.rampup_batch_size=[16,16,1000]",
    "training.model.rampup_batch_size=null",
    "training.model.virtual_pipeline_model_parallel_size=null",
    "training.run.time_limit=null",
    "cluster.mem=64GB",
    "cluster.srun_args=[--a,--b c]",
    "container_mounts=[null,/a]",
    "data_preparation.inputs=[/x]",
    # values that others refer to, and references
    "training.run.name=other",
    "training.run.results_dir=/elsewhere/${training.run.name}",
    "training.model.hidden_size=512",
    "training.model.ffn_hidden_size=${training.model.hidden_size}",
    "training.model.tensor_model_parallel_size=4",
    "training.model.micro_batch_size=${multiply:${training.model.hidden_size}, 2}",
    "training.model.seed=${divide_ceil:${training.model.hidden_size},3}",
    "training.model.optim.sched=${training.model.data}",
    "training.model.optim.sched.min_lr=0",
    "training.model.tokenizer=${training.model.data}",
    "training.model.tokenizer.library=x",
    "training.exp_manager.name=${oc.env:HOME}",
    "training.exp_manager.exp_dir='a ${training.run.name} and ${cluster.gpus_per_node}'",
    r"training.exp_manager.name='\${data_dir}'",
    "launcher_scripts_path=/nowhere",
    "launcher_scripts_path=scripts",
    "data_dir=${base_results_dir}/data",
    "engine=megatron",
    "cluster.container=/apps/a.sqsh",
    "container=null",
    # variables
    "env_vars.A=1.10",
    "env_vars.A=null",
    "env_vars.NCCL_DEBUG=INFO",
    "env_vars={B: 2}",
    "+env_vars.C=a,b",
    # new keys, and deleted ones
    "+training.model.a=1",
    "+training.model.a.b=2",
    "+training.model.a={b: 3}",
    "++training.model.a.b.c=4",
    "++training.model.num_layers=8",
    "~training.exp_manager.log_step_timing",
    "~training.model.nsys_profile",
    "~training.model.data",
    "~env_vars.NCCL_DEBUG",
    # mistakes
    "training=gpt3/126b",
    "training.trainer.num_node=2",
    "training.trainer.num_nodes=two",
    "training.run.name=???",
    "data_dir=${nope}",
    "data_dir=${data_dir}",
    "training.trainer.num_nodes=1,2",
    "hydra.run.dir=/x",
    "+training.model.num_layers=3",
]


def compose_by_hydra(overrides: Sequence[str], config_dirs: tuple[Path, ...] = ()) -> Composition:
    return compose(overrides, config_dirs)


# Several compositions to an example: what one changes must not be left to the next.
SWEEP = BatchComposer(BASE)


def outcome(composition: Composition | UserError) -> object:
    """Return all that can be seen of a composition; its YAML tells 1 from 1.0 and from true."""
    return (
        str(composition)
        if isinstance(composition, UserError)
        else (composition, stored_text(composition.config, {}))
    )


def attempt(make: Callable[[Sequence[str]], Composition], overrides: Sequence[str]) -> object:
    try:
        return outcome(make(overrides))
    except UserError as error:
        return outcome(error)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(OVERRIDES), max_size=6))
def test_any_mix_is_composed_as_by_hydra(overrides: list[str]) -> None:
    assert attempt(SWEEP.compose, overrides) == attempt(compose_by_hydra, [*BASE, *overrides])


@pytest.mark.parametrize("override", OVERRIDES)
def test_each_override_is_composed_as_by_hydra(override: str) -> None:
    expected = attempt(compose_by_hydra, [*BASE, override])
    assert attempt(SWEEP.compose, [override]) == expected
    assert attempt(compose, [*BASE, override]) == expected


@pytest.mark.parametrize(
    "overrides",
    [
        ["+training.model.a=${training.model}"],
        ["training.trainer=${training}"],
        ["+training.model.a=[${training.model}]"],
        ["+training.model.a.b=${training.model.a}"],
        ["cluster.comment=${cluster}"],
        ["+training.model.a={x: ${training.model.b}}", "+training.model.b={y: ${training.model.a}}"],
    ],
)
def test_value_that_refers_to_its_own_parent_is_refused(overrides: list[str]) -> None:
    for compose_points in (compose, SWEEP.compose):
        with pytest.raises(UserError, match=r"it refers to itself|there is no key"):
            compose_points([*BASE, *overrides])


def test_circle_of_references_is_named() -> None:
    with pytest.raises(UserError) as caught:
        compose([*BASE, "+training.model.foo=${extra}", "+extra={a: '${training.model}'}"])
    assert str(caught.value).splitlines()[:4] == [
        "training.model.foo: it refers to itself, by way of extra.a",
        "  from the command line: +training.model.foo=${extra}",
        "  extra.a is from the command line: +extra={a: '${training.model}'}",
        "  give it a value",
    ]


def test_reference_to_a_mapping_that_refers_back_has_a_value() -> None:
    """Only what is referred to is resolved: this is no circle."""
    lazy = ["+training.model.x=${training.model.y.a}", "+training.model.y=${training.model.z}"]
    config = compose([*BASE, *lazy, "+training.model.z={a: 1, b: '${training.model.x}'}"]).config
    assert config.training is not None
    assert config.training.model["y"] == {"a": 1, "b": 1}


def test_hydra_composes_the_same_choices_once(monkeypatch: pytest.MonkeyPatch) -> None:
    composed, by_hydra = [], hydra.compose

    def compose_and_note(*arguments: Any, **options: Any) -> DictConfig:
        composed.append(arguments)
        return by_hydra(*arguments, **options)

    monkeypatch.setattr(hydra, "compose", compose_and_note)
    sweep = BatchComposer(["cluster=bcm"])
    for point in (["training=gpt3/5b"], ["training.trainer.num_nodes=3"], ["~training.model.nsys_profile"]):
        sweep.compose([*point, "+training.model.new=1", "training.run.name=x", "env_vars.A=1"])
    assert len(composed) == 2


def test_a_point_leaves_nothing_to_the_next() -> None:
    points = [["training.model.hidden_size=64", "+training.model.a=1"], ["~training.model.nsys_profile"], []]
    first, second, third = map(BatchComposer(BASE).compose, points)
    assert first.config.training and second.config.training and third.config.training
    assert first.config.training.model["ffn_hidden_size"] == 256
    assert "a" not in second.config.training.model
    assert third.config == compose(BASE).config
    third.config.training.model["optim"]["betas"].append(1)
    assert compose(BASE).config != third.config, "and a consumer may change what it was given"
    assert BatchComposer(BASE).compose([]).config == compose(BASE).config


def test_numbers_meant_as_text_are_read_as_written(tmp_path: Path) -> None:
    """This holds in files and overrides, and where other keys refer to them."""
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/ours.yaml").write_text(
        "defaults: [bcm, _self_]\npartition: 0022\nenv_vars: {A: 1.10, B: '${cluster.partition}'}\n"
    )
    points = [[f"training.model.seed={n}", f"env_vars.C=${{cluster.partition}}{n}"] for n in range(3)]
    sweep = BatchComposer([*BASE, "cluster=ours"], (tmp_path,))
    for point in [*points, ["cluster.partition=1e5"]]:
        assert outcome(sweep.compose(point)) == outcome(
            compose_by_hydra([*BASE, "cluster=ours", *point], (tmp_path,))
        )


def test_a_mistake_names_its_source() -> None:
    points = map(BatchComposer(BASE).compose, [[], ["cluster.mem=[1]"]])
    next(points)
    with pytest.raises(UserError, match=r"from the command line: cluster.mem=\[1\]"):
        next(points)


def test_tree_of_the_user_is_composed_as_by_hydra(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/ours.yaml").write_text("defaults: [bcm, _self_]\npartition: ${oc.env:USER,p5}x\n")
    points = [["cluster=ours"], ["cluster=bcm"], ["cluster=ours", "cluster.mem=1"]]
    compositions = map(BatchComposer(BASE, (tmp_path,)).compose, points)
    for point, composition in zip(points, compositions, strict=True):
        assert outcome(composition) == outcome(compose_by_hydra([*BASE, *point], (tmp_path,)))
        compose(BASE)  # another tree meanwhile


def test_a_search_path_in_the_users_tree_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "more/cluster").mkdir(parents=True)
    (tmp_path / "more/cluster/far.yaml").write_text("defaults: [bcm, _self_]\n")
    config = Path(__file__).parents[2] / "conf/config.yaml"
    (tmp_path / "config.yaml").write_text(
        f"{config.read_text()}\nhydra:\n  searchpath: ['file://{tmp_path}/more']\n"
    )
    composition = BatchComposer(BASE, (tmp_path,)).compose(["cluster=far"])
    assert outcome(composition) == outcome(compose_by_hydra([*BASE, "cluster=far"], (tmp_path,)))


def test_mistakes_below_a_search_path_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "more/cluster").mkdir(parents=True)
    (tmp_path / "more/cluster/far.yaml").write_text("defaults: [bcm, _self_]\n")
    config = Path(__file__).parents[2] / "conf/config.yaml"
    (tmp_path / "config.yaml").write_text(
        f"{config.read_text()}\nhydra:\n  searchpath: ['file://{tmp_path}/more']\n"
    )
    mistakes = ["cluster=far", "cluster.partion=x", "cluster.mem=[1]"]
    with pytest.raises(UserError) as caught:
        compose([*BASE, *mistakes], (tmp_path,))
    assert [mistake.key for mistake in caught.value.mistakes] == ["cluster.partion", "cluster.mem"]
    assert "did you mean 'partition'?" in str(caught.value)


def test_composing_and_explaining_parse_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many mistakes there are."""
    text = f"# {tmp_path}\ndefaults: [bcm, _self_]\n"
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/ours.yaml").write_text(text)
    parsed, load = [], yaml.load

    def load_and_note(text: str, Loader: Any) -> Any:
        parsed.append(text)
        return load(text, Loader=Loader)

    monkeypatch.setattr(yaml, "load", load_and_note)
    mistakes = ["cluster.partion=x", "cluster.mem=[1]", "~cluster.nope", "training.run.time_limit=never"]
    with pytest.raises(UserError) as caught:
        compose([*BASE, "cluster=ours", *mistakes], (tmp_path,))
    assert len(caught.value.mistakes) == 4
    assert parsed.count(text) == 1

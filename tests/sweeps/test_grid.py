"""The points of a sweep, and their names."""

from __future__ import annotations

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from launcher.config.compose import BatchComposer
from launcher.errors import UserError
from launcher.sweeps.points import MOST_POINTS, read_grid

MODEL = "training.model"


def values(*overrides: str) -> list[dict[str, str]]:
    return [point.values for point in read_grid(overrides).points()]


@pytest.mark.parametrize(
    "overrides",
    [
        ["a.b=1,2,4", "c=x,y"],
        ["c=choice(x,y)", "a.b=range(1,4)", "fixed=1"],
        ["a=sort(3,1,2)", "b=true,false", "c=[1,2],[3]"],
        ["a=range(0,1,0.25)", "+b='x y',z"],
    ],
)
def test_the_points_are_those_of_hydras_own_sweeper(overrides: list[str]) -> None:
    (theirs,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), None)
    grid = read_grid(overrides)
    ours = [(*grid.shared, *point.overrides) for point in grid.points()]
    assert len(ours) == grid.size

    def read(points: object) -> list[dict[str, object]]:
        parser = OverridesParser.create()
        assert isinstance(points, list)
        return [{o.key_or_group: o.value() for o in parser.parse_overrides(list(point))} for point in points]

    assert read(ours) == read([list(point) for point in theirs])


def test_values_stay_as_they_were_typed() -> None:
    grid = read_grid(["training=gpt3/tiny", f"{MODEL}.optim.lr=1e-4,3e-4", f"{MODEL}.micro_batch_size=1,2"])
    assert grid.shared == ("training=gpt3/tiny",)
    assert [point.name for point in grid.points()] == [
        "lr=1e-4_micro_batch_size=1",
        "lr=1e-4_micro_batch_size=2",
        "lr=3e-4_micro_batch_size=1",
        "lr=3e-4_micro_batch_size=2",
    ]
    assert grid.points()[1].overrides == (f"{MODEL}.optim.lr=1e-4", f"{MODEL}.micro_batch_size=2")


def test_comma_is_a_part_of_a_text_and_choice_sweeps() -> None:
    grid = read_grid(["env_vars.LIST=a,b", "env_vars.ALGO=choice(Ring,'a b',1.10)"])
    assert grid.shared == ("env_vars.LIST=a,b",)
    algorithms = [
        point.config.env_vars["ALGO"]
        for point in map(BatchComposer(grid.shared).compose, [s.overrides for s in grid.points()])
    ]
    assert algorithms[:2] == ["Ring", "a b"]


def test_a_glob_chooses_files() -> None:
    trainings = [point["training"] for point in values("training=glob(gpt3/*k,exclude=*_32k)")]
    assert set(trainings) >= {"gpt3/40b_16k", "gpt3/40b_64k"}
    assert all(name.endswith("k") and not name.endswith("_32k") for name in trainings)


def test_labels_are_as_long_as_they_must_be() -> None:
    grid = read_grid(["a.optim.lr=1,2", "b.optim.lr=1,2", "a.seed=1,2", "training=x,y"])
    assert list(grid.labels.values()) == ["a.optim.lr", "b.optim.lr", "seed", "training"]


def test_names_are_valid_file_names_and_differ() -> None:
    long = ",".join(letter * 120 for letter in "ab")
    names = [point.name for point in read_grid([f"x.key={long}", "y='a/b','a b','$(touch c)'"]).points()]
    assert len(set(names)) == len(names) == 6
    assert all(len(name) <= 100 and not set(name) & set("/ $()'") for name in names)
    names_again = [
        point.name for point in read_grid([f"x.key={long}", "y='a/b','a b','$(touch c)'"]).points()
    ]
    assert names_again == names, "sweeping again finds the same runs"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training=gpt3/tiny"], "nothing is swept"),
        (["a=1,2,1"], "the value 1 is there twice"),
        (["a=1,2", "+a=3,4"], "a is swept twice"),
        (["a=interval(0,1)"], "an interval has no number of values"),
        (["training.run.name=x,y"], "cannot be swept"),
        (["stages=training,data_preparation"], "cannot be swept"),
        (["a=1,2", "training.run.results_dir=/x"], "each point has its own directory"),
        (["a=range(0,100)", "b=range(0,101)"], f"a sweep has {MOST_POINTS} at most"),
        (["training=glob(nothing*)"], "no choice is called so"),
        (["a.b=glob(*)"], "glob() chooses files"),
    ],
)
def test_keys_that_cannot_be_swept_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        read_grid(overrides)
    assert message in str(error.value)

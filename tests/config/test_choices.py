"""The nearest choice of a group: of model sizes the one nearest in parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.compose import compose, list_options
from launcher.config.overrides import choice_hint, parameters_in
from launcher.errors import UserError


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("400m", 400e6),
        ("gpt3/126M", 126e6),
        ("gpt3/1b3", 1.3e9),
        ("1.3b", 1.3e9),
        ("gpt3/175b_16k", 175e9),
        ("llama/llama3_1_405b", 405e9),
        ("llama/llama2_7b", 7e9),
        ("gpt3/400m_improved", 400e6),
        ("gpt3/1t", 1e12),
        ("gpt3/tiny", None),
        ("mt5/_base", None),
        ("bcm", None),
        ("p4d", None),
    ],
)
def test_parameters_are_read_from_a_name(name: str, parameters: float | None) -> None:
    assert parameters_in(name) == parameters


def test_every_shipped_size_states_its_parameters_or_none() -> None:
    without = [name for name in list_options("training") if parameters_in(name) is None]
    assert without == [
        "deepseek/deepseek_v2_lite",
        "deepseek/deepseek_v3",
        "gpt2/distil",
        "gpt3/tiny",
        "mixtral/mixtral_8x22b",
        "mixtral/mixtral_8x7b",
        "t5/tiny",
    ]


@pytest.mark.parametrize(
    ("choice", "suggestion"),
    [
        ("gpt3/400m", "gpt3/400m_improved"),
        ("gpt3/1b3", "gpt3/1b_improved"),
        ("gpt3/1.3b", "gpt3/1b_improved"),
        ("gpt3/126M", "gpt3/126m"),
        ("gpt3/5B", "gpt3/5b"),
        ("gpt3/5b_16K", "gpt3/5b_16k"),
        ("gpt3/40b_improve", "gpt3/40b_improved"),
        ("gpt3/13b", "gpt3/20b"),
        ("gpt3/6.7b", "gpt3/7b_improved"),
        ("gpt3/126b", "gpt3/175b"),
        ("gpt/5b", "gpt3/5b"),
        ("gpt3/5b/", "gpt3/5b"),
        ("llama/3_8b", "llama/llama3_8b"),
        ("llama/llama2_8b", "llama/llama3_8b"),
        ("t5/770m", "t5/220m"),
        ("gpt3/tyni", "gpt3/tiny"),
    ],
)
def test_nearest_size_is_suggested(choice: str, suggestion: str) -> None:
    assert choice_hint(choice, list_options("training")).startswith(f"did you mean {suggestion!r}? valid: ")


def test_size_without_its_family_is_completed() -> None:
    options = list_options("training")
    assert choice_hint("400m", options).startswith("did you mean 'gpt3/400m_improved'?")
    assert choice_hint("1b3", options).startswith("did you mean 'gpt2/1558m' or 'gpt3/1b_improved'?")


def test_sizes_far_from_the_typed_one_are_not_suggested() -> None:
    assert choice_hint("gpt3/10t", list_options("training")).startswith("valid: gpt3/126m")


def test_size_that_builds_on_another_names_its_whole_path(tmp_path: Path) -> None:
    """Below a family's folder the other sizes have whole paths."""
    (tmp_path / "training/gpt3").mkdir(parents=True)
    file = tmp_path / "training/gpt3/ours.yaml"
    file.write_text("defaults: [126m, _self_]\nrun: {name: ours}\n")
    with pytest.raises(UserError) as caught:
        compose(["training=gpt3/ours"], (tmp_path,))
    assert str(caught.value) == (
        f"training/126m: there is no such file to build on\n  from {file}:1\n"
        "  did you mean '/training/gpt3/126m@_here_'?"
    )
    file.write_text("defaults: [/training/gpt3/126m@_here_, _self_]\nrun: {name: ours}\n")
    training = compose(["training=gpt3/ours"], (tmp_path,)).config.training
    assert training is not None and training.run.name == "ours"

"""The words of the command line, before Hydra reads them."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launcher.config.compose import compose
from launcher.config.overrides import hydra_value, typed_override

pytestmark = pytest.mark.usefixtures("composed_anew")

# Whatever one line of a script can hold.
lines = st.text(st.characters(exclude_characters="\0\r\n", exclude_categories=["Cs"]), max_size=30)
# Characters with a meaning in Hydra's and OmegaConf's grammars.
nasty = st.text("\\'\"${}[](),:=?~!@ ab1.e\t#", max_size=20)


@settings(max_examples=60, deadline=None)
@given(text=lines | nasty)
@example(text="")
@example(text="???")
@example(text="null")
@example(text="0022")
@example(text="1_000")
@example(text="True")
@example(text="a|b")
@example(text="\\${HOME}\\\\${")
@example(text="\\'\\\\'\\")
@example(text=" ${oc.env:HOME} ")
def test_any_text_arrives_as_it_is(text: str) -> None:
    (typed,) = shlex.split(typed_override("cluster.comment", text))
    composition = compose([f"env_vars.X={hydra_value(text)}", typed])
    assert composition.config.env_vars["X"] == text
    assert composition.config.cluster.comment == text


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("env_vars.X=1.10", "1.10"),
        ("env_vars.X=0022", "0022"),
        ("env_vars.X=1e5", "1e5"),
        ("env_vars.X=1_000", "1_000"),
        ("env_vars.X=true", "true"),
        ("+env_vars.X=off", "off"),
        ("++env_vars.X=1.10", "1.10"),
        ("env_vars.NCCL_PROTO=mlx5_0,mlx5_1", "mlx5_0,mlx5_1"),
        ("env_vars.X=a=b", "a=b"),
        ("env_vars.X=$(hostname)", "$(hostname)"),
        ("env_vars.X=it's", "it's"),
        # as Hydra reads them
        ("env_vars.X='a b'", "a b"),
        ('env_vars.X="0022"', "0022"),
        (r"env_vars.X=a\,b", "a,b"),
        (r"env_vars.X=\${HOME}", "${HOME}"),
        ("env_vars.X=${engine}", "nemo"),
        ("env_vars.X=", ""),
        ("env_vars.X=null", None),
        ("env_vars={X: '1.10'}", "1.10"),
        ("env_vars={X: 1}", "1"),
    ],
)
def test_a_variable_arrives_as_it_was_typed(override: str, value: str | None) -> None:
    variables = compose([override]).config.env_vars
    assert (variables.get("X") or variables["NCCL_PROTO"] if value else variables["X"]) == value


@pytest.mark.parametrize("key", ["container", "cluster.container"])
def test_an_image_needs_no_quotes(key: str) -> None:
    assert compose([f"{key}=nvcr.io#nvidia/nemo:24.07"]).config.container == "nvcr.io#nvidia/nemo:24.07"
    assert compose([f"{key}=null"]).config.container is None


def test_paths_may_hold_what_looks_like_an_interpolation() -> None:
    config = compose([f"base_results_dir={hydra_value('/r/${x}')}"]).config
    assert config.base_results_dir == "/r/${x}"
    assert config.training is not None
    assert config.training.run.results_dir == "/r/${x}/gpt3_126m"

"""The whole configuration of a launch, stored as text and read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.compose import compose, list_options
from launcher.config.schema import RunConfig
from launcher.config.stored import read_stored, stored_text
from launcher.errors import UserError
from launcher.stages.planning import plan_launch

SECRET = "S3CRETvalue9"


def compose_config(*overrides: str) -> RunConfig:
    return compose(["launcher_scripts_path=/shared", *overrides]).config


def store_and_read(config: RunConfig, **environment: str) -> RunConfig:
    return read_stored(stored_text(config, environment), "root_config.yaml")


@pytest.mark.parametrize("size", ["gpt3/126m", "gpt3/40b_64k", "t5/220m", "llama/llama2_7b"])
@pytest.mark.parametrize("cluster", list_options("cluster"))
def test_stored_configuration_is_read_unchanged(size: str, cluster: str) -> None:
    if size not in list_options("training"):
        pytest.skip("no such size is shipped")
    config = compose_config(f"training={size}", f"cluster={cluster}")
    assert store_and_read(config) == config
    assert plan_launch(store_and_read(config), number=3, tag="x") == plan_launch(config, number=3, tag="x")


@pytest.mark.parametrize(
    "value",
    [
        "a  b",
        "01:00",
        "1e3",
        "${not.ours}",
        r"back\\slash",
        "???",
        "größe",
        "#x: y",
        "a\tb",
        "yes",
        "/a/\udcff",
    ],
)
def test_odd_values_stay_as_they_are(value: str) -> None:
    config = compose_config("training=gpt3/126m")
    odd = config.model_copy(update={"env_vars": {"ODD": value, "NULL": None}})
    assert store_and_read(odd).env_vars == odd.env_vars


def test_secrets_of_the_environment_stay_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    config = compose_config("training=gpt3/126m", "+training.model.note=${oc.env:HF_TOKEN}")
    odd = config.model_copy(update={"env_vars": {"MINE": f"a{SECRET}b", "ODD": "${x}"}})
    text = stored_text(odd, {"HF_TOKEN": SECRET, "SHELL": "/bin/bash"})
    assert SECRET not in text and text.count("${oc.env:HF_TOKEN}") == 2
    assert read_stored(text, "here").env_vars == odd.env_vars
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match=r"(?s)here: .*HF_TOKEN"):
        read_stored(text, "here")


def test_a_password_is_masked() -> None:
    config = compose_config("training=gpt3/126m")
    proxied = config.model_copy(update={"env_vars": {"https_proxy": f"http://me:{SECRET}@proxy:1"}})
    text = stored_text(proxied, {})
    assert SECRET not in text and "http://me:***@proxy:1" in text


@pytest.mark.parametrize("text", ["", "3", "a: [", "stages: [training]"])
def test_file_that_is_no_configuration_is_reported(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError):
        read_stored(text, "here")

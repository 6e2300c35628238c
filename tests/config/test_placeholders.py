"""Placeholders and empty variables: refused by name, before Slurm queues a job for `<Your partition>`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.config.compose import CONF_DIR, BatchComposer, compose, list_options
from launcher.config.overrides import hydra_value
from launcher.config.secrets import placeholder_in
from launcher.errors import UserError
from launcher.images.recipes import read_recipe, recipe_names

STARTER = Path(__file__).parents[2] / "launcher/starter/conf"


def mistakes(*overrides: str, config_dirs: tuple[Path, ...] = ()) -> list[str]:
    with pytest.raises(UserError) as caught:
        compose(overrides, config_dirs)
    return [str(mistake) for mistake in caught.value.mistakes]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("cluster.partition", "<Your partition>", "<Your partition>"),
        ("cluster.partition", "<partition>", "<partition>"),
        ("cluster.account", "‹account›", "‹account›"),
        ("cluster.account", "CHANGEME", "CHANGEME"),
        ("cluster.account", "change_me", "change_me"),
        ("cluster.account", "ReplaceMe", "ReplaceMe"),
        ("cluster.account", "TODO", "TODO"),
        ("cluster.account", "TBD", "TBD"),
        ("cluster.account", "XXXX", "XXXX"),
        ("cluster.qos", "your-qos", "your-qos"),
        ("cluster.mail_user", "YOUR_NAME@site.org", "YOUR_NAME"),
        ("cluster.reservation", "{{ reservation }}", "{{ reservation }}"),
        ("data_dir", "/fsx/<Your dir>/data", "<Your dir>"),
        ("data_dir", "/path/to/data", "/path/to"),
        ("data_dir", "...", "..."),
        ("base_results_dir", "/home/your_name/results", "your_name"),
        ("base_results_dir", "/fsx/.../results", "..."),
        ("container", "/apps/<image>.sqsh", "<image>"),
        ("container_mounts", "/path/to/data:/data", "/path/to"),
        ("env_vars.NCCL_SOCKET_IFNAME", "<your interface>", "<your interface>"),
        ("cluster.env_vars.X", "CHANGE_ME", "CHANGE_ME"),
        ("env_files.HF_TOKEN", "/home/<you>/.hf", "<you>"),
        ("training.run.name", "your-first-run", "your-first-run"),
        ("training.exp_manager.wandb_logger_kwargs.project", "<your project>", "<your project>"),
        ("training.model.tokenizer.vocab_file", "/path/to/vocab.json", "/path/to"),
        ("image.owner", "your-team", "your-team"),
    ],
)
def test_placeholders_are_recognized(key: str, value: str, text: str) -> None:
    placeholder = placeholder_in(key, value)
    assert placeholder is not None and placeholder.startswith(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.model.tokenizer.model", "<s>"),
        ("training.model.tokenizer.pad", "<|endoftext|>"),
        ("training.model.tokenizer.mask", "<extra_id_0>"),
        ("training.model.tokenizer.unk", "<UNK>"),
        ("training.model.name", "TODO"),
        ("env_vars.PS4", "<a>"),
        ("env_vars.DOTS", "..."),
        ("env_vars.X", "{{ x }}"),
        ("cluster.comment", "<why it runs>, TODO: your-part"),
        ("image.python_packages", "numpy>=1.26,<3"),
        ("cluster.constraint", "h100&efa"),
        ("cluster.job_name_prefix", "yours-"),
        ("data_dir", "/fsx/mypath/to/data"),
        ("data_dir", "/fsx/path/tools"),
        ("data_dir", "/fsx/todo/TODOS"),
        ("data_dir", "../data"),
        ("base_results_dir", "/r/a<b=&^>c"),
        ("base_results_dir", "/home/yourdon/results"),
        ("base_results_dir", "/r/xxx"),
        ("cluster.account", "methods"),
        ("cluster.account", "changemetrics"),
        ("cluster.begin", "now+1hour"),
        ("training.run.name", "gpt3_126m_a<b"),
    ],
)
def test_other_values_are_no_placeholders(key: str, value: str) -> None:
    assert placeholder_in(key, value) is None


def test_shipped_configurations_have_no_placeholder() -> None:
    for recipe in recipe_names():
        read_recipe(recipe)
    sweep = BatchComposer([])
    for cluster in list_options("cluster"):
        sweep.compose([f"cluster={cluster}"])
    for size in list_options("training"):
        sweep.compose([f"training={size}"])
    compose(["stages=[data_preparation]", "data_preparation.inputs=[/x]"])
    compose(["stages=[workspace]"])
    compose(["cluster=mine", "training=gpt3/mine"], (STARTER,))


def test_all_placeholders_are_named_with_their_sources(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/ours.yaml").write_text(
        "defaults: [bcm, _self_]\npartition: <Your partition>\nmem: <MEM>\nmail_type: [END]\n"
    )
    messages = mistakes(
        "cluster=ours", "data_dir='/fsx/<Your dir>'", "cluster.qos=TODO", config_dirs=(tmp_path,)
    )
    assert sorted(messages) == [
        "cluster.mem='<MEM>': a placeholder, not a value\n"
        f"  from {tmp_path}/cluster/ours.yaml:3\n"
        "  put your own in its place: cluster.mem=...; null leaves it out",
        "cluster.partition='<Your partition>': a placeholder, not a value\n"
        f"  from {tmp_path}/cluster/ours.yaml:2\n"
        "  put your own in its place: cluster.partition=...; null leaves it out",
        "cluster.qos='TODO': a placeholder, not a value\n"
        "  from the command line: cluster.qos=TODO\n"
        "  put your own in its place: cluster.qos=...; null leaves it out",
        # Once, though the data's prefix and the tokenizer's files are below it.
        "data_dir='/fsx/<Your dir>': a placeholder was left in it: <Your dir>\n"
        "  from the command line: data_dir='/fsx/<Your dir>'\n"
        "  put your own in its place: data_dir=...",
    ]


def test_placeholder_that_hydra_cannot_parse_is_named() -> None:
    assert mistakes("cluster.partition=<Your partition>")[0].startswith(
        "cluster.partition='<Your partition>': a placeholder, not a value\n"
    )


def test_placeholder_from_a_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_PARTITION", "<Your partition>")
    (message,) = mistakes("cluster.partition=${oc.env:OUR_PARTITION}")
    assert "cluster.partition='<Your partition>': a placeholder" in message


def test_sweep_refuses_a_placeholder() -> None:
    with pytest.raises(UserError, match=r"cluster\.qos='TODO': a placeholder"):
        BatchComposer(["cluster.qos=TODO"]).compose(["training.model.micro_batch_size=2"])


def test_secret_beside_a_placeholder_is_not_shown() -> None:
    token = f"hf_{'aB3' * 12}"
    (message,) = mistakes(f"env_vars.HF_TOKEN={hydra_value(f'<your token> {token}')}")
    assert message.startswith("env_vars.HF_TOKEN=***: a placeholder")
    assert token not in message


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("cluster.partition=${oc.env:OURS,gpu}", "gpu"),  # as in a shell's ${OURS:-gpu}
        ("cluster.partition=${oc.env:OURS,null}", None),
    ],
)
def test_an_empty_variable_is_none(override: str, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for state in ("", None):
        monkeypatch.setenv("OURS", state) if state is not None else monkeypatch.delenv("OURS")
        assert compose([override]).config.cluster.partition == value


def test_empty_variable_without_a_default_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "")
    assert mistakes("cluster.partition=${oc.env:OURS}", "data_dir=/fsx/${oc.env:OURS}/data") == [
        "cluster.partition: the environment variable OURS is empty\n"
        "  from the command line: cluster.partition=${oc.env:OURS}\n"
        "  give it a value, or give a default: ${oc.env:OURS,DEFAULT}",
        "data_dir: the environment variable OURS is empty\n"
        "  from the command line: data_dir=/fsx/${oc.env:OURS}/data\n"
        "  give it a value, or give a default: ${oc.env:OURS,DEFAULT}",
    ]
    assert compose(["env_vars.X=${oc.env:OURS,''}"]).config.env_vars["X"] == ""


@pytest.mark.parametrize("value", ["", "''", "' '", "${oc.env:OURS,''}"])
@pytest.mark.parametrize("key", ["partition", "account", "gres", "nodelist", "mail_type"])
def test_an_option_has_a_value_or_is_left_out(key: str, value: str) -> None:
    (message,) = mistakes(f"cluster.{key}={value}")
    assert f"cluster.{key}='" in message and "an empty value; null leaves the option out" in message


def test_shell_variable_left_by_envsubst_is_explained() -> None:
    (message,) = mistakes("data_dir=${TARGET_PATH}/data")
    assert "there is no key 'TARGET_PATH' to refer to" in message
    assert "${oc.env:TARGET_PATH}" in message and "envsubst" in message


def test_envsubst_leaves_the_root_as_it_is() -> None:
    """An empty ``${launcher_scripts_path}`` would make data_dir /data."""
    assert re.findall(r"\$\{\w+\}|\$\w+", (CONF_DIR / "config.yaml").read_text()) == []

"""engine=nemo: which script runs, from where, and what its configuration needs so that launches continue."""

from __future__ import annotations

import pytest

from launcher.config.compose import compose
from launcher.errors import UserError
from launcher.plan import Plan
from launcher.stages.planning import plan_launch

_SCRIPTS = "examples/nlp/language_modeling"


def plan_of(*overrides: str) -> Plan:
    config = compose(["engine=nemo", "launcher_scripts_path=/shared", *overrides]).config
    return plan_launch(config, number=2, tag="x")


@pytest.mark.parametrize(
    ("size", "script"),
    [
        ("gpt3/126m", "megatron_gpt_pretraining.py"),
        ("llama/llama2_7b", "megatron_gpt_pretraining.py"),
        ("t5/220m", "megatron_t5_pretraining.py"),
        ("mt5/170m", "megatron_t5_pretraining.py"),
        ("bert/110m", "megatron_bert_pretraining.py"),
    ],
)
def test_the_family_decides_the_script(size: str, script: str) -> None:
    payload = plan_of(f"training={size}").job.payload
    assert payload.argv[:3] == ("python3", "-u", f"/opt/NeMo/{_SCRIPTS}/{script}")
    assert payload.save_signal == "TERM"


def test_nemo_may_be_anywhere() -> None:
    payload = plan_of("container=null", "nemo_path=/sw/NeMo/", "cluster.python=/sw/bin/python").job.payload
    assert payload.argv[0] == "/sw/bin/python"
    assert payload.argv[2] == f"/sw/NeMo/{_SCRIPTS}/megatron_gpt_pretraining.py"
    assert (payload.working_dir, payload.python_path) == ("/sw/NeMo", ("/sw/NeMo",))


def test_logs_are_of_the_launch_and_checkpoints_of_the_run() -> None:
    config = plan_of().job.config
    assert config is not None
    assert config["exp_manager"]["explicit_log_dir"] == "/shared/results/gpt3_126m/launches/2/results"
    checkpoints = config["exp_manager"]["checkpoint_callback_params"]["dirpath"]
    assert checkpoints == "/shared/results/gpt3_126m/checkpoints"


def test_max_time_is_that_of_each_launch() -> None:
    config = plan_of("training.trainer.max_time='00:01:00:00'").job.config
    assert config is not None
    assert config["trainer"]["max_time"] is None
    assert config["exp_manager"]["max_time_per_run"] == "00:01:00:00"


def test_a_given_max_time_per_run_stays() -> None:
    config = plan_of("+training.exp_manager.max_time_per_run='00:00:30:00'").job.config
    assert config is not None
    assert config["exp_manager"]["max_time_per_run"] == "00:00:30:00"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["nemo_path=NeMo"], "nemo_path"),
        (["training.run.name=bash", "cluster.job_name_prefix=''"], "training.run.name"),
        (["training.run.model_type=t5"], "training.run.model_type"),
        (["training=t5/220m", "training.run.model_type=gpt"], "training.run.model_type"),
        (["training.run.model_type=gtp"], "training.run.model_type"),
        (["training.trainer.precision=fp16"], "training.trainer.precision"),
        (["+training.model.calculate_per_token_loss=True"], "training.model.calculate_per_token_loss"),
        (["+training.model.add_qkv_bias=True"], "training.model.add_qkv_bias"),
    ],
)
def test_mistakes_name_their_key(overrides: list[str], key: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_of(*overrides)
    assert [mistake.key for mistake in caught.value.mistakes] == [key]


@pytest.mark.parametrize("precision", ["16", "16-mixed", "bf16", "bf16-mixed", "32", "32-true", "null"])
def test_precisions_of_lightning_are_handed_on(precision: str) -> None:
    config = plan_of(f"training.trainer.precision={precision}").job.config
    assert config is not None
    assert str(config["trainer"]["precision"]) == precision.replace("null", "None")

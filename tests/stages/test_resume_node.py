"""training.resume: handed to our trainer, refused where nothing would read it."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.config.compose import compose
from launcher.errors import UserError
from launcher.stages.planning import plan_launch


def written_config(*overrides: str) -> dict[str, Any]:
    config = compose(["launcher_scripts_path=/shared", *overrides]).config
    job = plan_launch(config, number=2, tag="x").job
    assert job.config is not None
    return job.config


def test_our_trainer_gets_resume() -> None:
    overrides = [
        "training.resume.checkpoint='m-step=2'",
        "training.resume.lr_scale=0.5",
        "training.resume.load_optimizer=masters",
        "training.resume.skip_samples=[[640,960]]",
        "training.resume.data_weights=[[960,[0.7,1]]]",
    ]
    assert written_config("engine=megatron", *overrides)["resume"] == {
        "checkpoint": "m-step=2",
        "load_optimizer": "masters",
        "lr_scale": 0.5,
        "lr_freeze_steps": 0,
        "data_generation": 0,
        "skip_samples": [[640, 960]],
        "data_weights": [[960, [0.7, 1.0]]],
        "trust_owner": None,
    }
    assert (
        written_config("engine=megatron", "training.resume.trust_owner=1000")["resume"]["trust_owner"]
        == "1000"
    )


@pytest.mark.parametrize("engine", ["nemo", "megatron_lm"])
def test_resume_is_refused_with_other_engines(engine: str) -> None:
    assert "resume" not in written_config(f"engine={engine}")
    with pytest.raises(UserError, match=r"training\.resume\.load_optimizer=false: engine=") as error:
        written_config(f"engine={engine}", "training.resume.load_optimizer=False")
    assert "engine=megatron has" in str(error.value)


def test_resume_node_is_read_strictly() -> None:
    with pytest.raises(UserError, match=r"(?s)training\.resume.*did you mean 'lr_scale'"):
        written_config("engine=megatron", "+training.resume.lr_scal=0.5")
    with pytest.raises(UserError, match=r"training\.resume\.lr_scale"):
        written_config("engine=megatron", "training.resume.lr_scale=0")
    with pytest.raises(UserError, match=r"(?s)training\.resume\.load_optimizer=.*masters"):
        written_config("engine=megatron", "training.resume.load_optimizer=master")
    with pytest.raises(UserError, match=r"training\.resume\.skip_samples"):
        written_config("engine=megatron", "training.resume.skip_samples=[640,960]")

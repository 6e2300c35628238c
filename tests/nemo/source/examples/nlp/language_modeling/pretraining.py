"""Pretraining with NeMo's classes, as its scripts of the same names do it; these are not in its wheel."""

from __future__ import annotations

from typing import Any

import torch.multiprocessing
from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager


def pretrain(builder: Any, model: Any) -> None:
    """Train what the configuration named by --config-path and --config-name describes."""
    torch.multiprocessing.set_start_method("spawn", force=True)

    @hydra_runner(config_path=".", config_name="named_on_the_command_line")
    def run(config: Any) -> None:
        trainer = builder(config).create_trainer()
        exp_manager(trainer, config.exp_manager)
        trainer.fit(model(config.model, trainer))

    run()

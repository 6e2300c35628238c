"""Every key that we hand to NeMo's own scripts is one that they accept, and that does something there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from launcher.config.compose import compose, list_options
from launcher.stages.planning import plan_launch
from tests.nemo.conftest import HERE, Nemo

# Keys that no code of NeMo 2.4 asks for, and why they are rendered all the same.
REASONS = {
    "run.*": "the launcher's own node; NeMo reads run.name alone, for the model's FLOPs",
    "name": "in NeMo's own T5 and BERT files, for people",
    "model.nsys_profile.trace": "for the command line of nsys, which the launcher writes",
    "model.optim.bucket_cap_mb": "handed to apex's DistributedFusedAdam, which is not on PyPI",
    "model.sync_batch_comm": "in NeMo's own GPT file; its pipeline schedules stopped asking for it",
    "model.data.favor_longer_ngrams": "so in NeMo's own T5 file, whose code asks for favor_long_ngrams",
}

# Dictionaries of anything in the schema of exp_manager: handed to a logger as they are.
_FREE = ("exp_manager.wandb_logger_kwargs", "exp_manager.mlflow_logger_kwargs.tags")


@pytest.fixture(scope="session")
def known_keys(nemo: Nemo) -> dict[str, set[str]]:
    """Return the keys that NeMo knows, by node; see known_keys.py."""
    environment = {**os.environ, "PYTHONPATH": str(HERE / "cpu")}
    command = [nemo.python, HERE / "known_keys.py"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True)
    return {node: set(keys) for node, keys in json.loads(result.stdout.splitlines()[-1]).items()}


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def rendered_keys(size: str) -> set[str]:
    plan = plan_launch(compose([f"training={size}", "engine=nemo"]).config, number=1, tag="x")
    assert plan.job.config is not None
    return set(leaves(plan.job.config))


def is_known(key: str, known_keys: Mapping[str, set[str]]) -> bool:
    node, _, rest = key.partition(".")
    if key.startswith(_FREE):
        return True
    if node == "model":
        return all(part in known_keys["model"] for part in rest.split("."))
    return rest in known_keys.get(node, ())


@pytest.mark.timeout(600)  # the first asks NeMo
@pytest.mark.parametrize("size", list_options("training"))
def test_nemo_knows_each_key_or_we_say_why(size: str, known_keys: dict[str, set[str]]) -> None:
    keys = rendered_keys(size)
    assert {key for key in keys if not is_known(key, known_keys) and not has_reason(key)} == set()


@pytest.mark.timeout(600)
def test_each_reason_is_needed(known_keys: dict[str, set[str]]) -> None:
    unknown = {key for size in list_options("training") for key in rendered_keys(size)}
    unknown = {key for key in unknown if not is_known(key, known_keys)}
    assert {key for key in REASONS if not key.endswith("*")} <= unknown


@pytest.mark.timeout(600)
def test_a_key_that_nemo_does_not_know_is_found(known_keys: dict[str, set[str]]) -> None:
    assert not is_known("trainer.max_step", known_keys)
    assert not is_known("exp_manager.checkpoint_callback_params.save_topk", known_keys)
    assert not is_known("model.hiden_size", known_keys)
    assert is_known("exp_manager.checkpoint_callback_params.dirpath", known_keys)


def has_reason(key: str) -> bool:
    return key in REASONS or f"{key.partition('.')[0]}.*" in REASONS

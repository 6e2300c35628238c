"""Conversion with engine=nemo: NeMo's own script, with arguments from the training's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.compose import compose
from launcher.drafting import Request, drafts
from launcher.errors import UserError
from launcher.launching import launch_stages
from launcher.plan import Job
from launcher.stages.planning import plan_launch, split_by_stage
from tests.launching.fake_slurm import install, overrides

TRAINED = ["stages=[training,conversion]", "conversion=nemo"]
ALONE = ["stages=[conversion]", "conversion=nemo", "conversion.source=/others/run/checkpoints"]


def job_of(*words: str) -> Job:
    places = ["base_results_dir=/r", "data_dir=/d", "cluster=bcm", "container=/apps/x.sqsh", "engine=nemo"]
    *_, config = split_by_stage(compose([*places, *words]).config)
    return plan_launch(config, number=1, tag="x").job


def arguments(job: Job) -> dict[str, str]:
    """Return the script's options."""
    words = list(job.payload.argv)
    words = words[words.index("--nemo-path") :]
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize(
    ("training", "tensor", "pipeline", "nodes", "tasks", "model_type"),
    [
        ("gpt3/126m", 1, 1, 1, 1, "gpt"),
        ("gpt3/20b", 2, 1, 1, 2, "gpt"),
        ("gpt3/175b", 4, 8, 4, 8, "gpt"),
        ("t5/3b", 2, 1, 1, 2, "t5"),
        ("bert/110m", 1, 1, 1, 1, "bert"),
        ("llama/llama2_70b", 4, 4, 2, 8, "gpt"),
    ],
)
def test_job_has_the_gpus_of_one_replica(
    training: str, tensor: int, pipeline: int, nodes: int, tasks: int, model_type: str
) -> None:
    job = job_of(*TRAINED, f"training={training}")
    assert (job.resources.nodes, job.resources.tasks_per_node) == (nodes, tasks)
    assert (job.resources.gpus_per_node, job.resources.exclusive) == (tasks, False)
    assert (job.engine, job.stage) == ("nemo", "conversion")
    assert arguments(job) == {
        "--nemo-path": "/opt/NeMo",
        "--tensor_model_parallel_size": str(tensor),
        "--pipeline_model_parallel_size": str(pipeline),
        "--gpus_per_node": str(tasks),
        "--model_type": model_type,
    }


def test_job_reads_the_training_before_it() -> None:
    job = job_of(*TRAINED, "training=gpt3/126m", "conversion.tokenizer_dir=/apps/bpe")
    assert job.stage_config is not None
    node = job.stage_config["conversion"]
    assert node["source"] == "/r/gpt3_126m/checkpoints"
    assert node["output"] == "/r/gpt3_126m_conversion/nemo/step-{step}"
    assert node["training"]["directory"] == "/r/gpt3_126m"
    assert node["tokenizer_dir"] == "/apps/bpe"


@pytest.mark.parametrize("training", ["llama/llama2_7b", "llama/llama3_1_8b"])
def test_llama_is_converted_to_hugging_face(training: str) -> None:
    job = job_of(TRAINED[0], "conversion=huggingface", f"training={training}", "conversion.dtype=float32")
    assert job.stage_config is not None
    assert job.stage_config["conversion"]["to"] == "huggingface"


def test_decoder_of_a_t5_begins_at_its_stage() -> None:
    job = job_of(
        *TRAINED,
        "training=t5/3b",
        "training.model.pipeline_model_parallel_size=4",
        "training.model.pipeline_model_parallel_split_rank=2",
        "training.trainer.num_nodes=1",
    )
    options = arguments(job)
    assert options["--pipeline_model_parallel_split_rank"] == "2"
    assert options["--gpus_per_node"] == "8"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*ALONE], "conversion.model_type=null"),
        ([*ALONE, "conversion.model_type=gpt", "conversion.dtype=bfloat16"], "conversion.dtype=bfloat16"),
        ([*ALONE, "conversion=safetensors", "conversion.model_type=gpt"], "conversion.to=safetensors"),
        ([*ALONE, "conversion=huggingface", "conversion.model_type=gpt"], "conversion.model=null"),
        ([*TRAINED[:1], "conversion=huggingface", "training=t5/220m"], "its model_type is not one"),
        ([*TRAINED, "training=gpt3/126m", "conversion.every=5"], "conversion.every=5"),
        ([*ALONE, "conversion.model_type=gpt", "conversion.check.enabled=True"], "conversion.check.enabled"),
        ([*TRAINED[:1], "conversion=huggingface", "training=gpt3/126m"], "model.normalization="),
        ([*ALONE, "engine=megatron"], "engine=megatron has no NeMo"),
        (
            [*TRAINED, "training=gpt3/20b", "training.model.pipeline_model_parallel_size=11"],
            "of the cluster do not share evenly",
        ),
    ],
)
def test_requests_beyond_the_script_are_refused_by_their_key(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        job_of(*words, *(["cluster.gpus_per_node=8"] if words[0] == TRAINED[0] else []))
    assert message in str(raised.value)


def test_launch_has_the_code_that_its_tasks_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints" / "megatron_gpt--step=2-last").mkdir(parents=True)
    cluster = [word for word in overrides(tmp_path) if not word.startswith("training")]
    words = [*cluster, *ALONE[:2], "engine=nemo", f"nemo_path={tmp_path}", "conversion.model_type=gpt"]
    request = Request([*words, f"conversion.source={tmp_path}/checkpoints"], ["slipway", "launch"])
    (launch,) = launch_stages(drafts(request), request)
    assert (launch.paths.code / "slipway" / "trainer" / "conversion" / "nemo.py").is_file()

"""Conversion and evaluation as plans: by themselves, behind a training, and as the verbs ask for them."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.checks.gathering.path_resolver import PathResolver
from launcher.cli.app import main
from launcher.config.compose import compose
from launcher.drafting import Request, drafts
from launcher.errors import Mistakes, UserError
from launcher.launching import launch_stages
from launcher.plan import Job
from launcher.runs.trained import MarkedCheckpoint, newest_training
from launcher.stages.planning import plan_launch, split_by_stage
from tests.launching.fake_slurm import FakeSlurm, install, overrides

Capsys = pytest.CaptureFixture[str]
ALL = "stages=[training,conversion,evaluation]"
IMAGE = "container=/apps/x.sqsh"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install(tmp_path, monkeypatch)


@pytest.fixture
def run_dir(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run as a launch leaves it; no checkpoint is needed to plan."""
    monkeypatch.chdir(tmp_path)
    request = Request(overrides(tmp_path, "cluster.partition=cpu"), ["slipway", "launch"])
    (launch,) = launch_stages(drafts(request), request)
    return launch.paths.run_dir


def jobs(*words: str) -> dict[str, Job]:
    configs = split_by_stage(
        compose(["base_results_dir=/r", "data_dir=/d", "engine=megatron", *words]).config
    )
    return {config.stages[0]: plan_launch(config, number=1, tag="x").job for config in configs}


def printed_config(capsys: Capsys, *words: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["render", "--config", *words]) == 0
    content = yaml.safe_load(capsys.readouterr().out)
    assert isinstance(content, dict)
    return content


def test_checkpoints_of_the_training_before_are_converted_and_evaluated() -> None:
    jobs_by_stage = jobs(ALL, "training=gpt3/tiny")
    assert list(jobs_by_stage) == ["training", "conversion", "evaluation"]
    conversion, evaluation = (jobs_by_stage[stage].stage_config for stage in ("conversion", "evaluation"))
    assert conversion is not None and evaluation is not None
    node = conversion["conversion"]
    assert node["source"] == "/r/gpt3_tiny/checkpoints"
    assert node["output"] == "/r/gpt3_tiny_conversion/huggingface/step-{step}"
    assert node["training"] == {"run": "gpt3_tiny", "directory": "/r/gpt3_tiny"}
    assert (node["model"]["hidden_size"], node["model_type"]) == (128, "gpt")
    settings = evaluation["evaluation"]
    assert (settings["source"], settings["converted"]) == (node["source"], node["output"])
    assert settings["results"] == "/r/gpt3_tiny/evaluations"
    assert evaluation["model"] == {**node["model"], "data": evaluation["model"]["data"]}
    assert evaluation["exp_manager"]["explicit_log_dir"] == "/r/gpt3_tiny_evaluation/launches/1/results"


def test_a_given_source_replaces_the_checkpoints_of_the_training() -> None:
    node = jobs("stages=[training,conversion]", "training=gpt3/tiny", "conversion.source=/other")[
        "conversion"
    ]
    assert node.stage_config is not None
    assert node.stage_config["conversion"]["source"] == "/other"
    assert node.stage_config["conversion"]["model"] is None


def test_a_given_model_is_evaluated_in_place_of_the_conversions() -> None:
    node = jobs(ALL, "training=gpt3/tiny", "evaluation.converted=/own/step-{step}")["evaluation"].stage_config
    assert node is not None
    assert node["evaluation"]["converted"] == "/own/step-{step}"


def test_a_conversion_without_a_training_gives_its_model_to_the_evaluation() -> None:
    config = compose(
        ["stages=[conversion,evaluation]", "cluster=bcm", "conversion.source=/x", "evaluation.source=/x"]
    ).config
    *_, evaluation = split_by_stage(config)
    assert evaluation.evaluation is not None and config.conversion is not None
    assert evaluation.evaluation.converted == config.conversion.output


def test_an_evaluation_by_itself_converts_into_its_own_run() -> None:
    node = jobs("stages=[training,evaluation]", "training=gpt3/tiny")["evaluation"].stage_config
    assert node is not None
    assert node["evaluation"]["converted"] == "/r/gpt3_tiny_evaluation/huggingface/step-{step}"


def test_a_conversion_takes_one_task_without_gpus() -> None:
    job = jobs("stages=[conversion]", "cluster=p5", IMAGE, "conversion.source=/s/checkpoints")["conversion"]
    requested = job.resources
    assert (requested.tasks, requested.gpus_per_node, requested.gres, requested.exclusive) == (
        1,
        None,
        None,
        False,
    )
    assert job.environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert job.container is not None
    assert [(mount.source, mount.flags) for mount in job.container.mounts] == [
        ("/r", None),
        ("/s/checkpoints", "ro"),
    ]


@pytest.mark.parametrize(
    ("words", "tasks", "gpus"),
    [
        ([], (1, 8), 8),
        (["evaluation.perplexity.layout.tensor=2"], (1, 2), 2),
        (["evaluation.perplexity.layout={tensor: 8, pipeline: 2}"], (2, 8), 8),
        (["evaluation.perplexity.layout={tensor: 4, pipeline: 3}"], (2, 6), 6),
        (["evaluation.processes=4"], (1, 4), 4),
        (["evaluation.perplexity.enabled=False"], (1, 1), 1),
        (["evaluation.perplexity.enabled=False", "evaluation.lm_eval.device=cpu"], (1, 1), None),
    ],
)
def test_an_evaluation_has_a_gpu_for_each_process_of_its_layout(
    words: list[str], tasks: tuple[int, int], gpus: int | None
) -> None:
    tensor = "training.model.tensor_model_parallel_size=8"
    jobs_by_stage = jobs(
        "stages=[training,evaluation]",
        "training=gpt3/5b",
        tensor,
        "evaluation.lm_eval.tasks=[arc_easy]",
        *words,
    )
    requested = jobs_by_stage["evaluation"].resources
    assert (requested.nodes, requested.tasks_per_node) == tasks
    assert requested.gpus_per_node == gpus
    assert requested.exclusive is False


def test_values_of_lm_eval_reach_the_job_as_it_takes_them() -> None:
    node = jobs(
        "stages=[training,evaluation]",
        "training=gpt3/tiny",
        "evaluation.lm_eval.tasks=[hellaswag,own.yaml]",
        "evaluation.lm_eval.limit=20",
        "evaluation.lm_eval.batch_size=null",
        "evaluation.step=[2,4]",
    )["evaluation"].stage_config
    assert node is not None
    lm_eval = node["evaluation"]["lm_eval"]
    assert lm_eval["tasks"] == ["hellaswag", str(Path("own.yaml").absolute())]
    assert (lm_eval["limit"], lm_eval["batch_size"], lm_eval["device"]) == (20, None, "cpu")
    assert type(lm_eval["limit"]) is int
    assert node["evaluation"]["step"] == [2, 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stages=[conversion]"], "conversion.source=null"),
        (["stages=[evaluation]"], "evaluation.source=null"),
        (["stages=[evaluation]", "evaluation.source=/x"], "nothing says how /x was trained"),
        (["stages=[conversion]", "conversion.source=/x", "conversion.dtype=fp8"], "conversion.dtype='fp8'"),
        (["stages=[conversion]", "conversion.sorce=/x"], "sorce"),
        (["stages=[conversion]", "conversion=hugingface"], "huggingface"),
        (["stages=[training,evaluation]", "training=gpt3/126m", "engine=nemo"], "our own trainer evaluates"),
        (["stages=[evaluation]", "evaluation.training=3"], "expected the path of a YAML file"),
        (
            ["stages=[training,conversion]", "engine=megatron_lm", "conversion.every=2"],
            "conversion.every=2: checkpoints of engine=megatron_lm",
        ),
        (
            ["stages=[training,conversion]", "conversion.every=2", "conversion.output=/x/model"],
            "conversion.output='/x/model': with conversion.every=2 it needs {step}",
        ),
        (
            ["stages=[conversion]", "conversion.source=/x", "conversion.every=2"],
            "conversion.every=2: there is no training before it",
        ),
        (
            ["stages=[conversion,training]", "conversion.source=/x", "conversion.every=2"],
            "conversion.every=2: there is no training before it",
        ),
        (["stages=[training,evaluation]", "evaluation.processes=9"], "evaluation.processes=9: 2 nodes"),
    ],
)
def test_mistakes_name_the_key(words: list[str], message: str) -> None:
    with pytest.raises((UserError, Mistakes)) as raised:
        jobs(*words)
    assert message in str(raised.value)


T5 = [
    f"++training.model.{stack}.{key}"
    for stack in ("encoder", "decoder")
    for key in (
        "position_embedding_type=relative",
        "normalization=rmsnorm",
        "bias=False",
        "normalize_attention_scores=False",
    )
]


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        (["training=gpt3/126m"], None),
        (["training=gpt3/126m", "++training.model.activation=swiglu"], "training.model.activation=swiglu"),
        (["training=llama/llama3_1_8b"], None),
        (["training=llama/llama3_1_8b", "+training.model.rotary_percentage=0.5"], "rotary_percentage=0.5"),
        (["training=t5/220m"], "training.model.encoder.position_embedding_type=learned_absolute"),
        (["training=t5/220m", "conversion.to=safetensors"], None),
        (["training=t5/220m", *T5], "training.model.tokens_head_bias=True"),
        (["training=t5/220m", *T5, "+training.model.tokens_head_bias=False"], None),
    ],
)
def test_a_model_that_hugging_face_lacks_is_refused_before_its_training(
    words: list[str], mistake: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["check", "--json", "stages=[training,conversion]", "engine=megatron", "cluster=bcm", *words])
    reports = json.loads(capsys.readouterr().out)
    found = [
        finding["message"]
        for report in reports
        for finding in report["findings"]
        if finding["id"] == "engine.megatron"
    ]
    assert len(found) == (mistake is not None), found
    assert mistake is None or mistake in found[0]


def test_a_run_describes_its_checkpoints(run_dir: Path, capsys: Capsys) -> None:
    words = ["cluster=local", "stages=[evaluation]", f"evaluation.source={run_dir}/checkpoints"]
    config = printed_config(capsys, *words)
    job_config = yaml.safe_load((run_dir / "gpt3_tiny_hydra.yaml").read_text())
    assert {**config["model"], "data": 0} == {**job_config["model"], "data": 0}  # type: ignore[dict-item]
    assert config["evaluation"]["results"] == f"{run_dir}/evaluations"  # type: ignore[index]


def test_checkpoints_are_found_in_a_run_that_was_moved(run_dir: Path) -> None:
    (path,) = (run_dir / "launches" / "1").glob("*_hydra.yaml")
    config = yaml.safe_load(path.read_text())
    config["exp_manager"]["checkpoint_callback_params"] = {"dirpath": str(run_dir / "checkpoints")}
    path.write_text(yaml.safe_dump(config))
    moved = run_dir.rename(run_dir.with_name("moved"))
    training = newest_training(moved)
    assert training is not None and training.checkpoints == moved / "checkpoints"


def test_convert_runs_on_this_machine_by_default(run_dir: Path, capsys: Capsys) -> None:
    assert main(["convert", "gpt3_tiny@20", "--dtype", "bfloat16", "--check", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "srun" not in script
    assert f"--config-path={run_dir}_conversion/launches/1" in script


def test_on_cluster_takes_the_partition_of_the_run(run_dir: Path, capsys: Capsys) -> None:
    assert main(["evaluate", "gpt3_tiny@2,4", "--on-cluster", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --partition=cpu\n" in script
    assert "#SBATCH --ntasks-per-node=2\n" in script, "tensor parallel 2"
    assert main(["convert", "gpt3_tiny", "--on-cluster", "--dry-run", "cluster.partition=other"]) == 0
    assert "#SBATCH --partition=other\n" in capsys.readouterr().out


def test_a_directory_is_a_source_too(run_dir: Path, tmp_path: Path, capsys: Capsys) -> None:
    foreign = tmp_path / "a model"
    foreign.mkdir()
    assert main(["convert", str(foreign), "--to", "slipway", "--dry-run"]) == 0
    assert "a_model_conversion" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert"], "no source"),
        (["convert", "a", "b"], "one source at a time"),
        (["convert", "gpt3_tine"], "did you mean 'gpt3_tiny'?"),
        (["convert", "gpt3_tiny", "--to", "hugingface"], "did you mean 'huggingface'?"),
        (["convert", "gpt3_tiny", "--dtype", "fp16"], "conversion.dtype='fp16': expected 'float32'"),
        (["convert", "gpt3_tiny@2,4"], "one step at a time"),
    ],
)
def test_mistakes_of_the_verbs_are_named(
    run_dir: Path, capsys: Capsys, words: list[str], message: str
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not Path(f"{run_dir}_conversion").exists()


def test_a_missing_step_is_refused_with_the_existing_ones(
    run_dir: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.checks.gathering.checkpoints.read_complete_checkpoints", _marked)
    assert main(["convert", "gpt3_tiny@7"]) == 2
    error = capsys.readouterr().err
    assert "conversion.step='7': no complete checkpoint of this step" in error
    assert "steps: 2, 4" in error
    assert not Path(f"{run_dir}_conversion").exists()


def _marked(directory: Path) -> list[MarkedCheckpoint]:
    return [MarkedCheckpoint(step, step, 0.0, directory / f"step-{step}", {}) for step in (2, 4)]


def test_a_run_without_a_checkpoint_is_refused(run_dir: Path, capsys: Capsys) -> None:
    assert main(["convert", "gpt3_tiny"]) == 2
    assert "conversion.source" in (error := capsys.readouterr().err)
    assert "no checkpoint in it" in error


def test_missing_libraries_name_the_extra(
    run_dir: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "checkpoints" / "x").mkdir()
    monkeypatch.setattr("launcher.checks.gathering.host._libraries", lambda job: ("no_such_library",))
    assert main(["convert", "gpt3_tiny"]) == 2
    error = capsys.readouterr().err
    assert "cannot import no_such_library" in error
    assert "[train,conversion]" in error


def test_a_source_without_weights_is_refused_before_the_launch(
    tmp_path: Path, slurm: FakeSlurm, capsys: Capsys
) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "x.bin").touch()
    assert main(["convert", str(tmp_path / "tokens"), f"base_results_dir={tmp_path}/results"]) == 2
    assert "tokens': no weights of a known format in it" in capsys.readouterr().err


def test_a_directory_that_cannot_be_listed_does_not_end_the_checks_of_a_source(
    tmp_path: Path, slurm: FakeSlurm, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokens" / "stale").mkdir(parents=True)

    def failing(list_: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(path: Any = ".") -> Any:
            if str(path) == str(tmp_path / "tokens" / "stale"):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return list_(path)

        return call

    for name in ("listdir", "scandir"):  # as on a file system whose server has gone
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    assert main(["convert", str(tmp_path / "tokens"), f"base_results_dir={tmp_path}/results"]) == 2
    assert "tokens': no weights of a known format in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "difference"),
    [
        (None, "it has no conversion.json"),
        ({"to": "huggingface", "dtype": "bfloat16"}, "dtype=bfloat16"),
        ({"to": "huggingface", "dtype": None, "step": 2, "checkpoint": "x"}, "step=2, checkpoint=x"),
        ({"to": "huggingface", "dtype": None, "step": 4, "checkpoint": "x"}, "checkpoint=x"),
    ],
)
def test_an_output_of_another_conversion_is_refused_before_the_launch(
    run_dir: Path, tmp_path: Path, capsys: Capsys, record: dict[str, Any] | None, difference: str
) -> None:
    (run_dir / "checkpoints" / "step-4").mkdir()
    marker = run_dir / "checkpoints" / "step-4" / "complete.json"
    marker.write_text(json.dumps({"step": 4, "serial": 1, "files": {}}))
    output = tmp_path / "model"
    output.mkdir()
    (output / "x").touch()
    if record is not None:
        (output / "conversion.json").write_text(json.dumps({"made_of": record}))
    assert main(["convert", str(run_dir), "--output", str(output)]) == 2
    assert f"something else is there ({difference})" in capsys.readouterr().err
    assert main(["convert", str(run_dir), "--output", str(marker)]) == 2
    assert "something else is there (it has no conversion.json)" in capsys.readouterr().err
    assert not Path(f"{run_dir}_conversion").exists()


def test_an_unknown_task_is_refused_before_the_launch(run_dir: Path, capsys: Capsys) -> None:
    pytest.importorskip("lm_eval")
    (run_dir / "checkpoints" / "step-4").mkdir()
    assert main(["evaluate", "gpt3_tiny", "--tasks", "hellaswg,arc_easy"]) == 2
    error = capsys.readouterr().err
    assert "evaluation.lm_eval.tasks='hellaswg': lm-eval has no such task" in error
    assert "did you mean 'hellaswag'?" in error and "'arc_easy': " not in error
    assert not Path(f"{run_dir}_evaluation").exists()


@pytest.mark.parametrize("page", ["conversion", "evaluation"])
def test_commands_of_the_pages_can_be_planned(page: str, repository: Path) -> None:
    text = (repository / "docs" / f"{page}.md").read_text()
    commands = re.findall(r"^slipway launch (stages=.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        launches = drafts(Request(shlex.split(command), ["slipway", "launch"]))
        assert {draft.plan.job.engine for draft in launches} == {"megatron"}


def test_directories_of_earlier_stages_are_named_by_their_keys() -> None:
    words = [ALL, "engine=megatron", "cluster=bcm", "base_results_dir=/r", "data_dir=/d"]
    words += ["conversion.output=/c/step-{step}", "evaluation.results=/e"]
    words += ["+training.exp_manager.checkpoint_callback_params.dirpath=/k", "training=gpt3/126m"]
    _, conversion, evaluation = drafts(Request(words, ["slipway", "launch"]))
    assert conversion.directory_key(Path("/c")) == "conversion.output"
    assert evaluation.directory_key(Path("/e")) == "evaluation.results"
    assert PathResolver(conversion).is_created_later(Path("/k/step-4")), "checkpoints of the training"
    assert PathResolver(evaluation).is_created_later(Path("/c/step-4"))
    assert not PathResolver(conversion).is_created_later(Path("/c/step-4"))

"""Composition, and the messages about mistakes in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.compose import compose, list_options
from launcher.errors import UserError
from launcher.stages.planning import plan_launch

pytestmark = pytest.mark.usefixtures("composed_anew")


def test_values_are_those_of_the_reference() -> None:
    training = compose(["training=gpt3/126m"]).config.training
    assert training is not None
    model = training.model
    assert (model["num_layers"], model["hidden_size"], model["num_attention_heads"]) == (12, 768, 12)
    assert model["ffn_hidden_size"] == 3072
    assert model["optim"]["lr"] == 6e-4
    assert model["optim"]["sched"] == {
        "name": "CosineAnnealing",
        "warmup_steps": 636,
        "constant_steps": 100000,
        "min_lr": 6e-5,
    }
    assert training.trainer["max_steps"] == 600000
    assert training.exp_manager["checkpoint_callback_params"]["model_parallel_size"] == 1


def test_only_the_groups_of_the_requested_stages_are_composed() -> None:
    composition = compose([])
    assert composition.config.data_preparation is None
    assert composition.choices == {"cluster": "bcm", "training": "gpt3/126m"}


def test_choices_are_those_of_this_composition() -> None:
    assert compose(["training=gpt3/5b"]).choices["training"] == "gpt3/5b"
    assert compose(["training=gpt3/126m"]).choices["training"] == "gpt3/126m"


@pytest.mark.parametrize(
    ("cluster", "engine"), [("bcm", "nemo"), ("sandbox", "megatron"), ("local", "megatron")]
)
def test_each_cluster_has_its_engine(cluster: str, engine: str) -> None:
    config = compose([f"cluster={cluster}"]).config
    assert config.engine == engine
    assert (config.container is None) == (engine == "megatron")


def test_relative_paths_start_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose(["base_results_dir=out"]).config
    assert config.base_results_dir == str(tmp_path / "out")
    assert config.data_dir == str(tmp_path / "data")


def test_launcher_scripts_path_moves_data_and_results() -> None:
    config = compose(["launcher_scripts_path=/opt/launcher_scripts"]).config
    assert config.base_results_dir == "/opt/launcher_scripts/results"
    assert config.data_dir == "/opt/launcher_scripts/data"


def test_wrapper_style_overrides_work_unchanged() -> None:
    config = compose(
        [
            "stages=[training]",
            "training=gpt3/126m",
            "training.trainer.num_nodes=2",
            "training.trainer.limit_val_batches=0.0",
            "training.exp_manager.create_checkpoint_callback=False",
            "training.model.data.data_impl=mock",
            "training.model.data.data_prefix=[]",
            "training.run.dependency=null",
            "container_mounts=[null]",
            "env_vars.MY_OWN=1",
        ]
    ).config
    assert config.container_mounts == []
    assert config.env_vars["MY_OWN"] == "1"
    assert compose(["env_vars={A: 1}"]).config.env_vars["A"] == "1"
    assert compose(["cluster.account=12345"]).config.cluster.account == "12345"
    assert config.training is not None
    assert config.training.run.dependency is None


def test_tree_of_the_user_comes_first(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "ours.yaml").write_text("defaults: [bcm, _self_]\npartition: p5\n")
    assert compose(["cluster=ours"], (tmp_path,)).config.cluster.partition == "p5"
    assert "ours" in list_options("cluster", (tmp_path,))
    (tmp_path / "cluster" / "bcm.yaml").write_text("defaults: [_base, _self_]\npartition: shadowed\n")
    assert compose(["cluster=bcm"], (tmp_path,)).config.cluster.partition == "shadowed"
    assert compose(["cluster=bcm"]).config.cluster.partition is None, "only for as long as it is asked for"


def test_missing_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        compose([], (tmp_path / "nope",))


def test_the_sandbox_never_means_another_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPWAY_SANDBOX_DIR", str(tmp_path / "default"))
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm-prod/slurm.conf")
    assert compose(["cluster=sandbox"]).config.cluster.slurm_conf == str(tmp_path / "default/etc/slurm.conf")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sandbox.json").write_text("{}")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "other/etc/slurm.conf"))
    assert compose(["cluster=sandbox"]).config.cluster.slurm_conf == str(tmp_path / "other/etc/slurm.conf")


MISTAKES = [
    (["training=gpt3/5B"], ["training=gpt3/5B", "did you mean 'gpt3/5b'", "gpt3/126m"]),
    (["training=gpt/5b"], ["did you mean 'gpt3/5b'"]),
    (["cluster=bmc"], ["cluster=bmc", "did you mean 'bcm'"]),
    (["cluster.partion=x"], ["cluster.partion", "did you mean 'partition'"]),
    (["+cluster.partion=x"], ["cluster.partion", "did you mean 'partition'"]),
    (["cluster.exclusive=maybe"], ["cluster.exclusive='maybe'", "true or false"]),
    (
        ["training.model.micro_batchsize=3"],
        ["did you mean 'micro_batch_size'", "+training.model.micro_batchsize"],
    ),
    (["training.trainer.num_nodes=two"], ["training.trainer.num_nodes='two'", "a whole number"]),
    (["training.trainer.num_nodes=0"], ["training.trainer.num_nodes=0", "1 or more"]),
    (["stages=[trainin]"], ["stages=trainin", "did you mean 'training'"]),
    (["stages=[]"], ["stages=[]", "valid: data_preparation, training"]),
    (["stages=[data_preparation]"], ["data_preparation.inputs", "a value is needed"]),
    (["data_dir=${oc.env:SLIPWAY_NO_SUCH}"], ["SLIPWAY_NO_SUCH"]),
    (["engine=nemoo"], ["engine='nemoo'", "'nemo', 'megatron' or 'megatron_lm'"]),
    (["cluster.gres=gpu:4"], ["cluster.gres='gpu:4'", "cluster.gpus_per_node=8", "contradict"]),
    (["cluster.gpu_request=gres", "cluster.gres=null"], ["cluster.gpu_request=gres", "cluster.gres is null"]),
    (["cluster.gpu_request=gpu"], ["cluster.gpu_request='gpu'", "'gpus_per_node'"]),
    (["cluster.exclusive=users"], ["expected true or false, or user, mcs or topo"]),
    (["cluster.mem=64XB"], ["cluster.mem='64XB'", "not an amount of memory", "64G"]),
    (["cluster.mem=1.5G"], ["not an amount of memory"]),
    (["cluster.requeue=maybe"], ["cluster.requeue='maybe'", "true or false"]),
    (["cluster.sbatch.partition=x"], ["--partition is set by cluster.partition"]),
    (["cluster.sbatch.ntasks_per_node=8"], ["--ntasks-per-node is set by training.trainer.num_nodes"]),
    (["cluster.sbatch.spread_jobs=true"], ["no option --spread-jobs", "did you mean 'spread-job'"]),
    (["cluster.sbatch.comemnt=x"], ["did you mean --comment, which is set by cluster.comment?"]),
    (["cluster.sbatch.wrap=x"], ["--wrap is set by the launcher"]),
    (["cluster.sbatch.nice=[1]"], ["cluster.sbatch.nice=[1]: expected text, a number, or true"]),
    (["cluster.sbatch=spread"], ["cluster.sbatch='spread'"]),
    (["cluster.env_vars.A-B=1"], ["cluster.env_vars.A-B", "shell variable"]),
    (
        ["training.run.time_limit=banana"],
        ["training.run.time_limit='banana'", "not a time limit; valid: MIN"],
    ),
    (["container_options.writeable=true"], ["container_options.writeable", "did you mean 'writable'"]),
    (["container_options.save=here.sqsh"], ["container_options.save='here.sqsh'", "a whole path"]),
    (["env_files.A-B=/x"], ["env_files.A-B", "shell variable"]),
    (["env_files.TOKEN=secret"], ["env_files.TOKEN=***", "a whole path"]),
    (["env_files.A=/x", "env_vars.A=1"], ["env_files.A", "env_vars.A is set too"]),
    (["stage_cluster.trainin.mem=0"], ["stage_cluster.trainin", "'training'"]),
    (["stage_cluster.training.memory=0"], ["stage_cluster.training.memory", "there is no such key"]),
    (["stage_cluster.training.mem=lots"], ["stage_cluster.training.mem='lots'", "not an amount"]),
    (["stage_cluster.training.container=x"], ["stage_cluster.training.container", "container=..."]),
    (["cluster_type=k8s"], ["cluster_type='k8s'", "launches on Slurm"]),
    (["debug=True"], ["debug=true", "dry_run=True"]),
    (["wandb_api_bcp_secret_key=X"], ["wandb_api_bcp_secret_key", "env_files"]),
    (["training.run.name='$(touch x)'"], ["run.name='$(touch x)'", "not a safe file name"]),
    (["training.run.name=../up"], ["not a safe file name"]),
    (["container_mounts=['/a,/b']"], ["'/a,/b' is not a mount", "source:target"]),
    (["container_mounts=/a"], ["container_mounts", "list"]),
    (["env_vars.A-B=1"], ["env_vars.A-B", "shell variable"]),
    (["training.run.name='a b"], ["training.run.name='a b"]),
    (["a=1", "b=2"], ["a=1: there is no such key"]),
    (["cluster.bogus=1", "training.run.bogus=2"], ["cluster.bogus", "there is no such key"]),
    (["cluster=null"], ["cluster"]),
    (["~training"], ["stages=[training]", "not in the configuration"]),
    (["training.model.data=null"], ["training.model.data=null", "keys are needed"]),
    (["base_results_dir=null"], ["base_results_dir=null", "a directory is needed"]),
]


@pytest.mark.parametrize(("overrides", "words"), MISTAKES, ids=lambda value: " ".join(value)[:40])
def test_mistakes_name_the_key_and_what_is_valid(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        plan_launch(compose(overrides).config, number=1, tag="x")
    for word in words:
        assert word in str(raised.value)

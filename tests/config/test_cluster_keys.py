"""The keys of `cluster`, and their effects in a plan."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from launcher.config.compose import compose, list_options
from launcher.errors import UserError
from launcher.plan import Job
from launcher.rendering.slurm_flags import header_lines, srun_arguments
from launcher.slurm.queue_flags import QueueFlags
from launcher.slurm.sbatch_options import SET_BY, checked_name
from launcher.stages.planning import plan_launch


def job(*overrides: str) -> Job:
    return plan_launch(compose(overrides).config, number=1, tag="x").job


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("cluster.mem=64GB", "memory", "64G"),
        ("cluster.mem=64G", "memory", "64G"),
        ("cluster.mem=1tb", "memory", "1t"),
        ("cluster.mem=65536", "memory", "65536"),
        ("cluster.mem=0", "memory", "0"),
        ("cluster.mem=null", "memory", None),
        ("cluster.exclusive=False", "exclusive", False),
        ("cluster.exclusive=false", "exclusive", False),
        ("cluster.exclusive=user", "exclusive", "user"),
        ("cluster.exclusive=mcs", "exclusive", "mcs"),
        ("cluster.exclusive=topo", "exclusive", "topo"),
        ("training.run.time_limit=30", "time_limit", "30"),
        ("training.run.time_limit=1-12", "time_limit", "1-12"),
        ("training.run.time_limit=UNLIMITED", "time_limit", "UNLIMITED"),
    ],
)
def test_resources_are_read_in_the_notations_of_users(override: str, field: str, value: Any) -> None:
    planned = getattr(job(override).resources, field)
    assert planned == value and type(planned) is type(value)


_COMMAND = ["stages=[command]", "command.argv=[/bin/true]"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (8, None, None)),
        (["cluster.gpus_per_task=1"], (None, 1, None)),
        (["cluster.gpus_per_task=1", "cluster.gpu_request=gpus_per_node"], (8, None, None)),
        (["cluster.gpu_request=gres"], (None, None, "gpu:8")),
        (["cluster.gpu_request=none"], (None, None, None)),
        (["cluster.gpus_per_node=null"], (None, None, "gpu:8")),
        # What is no GPU is kept beside them.
        (["cluster.gres=tmpfs:200g"], (8, None, "tmpfs:200g")),
        (["cluster.gres='gpu:8,nvme:1'"], (8, None, "nvme:1")),
        (["cluster.gres='gpu:8,nvme:1'", "cluster.gpu_request=gres"], (None, None, "gpu:8,nvme:1")),
        (["cluster.gres='nvme:1,gpu:a100:8'", "cluster.gpus_per_task=1"], (None, 1, "nvme:1")),
        (["cluster.gres='gpu:8,nvme:1'", "cluster.gpu_request=none"], (None, None, "nvme:1")),
        (
            ["cluster.gres='gpu:8,nvme:1'", "stages=[data_preparation]", "data_preparation.inputs=[/x]"],
            (None, None, "nvme:1"),
        ),
        (
            ["cluster.gres='gpu:8,nvme:1'", "stages=[command]", "command.argv=[/bin/true]"],
            (None, None, "nvme:1"),
        ),
        (
            [
                "cluster.gres=nvme:1",
                "stages=[command]",
                "command.argv=[/bin/true]",
                "command.gpus_per_node=2",
            ],
            (2, None, "nvme:1"),
        ),
        (["cluster.gres=tmpfs:1g", "+stage_cluster.training.gres=null"], (8, None, None)),
    ],
)
def test_gpus_are_requested_in_one_way(overrides: list[str], expected: tuple[Any, ...]) -> None:
    resources = job(*overrides).resources
    assert (resources.gpus_per_node, resources.gpus_per_task, resources.gres) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("[--ntasks=3]", ["'--ntasks=3'", "training.trainer.devices"]),
        ("[-N2]", ["'-N2'", "--nodes is set by"]),
        ("[-lN,2]", ["'-lN 2'", "--nodes is set by"]),
        ("[--output=/x.%t]", ["--output is set by base_results_dir"]),
        ("[--jobid=1]", ["--jobid is set by Slipway"]),
        ("[--export=NONE]", ["--export is set by env_vars"]),
        ("[--kill-on-bad-exit=0]", ["--kill-on-bad-exit is set by Slipway"]),
        ("[--kill=0]", ["'--kill=0': --kill-on-bad-exit is set by"]),  # an abbreviation that getopt takes
        ("[-K0]", ["--kill-on-bad-exit is set by"]),
        ("[--container-image=foo]", ["--container-image is set by container", "container=foo"]),
        ("[--container-im,foo]", ["--container-image is set by container", "container=foo"]),
        ("[--container-name=x]", ["container_options.name=x"]),
        ("[--container-workdir=/y]", ["container_options.workdir=/y"]),
        ("[--mpi,pmix]", ["'--mpi pmix': --mpi is set by cluster.mpi", "cluster.mpi=pmix"]),
        ("'-c 4'", ["'-c 4': --cpus-per-task is set by", "cluster.cpus_per_task=4"]),
        ("[--time=1:00]", ["--time is set by training.run.time_limit"]),
        ("[-wn1]", ["cluster.nodelist=n1"]),
        ("[--cpu-bind=mask_cpu:0x1,0x2,0x4]", ["'0x2'", '["--cpu-bind=mask_cpu:0x1,0x2,0x4"]']),
        ("[--het-group=0,1]", ["'1'", '["--het-group=0,1"]']),
        ("[--label,true]", ["'true'", "for the program"]),
        ("[--environment=/a.toml,/b.toml]", ['["--environment=/a.toml,/b.toml"]']),
        ("[bash]", ["'bash'", "cluster.task_prefix"]),
        ("[--label,--,bash]", ["'--'", "cluster.task_prefix"]),
    ],
)
def test_arguments_of_srun_that_another_key_sets_are_refused(arguments: str, words: list[str]) -> None:
    own = ["cluster.mpi=pmi2", "cluster.cpus_per_task=2", "container_options.workdir=/x"]
    with pytest.raises(UserError) as raised:
        job(*own, f"cluster.srun_args={arguments}")
    assert str(raised.value).startswith("cluster.srun_args: ")
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "of_a_container", "kept"),
    [
        ('["--cpu-bind=mask_cpu:0x1,0x2"]', "null", ["--cpu-bind=mask_cpu:0x1,0x2"]),
        ("[--environment=/lab/containers/ngc.toml,--label]", "null", 2),
        ("[--environment,/lab/containers/ngc.toml]", "null", 2),
        ("[--task-prolog=/site/container_prolog.sh]", "null", 1),
        ("[--container-unshare=net,--label]", "null", ["--label"]),
        ("[--container-mounts,/a:/b,--wait=60]", "null", ["--wait=60"]),
        ("[--no-container-mount-home,-l]", "null", ["-l"]),
        ("[--container-mounts,/a:/b,--wait=60]", "/x.sqsh", 3),
        ("[--mpi=none,--gpu-bind=map_gpu:0,--mem=0,--exclusive]", "/x.sqsh", 4),
    ],
)
def test_arguments_of_srun_are_left_out_where_their_names_are_those_of_pyxis(
    arguments: str, of_a_container: str, kept: list[str] | int
) -> None:
    planned = job(f"cluster.srun_args={arguments}", f"container={of_a_container}", "engine=megatron")
    written, kept = srun_arguments(planned), list(planned.srun_args) if isinstance(kept, int) else kept
    assert written[-len(kept) :] == kept


@pytest.mark.parametrize(
    ("overrides", "mpi"),
    [
        ([], "pmix"),
        (["training.model.ub_tp_comm_overlap=False"], None),
        (["+training.model.ub_tp_comm_bootstrap_backend=nccl"], None),
        (["+training.model.ub_tp_comm_bootstrap_backend=mpi"], "pmix"),
        (["cluster.mpi=none"], "none"),
        (["cluster.srun_args=[--mpi=pmi2]"], None),
        (["engine=megatron"], None),
    ],
)
def test_user_buffers_of_nemo_start_by_pmix(overrides: list[str], mpi: str | None) -> None:
    assert job("training=gpt3/20b", "cluster=bcm", *overrides).mpi == mpi


def test_gpus_of_gres_and_of_their_own_key_must_agree() -> None:
    with pytest.raises(UserError, match="contradict each other"):
        job("cluster.gres='gpu:4,nvme:1'")


def test_further_flags_are_named_with_dashes_or_underscores() -> None:
    planned = job("cluster.sbatch={spread_job: true, wait-all-nodes: 1, tmp: 10G, hold: false, hint: null}")
    assert planned.queue.further == {"spread-job": True, "wait-all-nodes": "1", "tmp": "10G"}


@pytest.mark.parametrize(
    "override",
    [
        "+cluster.sbatch.job_name=x",
        "++cluster.sbatch.nic=100",
        "cluster.sbatch={nic: 1}",
        "cluster.sbatch.nice=[1]",
    ],
)
def test_a_mistake_in_a_further_flag_is_the_users_own(override: str) -> None:
    with pytest.raises(UserError) as raised:
        compose([override])
    key = override.lstrip("+").partition("=")[0].removesuffix("={nic: 1}")
    assert str(raised.value).startswith(key if "{" not in override else "cluster.sbatch.nic")
    assert f"from the command line: {override}" in str(raised.value)


def test_numbers_among_further_flags_are_as_written(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "ours.yaml").write_text(
        "defaults: [bcm, _self_]\nsbatch: {wckey: 1.10, mem_bind: local, tmp: 0100, nice: 1e3}\n"
    )
    plain = job("cluster.sbatch.wckey=1.10", "cluster.sbatch.nice=0100", "cluster.sbatch.hold=true")
    assert plain.queue.further == {"wckey": "1.10", "nice": "0100", "hold": True}
    config = compose(["cluster=ours"], (tmp_path,)).config
    further = plan_launch(config, number=1, tag="x").job.queue.further
    assert further == {"wckey": "1.10", "mem-bind": "local", "tmp": "0100", "nice": "1e3"}


def test_numbers_in_a_stages_own_cluster_are_as_written() -> None:
    planned = job(
        *(
            f"stage_cluster.training.{text}"
            for text in ("env_vars.A=1.10", "sbatch.wckey=2.10", "account=0042")
        ),
        "cluster.env_vars.B=x",
    )
    assert (planned.environment["A"], planned.environment["B"]) == ("1.10", "x")
    assert (planned.queue.account, planned.queue.further) == ("0042", {"wckey": "2.10"})
    with pytest.raises(UserError, match=r"stage_cluster\.training\.sbatch\.nic: ") as raised:
        compose(["stage_cluster.training.sbatch.nic=1"])
    assert "from the command line" in str(raised.value)


def test_an_empty_list_is_no_flag() -> None:
    queue = job("cluster.mail_type=[]", "cluster.nodelist=[null]", "cluster.exclude=[]").queue
    assert (queue.mail_type, queue.nodelist, queue.exclude) == (None, None, None)


@pytest.mark.parametrize("mount", ["/a:b", "/a:ro"])
def test_a_mounts_target_is_a_whole_path(mount: str) -> None:
    with pytest.raises(UserError, match="is not a mount") as raised:
        job("cluster.container=/x.sqsh", f"container_mounts=['{mount}']")
    assert raised.value.key == "container_mounts"


def test_each_row_of_the_queue_is_a_key_with_a_line_in_the_header() -> None:
    types = {name: get_args(hint) for name, hint in get_type_hints(QueueFlags).items()}
    rows = {name: 1 if int in kinds else "x" for name, kinds in types.items() if bool not in kinds}
    overrides = [f"cluster.{name}={value}" for name, value in rows.items()]
    lines = header_lines(plan_launch(compose(overrides).config, number=1, tag="x"))
    assert {f"--{name.replace('_', '-')}={value}" for name, value in rows.items()} < {*map(str, lines)}
    assert {name: getattr(job(*overrides).queue, name) for name in rows} == rows


def test_every_flag_that_we_set_is_refused_as_a_further_one() -> None:
    keys = [field.name.replace("_", "-") for field in fields(QueueFlags)]
    for flag in [*keys, "no-requeue", "gres", "mem", "nodes", "time", "dependency", "job-name", "output"]:
        assert flag in SET_BY
        with pytest.raises(ValueError, match=f"--{flag} is set by"):
            checked_name(flag)


def test_an_array_is_one_training_several_times_one_after_another() -> None:
    assert job("cluster.sbatch={array: 0-4%1}").queue.further == {"array": "0-4%1"}
    for array in ("0-4", "0-4%2", "1,3", "7"):
        with pytest.raises(UserError, match="train the same run, one after another") as raised:
            job(f"cluster.sbatch.array='{array}'")
        message = str(raised.value)
        assert message.startswith("cluster.sbatch.array=")
        assert f"write {array.partition('%')[0]}%1" in message
        assert f"from the command line: cluster.sbatch.array='{array}'" in message
    with pytest.raises(UserError, match="not a job array; valid: 0-4%1"):
        job("cluster.sbatch={array: five}")


def test_logs_are_appended_to() -> None:
    with pytest.raises(ValueError, match="--open-mode is set by Slipway, to append"):
        checked_name("open_mode")


def test_variables_of_the_cluster_are_below_those_of_the_root() -> None:
    variables = job(
        "cluster=p4d", "cluster.env_vars.A=1", "cluster.env_vars.B=1.10", "env_vars.A=2"
    ).environment
    assert (variables["A"], variables["B"]) == ("2", "1.10")
    assert variables["FI_EFA_USE_DEVICE_RDMA"] == "1"
    assert "FI_PROVIDER" not in job("cluster=p4d", "env_vars.FI_PROVIDER=null").environment


@pytest.mark.parametrize("cluster", ["p4d", "p4de", "p5", "p5en"])
def test_aws_clusters_use_efa(cluster: str) -> None:
    planned = job(f"cluster={cluster}")
    assert planned.environment["FI_PROVIDER"] == "efa"
    assert (planned.resources.gpus_per_node, planned.resources.exclusive) == (8, True)
    assert ("FI_EFA_USE_DEVICE_RDMA" in planned.environment) == cluster.startswith("p4")


def test_parts_of_clusters_are_no_choices() -> None:
    assert list_options("cluster") == ["bcm", "interactive", "local", "p4d", "p4de", "p5", "p5en", "sandbox"]


def test_a_stage_has_its_own_cluster() -> None:
    changes = (
        "stage_cluster={data_preparation: {partition: cpu, job_name_prefix: prep-}, training: {qos: high}}"
    )
    training = job(changes, "cluster.partition=gpu")
    assert (training.queue.partition, training.queue.qos) == ("gpu", "high")
    config = compose([changes, "stages=[data_preparation]", "data_preparation.inputs=[/x]"]).config
    plan = plan_launch(config, number=1, tag="x")
    assert (plan.job.queue.partition, plan.job.queue.qos) == ("cpu", None)
    assert plan.paths.job_name == "prep-tokenize_text"


def test_preparing_data_needs_no_gpus_unless_its_own_cluster_says_so() -> None:
    stage = ["stages=[data_preparation]", "data_preparation.inputs=[/x]", "cluster.gpu_request=gpus_per_node"]
    plain = job(*stage).resources
    assert (plain.gpus_per_node, plain.gres, plain.exclusive) == (None, None, False)
    own = job(
        *stage, "stage_cluster.data_preparation={exclusive: true, gres: 'gpu:1', gpu_request: gres}"
    ).resources
    assert (own.gpus_per_node, own.gres, own.exclusive) == (None, "gpu:1", True)


@pytest.mark.parametrize("value", ["true", "2.5", "8.0", "[8]", "eight"])
@pytest.mark.parametrize(
    "key", ["cluster.gpus_per_node", "training.trainer.num_nodes", "numa_mapping.min_cores"]
)
def test_numbers_that_are_not_whole_are_refused(key: str, value: str) -> None:
    with pytest.raises(UserError, match="expected a whole number") as raised:
        job(f"{key}={value}")
    assert key in str(raised.value)


SECRETS = ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "hf_token", "CLIENT_SECRET"]


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("node", ["env_vars", "cluster.env_vars"])
def test_a_secret_is_refused_and_not_shown(node: str, name: str) -> None:
    composition = compose([f"{node}.{name}=hunter2"])
    with pytest.raises(UserError, match="must not be written into a script") as raised:
        plan_launch(composition.config, number=1, tag="x")
    composition.annotate(raised.value)
    assert f"{node}.{name}" in str(raised.value)
    assert "hunter2" not in str(raised.value)
    assert f"env_files={{{name}: /path" in str(raised.value)


@pytest.mark.parametrize(
    "override",
    [
        "env_vars.TOKENIZERS_PARALLELISM=false",
        "env_vars.AWS_WEB_IDENTITY_TOKEN_FILE=/x",
        "env_vars.HF_TOKEN=null",
        "env_vars.MONKEY=1",
        "env_vars.SECRETARY=1",
    ],
)
def test_harmless_values_that_look_like_secrets_are_accepted(override: str) -> None:
    job(override)


def test_default_values_of_nemo_launcher_keys_are_accepted() -> None:
    compose(["cluster_type=bcm", "debug=False", "bcp_no_redirect=False", "wandb_api_bcp_secret_key=null"])


@pytest.mark.parametrize(
    "override, hint",
    [
        ("cluster.time=2:00:00", "--time is set by training.run.time_limit"),
        ("cluster.nodes=2", "--nodes is set by training.trainer.num_nodes and training.trainer.devices"),
        ("cluster.gpus=8", "--gpus is set by cluster.gpus_per_node, cluster.gpus_per_task or cluster.gres"),
        ("cluster.nice=100", "sbatch has --nice: cluster.sbatch.nice=..."),
        ("cluster.core-spec=2", "sbatch has --core-spec: cluster.sbatch.core_spec=..."),
        ("run.time_limit=2:00:00", "did you mean 'training.run.time_limit'?"),
    ],
)
def test_slurm_option_leads_to_its_key(override: str, hint: str) -> None:
    with pytest.raises(UserError) as raised:
        compose(["training=gpt3/126m", "cluster=bcm", override])
    assert raised.value.hint == hint


def test_slurm_option_in_a_file_leads_to_its_key(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text("defaults: [bcm, _self_]\nnice: 100\n")
    with pytest.raises(UserError) as raised:
        compose(["training=gpt3/126m", "cluster=mine"], config_dirs=(tmp_path,))
    (mistake,) = raised.value.mistakes
    assert mistake.hint == "sbatch has --nice: cluster.sbatch.nice=..."

"""Whole scripts, reviewed like code: a diff in one is explained in the commit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config.compose import compose
from launcher.plan import Plan
from launcher.rendering.render import TEMPLATE_DIR, render
from launcher.stages.planning import plan_launch, split_by_stage
from tests.launch_files import script_of, task_of

GOLDEN = Path(__file__).parent / "golden"

_PLACES = [
    "base_results_dir=/shared/results",
    "data_dir=/shared/data",
    "cluster.python=/shared/venv/bin/python",
]

CASES = {
    "gpt3_126m_bcm": ["training=gpt3/126m", "cluster=bcm"],
    "gpt3_5b_bcm": ["training=gpt3/5b", "cluster=bcm", "cluster.partition=gpu", "cluster.account=llm"],
    "gpt3_126m_two_nodes": [
        "training=gpt3/126m",
        "training.trainer.num_nodes=2",
        "training.run.dependency=null",
    ],
    "gpt3_126m_image_file": [
        "container=/apps/nemo.sqsh",
        "container_mounts=[/fsx,/etc/topo.xml:/topo.xml:ro]",
        "env_vars.NCCL_DEBUG=INFO",
    ],
    "gpt3_126m_megatron_engine": ["engine=megatron", "cluster.python=null"],
    "gpt3_tiny_sandbox": ["training=gpt3/tiny", "cluster=sandbox", "cluster.slurm_conf=null"],
    "gpt3_tiny_local": ["training=gpt3/tiny", "cluster=local"],
    "gpt3_tiny_interactive": ["training=gpt3/tiny", "cluster=interactive", "cluster.scheduler=allocation"],
    "separate_stderr": ["cluster.stderr_to_stdout=False", "cluster.cpus_per_task=12"],
    "gres_instead": ["cluster.gpus_per_node=null", "cluster.gres=gpu:h100:8"],
    "qos_reservation_constraint": [
        "cluster.qos=high",
        "cluster.reservation=maintenance_9",
        "cluster.constraint='h100&efa'",
    ],
    "chosen_nodes": ["cluster.nodelist=[n1,n2]", "cluster.exclude='bad[1-3]'", "cluster.switches=1@10:00"],
    "licenses_begin_deadline": [
        "cluster.licenses=[fs:2,matlab]",
        "cluster.begin=now+1hour",
        "cluster.deadline=2030-01-01T00:00:00",
    ],
    "mail_and_comment": [
        "cluster.mail_type=[END,FAIL]",
        "cluster.mail_user=me@example.org",
        "cluster.comment='a try, the 2nd'",
    ],
    "requeue_and_signal": ["cluster.requeue=True", "cluster.signal='B:USR1@300'"],
    "no_requeue": ["cluster.requeue=False", "training.run.time_limit=30"],
    "exclusive_user": ["cluster.exclusive=user", "cluster.mem=64GB"],
    "shared_nodes": ["cluster.exclusive=False", "cluster.mem=null", "training.run.time_limit=null"],
    "gpus_per_task": ["cluster.gpus_per_task=1"],
    "gpu_request_gres": ["cluster.gpu_request=gres"],
    "gpu_request_none": ["cluster.gpu_request=none"],
    "further_sbatch_flags": [
        "cluster.sbatch={spread_job: true, nice: 100, tmp: 10G, wckey: 'a b', hold: null}"
    ],
    "mpi": ["training=gpt3/20b", "cluster.mpi=pmix"],
    "container_options": [
        "container_options.mount_home=True",  # decides over the cluster's srun_args
        "container_options.writable=False",
        "container_options.remap_root=True",
        "container_options.entrypoint=False",
        "container_options.workdir=/work",
        "container_options.name=nemo",
        "container_options.env=[LD_LIBRARY_PATH,PATH]",
        "container_options.save=/shared/saved.sqsh",
        "training.trainer.num_nodes=1",
    ],
    "named_container_of_a_file": [
        "container=/apps/nemo.sqsh",
        "container_options.name=nemo",
        "container_mounts=[tmpfs:/scratch,umount:/dev/shm]",
    ],
    "image_staged": [
        "container=/apps/nemo.sqsh",
        "container_options.stage_to=/local disk",
        "training.trainer.num_nodes=2",
        "cluster.srun_args=['--no-container-mount-home','--mpi=none']",
    ],
    "image_staged_interactive": [
        "training=gpt3/tiny",
        "cluster=interactive",
        "cluster.scheduler=allocation",
        "container=/apps/trainer.sqsh",
        "container_options.stage_to=/scratch",
    ],
    "image_staged_node_range": [
        "container=/apps/nemo.sqsh",
        "container_options.stage_to=/scratch",
        "resilience.nodes={min: 1, max: 2}",
    ],
    "apptainer": [
        "container=/apps/nemo.sqsh",
        "container_options.runtime=apptainer",
        "container_options.env=[LD_LIBRARY_PATH,PATH]",
        "container_mounts=[/fsx,/etc/topo.xml:/topo.xml:ro]",
    ],
    "apptainer_options": [
        "container=/apps/nemo.sqsh",
        "container_options.runtime=apptainer",
        "container_options.stage_to=/scratch",
        "container_options.mount_home=True",
        "container_options.writable=True",
        "container_options.remap_root=True",
        "container_options.entrypoint=True",
        "container_options.workdir=/work",
    ],
    "no_container": ["container=null"],
    "no_numa_mapping": ["numa_mapping.enable=False"],
    "numa_mapping_all_cores": [
        "numa_mapping.max_cores=null",
        "numa_mapping.balanced=False",
        "numa_mapping.cores=single_logical",
    ],
    "profiled": ["training.model.nsys_profile.enabled=True", "training.model.nsys_profile.ranks=[0,8]"],
    "vboost": ["enable_vboost=True"],
    "pipeline_environment": ["training=gpt3/175b_16k", "env_vars.NVTE_BWD_LAYERNORM_SM_MARGIN=4"],
    "llama_user_buffers": ["training=llama/llama2_70b"],
    "secrets_by_reference": ["wandb_api_key_file=/home/me/.wandb", "env_files.HF_TOKEN='/home/me/my token'"],
    "p5_efa": ["cluster=p5", "env_vars.NCCL_SOCKET_IFNAME=null", "env_vars.FI_PROVIDER=other"],
    "p4d_efa": ["cluster=p4d"],
    "stage_cluster": [
        "stage_cluster.training.partition=h100",
        "stage_cluster.training.env_vars.NCCL_DEBUG=INFO",
    ],
    "t5_220m": ["training=t5/220m"],
    "bert_110m": ["training=bert/110m"],
    "mt5_170m": ["training=mt5/170m"],
    "gpt2_124m_megatron": ["training=gpt2/124m", "engine=megatron", "container=null"],
    "node_range": [
        "training=gpt3/126m",
        "resilience.nodes={min: 1, max: 2}",
        "enable_vboost=True",
    ],
    "spare_nodes": [
        "resilience.health=quick",
        "resilience.spares=2",
        "training.trainer.num_nodes=4",
        "cluster.sbatch.segment=3",
    ],
    "node_range_megatron": [
        "training=gpt3/tiny",
        "cluster=sandbox",
        "cluster.slurm_conf=null",
        "resilience.nodes={min: 1, max: 2}",
    ],
    "tokenize_on_cpus": [
        "stages=[data_preparation]",
        "data_preparation.inputs=[/shared/books]",
        "stage_cluster={data_preparation: {partition: cpu, cpus_per_task: 8, mem: 32G}}",
    ],
    "tokenize_bcm": ["stages=[data_preparation]", "data_preparation.inputs=[/shared/books]"],
    "tokenize_local": [
        "stages=[data_preparation]",
        "cluster=local",
        "data_preparation.inputs=[/shared/books]",
    ],
    "convert_bcm": [
        "stages=[conversion]",
        "engine=megatron",
        "conversion.source=/shared/others/gpt3_126m/checkpoints",
        "conversion.output=/shared/models/gpt3_126m-{step}",
        "conversion.tokenizer_dir=/shared/tokenizers/bpe",
    ],
    "convert_nemo_behind_training_bcm": [
        "stages=[training,conversion]",
        "training=gpt3/20b",
        "conversion=nemo",
    ],
    "evaluate_behind_training_bcm": [
        "stages=[training,conversion,evaluation]",
        "engine=megatron",
        "training=gpt3/5b",
        "evaluation.lm_eval.tasks=[hellaswag,/shared/tasks/own.yaml]",
    ],
    "command": [
        "stages=[command]",
        "command.argv=[/shared/convert.py,--to,'a \"b\" & ;c']",
        "command.container=null",
        "container=null",
    ],
    "command_gpus_container": [
        "stages=[command]",
        "command.argv=[all_reduce_perf,-b,8M,--data,/shared/data/x]",
        "command.nodes=2",
        "command.tasks_per_node=8",
        "command.gpus_per_node=8",
        "command.mem=64G",
        "command.workdir=/shared/bench",
        "command.env_vars={NCCL_DEBUG: INFO, NCCL_NVLS_ENABLE: null}",
        "command.writable=[/shared/bench]",
    ],
}


def plan_case(overrides: list[str]) -> Plan:
    """Plan the last of the jobs that the overrides request."""
    *_, config = split_by_stage(compose([*_PLACES, *overrides]).config)
    return plan_launch(config, number=1, tag="golden")


def rendered(overrides: list[str]) -> str:
    plan = plan_case(overrides)
    return f"{script_of(plan)}\n##### task.sh #####\n{task_of(plan)}"


@pytest.mark.parametrize("name", CASES)
def test_script_is_the_reviewed_one(name: str, request: pytest.FixtureRequest) -> None:
    path, text = GOLDEN / f"{name}.sh", rendered(CASES[name])
    if request.config.getoption("--write-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "if the change is meant: make golden, and review the diff"


def test_no_golden_script_without_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.sh")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_bash_and_shellcheck_accept_every_script(name: str) -> None:
    for script in rendered(CASES[name]).split("\n##### task.sh #####\n"):
        accept(script)


def test_bash_and_shellcheck_accept_what_task_sh_reads() -> None:
    texts = render(plan_case(CASES["gpt3_126m_bcm"]))
    copied = [path for path in texts if path.name in ("attach.sh", "binding.sh")]
    assert len(copied) == 2
    for path in copied:
        accept(texts[path])


def test_bash_and_shellcheck_accept_what_runs_on_each_node() -> None:
    accept((TEMPLATE_DIR / "stage_image.sh").read_text())


def accept(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "-"], input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_header_has_the_flags_of_the_nemo_launcher() -> None:
    script = rendered(CASES["gpt3_126m_bcm"])
    for line in (
        "--job-name=nemo-megatron-gpt3_126m",
        "--nodes=8",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--exclusive",
        "--mem=0",
        "--time=1-00:00:00",
        "--dependency=singleton",
    ):
        assert f"\n#SBATCH {line}\n" in script
    assert "\n    /opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py \\\n" in script
    assert "--container-mounts=/shared/results:/shared/results,/shared/data:/shared/data:ro" in script


def test_scripts_do_not_depend_on_order_of_hashes(repository: Path) -> None:
    """Sets of strings have another order in each process: a set in a script would change its replay."""
    names = ["gpt3_126m_bcm", "image_staged", "apptainer_options"]  # of other templates each
    program = "from tests.rendering.test_golden import *; print(rendered(CASES[sys.argv[1]]), end='')"
    for seed, name in enumerate(names, start=1):
        done = subprocess.run(
            [sys.executable, "-c", program, name],
            cwd=repository,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == (GOLDEN / f"{name}.sh").read_text(), name

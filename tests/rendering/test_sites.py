"""The launch files of real sites as keys of ours, and what users of launchers reported in public.

The sites' files were read in November 2026; the text here is our own. Each says the same as the site's: the
lines of its header, of `srun`, and what its shell does before and in the tasks.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.config.compose import compose
from launcher.errors import UserError
from launcher.plan import Plan
from launcher.rendering.render import render
from launcher.sandbox.lifecycle import Sandbox
from launcher.stages.planning import plan_launch
from tests.launch_files import script_of, task_of

_PLACES = ["base_results_dir=/shared/results", "data_dir=/shared/data"]


@dataclass(frozen=True)
class Site:
    """A site's file in `conf/cluster/`, what is typed beside it, and lines of the script and of the tasks."""

    cluster: str
    typed: tuple[str, ...]
    header: tuple[str, ...]
    srun: tuple[str, ...]
    script: tuple[str, ...] = ()
    task: tuple[str, ...] = ()


SITES = {
    # bigscience-workshop/bigscience, train/tr11-176B-ml/tr11-176B-ml.slurm
    "jean-zay": Site(
        """
        partition: gpu_p5
        account: six@a100
        qos: qos_gpu-gc
        reservation: hug
        constraint: a100
        gpus_per_node: 8
        gres: gpu:8
        gpu_request: gres
        cpus_per_task: 8
        sbatch: {hint: nomultithread}
        srun_args: [--wait=60]
        setup: ["source $ALL_CCFRWORK/start-training"]
        env_vars: {HF_DATASETS_OFFLINE: "1", NCCL_ASYNC_ERROR_HANDLING: "1"}
        """,
        ("training=gpt3/175b", "engine=megatron_lm", "container=null", "training.run.time_limit='100:00:00'"),
        (
            *("partition=gpu_p5", "account=six@a100", "qos=qos_gpu-gc", "reservation=hug", "constraint=a100"),
            *("gres=gpu:8", "cpus-per-task=8", "hint=nomultithread", "time=100:00:00"),
        ),
        ("--cpus-per-task=8", "--wait=60"),
        ("eval 'source $ALL_CCFRWORK/start-training'", "export HF_DATASETS_OFFLINE=1"),
    ),
    # allenai/OLMo, scripts/lumi/peteish13.sh; the mask is that of LUMI's documentation
    "lumi": Site(
        """
        partition: standard-g
        account: project_462000229
        gpus_per_node: 8
        cpus_per_task: 7
        mem: "0"
        exclusive: user
        sbatch: {time-min: "24:00:00"}
        srun_args: ["--distribution=block:block", "--cpu-bind=mask_cpu:0xfe,0xfe00"]
        env_vars: {MPICH_GPU_SUPPORT_ENABLED: "1", NCCL_SOCKET_IFNAME: hsn}
        env_expand:
          OMP_NUM_THREADS: $SLURM_CPUS_PER_TASK
          PYTHONPATH: .:$PYTHONPATH
          ROCR_VISIBLE_DEVICES: $SLURM_LOCALID
        """,
        (
            *("stages=[command]", "command.argv=[python, scripts/train.py]", "command.nodes=64"),
            *("command.tasks_per_node=8", "command.gpus_per_node=8", "container=/apps/olmo.sif"),
            *("container_options.runtime=singularity", "container_options.gpu_flag=rocm"),
        ),
        ("exclusive=user", "time-min=24:00:00", "mem=0", "nodes=64", "ntasks-per-node=8"),
        ("--cpu-bind=mask_cpu:0xfe,0xfe00", "singularity", "exec", "--rocm", "/apps/olmo.sif"),
        ("export NCCL_SOCKET_IFNAME=hsn",),
        (
            'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK?env_expand.OMP_NUM_THREADS: not set in the task}"',
            'export PYTHONPATH=."${PYTHONPATH:+:$PYTHONPATH}"',
        ),
    ),
    # aws-samples/awsome-distributed-training, 3.test_cases/megatron/nemo1.0, conf.template
    "aws-nemo": Site(
        """
        account: null
        exclusive: True
        gpus_per_node: 8
        mem: "0"
        job_name_prefix: nemo-megatron-
        srun_args: ["--container-mount-home"]
        env_vars: {FI_PROVIDER: efa, NCCL_DEBUG: INFO}
        env_expand: {LD_LIBRARY_PATH: "/opt/amazon/efa/lib:$LD_LIBRARY_PATH"}
        """,
        ("engine=nemo", "container=/fsx/nemo.sqsh", "container_mounts=[/fsx]"),
        ("exclusive", "gpus-per-node=8", "job-name=nemo-megatron-gpt3_126m"),
        ("--container-image=/fsx/nemo.sqsh", "--container-mount-home"),
        ("export FI_PROVIDER=efa",),
        ('export LD_LIBRARY_PATH=/opt/amazon/efa/lib"${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"',),
    ),
    # the same, 3.test_cases/mosaicml-composer/mpt, 2.train-mpt-manual-distributed.sbatch
    "aws-mpt": Site(
        """
        exclusive: True
        gpus_per_node: 8
        stderr_to_stdout: False
        env_vars: {FI_EFA_FORK_SAFE: "1"}
        env_expand: {NODE_RANK: $SLURM_NODEID}
        """,
        (
            *("stages=[command]", "command.argv=[composer, train.py]", "container=/fsx/llm-foundry.sqsh"),
            *("command.nodes=4", "command.tasks_per_node=8", "command.gpus_per_node=8"),
        ),
        ("nodes=4", "ntasks-per-node=8", "gpus-per-node=8"),
        ("--container-image=/fsx/llm-foundry.sqsh",),
        (),
        ('export NODE_RANK="${SLURM_NODEID?env_expand.NODE_RANK: not set in the task}"',),
    ),
    # JUWELS Booster: hosts have an `i` for InfiniBand (huggingface/accelerate#1489, pytorch/pytorch#73656)
    "juwels": Site(
        """
        partition: booster
        account: trustllm
        gpus_per_node: 4
        gres: gpu:4
        gpu_request: gres
        sbatch: {threads-per-core: 1}
        setup: [module purge, module load Stages/2025 CUDA]
        env_vars: {NCCL_SOCKET_IFNAME: ib0, GLOO_SOCKET_IFNAME: ib0}
        env_expand: {MASTER_ADDR: "\\\\${MASTER_ADDR}i", MASTER_PORT: "6000"}
        """,
        (
            *("container=/p/images/ngc.sif", "container_options.runtime=apptainer", "engine=megatron"),
            "training.trainer.devices=4",
        ),
        ("gres=gpu:4", "threads-per-core=1", "ntasks-per-node=4"),
        ("apptainer", "exec", "--nv", "/p/images/ngc.sif"),
        ("eval 'module purge'", "eval 'module load Stages/2025 CUDA'"),
        (
            'export MASTER_ADDR="${MASTER_ADDR?env_expand.MASTER_ADDR: not set in the task}"i',
            "export MASTER_PORT=6000",
        ),
    ),
    # Perlmutter: images by Shifter, a plugin of sbatch and a program before the task
    "perlmutter": Site(
        """
        constraint: gpu&hbm80g
        qos: regular
        account: m1234_g
        licenses: [scratch, cfs]
        gpus_per_node: 4
        python: python3
        spank: {image: "registry.nersc.gov/lab/nemo:25.07", module: "gpu,nccl-2.18"}
        task_prefix: [shifter]
        """,
        ("container=null", "engine=megatron", "training.trainer.devices=4"),
        (
            *('constraint="gpu&hbm80g"', "licenses=scratch,cfs", "module=gpu,nccl-2.18"),
            "image=registry.nersc.gov/lab/nemo:25.07",
        ),
        ("shifter", 'bash "$SLIPWAY_DIR/task.sh"', "python3"),
    ),
    # Leonardo: a disk of the node by gres, proxies in the environment
    "leonardo": Site(
        """
        partition: boost_usr_prod
        account: AIFAC_L01
        qos: boost_qos_lprod
        exclude: "lrdn[0001-0003]"
        gpus_per_node: 4
        gres: gpu:4,tmpfs:200g
        mem: 494000MB
        env_vars: {https_proxy: "http://login01:3128"}
        env_expand: {TRITON_CACHE_DIR: $TMPDIR/triton}
        """,
        (
            *("container=/leonardo/images/megatron.sif", "container_options.runtime=singularity"),
            *("engine=megatron", "training.trainer.devices=4"),
        ),
        ("gpus-per-node=4", "gres=tmpfs:200g", "mem=494000M", 'exclude="lrdn[0001-0003]"'),
        ("singularity", "--nv"),
        ("export https_proxy=http://login01:3128",),
        ('export TRITON_CACHE_DIR="${TMPDIR?env_expand.TRITON_CACHE_DIR: not set in the task}"/triton',),
    ),
    # CSCS Alps: the container engine is a plugin's option, for sbatch and for srun
    "alps": Site(
        """
        account: a-a06
        gpus_per_node: 4
        cpus_per_task: 72
        mem: "460000"
        signal: USR1@600
        spank: {environment: /store/lab/containers/ngc.toml}
        srun_args: ["--environment=/store/lab/containers/ngc.toml", -lu]
        python: python
        """,
        ("container=null", "engine=megatron", "training.trainer.devices=4"),
        ("cpus-per-task=72", "mem=460000", "signal=USR1@600", "environment=/store/lab/containers/ngc.toml"),
        ("--cpus-per-task=72", "--environment=/store/lab/containers/ngc.toml", "-lu"),
    ),
}
# What only the site's own Slurm has.
_OF_THE_SITE = re.compile(
    r"#SBATCH --(partition|account|qos|reservation|constraint|licenses|exclude|gres|environment|image|module"
    r"|nodes|ntasks-per-node|gpus-per-node|cpus-per-task|mem|dependency|output|error|time)=.*\n"
)


def _plan(tmp_path: Path, name: str) -> Plan:
    site, file = SITES[name], tmp_path / "conf/cluster/site.yaml"
    file.parent.mkdir(parents=True)
    lines = "\n".join(line.removeprefix(" " * 8) for line in site.cluster.splitlines())
    file.write_text(f"defaults: [_base, _self_]\n{lines}\n")
    config = compose(["cluster=site", *_PLACES, *site.typed], (tmp_path / "conf",)).config
    return plan_launch(config, number=1, tag="x")


@pytest.mark.parametrize("name", SITES)
def test_launch_file_of_a_site_is_expressed_by_keys(name: str, tmp_path: Path) -> None:
    site, plan = SITES[name], _plan(tmp_path, name)
    script = script_of(plan)
    header, _, rest = script.partition("\n\n")
    for flag in site.header:
        assert f"#SBATCH --{flag}" in header.splitlines(), header
    lines = [line.strip().removesuffix(" \\") for line in rest.splitlines()]
    step = lines[lines.index("srun") :]
    assert [line for line in step if line in site.srun] == list(site.srun), step
    for line in site.script:
        assert line in lines
    for line in site.task:
        assert line in task_of(plan).splitlines()


@pytest.mark.slurm
def test_slurm_takes_the_headers_of_the_sites(tmp_path: Path, sandbox: Sandbox) -> None:
    for name in SITES:
        script = tmp_path / f"{name}.sh"
        script.write_text(_OF_THE_SITE.sub("", script_of(_plan(tmp_path / name, name))))
        done = subprocess.run(
            ["sbatch", "--test-only", "--nodes=1", "--time=2-00:00:00", script],
            env=sandbox.environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{name}: {done.stderr}\n{script.read_text()[:1000]}"


# Public reports: what is typed, and lines of the files that follow, or what the refusal says after a `!`.
REPORTS: dict[str, tuple[list[str], list[str]]] = {
    "NVIDIA-NeMo/Run#381, --ntasks alone": (["+cluster.sbatch.ntasks=8"], ["!training.trainer.num_nodes"]),
    "NVIDIA-NeMo/Run#169, no container": (["container=null", "engine=megatron"], ["--export=ALL"]),
    "NVIDIA-NeMo/Run#129, commands before the task": (
        ["cluster.setup=[module load cuda]"],
        ["eval 'module load cuda'"],
    ),
    "NVIDIA-NeMo/Run#230, SHARP": (["cluster.srun_args=[--network=sharp]"], ["--network=sharp"]),
    "NVIDIA-NeMo/Run#38, names": (["training.run.name='a b|c'"], ["!not a safe file name"]),
    "NVIDIA-NeMo/Megatron-Bridge#3034, the image's variables win": (
        ["env_vars.NCCL_DEBUG=INFO"],
        [
            "--container-env=MASTER_ADDR,MASTER_PORT,TRANSFORMERS_OFFLINE,"
            "TORCH_NCCL_AVOID_RECORD_STREAMS,NCCL_NVLS_ENABLE,NCCL_DEBUG"
        ],
    ),
    "facebookincubator/submitit#14, --mem-per-gpu": (
        ["cluster.sbatch.mem_per_gpu=64G"],
        ["!cluster.mem=null, or cluster.sbatch.mem_per_gpu=null"],
    ),
    "the same without mem": (
        ["cluster.sbatch.mem_per_gpu=64G", "cluster.mem=null"],
        ["#SBATCH --mem-per-gpu=64G"],
    ),
    "facebookincubator/submitit#1710, --gres": (
        ["cluster.gpu_request=gres", "cluster.gres=gpu:a100:8"],
        ["#SBATCH --gres=gpu:a100:8"],
    ),
    "NVIDIA/exemplar-performance#5, gres not in the script": (
        ["cluster.gres='gpu:8,nvme:1'"],
        ["#SBATCH --gpus-per-node=8", "#SBATCH --gres=nvme:1"],
    ),
    "bessagroup/f3dasm#352, --mem beside --mem-per-cpu": (
        ["cluster.sbatch.mem_per_cpu=4G"],
        ["!cluster.mem='0' and cluster.sbatch.mem_per_cpu='4G' exclude each other"],
    ),
    "CliMA/slurm-buildkite#47, flags that exclude each other": (
        ["cluster.sbatch.oversubscribe=True"],
        ["!cluster.exclusive=False, or cluster.sbatch.oversubscribe=null"],
    ),
    "the same, of cores": (
        ["cluster.cpus_per_task=4", "cluster.sbatch.cpus_per_gpu=4"],
        ["!cluster.cpus_per_task=null, or cluster.sbatch.cpus_per_gpu=null"],
    ),
    "the same, of memory": (
        ["cluster.mem=null", "cluster.sbatch={mem-per-cpu: 1G, mem-per-gpu: 8G}"],
        ["!cluster.sbatch.mem_per_cpu=null, or cluster.sbatch.mem_per_gpu=null"],
    ),
    "nextflow-io/nextflow#2477, --clusters": (["+cluster.sbatch.clusters=x"], ["!--clusters is set by"]),
    "facebookresearch/hydra#1314, commas": (["env_vars.X=a,b=c"], ["export X=a,b=c"]),
    "esm-tools/esm_tools#934, a name with -hetjob": (
        ["training.run.name=x-hetjob"],
        ["#SBATCH --job-name=nemo-megatron-x-hetjob"],
    ),
    "BLAST-WarpX/warpx#5340, cores of a step": (
        ["cluster.cpus_per_task=8"],
        ["#SBATCH --cpus-per-task=8", "--cpus-per-task=8"],
    ),
    "awslabs/ai-on-eks#241, the port": (
        ["env_vars.MASTER_PORT=6000"],
        ["!env_expand.MASTER_PORT="],
    ),
    "Lightning-AI/pytorch-lightning#16828, a GPU for each task": (
        ["cluster.gpus_per_task=1"],
        ["#SBATCH --gpus-per-task=1"],
    ),
    "NVIDIA/pyxis#67, relative": (
        ["container=./a.sqsh"],
        ["!an image file is given by its whole path"],
    ),
    "apptainer's image, relative": (["container=a.sif"], ["!an image file is given by its whole path"]),
    "NVIDIA/pyxis#28, a container's name": (
        ["container_options.name=nemo", "container=/a.sqsh"],
        ["--container-name=%SLIPWAY_CONTAINER%"],
    ),
    "meta-pytorch/torchx#359, memory": (["cluster.mem=null"], ["#SBATCH --exclusive"]),
    "outerloop#176, --gpus": (["+cluster.sbatch.gpus=8"], ["!cluster.gpus_per_node"]),
    "an option of a plugin": (["+cluster.sbatch.environment=/x"], ["!cluster.spank.environment="]),
    "a slip in an option": (
        ["+cluster.sbatch.nise=5"],
        ["!did you mean 'nice'? one of a site's plugin: cluster.spank.nise="],
    ),
    "an option of sbatch's in the wrong place": (["+cluster.spank.nice=5"], ["!cluster.sbatch.nice=..."]),
    "an option of srun's in front of the tasks": (["cluster.task_prefix=[--label]"], ["!cluster.srun_args"]),
    "a command in place of a variable": (["env_expand.X=$(hostname)"], ["!no commands"]),
    "a secret in place of a variable": (
        ["env_expand.HF_TOKEN=hf_0123456789abcdefghijklmnopqrstuvwx"],
        ["!env_files={HF_TOKEN:"],
    ),
    "a variable of the job to come": (
        [r"container_mounts=['${SLURM_TMPDIR}:/scratch']"],
        ["!env_expand takes $SLURM_TMPDIR"],
    ),
    "the home, by its variable": (["container=$HOME/a.sqsh"], [f"--container-image={Path.home()}/a.sqsh"]),
    "the home, by ~": (
        ["env_files.A_TOKEN=~/token"],
        [f"A_TOKEN=$(head -n 1 {Path.home()}/token | tr -d '\\r') ||"],
    ),
}


@pytest.mark.parametrize("report", REPORTS)
def test_public_report(report: str) -> None:
    typed, expected = REPORTS[report]
    try:
        composition = compose(["training=gpt3/126m", "container=/apps/x.sqsh", *_PLACES, *typed])
        texts = render(plan_launch(composition.config, number=1, tag="x"))
    except UserError as error:
        message = str(error)
        assert all(text[0] == "!" and text[1:] in message for text in expected), message
        return
    lines = [line.strip() for text in texts.values() for line in text.splitlines()]
    for text in expected:
        assert any(line.startswith(text) for line in lines), texts

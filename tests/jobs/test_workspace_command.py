"""The command of a workspace, through a real bash: stand-ins for salloc and srun record their words."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.cli.app import main
from launcher.cli.completion import candidates
from launcher.config.compose import CONF_DIR
from launcher.config.overrides import hydra_value
from launcher.drafting import Draft, Request, drafts
from launcher.errors import Mistakes, UserError
from launcher.launching.workspace import ignored, unwrap_script
from launcher.plan import Mount

REPOSITORY = Path(__file__).resolve().parents[2]

# Each records its words and its environment, and runs the command among its words.
_STAND_IN = """#!/bin/bash
set -e
printf '%s\\0' "$@" >'{record}/{name}'
env -0 >'{record}/{name}.env'
while [[ $1 != {next} ]]; do shift; done
exec "$@"
"""
_SHELL = """#!/bin/bash
set -e
env -0 >'{record}/shell.env'
pwd -P >'{record}/shell.pwd'
exit 7
"""
HOSTILE = """a 'b' "c" $(touch canary) `touch canary` \\ $HOME"""


@dataclass
class Desk:
    """The user's working directory, with the stand-ins on PATH."""

    directory: Path
    path: str

    def run(self, text: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", text],
            env={**os.environ, "PATH": self.path, **variables},
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def words(self, program: str) -> list[str]:
        return (self.directory / program).read_bytes().decode().split("\0")[:-1]

    def variables(self, program: str) -> dict[str, str]:
        items = (self.directory / f"{program}.env").read_bytes().decode().split("\0")[:-1]
        return dict(item.partition("=")[::2] for item in items)

    @property
    def shell(self) -> str:
        """A shell whose path is not easy to quote."""
        path = self.directory / HOSTILE.replace("/", "") / "sh"
        path.parent.mkdir(exist_ok=True)
        path.write_text(_SHELL.format(record=self.directory))
        path.chmod(0o755)
        return str(path)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, following in (("salloc", "srun"), ("srun", "bash")):
        (programs / name).write_text(_STAND_IN.format(record=tmp_path, name=name, next=following))
        (programs / name).chmod(0o755)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SALLOC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path, f"{programs}:{os.environ['PATH']}")


def draft_workspace(*overrides: str) -> Draft:
    (draft,) = drafts(Request(["stages=[workspace]", *overrides], ["slipway"]))
    return draft


def test_all_values_reach_the_shell_unchanged(desk: Desk) -> None:
    (desk.directory / "key").write_text("s3cret\nsecond line\n")
    draft = draft_workspace(
        f"env_vars.NOTE={hydra_value(HOSTILE)}",
        f"env_files.HF_TOKEN={desk.directory}/key",
        f"cluster.comment={hydra_value(HOSTILE)}",
        f"workspace.shell={hydra_value(desk.shell)}",
        f"workspace.workdir={desk.directory}/bin",
        "container_mounts=[/fsx data:/fsx:ro]",
        "cluster.partition=gpu",
        "cluster.sbatch={nice: 100, spread_job: True, array: 0-1%1, export: ALL}",
    )
    leaks = {"SBATCH_PARTITION": "x", "SLURM_NNODES": "9", "SALLOC_ACCOUNT": "x", "PYXIS_CONTAINER_NAME": "x"}
    done = desk.run(draft.script, **leaks, SLURM_CONF="/site/slurm.conf", PYTHONPATH="/mine")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    assert not (desk.directory / "canary").exists()
    results, data = desk.directory / "results", desk.directory / "data"
    inner = [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        "--kill-on-bad-exit=1",
        "--export=ALL",
        "--container-image=nvcr.io#nvidia/nemo:25.07",
        f"--container-mounts={results}:{results},{data}:{data}:ro,/fsx data:/fsx:ro",
        f"--container-env={','.join(draft.plan.job.container_variables)}",
        "--no-container-mount-home",
        "bash",
        "-c",
    ]
    flags = [
        "--job-name=nemo-megatron-workspace",
        "--partition=gpu",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--mem=0",
        "--exclusive",
        "--time=04:00:00",
        f"--comment={HOSTILE}",
        "--nice=100",
        "--spread-job",
    ]
    words, last = desk.words("salloc"), ["bash", "/opt/NeMo", f"{desk.directory}/bin", desk.shell]
    assert words[: len(flags) + len(inner)] == flags + inner and words[-4:] == last
    assert len(words) == len(flags) + len(inner) + 1 + len(last)  # the command for the node is one word
    shell = desk.variables("shell")
    assert (shell["NOTE"], shell["HF_TOKEN"], shell["NCCL_NVLS_ENABLE"]) == (HOSTILE, "s3cret", "0")
    assert shell["PYTHONPATH"] == "/opt/NeMo:/mine"
    assert (desk.directory / "shell.pwd").read_text() == f"{desk.directory}/bin\n"
    for program in ("salloc", "srun"):
        variables = desk.variables(program)
        assert variables["SLURM_CONF"] == "/site/slurm.conf"
        assert not set(leaks) & set(variables)
    assert shell["SLURM_JOB_NAME"] == "interactive"


def test_a_secret_is_read_from_its_file_and_is_not_in_the_script(desk: Desk) -> None:
    key = desk.directory / "key file"
    key.write_text("s3cret\n")
    draft = draft_workspace(f"wandb_api_key_file={hydra_value(str(key))}")
    assert "s3cret" not in draft.script and f"$(head -n 1 '{key}' | tr" in draft.script
    desk.run(draft.script)
    assert desk.variables("srun")["WANDB_API_KEY"] == "s3cret"
    (desk.directory / "salloc").unlink()
    key.unlink()
    done = desk.run(draft.script)
    assert done.returncode == 1 and "head: cannot open" in done.stderr
    assert not (desk.directory / "salloc").exists()


def test_a_signal_to_the_process_ends_the_session(desk: Desk) -> None:
    """The process is salloc itself: no bash in front of it keeps the signal."""
    shell = desk.directory / "shell"
    shell.write_text(f"#!/bin/bash\ncd {desk.directory} && echo $$ >new && mv new pid; exec sleep 60\n")
    shell.chmod(0o755)
    script = unwrap_script(draft_workspace("training=gpt3/5b", f"workspace.shell={shell}").script)
    environment = {**os.environ, "PATH": desk.path}
    with subprocess.Popen(["bash", "-c", script], env=environment, stdin=subprocess.DEVNULL) as session:
        while session.poll() is None and not (desk.directory / "pid").exists():
            time.sleep(0.05)
        session.terminate()
    assert session.returncode == -signal.SIGTERM
    assert (desk.directory / "pid").read_text() == f"{session.pid}\n"


def test_a_workspace_has_the_trainer_of_the_checkout(desk: Desk) -> None:
    draft = draft_workspace(
        "engine=megatron", "training=gpt3/tiny", "container=/apps/x.sqsh", "cluster.srun_args=[]"
    )
    assert draft.plan.job.container is not None
    mount = Mount(str(REPOSITORY / "slipway"), "/opt/slipway/slipway")
    assert mount in draft.plan.job.container.mounts
    desk.run(draft.script)
    assert desk.words("srun")[-4:] == ["bash", "/opt/slipway", "/opt/slipway", "bash"]
    bare = draft_workspace(
        "engine=megatron", "training=gpt3/tiny", "container=null", "workspace.shell=/bin/true"
    )
    assert desk.run(bare.script).returncode == 0
    assert desk.words("srun")[-4:] == ["bash", str(REPOSITORY), str(desk.directory), "/bin/true"]
    assert not any("container" in word for word in desk.words("srun"))


def test_a_workspace_has_a_container_of_its_own(desk: Desk) -> None:
    """Changes there reach neither the training's unpacked container nor its saved image."""
    options = ["name=nemo", "save=/apps/saved.sqsh", "stage_to=/scratch", "writable=True"]
    overrides = [
        "training=gpt3/20b",
        "container=/apps/x.sqsh",
        *(f"container_options.{option}" for option in options),
    ]
    desk.run(draft_workspace(*overrides).script)
    words = desk.words("srun")
    # This variable follows from the model's layout, as in the training.
    assert desk.variables("srun")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "--container-image=/apps/x.sqsh" in words
    assert any(re.fullmatch("--container-name=nemo_workspace-[0-9a-f]{12}", word) for word in words)
    assert "--container-writable" in words
    assert not any("saved.sqsh" in word for word in words)


def test_apptainer_starts_the_shell(desk: Desk) -> None:
    draft = draft_workspace("container=/apps/x.sqsh", "container_options.runtime=apptainer")
    desk.run(draft.script)
    words = desk.words("srun")
    assert words.index("apptainer") < words.index("/apps/x.sqsh") < words.index("bash")


def test_a_missing_directory_does_not_end_the_session(desk: Desk) -> None:
    draft = draft_workspace("workspace.workdir=/no/such", f"workspace.shell={hydra_value(desk.shell)}")
    done = desk.run(draft.script)
    assert done.returncode == 7 and "/no/such" in done.stderr
    assert (desk.directory / "shell.pwd").read_text() == f"{desk.directory}\n"


def test_a_workspace_in_an_allocation(desk: Desk) -> None:
    draft = draft_workspace("cluster.scheduler=allocation", "container=null", "workspace.shell=/bin/true")
    done = desk.run(draft.script, SLURM_JOB_ID="4711", SLURM_NTASKS="16", SLURM_CONF="/site/slurm.conf")
    assert done.returncode == 0, done.stderr
    assert desk.words("srun")[:4] == ["--jobid=4711", "--overlap", "--nodes=1", "--ntasks=1"]
    assert not {"SLURM_JOB_ID", "SLURM_NTASKS"} & set(desk.variables("srun"))
    assert not (desk.directory / "salloc").exists()
    assert "this shell is in no allocation" in desk.run(draft.script).stderr


def test_a_workspace_on_this_machine(desk: Desk) -> None:
    draft = draft_workspace(
        "cluster=local",
        "training=gpt3/tiny",
        "container=/x.sqsh",
        f"workspace.shell={hydra_value(desk.shell)}",
    )
    assert desk.run(draft.script).returncode == 7
    assert desk.variables("shell")["PYTHONPATH"].split(":")[0] == str(REPOSITORY)
    assert not (desk.directory / "srun").exists()


@pytest.mark.parametrize(
    ("overrides", "flags"),
    [
        ([], ["--gpus-per-node=8"]),
        (["workspace.gpus=2"], ["--gpus-per-node=2"]),
        (["workspace.gpus=0"], []),
        (["cluster.gpus_per_node=null", "cluster.gres=gpu:h100:8"], ["--gres=gpu:h100:8"]),
        (
            ["cluster.gpus_per_node=null", "cluster.gres=gpu:h100:8", "workspace.gpus=1"],
            ["--gres=gpu:h100:1"],
        ),
        (["cluster.gpus_per_node=null", "cluster.gres=gpu", "workspace.gpus=1"], ["--gres=gpu:1"]),
        (
            ["cluster.gpus_per_node=null", "cluster.gres='nvme:1,gpu:8,ib:2'", "workspace.gpus=2"],
            ["--gres=gpu:2,nvme:1,ib:2"],
        ),
        (
            ["cluster.gpus_per_node=null", "cluster.gres='gpu:8,ib:2'", "workspace.gpus=0"],
            ["--gres=ib:2"],
        ),
        (["cluster.gpus_per_node=null", "cluster.gres=gpu:8", "workspace.gpus=0"], []),
        (["cluster.gpu_request=none", "workspace.gpus=2"], ["--gpus-per-node=2"]),
        (
            ["cluster.gpus_per_task=1", "cluster.cpus_per_task=12"],
            ["--gpus-per-node=8", "--cpus-per-task=96", "--cpus-per-task=96"],
        ),
        (
            ["cluster.cpus_per_task=12", "workspace.gpus=2"],
            ["--gpus-per-node=2", "--cpus-per-task=24", "--cpus-per-task=24"],
        ),
        (["stage_cluster.workspace={exclusive: False, gpus_per_node: 1}"], ["--gpus-per-node=1"]),
    ],
)
def test_requested_resources_become_salloc_flags(desk: Desk, overrides: list[str], flags: list[str]) -> None:
    """A single task has the resources of all tasks of a training's node, or the requested GPUs."""
    desk.run(draft_workspace("training=gpt3/5b", "cluster.gres=null", *overrides).script)
    words = desk.words("salloc")
    assert [
        word for word in words if "gpu" in word.partition("=")[0] or "gres" in word or "cpus" in word
    ] == flags
    assert {"--nodes=1", "--ntasks-per-node=1", "--ntasks=1"} <= set(words)
    assert not any(word.startswith(("--dependency", "--signal", "--no-requeue")) for word in words)


def test_a_workspace_has_the_image_of_developers(desk: Desk) -> None:
    def image(*overrides: str) -> str:
        container = draft_workspace(*overrides).plan.job.container
        assert container is not None
        return container.image

    dev = image("container=megatron:dev")
    assert image("container=megatron") == image("container=megatron:run") == dev
    assert image("container=megatron", "workspace.container=megatron:run") != dev
    assert image("workspace.container=nvcr.io#nvidia/nemo:24.09") == "nvcr.io#nvidia/nemo:24.09"
    (training,) = drafts(Request(["container=megatron"], ["slipway"]))
    assert training.plan.job.container is not None and training.plan.job.container.image != dev


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stages=[workspace,training]"], "a workspace is interactive"),
        (["workspace.shell=bin/sh"], "workspace.shell='bin/sh': a name or a whole path"),
        (["workspace.workdir=src"], "workspace.workdir='src': a whole path"),
        (["workspace.gpus=-1"], "workspace.gpus=-1"),
        (["workspace.node=2"], "workspace.node"),
        (["workspace=null"], "workspace=null: there is no such choice"),
        (["env_vars.HF_TOKEN=x"], "a secret must not be written into a script"),
        (["container=megatron:debug"], "flavor"),
    ],
)
def test_mistakes(desk: Desk, overrides: list[str], message: str) -> None:
    with pytest.raises((UserError, Mistakes), match=message):
        draft_workspace(*overrides)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch", "--follow"], "--follow: stages=[workspace] is a shell"),
        (["launch", "--json"], "--json: stages=[workspace] is a shell"),
        (["launch", "--smoke"], "--smoke: stages=[workspace] is a shell"),
        (["launch", "--build=job"], "--build=job: with stages=[workspace]"),
        (["render", "--task"], "--task: a workspace has no tasks"),
        (["sweep", "training.model.optim.lr=1e-4,2e-4", "--dry-run"], "an interactive shell cannot be swept"),
        (["launch", "--no-check=path.mounts"], "salloc is not on this machine"),
    ],
)
def test_requests_unfit_for_a_shell_are_refused(
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("PATH", str(desk.directory))
    assert main([*words, "stages=[workspace]", "training=gpt3/126m"]) == 2
    assert message in capsys.readouterr().err
    assert not (desk.directory / "results").exists()


def test_print_shows_the_command(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["stages=[workspace]", "training=gpt3/5b", "cluster.partition=gpu"]
    printed = []
    for command in (["launch", "--print"], ["launch", "--dry-run"], ["launch", "dry_run=True"], ["render"]):
        assert main([*command, *words]) == 0
        printed.append(capsys.readouterr().out)
    assert len(set(printed)) == 1 and "exec salloc \\\n" in printed[0]
    assert not (desk.directory / "results").exists()
    done = subprocess.run(
        [sys.executable, REPOSITORY / "launcher/main.py", *words, "--print"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, printed[0]), done.stderr


@pytest.mark.parametrize("cluster", ["bcm", "local", "interactive"])
def test_shellcheck_finds_nothing(desk: Desk, cluster: str) -> None:
    places = {"interactive": ["cluster.scheduler=allocation"]}.get(cluster, [])
    text = draft_workspace(f"cluster={cluster}", "env_files.HF_TOKEN=/home/me/key", *places).script
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_users_own_template_is_used(desk: Desk) -> None:
    (desk.directory / "templates").mkdir()
    (desk.directory / "templates/session.sh.j2").write_text(
        '{% extends "slipway/session.sh.j2" %}\n'
        "{% block environment %}{{ super() }}export MINE=1\n{% endblock %}\n"
    )
    request = Request(["stages=[workspace]"], ["slipway"], template_dir=desk.directory / "templates")
    (draft,) = drafts(request)
    desk.run(draft.script)
    assert desk.variables("salloc")["MINE"] == "1"


def test_variables_for_salloc_in_the_shell_are_reported(desk: Desk) -> None:
    leaks = {"SALLOC_ACCOUNT": "llm", "SBATCH_PARTITION": "x", "HOME": "/"}
    warnings = ["SALLOC_ACCOUNT=llm of your shell is not passed on to salloc"]
    assert ignored(draft_workspace().plan, leaks) == warnings
    assert ignored(draft_workspace("cluster=local", "training=gpt3/tiny").plan, leaks) == []


def test_keys_of_a_workspace_are_completed() -> None:
    roots = [CONF_DIR]
    assert "stages=[workspace]" in candidates("stages=[w", [], roots)
    assert "workspace.shell=" in candidates("workspace.s", [], roots)
    assert candidates("workspace=", [], roots) == ["workspace=default"]

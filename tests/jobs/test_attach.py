"""`slipway attach` on a real Slurm, and without one; for a container, the printed line."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import subprocess
import time

import pytest
from control_project import SLIPWAY, Project

from launcher.rendering.render import TEMPLATE_DIR

# Prints the environment of a shell in the place of a rank.
_LOOK = (
    'echo "$RANK of $WORLD_SIZE on $(hostname) in $PWD, rendezvous $MASTER_ADDR, GPUs $CUDA_VISIBLE_DEVICES"'
)


def attach(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SLIPWAY, "attach", *words],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slurm
def test_attach_finds_the_node_of_a_rank(project: Project) -> None:
    job = project.launch_ranks()
    project.wait_until_it_trains(ranks=4)
    code, (first, second) = project.launch_dir() / "code", project.nodes()
    for place, rank, node in (
        ([], 0, first),
        (["--rank", "3"], 3, second),
        (["--node", second], 2, second),
    ):
        # The variables of another allocation are ignored.
        done = attach("run", *place, "--", "bash", "-c", _LOOK, SLURM_JOB_ID="1", SLURM_NNODES="7")
        assert done.stdout == f"{rank} of 4 on {node} in {code}, rendezvous {first}, GPUs 0,1\n", done.stderr
        script = project.launch_dir() / "attach.sh"
        name = "any" if "--node" in place else rank
        line = f"srun --jobid={job} --overlap --nodes=1 --ntasks=1 --nodelist={node}"
        assert f"{line} bash {script} {project.tag()} {name} bash -c {shlex.quote(_LOOK)}" in done.stderr
    pasted = subprocess.run(
        ["bash", "-c", done.stderr.splitlines()[0]],
        env={**os.environ, "SLURM_JOB_ID": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert pasted.stdout == done.stdout, pasted.stderr
    assert attach("run", "--", "bash", "-c", "exit 7").returncode == 7
    assert (
        attach("run", "--outside", "--", "bash", "-c", 'echo "$(hostname) [${RANK-}]"').stdout
        == f"{first} []\n"
    )


@pytest.mark.slurm
def test_attach_opens_a_shell_on_a_terminal(project: Project) -> None:
    project.launch_ranks()
    project.wait_until_it_trains(ranks=4)
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(SLIPWAY, [str(SLIPWAY), "attach", "run", "--rank", "2"], {**os.environ, "TERM": "vt100"})
    os.write(terminal, b"tty && echo rank=$RANK term=$TERM; exit 5\n")
    output = _read(terminal)
    assert "rank=2 term=vt100" in output and "/dev/pts/" in output, output
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def _read(terminal: int) -> str:
    """Return the output of a terminal until nobody has it open any more."""
    output, end = b"", time.monotonic() + 60
    while time.monotonic() < end and select.select([terminal], [], [], end - time.monotonic())[0]:
        try:
            output += os.read(terminal, 4096)
        except OSError:  # raised by Linux when the other end is closed
            break
    os.close(terminal)
    return output.decode()


@pytest.mark.slurm
def test_print_shows_the_line_alone(project: Project) -> None:
    """The line for a container is the same: it has no name, and needs none."""
    job = project.launch_ranks("cluster.partition=cloud")
    code, _, err = project.slipway("attach", "run")
    assert code == 2
    assert f"job {job} of run is not running: it is PENDING" in err and "slipway follow run" in err
    project.slipway("cancel", "run")
    code, _, err = project.slipway("attach", "run", "--print")
    assert code == 2 and f"job {job} of run is not running: it is CANCELLED" in err
    job = project.launch_ranks()
    project.wait_until_it_trains(2, ranks=4)
    first, _ = project.nodes(2)
    code, out, err = project.slipway("attach", "run", "--print", "--rank", "1")
    assert (code, err) == (0, "")
    script = project.launch_dir(2) / "attach.sh"
    srun_options = f"--jobid={job} --overlap --nodes=1 --ntasks=1 --nodelist={first}"
    assert out == f"srun {srun_options} --pty bash {script} {project.tag(2)} 1\n"
    done = attach("run", "--print", SLURM_JOB_ID="1", SLURM_CONF="")
    conf = os.environ["SLURM_CONF"]
    assert done.stdout.startswith(f"(unset ${{!SLURM_*}}; SLURM_CONF={conf} srun {srun_options} --pty"), (
        done.stderr
    )
    for options, message in (
        (["--rank", "4"], "the ranks 0 to 3"),
        (["--node", "n9"], f"job {job} does not run there"),
        (["--launch", "1"], "is not running: it is CANCELLED"),
    ):
        code, _, err = project.slipway("attach", "run", "--print", *options)
        assert code == 2 and message in err


@pytest.mark.slurm
def test_attach_to_a_task_of_an_array(project: Project) -> None:
    job = project.launch("cluster.sbatch={array: 3-4%1}")
    project.wait_until_it_trains()
    for name in ("run", f"{job}_3"):
        done = attach(name, "--", "bash", "-c", 'echo "$SLURM_ARRAY_TASK_ID $RANK"')
        assert done.stdout == "3 0\n", done.stderr
    code, _, err = project.slipway("attach", f"{job}_4")
    assert code == 2 and f"job {job}_4 of run is not running: it is PENDING" in err
    code, _, err = project.slipway("attach", "run", "--node", "n9")
    assert code == 2 and f"--node n9: job {job}_3 does not run there" in err


def test_a_container_of_apptainers_cannot_be_joined() -> None:
    unshare = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("no mount namespace of its own for a process here")
    tag = f"apptainers-{os.getpid()}"
    variables = [f"SLIPWAY_TAG={tag}", "RANK=0", "APPTAINER_CONTAINER=/apps/nemo.sqsh"]
    rank = subprocess.Popen(
        ["env", *variables, *unshare, "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE
    )
    try:
        assert rank.stdout is not None and rank.stdout.readline() == b"\n"
        script = ["bash", TEMPLATE_DIR / "attach.sh", tag, "0", "true"]
        done = subprocess.run(script, capture_output=True, text=True)
    finally:
        rank.kill()
        rank.communicate()
    assert done.returncode == 1
    assert "a container of Apptainer's" in done.stderr and "--outside" in done.stderr


def test_attach_without_slurm(local_project: Project) -> None:
    project = local_project
    project.launch_ranks()
    project.wait_until_it_trains(ranks=4)
    done = attach("run", "--rank", "3", "--", "bash", "-c", 'echo "$RANK $PWD"; exit 3')
    assert (done.returncode, done.stdout) == (3, f"3 {project.launch_dir()}/code\n"), done.stderr
    script = project.launch_dir() / "attach.sh"
    script.write_text(f"touch {project.launch_dir()}/canary")
    script.chmod(0o777)  # as if somebody else had written it
    done = attach("run", "--rank", "2", "--", "bash", "-c", 'echo "$RANK $PWD"; exit 3')
    assert (done.returncode, done.stdout) == (3, f"2 {project.launch_dir()}/code\n"), done.stderr
    assert not (project.launch_dir() / "canary").exists()
    code, _, err = project.slipway("attach", "run", "--node", "n1")
    assert code == 2 and "it has no nodes" in err
    manifest = project.launch_dir() / "launcher.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "host": "elsewhere"}))
    code, _, err = project.slipway("attach", "run")
    assert code == 3 and "attach from there: ssh elsewhere" in err

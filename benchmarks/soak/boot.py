"""Booting the clusters of a soak, and removing them however it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

from benchmarks.soak import zygote
from benchmarks.soak.cluster import ROOT, SANDBOX, Cluster
from launcher.sandbox import STATE_FILE
from launcher.sandbox.lifecycle import down, up
from launcher.sandbox.options import SandboxOptions

TRAINING = (
    "slipway.trainer.pretrain", "slipway.trainer.config.check", "slipway.trainer.loop.startup_report",
    "slipway.trainer.loop.run", "slipway.trainer.loop.saving", "slipway.trainer.loop.session",
    "tensorboard.summary.writer.event_file_writer",
)  # fmt: skip
_LAUNCHING = ("benchmarks.soak.warm_launcher", "benchmarks.soak.trial")


def short_parent() -> str:
    """Return a directory for temporary files whose path leaves room for the names of sockets (107 bytes)."""
    directory = tempfile.gettempdir()
    return directory if len(directory) < 12 else "/tmp"


@contextmanager
def boot_clusters(nodes: int, disks: int = 0, lanes: int = 1) -> Iterator[list[Cluster]]:
    """Boot sandboxes: the first of `nodes` nodes, with file systems for full disks, the others of three."""
    parent = Path(tempfile.mkdtemp(prefix="soak-", dir=short_parent()))
    with ExitStack() as stack:
        stack.enter_context(_guarded(parent))
        clock = _clock(parent)
        preload = {"LD_PRELOAD": str(clock)} if clock else {}
        rank_socket, launch_socket = parent / "ranks", parent / "launchers"
        ranks = run_zygote(rank_socket, parent / "ranks.jsonl", TRAINING, preload)
        launchers = run_zygote(launch_socket, parent / "launchers.jsonl", _LAUNCHING)
        zygotes = [stack.enter_context(context) for context in (ranks, launchers)]
        for number in range(disks):
            stack.enter_context(_disk(parent / "disks" / str(number)))
        clusters = []
        for number, size in enumerate([nodes, *[3] * (lanes - 1)]):
            directory = parent / f"c{number}"
            (directory / "clocks").mkdir(parents=True)
            stack.callback(down, directory / SANDBOX)
            up(SandboxOptions(directory=directory / SANDBOX, nodes=size, cloud_nodes=0))
            cluster = Cluster(directory, size, rank_socket, launch_socket)
            cluster.zygotes = zygotes
            _prepare(cluster, number, clock)
            closing = threading.Event()
            watch = threading.Thread(target=_watch, args=(cluster, closing), daemon=True)
            watch.start()
            stack.callback(watch.join)
            stack.callback(closing.set)
            clusters.append(cluster)
        yield clusters


def _watch(cluster: Cluster, closing: threading.Event) -> None:
    while not closing.wait(0.5):
        cluster.look()


def _prepare(cluster: Cluster, number: int, clock: Path | None) -> None:
    prolog = cluster.directory / "prolog"
    prolog.write_text(
        "#!/bin/bash\n"
        f'[[ -e "{cluster.directory}/clocks/$SLURMD_NODENAME" ]] || exit 0\n'
        f'echo "export {zygote.OFFSET}=$(<"{cluster.directory}/clocks/$SLURMD_NODENAME")"\n'
        f'echo "export LD_PRELOAD={clock}"\n'
    )
    prolog.chmod(0o755)
    with cluster.conf.open("a") as file:
        file.write(f"TaskProlog={prolog}\n" if clock else "")
    # A requeued job waits until the credentials of its earlier attempt have expired; two minutes, by default.
    cluster.configure(r"(AuthInfo=.*)", r"\1,cred_expire=5")
    # Ports of a rendezvous follow from the number of a job: other sandboxes of this machine have others.
    cluster.configure(r"(FirstJobId=)(\d+)", lambda match: f"{match[1]}{int(match[2]) + 4000 * number}")
    cluster.kill_controller()
    cluster.start_controller(forgetful=True)
    # Both take their time where much else begins on the machine.
    cluster.slurm("scontrol", "reconfigure", seconds=240)
    # The real trainer saves within that, on a busy machine too.
    cluster.slurm("scontrol", "update", "PartitionName=low", "GraceTime=10", seconds=240)


def _clock(parent: Path) -> Path | None:
    """Build the library of a clock that is off; return None without a compiler."""
    compiler = shutil.which("cc")
    library = parent / "clock.so"
    source = Path(__file__).with_name("clock.c")
    command = [str(compiler), "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    if compiler is None or subprocess.run(command, capture_output=True).returncode:
        return None
    return library


@contextmanager
def run_zygote(
    path: Path, journal: Path, modules: tuple[str, ...], environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[str]]:
    """Run a zygote that has imported modules; it listens on the socket `path`."""
    command = [sys.executable, "-m", "benchmarks.soak.zygote", "serve", str(path), str(journal), *modules]
    # OpenMP reads its own when it is loaded: what `slipway.trainer.device` sets comes too late for a fork.
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    env = {**os.environ, **variables, **environment}
    log = path.with_suffix(".log")
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
    with server:
        assert server.stdin and server.stdout
        try:
            if server.stdout.readline() != "ready\n":
                raise RuntimeError(log.read_text())
            yield server
        finally:
            server.stdin.close()
            server.wait(20)


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Mount a small file system before the nodes boot, so that they see it; do nothing if that fails."""
    path.mkdir(parents=True)
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "soak", str(path)], capture_output=True
    )
    try:
        yield
    finally:
        if result.returncode == 0:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def _guarded(parent: Path) -> Iterator[None]:
    """Clear a directory of clusters away at the end, also when this process is killed."""
    words = [sys.executable, "-c", "from benchmarks.soak.boot import clear; clear()", str(parent)]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield
        finally:
            assert guard.stdin
            guard.stdin.close()


def clear() -> None:
    """Wait for the end of stdin; then stop the clusters that are left in a directory, and remove it."""
    sys.stdin.read()
    parent = Path(sys.argv[1])
    for state in sorted(parent.glob(f"c*/{SANDBOX}/{STATE_FILE}")):
        down(state.parent)
    for disk in (parent / "disks").glob("*"):
        if disk.is_mount():
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
    shutil.rmtree(parent)

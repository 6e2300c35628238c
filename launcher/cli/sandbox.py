"""`slipway sandbox`: a throw-away multi-node Slurm on this machine."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.sandbox import DIRECTORY_VARIABLE, Reporter, default_directory, slurm_conf_path
from launcher.ui.terminal import open_console

if TYPE_CHECKING:
    from rich.status import Status as Spinner

    from launcher.sandbox.lifecycle import Sandbox
    from launcher.sandbox.state import SandboxStatus

# The exit code of a sandbox that is down; 1 and 2 mean other things everywhere.
DOWN = 3
_START_AGAIN = "`slipway sandbox up` removes it and starts a new one"

_DESCRIPTION = """\
A real multi-node Slurm on loopback, from the distribution's packages: its nodes are daemons on this machine,
its GPUs are device files. It needs root, does not touch a Slurm that is installed, and lives in one
directory until `slipway sandbox down` removes it.

examples:
  slipway sandbox up                    four nodes with eight fake GPUs each
  eval "$(slipway sandbox env)"         sinfo, sbatch, srun and squeue now use the sandbox
  slipway sandbox status
  slipway sandbox down"""

_UP = """\
Boot a sandbox and wait until its nodes are idle. If one with the same options is up, nothing happens.

Partitions: gpu (default); low, whose jobs are requeued when gpu or high need the nodes; high; and cloud,
whose nodes do not exist: it is for `sbatch --test-only`, which validates a script for a thousand nodes there.

examples:
  slipway sandbox up
  slipway sandbox up --accounting                    with MariaDB and slurmdbd, so that sacct answers
  slipway sandbox up --accounting --account research --qos debug    refuse all other accounts and QOS
  slipway sandbox up --pyxis                         with Enroot and Pyxis, if they are installed
  slipway sandbox up --dir /tmp/second --nodes 2     a second one beside the first
  sbatch --test-only --partition=cloud job.sh        would a cluster with 1,024 nodes take this script?

exit code:
  0  up
  2  something is missing, a daemon did not start, or a sandbox with other options is up"""

_DOWN = """\
Cancel the sandbox's jobs, stop its daemons and all processes of its jobs, and remove its directory.

examples:
  slipway sandbox down
  slipway sandbox down --dir /tmp/second

exit code:
  0  removed, or there was no sandbox
  2  it could not be stopped"""

_STATUS = """\
Show whether the sandbox is up, its nodes, and how many jobs run on it.

examples:
  slipway sandbox status
  slipway sandbox status --json | jq .nodes

exit code:
  0  up
  3  down, or some of its daemons no longer run"""

_ENV = """\
Print the shell commands that point Slurm's commands at the sandbox.

examples:
  eval "$(slipway sandbox env)"
  unset SLURM_CONF                      back to the machine's own Slurm

exit code:
  0  printed
  3  there is no sandbox, or its controller does not answer"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb with its own verbs."""
    parser = subparsers.add_parser(
        "sandbox", help="a real multi-node Slurm on this machine", description=_DESCRIPTION
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    boot = _add_verb(verbs, "up", "boot a sandbox", _UP, _up)
    boot.add_argument("--nodes", type=int, default=4, metavar="N", help="nodes that run jobs (default: 4)")
    boot.add_argument("--gpus", type=int, default=8, metavar="N", help="fake GPUs per node (default: 8)")
    boot.add_argument(
        "--gpu-type", metavar="TYPE", help="type of the fake GPUs, such as a100 (default: none)"
    )
    boot.add_argument(
        "--cpus", type=int, default=64, metavar="N", help="CPUs that a node claims to have (default: 64)"
    )
    text = "let jobs run in containers; FILE is spank_pyxis.so, needed if it is in no usual directory"
    boot.add_argument("--pyxis", nargs="?", const=Path(), type=Path, metavar="FILE", help=text)
    boot.add_argument("--accounting", action="store_true", help="run slurmdbd and MariaDB too, for sacct")
    for flag, kind in (("account", "an account"), ("qos", "a quality of service")):
        text = f"{kind} that you may use; Slurm refuses all others. May be repeated"
        boot.add_argument(f"--{flag}", action="append", default=[], metavar="NAME", help=text)
    boot.add_argument(
        "--cloud-nodes",
        type=int,
        default=1024,
        metavar="N",
        help="nodes of the partition for `sbatch --test-only`; 0: no such partition (default: 1024)",
    )
    boot.add_argument(
        "--base-port", type=int, metavar="PORT", help="first of its ports (default: any free ones)"
    )
    _add_verb(verbs, "down", "stop and remove a sandbox", _DOWN, _down)
    show = _add_verb(verbs, "status", "show the state of a sandbox and its jobs", _STATUS, _status)
    show.add_argument("--json", action="store_true", help="print one object")
    _add_verb(verbs, "env", "print shell commands that point Slurm at a sandbox", _ENV, _env)


def _add_verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=summary, description=description)
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help=f"directory of the sandbox (default: ${DIRECTORY_VARIABLE} or /var/lib/slipway/sandbox)",
    )
    parser.set_defaults(run=run)
    return parser


def _up(args: argparse.Namespace) -> int:
    from launcher.sandbox.lifecycle import up
    from launcher.sandbox.options import SandboxOptions

    options = SandboxOptions(
        directory=_directory(args),
        nodes=args.nodes,
        gpus=args.gpus,
        cpus=args.cpus,
        accounting=args.accounting,
        cloud_nodes=args.cloud_nodes,
        base_port=args.base_port,
        gpu_type=args.gpu_type,
        accounts=tuple(args.account),
        qos=tuple(args.qos),
        pyxis=_pyxis(args),
    )
    began = time.monotonic()
    with _StepDisplay() as progress:
        sandbox = up(options, progress)
    if sandbox.was_up:
        print(f"already up in {sandbox.directory}")
    else:
        print(f"up in {sandbox.directory} after {time.monotonic() - began:.1f} s")
    _print_partitions(sandbox)
    _print_next_steps(args)
    return 0


def _pyxis(args: argparse.Namespace) -> Path | None:
    from launcher.sandbox.prerequisites import find_plugin

    # Without a file, search the usual directories.
    return find_plugin() if args.pyxis == Path() else args.pyxis


def _down(args: argparse.Namespace) -> int:
    from launcher.sandbox.lifecycle import down

    directory = _directory(args)
    with _StepDisplay() as progress:
        existed = down(directory, progress)
    print(f"removed {directory}" if existed else f"no sandbox in {directory}: nothing to stop")
    return 0


def _status(args: argparse.Namespace) -> int:
    from launcher.sandbox.state import status

    sandbox = status(_directory(args))
    if args.json:
        record = asdict(sandbox) | {"directory": str(sandbox.directory)}
        print(json.dumps(record, indent=2))
    else:
        print(_describe(sandbox))
    return 0 if sandbox.is_up else DOWN


def _env(args: argparse.Namespace) -> int:
    from launcher.sandbox.state import status

    directory = _directory(args)
    sandbox = status(directory)
    # With a dead node Slurm still answers; with a dead controller it does not.
    if not sandbox.nodes:
        print(f"the sandbox in {directory} is {sandbox.phase}: slipway sandbox up", file=sys.stderr)
        return DOWN
    print(f"export SLURM_CONF={shlex.quote(str(slurm_conf_path(sandbox.directory)))}")
    if args.dir is not None:
        print(f"export {DIRECTORY_VARIABLE}={shlex.quote(str(sandbox.directory))}")
    return 0


def _directory(args: argparse.Namespace) -> Path:
    directory: Path | None = args.dir
    return directory or default_directory()


def _print_partitions(sandbox: Sandbox) -> None:
    from launcher.sandbox.state import partition_table

    print("", *partition_table(sandbox.slurm_conf), "", sep="\n")


def _print_next_steps(args: argparse.Namespace) -> None:
    where = f" --dir {shlex.quote(str(args.dir))}" if args.dir else ""
    print("next:")
    print(f'  eval "$(slipway sandbox env{where})"')
    print("  slipway launch training=gpt3/tiny cluster=sandbox training.model.data.data_impl=mock")
    print(f"  slipway sandbox down{where}", flush=True)


def _describe(sandbox: SandboxStatus) -> str:
    if sandbox.phase == "down":
        return f"down: no sandbox in {sandbox.directory}"
    if sandbox.phase in ("starting", "failed"):
        logs = f"its logs are in {sandbox.directory}/log"
        return f"{sandbox.phase} in {sandbox.directory}; {logs}\n  {_START_AGAIN}"
    lines = [f"{sandbox.phase} in {sandbox.directory}"]
    if sandbox.missing:
        lines += [f"  no longer running: {', '.join(sandbox.missing)}", f"  {_START_AGAIN}"]
    jobs = f"{sandbox.running} running, {sandbox.pending} pending"
    rows = {
        "nodes": ", ".join(f"{node.name} {node.state}" for node in sandbox.nodes) or "unknown",
        "test only": f"{sandbox.cloud_nodes} cloud nodes" if sandbox.cloud_nodes else "no",
        "accounting": "yes" if sandbox.accounting else "no",
        "containers": "Pyxis" if sandbox.pyxis else "no",
        "jobs": "unknown" if sandbox.running is None else jobs,
        "ports": ", ".join(f"{name} {port}" for name, port in sandbox.ports.items()),
        "SLURM_CONF": str(slurm_conf_path(sandbox.directory)),
    }
    return "\n".join(lines + [f"  {name:10}  {value}" for name, value in rows.items()])


class _StepDisplay(Reporter):
    """The display of steps: one changing line on a terminal, a line for each completed step elsewhere."""

    def __init__(self) -> None:
        self._spinner: Spinner | None = None
        self._context: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> _StepDisplay:
        if sys.stdout.isatty():
            self._spinner = open_console(highlight=False).status("")
            self._context = self._spinner
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)

    def step(self, what: str) -> None:
        if self._spinner:
            self._spinner.update(what)

    def done(self, what: str) -> None:
        if self._spinner:
            self._spinner.console.print("[green]✓[/]", what)
        else:
            print(what, flush=True)

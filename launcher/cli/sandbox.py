"""`slipway sandbox`: a throw-away multi-node Slurm on this machine."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.options import Verbs, add_option, add_verb
from launcher.sandbox import DIRECTORY_VARIABLE, Reporter, default_directory, slurm_conf_path
from launcher.sandbox.options import SandboxOptions
from launcher.sandbox.prerequisites import find_plugin
from launcher.ui.terminal import open_console, print_json, print_stderr

if TYPE_CHECKING:
    from launcher.sandbox.state import SandboxStatus

# The exit code of a sandbox that is down; 1 and 2 mean other things everywhere.
DOWN = 3
_START_AGAIN = "`slipway sandbox up` removes it and starts a new one"

_HELP = """\
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

Partitions: gpu (default); low, with jobs that are requeued when gpu or high need the nodes; high; and cloud,
with fictitious nodes: there `sbatch --test-only` validates a script for a thousand nodes.

examples:
  slipway sandbox up
  slipway sandbox up --accounting                    with MariaDB and slurmdbd, so that sacct answers
  slipway sandbox up --accounting --account research --qos debug    refuse all other accounts and QOS
  slipway sandbox up --pyxis                         with Enroot and Pyxis, if they are installed
  slipway sandbox up --dir /tmp/second --nodes 2     a second one next to the first
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


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "sandbox", None, text=_HELP)
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    boot = _add_verb(verbs, "up", "boot a sandbox", _UP, _up)
    add_option(boot, "--nodes N", "nodes that run jobs (default: 4)", default=4)
    add_option(boot, "--gpus N", "fake GPUs per node (default: 8)", default=8)
    add_option(boot, "--gpu-type TYPE", "type of the fake GPUs, such as a100 (default: none)")
    add_option(boot, "--cpus N", "CPUs that a node claims to have (default: 64)", default=64)
    text = "let jobs run in containers; FILE is spank_pyxis.so, needed if it is in no usual directory"
    add_option(boot, "--pyxis FILE", text, nargs="?", const=Path())
    add_option(boot, "--accounting", "run slurmdbd and MariaDB too, for sacct")
    for flag, kind in (("account", "an account"), ("qos", "a quality of service")):
        text = f"{kind} that you may use; Slurm refuses all others. May be repeated"
        add_option(boot, f"--{flag} NAME", text, action="append", default=[])
    text = "nodes of the partition for `sbatch --test-only`; 0: no such partition (default: 1024)"
    add_option(boot, "--cloud-nodes N", text, default=1024)
    add_option(boot, "--base-port PORT", "first of its ports (default: any free ones)", type=int)
    _add_verb(verbs, "down", "stop and remove a sandbox", _DOWN, _down)
    show = _add_verb(verbs, "status", "show the state of a sandbox and its jobs", _STATUS, _status)
    add_option(show, "--json", "print one object")
    _add_verb(verbs, "env", "print shell commands that point Slurm at a sandbox", _ENV, _env)


def _add_verb(
    verbs: Verbs, name: str, summary: str, text: str, run: Callable[[argparse.Namespace], int | None]
) -> argparse.ArgumentParser:
    parser = add_verb(verbs, name, run, summary, text)
    where = f"directory of the sandbox (default: ${DIRECTORY_VARIABLE} or /var/lib/slipway/sandbox)"
    add_option(parser, "--dir DIR", where)
    return parser


def _up(args: argparse.Namespace) -> None:
    from launcher.sandbox.lifecycle import up
    from launcher.sandbox.state import partition_table

    same = ("nodes", "gpus", "cpus", "accounting", "cloud_nodes", "base_port", "gpu_type")
    options = SandboxOptions(
        directory=args.dir or default_directory(),
        accounts=tuple(args.account),
        qos=tuple(args.qos),
        # Without a file, search the usual directories.
        pyxis=find_plugin() if args.pyxis == Path() else args.pyxis,
        **{name: getattr(args, name) for name in same},
    )
    began = time.monotonic()
    with _StepDisplay() as progress:
        sandbox = up(options, progress)
    after = "" if sandbox.was_up else f" after {time.monotonic() - began:.1f} s"
    print(f"{'already up' if sandbox.was_up else 'up'} in {sandbox.directory}{after}")
    print("", *partition_table(sandbox.slurm_conf), "", sep="\n")
    where = f" --dir {shlex.quote(str(args.dir))}" if args.dir else ""
    print("next:")
    print(f'  eval "$(slipway sandbox env{where})"')
    print("  slipway launch training=gpt3/tiny cluster=sandbox training.model.data.data_impl=mock")
    print(f"  slipway sandbox down{where}", flush=True)


def _down(args: argparse.Namespace) -> None:
    from launcher.sandbox.lifecycle import down

    directory = args.dir or default_directory()
    with _StepDisplay() as progress:
        existed = down(directory, progress)
    print(f"removed {directory}" if existed else f"no sandbox in {directory}: nothing to stop")


def _status(args: argparse.Namespace) -> int:
    from launcher.sandbox.state import status

    sandbox = status(args.dir or default_directory())
    if args.json:
        print_json(asdict(sandbox) | {"directory": str(sandbox.directory)})
    else:
        print(_describe(sandbox))
    return 0 if sandbox.is_up else DOWN


def _env(args: argparse.Namespace) -> int:
    from launcher.sandbox.state import status

    directory = args.dir or default_directory()
    sandbox = status(directory)
    # With a dead node Slurm still answers; with a dead controller it does not.
    if not sandbox.nodes:
        print_stderr(f"the sandbox in {directory} is {sandbox.phase}: slipway sandbox up")
        return DOWN
    print(f"export SLURM_CONF={shlex.quote(str(slurm_conf_path(sandbox.directory)))}")
    if args.dir is not None:
        print(f"export {DIRECTORY_VARIABLE}={shlex.quote(str(sandbox.directory))}")
    return 0


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


class _StepDisplay(ExitStack, Reporter):
    """The display of steps: one changing line on a terminal, a line for each completed step elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        spinner = open_console(highlight=False).status("") if sys.stdout.isatty() else None
        self._spinner = self.enter_context(spinner) if spinner else None

    def step(self, what: str) -> None:
        if self._spinner:
            self._spinner.update(what)

    def done(self, what: str) -> None:
        if self._spinner:
            self._spinner.console.print("[green]✓[/]", what)
        else:
            print(what, flush=True)

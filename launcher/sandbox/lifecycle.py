"""Bringing a sandbox up, and taking it down without a trace."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError
from launcher.sandbox import containers, daemons, prerequisites, state
from launcher.sandbox.clients import client_environment
from launcher.sandbox.layout import Layout
from launcher.sandbox.options import Options
from launcher.sandbox.ports import Ports, choose_ports
from launcher.sandbox.reporting import Reporter, Silent
from launcher.sandbox.state import State
from launcher.sandbox.stopping import remove_files, stop
from launcher.sandbox.supervision import StartError, Supervisor


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox that is up. `was_up` tells that it already was."""

    options: Options
    ports: Ports
    was_up: bool = False

    @property
    def directory(self) -> Path:
        return self.options.directory

    @property
    def slurm_conf(self) -> Path:
        return Layout(self.directory).slurm_conf

    def environment(self) -> dict[str, str]:
        """Return an environment in which Slurm's commands, and jobs, mean this sandbox."""
        return client_environment(self.slurm_conf)


def up(options: Options, reporter: Reporter | None = None) -> Sandbox:
    """Boot a sandbox, unless the same is up already.

    What is left of one that crashed, or that never came up, is stopped and removed first.

    Raises
    ------
    UserError
        When something is missing on the machine, when a sandbox with other options is up in the same
        directory, or when a daemon does not start; nothing is left running then.
    """
    reporter = reporter or Silent()
    prerequisites.check(options.accounting)
    if options.pyxis is not None:
        containers.check(options.pyxis)
    Layout(options.directory).check_socket_length(options.nodes)
    try:
        options.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        told = f"cannot make {options.directory}: {error.strerror}"
        raise UserError(told, hint="choose another: --dir") from error
    with state.locked(options.directory):
        found = state.load(options.directory)
        if found is not None and found.is_up:
            _check_same(found.options, options)
            return Sandbox(found.options, found.ports, was_up=True)
        if found is not None:
            reporter.step("clearing away a sandbox that is not whole")
            stop(found)
            remove_files(found.layout)
            reporter.done("cleared away a sandbox that was not whole")
        try:
            return _boot(options, reporter)
        except BaseException:
            # Succeeds where nothing was left in it.
            with suppress(OSError):
                options.directory.rmdir()
            raise


def down(directory: Path, reporter: Reporter | None = None) -> bool:
    """Stop a sandbox and remove its directory.

    Returns
    -------
    bool
        Whether there was one.
    """
    reporter = reporter or Silent()
    directory = directory.resolve()
    if state.load(directory) is None:
        return False
    prerequisites.check_root()
    with state.locked(directory):
        found = state.load(directory)
        if found is None:
            return False
        reporter.step("stopping jobs and daemons")
        stop(found)
        reporter.done("stopped jobs and daemons")
        remove_files(found.layout)
        directory.rmdir()
    return True


def _check_same(running: Options, asked: Options) -> None:
    differences = running.differences(asked)
    if differences:
        raise UserError(
            f"a sandbox with other options is up in {running.directory}: {'; '.join(differences)}",
            hint="stop it first with `slipway sandbox down`, or give another --dir",
        )


def _boot(options: Options, reporter: Reporter) -> Sandbox:
    if any(options.directory.iterdir()):
        raise UserError(
            f"{options.directory} holds something that is not a sandbox",
            hint="choose an empty or a new directory with --dir",
        )
    record = State(options, choose_ports(options))
    record.save()
    try:
        daemons.write_files(record)
        daemons.start_all(Supervisor(record, reporter))
    except StartError:
        # The logs stay for whoever wants to know more; the next `up` or `down` removes them.
        stop(record)
        record.phase = state.FAILED
        record.save()
        raise
    except BaseException:
        stop(record)
        remove_files(record.layout)
        raise
    record.phase = state.UP
    record.save()
    return Sandbox(options, record.ports)

"""Accounts and qualities of service in the sandbox's database."""

from __future__ import annotations

from launcher.sandbox.clients import ask
from launcher.sandbox.configuration import CLUSTER
from launcher.sandbox.supervision import StartError, Supervisor

_USER = "root"  # who boots a sandbox


def add_accounts(supervisor: Supervisor) -> None:
    """Add what was asked for, once slurmctld has made itself known to slurmdbd."""
    options, conf = supervisor.state.options, supervisor.layout.slurm_conf
    supervisor.reporter.step("adding accounts")
    supervisor.wait("slurmctld", lambda: bool(ask(conf, *_SHOW_ROOT)))
    own = [*options.qos, "normal"]
    commands = [["add", "qos", name] for name in options.qos]
    commands += [["add", "account", name, f"cluster={CLUSTER}"] for name in options.accounts]
    commands += [["add", "user", _USER, f"account={name}"] for name in options.accounts]
    commands += [["modify", "user", _USER, "set", f"qos={','.join(own)}", "defaultqos=normal"]]
    if options.accounts:
        commands += [["modify", "user", _USER, "set", f"defaultaccount={options.accounts[0]}"]]
    for command in commands:
        if ask(conf, "sacctmgr", "--immediate", "--quiet", *command, seconds=20) is None:
            raise StartError(f"sacctmgr {' '.join(command)} failed")
    told = {"accounts": options.accounts, "QOS": options.qos}
    supervisor.reporter.done(
        "; ".join(f"{what}: {', '.join(names)}" for what, names in told.items() if names)
    )


_SHOW_ROOT = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={_USER}", f"cluster={CLUSTER}")

"""The long options of sbatch, the keys of those that Slipway sets itself, and the forms of some values.

From sbatch's manual pages of Slurm 22.05 to 25.05.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields

from launcher.errors import literal, nearest, setting_error
from launcher.slurm.queue_flags import QueueFlags

_TASKS = "training.trainer.num_nodes and training.trainer.devices"
_LOG = "base_results_dir, and cluster.stderr_to_stdout"
_SUBMITTING = "the launcher, which submits the script and reads the job's id"

_SUBMITTERS = "help parsable quiet test-only usage verbose version wait wrap"

_RESOURCES = "cpus-per-task exclusive gpus-per-node gpus-per-task gres mem"
# The keys of `cluster` that have the names of options.
_CLUSTER_KEYS = (*(key.name.replace("_", "-") for key in fields(QueueFlags)), *_RESOURCES.split())
# Slipway sets these, or could not follow the job without them: the key to use instead; of another stage than
# the training it is that of the stage, as in `data_preparation.run.time_limit`.
SET_BY: Mapping[str, str] = {
    **{name: f"cluster.{name.replace('-', '_')}" for name in _CLUSTER_KEYS},
    **dict.fromkeys(("error", "output"), _LOG),
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), _TASKS),
    **dict.fromkeys(_SUBMITTERS.split(), _SUBMITTING),
    "clusters": "cluster.slurm_conf, the configuration of the cluster that the job goes to",
    "dependency": "training.run.dependency",
    "gpus": "cluster.gpus_per_node, cluster.gpus_per_task or cluster.gres",
    "job-name": "training.run.name and cluster.job_name_prefix",
    "no-requeue": "cluster.requeue",
    "open-mode": "Slipway, to append: a requeued job keeps the log of its first attempt",
    "time": "training.run.time_limit",
}

# The others are free for `cluster.sbatch`.
_NAMES = """
acctg-freq array batch bb bbf chdir cluster-constraint consolidate-segments container container-id contiguous
core-spec cores-per-socket cpu-freq cpus-per-gpu delay-boot distribution exclude-topo export export-file
extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus-per-socket gres-flags hint hold ignore-pbs
input kill-on-invalid-dep mcs-label mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill nodefile
ntasks-per-core ntasks-per-gpu ntasks-per-socket oom-kill-step overcommit oversubscribe power
prefer priority profile propagate reboot resv-ports segment sockets-per-node spread-job spread-segments
stepmgr thread-spec threads-per-core time-min tmp tres-bind tres-per-task uid use-min-nodes wait-all-nodes
wckey
"""
FREE = frozenset(_NAMES.split()) - SET_BY.keys()


def key_hint(name: str) -> str | None:
    """Return the key that sets the option of sbatch with the name of a mistaken key of `cluster`."""
    flag = name.replace("_", "-")
    if flag in SET_BY:
        return f"--{flag} is set by {SET_BY[flag]}"
    return f"sbatch has --{flag}: cluster.sbatch.{flag.replace('-', '_')}=..." if flag in FREE else None


def checked_name(name: str) -> str:
    """Return sbatch's name of an option; raise ValueError for an unknown one, or one that Slipway sets."""
    flag = name.replace("_", "-")
    if flag in SET_BY:
        raise ValueError(f"--{flag} is set by {SET_BY[flag]}")
    if flag not in FREE:
        valid = FREE | SET_BY.keys()
        near = "".join(f"did you mean {_with_key(option)}? " for option in nearest(flag, valid))
        plugin = f"one of a site's plugin: cluster.spank.{name}=..."
        raise ValueError(f"sbatch itself has no option --{flag}; {near}{plugin}")
    return flag


def _with_key(flag: str) -> str:
    return f"--{flag}, which is set by {SET_BY[flag]}" if flag in SET_BY else repr(flag)


def check_plugin_name(name: str) -> str:
    """Return the name of an option of a SPANK plugin; raise ValueError for one of sbatch's or Pyxis' own."""
    flag = name.replace("_", "-")
    if flag in FREE or flag in SET_BY:
        raise ValueError(key_hint(flag))
    if flag.startswith(("container-", "no-container-")):
        raise ValueError("Pyxis' options are srun's: container_options, or cluster.srun_args")
    if not re.fullmatch(r"[A-Za-z][\w.-]*", flag, re.ASCII):
        raise ValueError("not the name of an option; valid: letters, digits, - and _")
    return flag


_ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%(?P<at_once>\d+))?", re.ASCII)


def check_array(array: bool | str | None) -> None:
    """Raise ValueError if the tasks of an ``--array`` could run at once: all train the same run."""
    if array is None or array is False:
        return
    match = _ARRAY.fullmatch(str(array))
    if not match:
        raise ValueError("not a job array; valid: 0-4%1, which is five jobs one after another")
    if match["at_once"] != "1":
        in_turn = str(array).partition("%")[0] + "%1"
        raise ValueError(f"the tasks of an array train the same run, one after another: write {in_turn}")


def combine_dependency(own: str | None, after: str, key: str = "training.run.dependency") -> str:
    """Return the value of ``--dependency`` for a job with a dependency that also waits for another job.

    On the command line it replaces the header's. Alternatives (``?``) are a UserError: Slurm does not mix
    them with other dependencies.
    """
    if own is None:
        return after
    condition = after.partition(":")[0]
    if "?" in own:
        raise setting_error(
            f"{key}={literal(own)}: alternatives (?) cannot be waited for together with {condition}",
            hint=f"{key}=null, or all of several, with commas between",
        )
    return f"{after},{own}"

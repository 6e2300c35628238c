"""Gather facts of the launching machine, and ask our trainer and the cluster.

The trainer runs in another process, because the launcher imports no trainer module: a job that it would
refuse need not wait for it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.checks.facts import ExcludeFile, HostFacts, Interpreter
from launcher.checks.gathering.path_resolver import is_sandbox_of
from launcher.checks.rules.cluster import ClusterRequest
from launcher.checks.rules.launch import LIBRARIES
from launcher.drafting import Draft
from launcher.errors import file_mode, nearest_files
from launcher.plan import Job, Plan
from launcher.runs.provenance import user
from launcher.slurm.cluster import ClusterFacts
from launcher.slurm.srun_options import step_options
from slipway.common.node.excluded import read_exclude_file
from slipway.common.node.settings import OLDEST_PYTHON

# Packages of a comparison with Hugging Face's model, and of lm-eval's tasks, which run on that.
_TRANSFORMERS, _LM_EVAL = ("transformers", "megatron", "psutil"), ("lm_eval", "transformers", "safetensors")
_ANSWER = "missing:"
_ASK = """\
import importlib.util, sys
print("missing:", *(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
"""
_PATIENCE_SECONDS = 60

# The job script takes the first that exists (templates/supervisor.sh.j2).
SUPERVISOR_PYTHONS = ("/usr/bin/python3", "/usr/libexec/platform-python", "python3")
_ASK_VERSION = "import sys; print('%d.%d.%d' % sys.version_info[:3])"


def host_question(draft: Draft) -> object:
    job, changed_by = draft.plan.job, _find_changing_key(draft)
    libraries = _libraries(job) if job.stage in LIBRARIES else ()
    environment = tuple(sorted(job.environment.items()))
    container, program = job.container is None, job.payload.argv[0]
    return draft.plan.scheduler, libraries, job.engine, container, program, environment, changed_by


def host_facts(draft: Draft) -> HostFacts:
    """Return the facts of this machine that a launch needs."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return HostFacts(
        in_allocation=bool(os.environ.get("SLURM_JOB_ID")),
        allocation_nodes=int(nodes) if nodes.isdecimal() else None,
        interpreter=_interpreter(draft.plan, _find_changing_key(draft)),
        is_heterogeneous="SLURM_HET_SIZE" in os.environ,
    )


def _find_changing_key(draft: Draft) -> str | None:
    """Return the key or option with which the job may add libraries on the nodes."""
    job = draft.plan.job
    by_plugin = next((option for option in step_options(job.srun_args) if option.is_of_a_site), None)
    ways = {
        "cluster.setup": job.setup,
        "cluster.task_prefix": job.task_prefix,
        "cluster.spank": draft.config.cluster.spank,
        f"--{by_plugin and by_plugin.name} of cluster.srun_args": by_plugin,
        "--template-dir": draft.template_dir,
    }
    return next((way for way, value in ways.items() if value), None)


def lacks_gpus(draft: Draft) -> str | None:
    """Return why our trainer finds no GPU; None if it does, or if unknown."""
    if draft.plan.job.engine != "megatron":
        return None
    if draft.plan.scheduler == "local":
        return None if any(Path("/dev").glob("nvidia*")) else "this machine has no GPU (no /dev/nvidia*)"
    return "the GPUs of the sandbox are fake" if is_sandbox_of(draft.plan.slurm_conf) else None


def read_excluded_nodes(draft: Draft) -> ExcludeFile | None:
    """Read the team's file of nodes to avoid; return None if the job has none."""
    path = draft.plan.job.chain.exclude_file
    if path is None:
        return None
    try:
        return ExcludeFile(path, read_exclude_file(path, time.time()))
    except (OSError, ValueError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower()
        return ExcludeFile(path, problem=f"it cannot be read: {why}", fix=nearest_files(Path(path)))


def _interpreter(plan: Plan, changed_by: str | None) -> Interpreter | None:
    """Return the tasks' interpreter on this machine; None if they run another program."""
    job = plan.job
    in_container = job.container is not None and plan.scheduler != "local"
    if in_container or job.engine != "megatron" or job.stage not in LIBRARIES:
        return None
    name = job.payload.argv[0]
    is_own = name == sys.executable
    if (program := shutil.which(name)) is not None:
        missing = _find_missing_libraries(program, _libraries(job), job.environment)
        return Interpreter(name, is_own, program, missing=missing, changed_by=changed_by)
    path = Path(name)
    if not path.is_absolute() or not stat.S_ISDIR(file_mode(path.parent)):
        return Interpreter(name, is_own)  # the nodes may have it
    why = "it may not be executed" if file_mode(path) else "there is no such file"
    return Interpreter(name, is_own, problem=why, nearest=nearest_files(path))


def _libraries(job: Job) -> tuple[str, ...]:
    """Return the modules that the tasks of a job import."""
    libraries, node = (*LIBRARIES[job.stage][0].split(),), (job.stage_config or {}).get(job.stage, {})
    if job.stage == "conversion" and node["check"]["enabled"]:
        libraries += _TRANSFORMERS
    if job.stage == "evaluation" and node["lm_eval"]["tasks"]:
        libraries += _LM_EVAL
    return libraries


def _find_missing_libraries(
    interpreter: str, names: tuple[str, ...], variables: Mapping[str, str]
) -> tuple[str, ...] | None:
    """Ask an interpreter for missing libraries without importing them; return None without an answer."""
    command = [interpreter, "-c", _ASK, *names]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            cwd="/",  # ignore a folder `torch` in the current directory
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if done.returncode != 0 or not answers:
        return None
    return tuple(answers[-1].removeprefix(_ANSWER).split())


def supervisor_python_problem(names: Sequence[str] = SUPERVISOR_PYTHONS) -> str:
    """Return why this machine's Python cannot run a job's supervisor; an empty string if it can."""
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        return f"this machine has no {', '.join(names[:-1])}, and no {names[-1]} on PATH"
    if re.fullmatch(r"python3\.([7-9]|[1-9]\d)", Path(path).resolve().name):
        return ""  # the name has the version
    try:
        process = subprocess.run(
            [path, "-ISc", _ASK_VERSION], capture_output=True, text=True, timeout=_PATIENCE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not start: {error}"
    version = process.stdout.strip()
    if process.returncode or not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return f"{path} does not say its version"
    if tuple(map(int, version.split("."))) >= OLDEST_PYTHON:
        return ""
    return f"{path} is {version}, older than {'.'.join(map(str, OLDEST_PYTHON))}"


# --- the verdict of our trainer

# Checkout and installation both have the trainer next to the launcher.
_HOME = Path(__file__).resolve().parents[3]
_VERDICT_SECONDS = 30
_VERDICT_SECONDS_EACH = 0.1


def trainer_verdicts(plans: Sequence[Plan]) -> list[str | None]:
    """Return the trainer's message on each plan, asked in one process.

    A message is empty if the trainer accepts the plan or does not run it, None if it cannot be asked.
    """
    asked = [_trainer_question(plan) if plan.job.engine == "megatron" else None for plan in plans]
    questions = [question for question in asked if question is not None]
    seconds = _VERDICT_SECONDS + _VERDICT_SECONDS_EACH * len(questions)
    answers: list[str | None] = []
    try:
        lines = (
            ask_module("slipway.trainer.config.verdict", "\n".join(questions), seconds) if questions else ""
        )
        answers = [json.loads(line)["mistake"] or "" for line in lines.splitlines()]
    except (OSError, ValueError, TypeError, KeyError, subprocess.SubprocessError):
        answers = []
    message = iter(answers if len(answers) == len(questions) else [None] * len(questions))
    return ["" if question is None else next(message) for question in asked]


def ask_module(module: str, question: str, seconds: float) -> str:
    """Return the answer of a program of the trainer; raise OSError or SubprocessError without one."""
    return subprocess.run(
        [sys.executable, "-m", module],
        input=question,
        capture_output=True,
        text=True,
        timeout=seconds,
        # Python imports our modules from there, never ones of the user's directory.
        cwd=_HOME,
    ).stdout


def _trainer_question(plan: Plan) -> str | None:
    """Return the question on a training, or on a model that is to be converted; None for another plan."""
    resources, conversion = plan.job.resources, (plan.job.stage_config or {}).get("conversion")
    if conversion is not None:
        model = conversion["model"] if conversion["to"] == "huggingface" else None
        question = {"model": model, "type": conversion["model_type"]}
        return json.dumps(question) if isinstance(model, Mapping) else None
    if plan.job.config is None:
        return None
    # Only the ends of a range: a check of our own examines the numbers in between.
    nodes = sorted({resources.nodes, resources.max_nodes or resources.nodes})
    worlds = [each * resources.tasks_per_node for each in nodes]
    return json.dumps({"config": plan.job.config, "worlds": worlds})


# --- the cluster


def ask_cluster(plan: Plan, parts: Iterable[str]) -> ClusterFacts:
    # Imported late: a dry run does not ask the cluster.
    from launcher.slurm.questions import ask_at_once, facts_of, questions

    known = questions(plan.job.queue.partition, user())
    replies = ask_at_once({part: known[part] for part in parts}, plan.slurm_conf)
    return facts_of(replies, of_default=plan.job.queue.partition is None)


def cluster_question(draft: Draft) -> object:
    plan = draft.plan
    return plan.scheduler, plan.slurm_conf, plan.job.queue.partition, plan.job.container is None


def cluster_facts(draft: Draft) -> ClusterFacts | None:
    """Ask the cluster for its resources and limits; None if the job does not use Slurm."""
    plan = draft.plan
    if plan.scheduler != "slurm":
        return None
    parts = ["settings", "partitions", "nodes", "associations", "qos"]
    cluster = ask_cluster(plan, parts if plan.job.container is None else [*parts, "pyxis"])
    # Slurm may hide existing nodes (``PrivateData=nodes``).
    mine = ClusterRequest(plan, cluster).partitions
    is_hidden = [each.total_nodes > 0 and not (cluster.nodes or {}).get(each.name) for each in mine]
    if cluster.nodes is None or not mine or not all(is_hidden):
        return cluster
    missing = {**cluster.missing, "nodes": "Slurm does not show the nodes of the partition"}
    return replace(cluster, nodes=None, gpu_types=None, missing=missing)

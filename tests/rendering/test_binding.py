"""The cores of each task: on this machine, and on machines that are made up."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest

from launcher.config.compose import compose
from launcher.errors import UserError
from launcher.plan import Payload, Plan
from launcher.rendering.render import render
from launcher.stages.planning import plan_launch
from tests.fakes.programs import write_program
from tests.launch_files import task_of, write_files

OWN = sorted(os.sched_getaffinity(0))


def plan_command(tmp_path: Path, tasks: int, *overrides: str, command: str = "taskset -pc $$") -> Plan:
    places = [
        "cluster=bcm",
        "container=null",
        f"training.trainer.devices={tasks}",
        f"base_results_dir={tmp_path}",
        "training.trainer.num_nodes=1",
    ]
    plan = plan_launch(compose([*places, *overrides]).config, number=1, tag="x")
    payload = Payload(argv=("bash", "-c", command), working_dir="/")
    # Rendered for this machine, so that it runs without a Slurm.
    return dataclasses.replace(plan, scheduler="local", job=dataclasses.replace(plan.job, payload=payload))


@pytest.mark.skipif(len(OWN) < 2 or len(OWN) != os.cpu_count(), reason="needs two cores, and all of them")
def test_two_tasks_share_no_core(tmp_path: Path) -> None:
    plan = plan_command(tmp_path, 2)
    write_files(plan)
    done = subprocess.run(["bash", plan.paths.script], capture_output=True, text=True, timeout=60, check=True)
    lists = re.findall(r"current affinity list: (\S+)", done.stdout)
    first, second = (set(_expand(text)) for text in lists)
    assert first and second and not first & second, done.stdout


def _expand(text: str) -> list[int]:
    cpus: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        cpus.extend(range(int(low), int(high or low) + 1))
    return cpus


class Machine:
    """A made-up machine: two threads a core, and the given cores and GPUs of its NUMA nodes."""

    def __init__(self, root: Path, cores_of_nodes: list[int], gpus: list[int] | None = None) -> None:
        self.root, self.bin = root, root / "bin"
        cores = sum(cores_of_nodes)
        self._write("sys/devices/system/cpu/online", f"0-{2 * cores - 1}")
        self._write("proc/status", f"Name:\tbash\nCpus_allowed_list:\t0-{2 * cores - 1}\n")
        for cpu in range(2 * cores):
            siblings = f"{cpu % cores},{cpu % cores + cores}"
            self._write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
        first = 0
        for node, count in enumerate(cores_of_nodes):
            low, high = first, first + count - 1
            self._write(
                f"sys/devices/system/node/node{node}/cpulist", f"{low}-{high},{low + cores}-{high + cores}"
            )
            first += count
        self._command("taskset", 'if [[ $# == 2 ]]; then echo "pid 1: 0-1"; fi')
        if gpus is not None:
            buses = [f"00000000:{number:02X}:1C.0" for number in range(len(gpus))]
            for bus, node in zip(buses, gpus, strict=True):
                self._write(f"sys/bus/pci/devices/{bus[4:].lower()}/numa_node", str(node))
            self._command("nvidia-smi", f"printf '%s\\n' {' '.join(buses)}")

    def _write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def _command(self, name: str, body: str) -> None:
        write_program(self.bin / name, body)

    def bind(self, plan: Plan, **env: str) -> list[str]:
        """Return the cores that each task of a node reports."""
        script = task_of(plan).replace(f"source {plan.paths.binding}", render(plan)[plan.paths.binding])
        script = script.replace("/sys/", f"{self.root}/sys/")
        script = script.replace("/proc/$$/status", f"{self.root}/proc/status")
        messages, tasks = [], str(plan.job.resources.tasks_per_node)
        for rank in range(plan.job.resources.tasks_per_node):
            variables = {
                "PATH": f"{self.bin}:/usr/bin:/bin",
                "WORLD_SIZE": tasks,
                "LOCAL_WORLD_SIZE": tasks,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                **env,
            }
            done = subprocess.run(
                ["bash", "-c", script, "task.sh", "true"], env=variables, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            messages.append(done.stdout.strip().partition(": ")[2])
        return messages


def test_eight_tasks_divide_the_cores_of_two_numa_nodes(tmp_path: Path) -> None:
    """Each node has 48 cores, as p5: each task has 8 of them, with both threads."""
    messages = Machine(tmp_path / "m", [48, 48]).bind(plan_command(tmp_path, 8))
    assert messages[0] == f"on CPUs {','.join(f'{c},{c + 96}' for c in range(8))} of NUMA node 0"
    assert messages[3].startswith("on CPUs 24,120,25,") and messages[3].endswith("of NUMA node 0")
    assert messages[4].startswith("on CPUs 48,144,") and messages[4].endswith("of NUMA node 1")
    cpus = [cpu for text in messages for cpu in text.split()[2].split(",")]
    assert len(cpus) == len(set(cpus)) == 8 * 16


def test_cores_are_near_the_gpu(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "m", [4, 4], gpus=[1, 1, 0, 0])
    assert [text.split()[-1] for text in machine.bind(plan_command(tmp_path, 4))] == ["1", "1", "0", "0"]


def test_tasks_get_equally_many_cores_unless_balancing_is_off(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "m", [6, 4], gpus=[0, 1, 1, 1])
    one_thread = "numa_mapping.cores=single_logical"
    messages = machine.bind(plan_command(tmp_path, 4, one_thread))
    assert [len(text.split()[2].split(",")) for text in messages] == [1, 1, 1, 1]
    messages = machine.bind(plan_command(tmp_path, 4, one_thread, "numa_mapping.balanced=False"))
    assert [len(text.split()[2].split(",")) for text in messages] == [6, 1, 1, 1]


def test_too_few_cores_leave_the_tasks_alone(tmp_path: Path) -> None:
    messages = Machine(tmp_path / "m", [2]).bind(plan_command(tmp_path, 4))
    assert all("too few cores" in text for text in messages)
    messages = Machine(tmp_path / "n", [8]).bind(plan_command(tmp_path, 4, "numa_mapping.min_cores=3"))
    assert all("too few cores" in text for text in messages)


def test_a_part_of_a_node_is_left_as_the_scheduler_chose(tmp_path: Path) -> None:
    messages = Machine(tmp_path / "m", [8]).bind(plan_command(tmp_path, 2), SLURM_CPUS_ON_NODE="4")
    assert messages == ["its cores are left as the scheduler chose them"] * 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["numa_mapping.enable=False"],
        ["training=gpt3/tiny"],  # on CPUs
        ["cluster.srun_args=['--cpu-bind=cores']"],
        ["cluster=local"],
    ],
)
def test_no_binding_is_planned(tmp_path: Path, overrides: list[str]) -> None:
    plan = plan_command(tmp_path, 2, *overrides)
    assert plan.job.binding is None
    assert "taskset" not in task_of(plan)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("numa_mapping.mode=single", "'unique_contiguous'"),
        ("numa_mapping.scope=socket", "'node'"),
        ("numa_mapping.max_cores=0", "1 or more"),
        ("numa_mapping.min_cores=9", "numa_mapping.max_cores=8: less than min_cores, 9"),
        ("numa_mapping.max_core=9", "did you mean 'max_cores'"),
    ],
)
def test_bindings_that_are_not_implemented_are_refused(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        plan_command(tmp_path, 2, override)


def test_a_kernel_that_does_not_tell_of_threads_ends_no_training(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "m", [4])
    for path in (machine.root / "sys").rglob("thread_siblings_list"):
        path.unlink()
    messages = machine.bind(plan_command(tmp_path, 2))
    assert messages == ["on CPUs 0,1,2,3 of NUMA node 0", "on CPUs 4,5,6,7 of NUMA node 0"]
    (machine.root / "sys/devices/system/cpu/online").unlink()
    assert machine.bind(plan_command(tmp_path, 2)) == ["its cores are left as the scheduler chose them"] * 2


def test_one_thread_of_a_core_is_one_that_is_allowed(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "m", [4])
    machine._write("proc/status", "Cpus_allowed_list:\t6-7\n")
    plan = plan_command(tmp_path, 2, "numa_mapping.cores=single_logical")
    messages = machine.bind(plan, SLURM_CPUS_ON_NODE="2")
    assert messages == ["on CPUs 6 of NUMA node 0", "on CPUs 7 of NUMA node 0"]


def test_cores_that_the_user_confined_are_not_widened(tmp_path: Path) -> None:
    """Slurm does not say here that the whole node is the job's."""
    machine = Machine(tmp_path / "m", [4])
    machine._write("proc/status", "Cpus_allowed_list:\t0-1\n")
    assert machine.bind(plan_command(tmp_path, 1))[0] == "on CPUs 0,1 of NUMA node 0"

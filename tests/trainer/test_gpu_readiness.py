"""The requirements of a training on a GPU, as far as they are visible without one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
import yaml

from slipway.common.errors import UserError
from slipway.trainer import device, requirements
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.report.progress import StepClock
from slipway.trainer.world import World
from tests.trainer.conftest import free_port
from tests.trainer.probing import run_probe
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

TENSOR = "model.tensor_model_parallel_size"
DETERMINISTIC = "model.deterministic_mode"
# The variables for waiting threads of OpenMP.
SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE"}
WORLD = World(rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", port=0)
ALLOCATOR, THREADS = "PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_COMPILE_THREADS"
COMPILING = {
    "TORCHINDUCTOR_CACHE_DIR": "/absent/compiled",
    "TRITON_CACHE_DIR": "/absent/compiled/triton",
    THREADS: str(min(len(os.sched_getaffinity(0)), os.cpu_count() or 1, 32)),
    ALLOCATOR: "expandable_segments:True",
}


@pytest.fixture(scope="module")
def gpu_probe(configuration: Any, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("gpu")
    changes = {"exp_manager.explicit_log_dir": str(directory), "model.data.data_impl": "mock"}
    (directory / "base.yaml").write_text(yaml.safe_dump(configuration(changes)))
    arguments = [str(directory / "base.yaml"), str(free_port()), str(directory / "engine")]
    result: dict[str, Any] = run_probe(pool, "tests.trainer.probe_gpu", arguments, directory)
    return result


def test_missing_gpu_is_reported_with_the_drivers_message(gpu_probe: dict[str, Any]) -> None:
    devices = gpu_probe["devices"]
    assert "trainer.accelerator=gpu: " in devices["gpu 0"]
    assert "The NVIDIA driver on your system is too old (found version 12020)" in devices["gpu 0"]
    assert devices["gpu 0"].endswith("to train on the CPU: training.trainer.accelerator=cpu")
    assert devices["auto 0"] == devices["cpu 0"] == "cpu"
    # Without a driver a task of each node reports it for all.
    assert devices["told by, driver None"] == "node"
    assert devices["told by, driver NVRM version: 535.0"] == "rank"


def test_each_task_has_a_gpu_of_its_own(gpu_probe: dict[str, Any]) -> None:
    devices, (mixed, shared, apart) = gpu_probe["devices"], gpu_probe["claims"]
    assert devices["gpu 1 of 8"] == "cuda:0"
    assert devices["gpu 8 of 8"] == "cuda:3"
    assert "has 8 tasks and 4 visible GPUs: expected a GPU for each task" in devices["gpu 4 of 8"]
    assert "computes on cpu, and rank 0 on" in mixed
    assert "has the same GPU as another rank (A)" in shared
    assert apart == "None"


def test_generators_that_differ_are_made_equal_with_a_warning(gpu_probe: dict[str, Any]) -> None:
    generators = gpu_probe["generators"]
    assert generators["silent"]
    (text,) = generators["said"]
    assert text.startswith(
        "the random generators of the 2 data-parallel ranks differ: all continue with the first"
    )
    assert generators["kept"]


def test_generators_of_another_kind_of_device_are_not_restored(gpu_probe: dict[str, Any]) -> None:
    assert gpu_probe["generators"]["fit"] == [True, False]


def test_transformer_engine_that_does_not_load_is_not_used(gpu_probe: dict[str, Any]) -> None:
    problem = "OSError: libcudnn.so.9: cannot open shared object file"
    assert gpu_probe["engine"] == {"problem": problem, "used": False}


def test_collectives_wait_for_less_after_the_first_step(gpu_probe: dict[str, Any]) -> None:
    assert len(gpu_probe["timeouts"]) > 1, "the default group, and megatron-core's"
    assert set(gpu_probe["timeouts"]) == {7}


@pytest.mark.parametrize(
    ("package", "version", "message"),
    [
        ("megatron-core", "0.13.1", "has megatron-core 0.13.1: engine=megatron is written for 0.16"),
        ("megatron-core", "0.17.0rc1", "has megatron-core 0.17.0rc1: engine=megatron is written for 0.16"),
        ("torch", "2.7.0a0+nv25.03", r"has torch 2.7.0a0\+nv25.03: engine=megatron needs 2.8 or newer"),
    ],
)
def test_another_version_is_refused_before_it_is_imported(
    package: str, version: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requirements.check_versions()
    assert requirements.list_untested() == []
    versions = {
        "megatron-core": "0.16.1",
        "torch": "2.11.0+cu130",
        "transformer_engine": "2.16.0",
        package: version,
    }
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    with pytest.raises(UserError, match=message):
        requirements.check_versions()
    (note,) = [note for note in requirements.list_untested() if "transformer_engine" in note]
    assert note == "note: transformer_engine 2.16.0: not tested with this trainer; 2.9 to below 2.12 are"


@pytest.fixture
def settings(configuration: Callable[..., dict[str, Any]]) -> Callable[..., Settings]:
    def read(**changes: Any) -> Settings:
        files = {"exp_manager.explicit_log_dir": "/absent", "model.data.data_impl": "mock"}
        return read_settings(flatten(configuration({**files, **changes})))

    return read


def _prepare(settings: Settings, variables: dict[str, str] | None = None, world: World = WORLD) -> Any:
    prepared = dict(variables or {})
    device.prepare_environment(settings, world, prepared)
    return prepared


def test_the_environment_is_prepared_before_cuda_starts(settings: Callable[..., Settings]) -> None:
    assert _prepare(settings(**{DETERMINISTIC: True, TENSOR: 2}), {"NCCL_ALGO": "Tree"}) == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "NCCL_ALGO": "Tree",
        **SLEEPING,
        **COMPILING,
    }
    on_cpu = settings(**{"trainer.accelerator": "cpu", DETERMINISTIC: True})
    assert _prepare(on_cpu) == {"CUDA_VISIBLE_DEVICES": "", **SLEEPING}
    assert _prepare(settings(**{"trainer.accelerator": "gpu"})) == COMPILING
    kernels = {name: value for name, value in COMPILING.items() if name != ALLOCATOR}
    compiled = settings(**{"trainer.accelerator": "cpu", "model.compile_layers": True})
    assert _prepare(compiled) == {"CUDA_VISIBLE_DEVICES": "", **SLEEPING, **kernels}


def test_a_value_of_the_job_stays_in_the_environment(settings: Callable[..., Settings]) -> None:
    chosen = dict.fromkeys((*SLEEPING, *COMPILING), "chosen")
    assert _prepare(settings(), chosen) == chosen
    # The allocator has a second name, and Triton's files follow the compiler's.
    others = _prepare(settings(), {"PYTORCH_ALLOC_CONF": "", "TORCHINDUCTOR_CACHE_DIR": "/local"})
    assert ALLOCATOR not in others
    assert others["TRITON_CACHE_DIR"] == "/local/triton"


def test_ranks_of_a_node_share_its_cores_to_compile(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    def count_threads(bound: int, cores: int, ranks: int) -> str:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)))
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        threads: str = _prepare(settings(), world=replace(WORLD, local_size=ranks))[THREADS]
        return threads

    assert count_threads(bound=64, cores=64, ranks=8) == "8"
    assert count_threads(bound=8, cores=64, ranks=8) == "8"
    assert count_threads(bound=2, cores=2, ranks=4) == "1"
    assert count_threads(bound=128, cores=128, ranks=1) == "32"


def test_timeouts_are_read_from_keys(settings: Callable[..., Settings]) -> None:
    assert (settings().timeouts.start, settings().timeouts.after_start) == (30, None)
    keys = {"model.distributed_timeout_minutes": 10, "model.distributed_timeout_seconds_after_init": 90}
    timeouts = settings(**keys).timeouts
    assert (timeouts.start, timeouts.after_start) == (10, 90)


def test_step_time_runs_from_one_end_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def synchronize() -> None:
        waits.append(now[0])
        now[0] += 0.5

    clock = StepClock(synchronize)
    now[0] = 2.0
    assert clock.lap() == 2.0
    with clock.exclude():
        # The half second before it is the optimizer's, which a GPU had still to do.
        now[0] += 100.0
    now[0] += 1.0
    assert clock.lap() == 1.5
    assert waits == [2.0]
    now[0] += 3.0
    assert clock.lap() == 3.0

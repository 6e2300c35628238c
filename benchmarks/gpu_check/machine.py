"""Trainings that a check starts on this machine, and what the machine is."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.common.errors import UserError
from slipway.trainer import requirements
from slipway.trainer.report.metrics import FILE_NAME

_POLL_SECONDS = 0.02

SMALL: dict[str, Any] = {
    "run": {"name": "gpu_check"},
    "trainer": {
        "num_nodes": 1,
        "precision": 32,
        "max_steps": 4,
        "limit_val_batches": 0,
        "log_every_n_steps": 1,
        "gradient_clip_val": 1.0,
    },
    "exp_manager": {
        "create_checkpoint_callback": False,
        "create_tensorboard_logger": False,
        "resume_if_exists": True,
    },
    "model": {
        "micro_batch_size": 2,
        "global_batch_size": 16,
        "encoder_seq_length": 64,
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        # Large: where all is nearly zero, a wrong number looks like a right one.
        "init_method_std": 0.1,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "override_vocab_size": 512,
        "use_cpu_initialization": True,
        "transformer_engine": False,
        "tokenizer": {"library": "megatron", "type": "GPT2BPETokenizer"},
        "optim": {
            "name": "adamw",
            "lr": 1e-3,
            "weight_decay": 0.1,
            "betas": [0.9, 0.95],
            "sched": {"name": "CosineAnnealing", "warmup_steps": 2, "min_lr": 1e-4},
        },
        "data": {"data_impl": "mock"},
    },
}


@dataclass(frozen=True)
class Trained:
    """The outcome of one training."""

    codes: list[int]
    lines: list[dict[str, Any]]
    output: str

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl of a kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return the lines of the steps."""
        return self.of("train")

    @property
    def curve(self) -> dict[int, tuple[float, float]]:
        """Return the loss and the gradient's norm by step; of a repeated step the last report counts."""
        return {line["step"]: (line["loss"], line["grad_norm"]) for line in self.steps}

    def problem(self) -> str | None:
        """Return the end of the output if a rank failed; None if all went well."""
        if not any(self.codes):
            return None
        return f"exit codes {self.codes}: {' | '.join(self.output.strip().splitlines()[-4:])}"


class Machine:
    """The machine at hand, on which trainings run in a directory of their own."""

    def __init__(self, directory: Path, described: Mapping[str, Any], patience: float) -> None:
        self.directory = directory
        self.described = described
        self._patience = patience
        self._known: dict[str, Trained] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """Return the visible GPUs."""
        return list(self.described["gpus"])

    def train(self, name: str, changes: Mapping[str, Any], ranks: int = 1) -> Trained:
        """Run a training to its end; one of a name that ran before is not run again."""
        if name not in self._known:
            processes = self.start(name, changes, ranks)
            self._known[name] = self.finish(name, processes)
        return self._known[name]

    def compute(self, module: str) -> dict[str, Any]:
        """Run a module as the only rank; return the object that it prints.

        Raises
        ------
        RuntimeError
            If it fails.
        """
        return _read_output([module], _rank(0, 1, _free_port()))

    def start(
        self, name: str, changes: Mapping[str, Any], ranks: int = 1, base: dict[str, Any] | None = None
    ) -> list[subprocess.Popen[bytes]]:
        """Start the ranks of a training."""
        # Late: what an interpreter lacks is told before it is imported.
        import yaml

        config = json.loads(json.dumps(base or SMALL))
        own = {"trainer.accelerator": "gpu" if self.gpus else "cpu", "trainer.devices": ranks}
        own["exp_manager.explicit_log_dir"] = str(self.directory / name)
        for key, value in {**own, **changes}.items():
            *path, last = key.split(".")
            node = config
            for part in path:
                node = node.setdefault(part, {})
            node[last] = value
        written = self.directory / f"{name}.yaml"
        written.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "slipway.trainer.pretrain", "--config-path", str(self.directory)]
        command += ["--config-name", name]
        port = _free_port()
        processes: list[subprocess.Popen[bytes]] = []
        with (self.directory / f"{name}.log").open("ab") as log:
            for rank in range(ranks):
                # More threads gain nothing for models of this size, and get in each other's way.
                environment = {"OMP_NUM_THREADS": "1", **os.environ, **_rank(rank, ranks, port)}
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                )
                processes.append(process)
                self._started.append(process)
        return processes

    def finish(self, name: str, processes: Sequence[subprocess.Popen[bytes]]) -> Trained:
        """Wait for the ranks; end them all when one fails, or when patience ends."""
        deadline, late = time.monotonic() + self._patience, False
        try:
            while any(process.poll() is None for process in processes):
                late = time.monotonic() > deadline
                if late or any(process.poll() for process in processes):
                    # The others wait for a rank that is gone.
                    time.sleep(1.0)
                    break
                time.sleep(_POLL_SECONDS)
        finally:
            for process in processes:
                process.kill()
            codes = [process.wait() for process in processes]
        output = (self.directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        if late:
            output += f"\ntook longer than {self._patience:g} s"
        return Trained(codes, self.lines(name), output)

    def kill_after(self, name: str, step: int, processes: Sequence[subprocess.Popen[bytes]]) -> bool:
        """Kill a training with SIGKILL once it has told a step; return whether it was still running."""
        deadline = time.monotonic() + self._patience
        try:
            while all(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if any(line["kind"] == "train" and line["step"] >= step for line in self.lines(name)):
                    return all(process.poll() is None for process in processes)
                time.sleep(_POLL_SECONDS)
            return False
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def kill_all(self) -> None:
        """Kill what is still running of all trainings that were started."""
        for process in self._started:
            process.kill()
            process.wait()

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return what a training has told so far; the last line may be half written."""
        try:
            text = (self.directory / name / FILE_NAME).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def describe() -> dict[str, Any]:
    """Return versions and devices; libraries are imported, so this runs in a process of its own."""
    facts: dict[str, Any] = {"host": socket.gethostname(), "python": sys.version.split()[0], "gpus": []}
    facts["transformer_engine_problem"] = None
    for package in ("torch", "megatron-core", "transformer_engine", "apex"):
        facts[package] = requirements.version(package)
    torch = importlib.import_module("torch")
    facts["cuda"], facts["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    from slipway.trainer.device import driver_version, explain_no_cuda

    facts["driver"] = driver_version()
    facts["no_cuda"] = None if torch.cuda.is_available() else explain_no_cuda([])
    if facts["no_cuda"] is None:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"{properties.major}.{properties.minor}"
            memory = properties.total_memory
            facts["gpus"].append({"name": properties.name, "memory": memory, "capability": capability})
    try:
        # Another version of megatron-core may lack what is imported from it.
        requirements.check_versions()
        from slipway.trainer.model.backends import transformer_engine_problem

        facts["transformer_engine_problem"] = transformer_engine_problem()
    except (UserError, ImportError, AttributeError, OSError) as error:
        facts["transformer_engine_problem"] = f"{type(error).__name__}: {error}"
    return facts


def described() -> dict[str, Any]:
    """Run :func:`describe` in a process of its own, so that this one holds no GPU.

    Raises
    ------
    UserError
        If that process fails, as where torch cannot be imported.
    """
    try:
        return _read_output(["benchmarks.gpu_check", "--describe"], {})
    except RuntimeError as error:
        raise UserError(f"{sys.executable} cannot describe this machine: {error}") from None


def _read_output(module: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the object that a module prints last.

    Raises
    ------
    RuntimeError
        With the end of its errors, if it fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", *module],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise RuntimeError(" | ".join(done.stderr.strip().splitlines()[-3:]))
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return content


def _rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    return {
        **{name: str(value) for name, value in names.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    """Return a port on which nobody listens, and that no outgoing connection takes before rank 0 does."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port

"""A small corpus, and trainings of a very small GPT in processes of their own."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.faults import FAULT
from tests.warm import WarmPool

REPOSITORY = Path(__file__).resolve().parents[2]
SEQ_LENGTH = 32
VOCABULARY = 300
TIMEOUT = 120

CONFIG: dict[str, Any] = {
    "run": {"name": "very_small"},
    "trainer": {
        "devices": 1,
        "num_nodes": 1,
        "precision": 32,
        "max_steps": 6,
        "val_check_interval": 4,
        "limit_val_batches": 50,
        "gradient_clip_val": 1.0,
        "log_every_n_steps": 1,
    },
    "exp_manager": {
        "explicit_log_dir": None,
        "resume_if_exists": True,
        "resume_ignore_no_checkpoint": True,
        "create_checkpoint_callback": True,
        "checkpoint_callback_params": {
            "filename": "megatron_gpt--{val_loss:.2f}-{step}-{consumed_samples}",
        },
    },
    "model": {
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "tensor_model_parallel_size": 1,
        "encoder_seq_length": SEQ_LENGTH,
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "make_vocab_size_divisible_by": 8,
        "seed": 1234,
        "tokenizer": {"library": "megatron", "type": "GPT2BPETokenizer"},
        "optim": {
            "name": "adamw",
            "lr": "1e-2",
            "weight_decay": 0.1,
            "betas": [0.9, 0.95],
            "sched": {"name": "CosineAnnealing", "warmup_steps": 2, "min_lr": 1e-3},
        },
        "data": {"data_impl": "mmap", "splits_string": "80,20,0"},
    },
}


# A value of `config_with` that removes a key. Compared by value: pytest imports this file under another name.
REMOVED = "~"


def config_with(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with dotted keys changed, or removed."""
    config = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        *path, last = key.split(".")
        node = config
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
        if value == REMOVED:
            del node[last]
    return config


@dataclass(frozen=True)
class Outcome:
    """The results of a training: exit codes and outputs by rank, and the lines of metrics.jsonl."""

    codes: list[int]
    stdout: list[str]
    stderr: list[str]
    log_dir: Path

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl of a kind."""
        text = (self.log_dir / "metrics.jsonl").read_text()
        return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]

    def curve(self, *names: str) -> list[tuple[Any, ...]]:
        """Return chosen fields of the training lines, the step first."""
        return [(line["step"], *(line[name] for name in names)) for line in self.lines("train")]


class Trainings:
    """The trainings of a session; each `name` is a run with a log directory of its own."""

    def __init__(self, root: Path, prefix: Path | None, tokenizer: Path | None, pool: WarmPool) -> None:
        self.root = root
        self._pool = pool
        self._launches = 0
        self._prefix = prefix
        self._tokenizer = tokenizer

    def start(
        self, name: str, changes: dict[str, Any], world: int, arguments: list[str]
    ) -> tuple[list[subprocess.Popen[str]], Path]:
        """Start processes of their own for a training; return them and its log directory."""
        options, log_dir = self.configure(name, changes, world)
        command = [sys.executable, "-m", "slipway.trainer.pretrain", *options, *arguments]
        port = free_port()
        processes = [
            subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, **environment(rank, world, port)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        return processes, log_dir

    def configure(self, name: str, changes: dict[str, Any], world: int) -> tuple[list[str], Path]:
        """Write the configuration; return the command line's options and the log directory."""
        log_dir = self.root / name
        files = {"trainer.devices": world, "exp_manager.explicit_log_dir": str(log_dir)}
        if self._prefix and self._tokenizer:
            files["model.data.data_prefix"] = [str(self._prefix)]
            files["model.tokenizer.vocab_file"] = str(self._tokenizer / "vocab.json")
            files["model.tokenizer.merge_file"] = str(self._tokenizer / "merges.txt")
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config_with({**files, **changes})))
        return ["--config-path", str(path.parent), "--config-name", name], log_dir

    def __call__(
        self,
        name: str,
        changes: dict[str, Any] | None = None,
        world: int = 1,
        arguments: list[str] | None = None,
        fault: str = "",
    ) -> Outcome:
        """Run a training to its end; its processes are forked from a warm one."""
        options, log_dir = self.configure(name, changes or {}, world)
        port, self._launches = free_port(), self._launches + 1
        files = [
            [self.root / f"{self._launches}.rank{rank}.{kind}" for rank in range(world)]
            for kind in ("out", "err")
        ]
        processes = [
            self._pool.start(
                [*options, *(arguments or [])],
                {**environment(rank, world, port), FAULT: fault},
                output,
                errors=errors,
            )
            for rank, (output, errors) in enumerate(zip(*files, strict=True))
        ]
        codes = [process.wait() for process in processes]
        stdout, stderr = ([path.read_text() for path in paths] for paths in files)
        return Outcome(codes, stdout, stderr, log_dir)

    @staticmethod
    def finish(processes: list[subprocess.Popen[str]], log_dir: Path) -> Outcome:
        """Wait for a training's processes."""
        try:
            outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
        finally:
            for process in processes:
                process.kill()
        codes = [process.returncode for process in processes]
        return Outcome(codes, [out for out, _ in outputs], [error for _, error in outputs], log_dir)


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return torchrun's variables of a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


# Below those of sandboxes, jobs and outgoing connections, which could take one before rank 0 listens.
# Two sessions without workers, each in a checkout of its own, begin elsewhere: ranks would meet the other's.
@cache
def _ports() -> Iterator[int]:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    return count(10000 + (750 * (int(worker.removeprefix("gw")) % 8) if worker else os.getpid() * 37 % 5000))


def free_port() -> int:
    """Return a port that nothing listens on, each time another, and to each of several workers its own."""
    while True:
        port = next(_ports())
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="session")
def configuration() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the very small configuration, with dotted keys changed."""
    return config_with


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of text files; one is not UTF-8, one is empty."""
    directory = tmp_path_factory.mktemp("corpus")
    words = ["alpha", "beta", "gamma", "delta", "größe", "日本", "\n", "the", "of", "train"]
    for number in range(40):
        text = " ".join(words[(number * 7 + k * k) % len(words)] for k in range(120))
        folder = directory / f"part{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:02}.txt").write_text(f"{number} {text}", encoding="utf-8")
    (directory / "latin1.txt").write_bytes(b"gr\xf6\xdfe")
    (directory / "empty.txt").touch()
    (directory / "other.md").write_text("not matched")
    return directory


@dataclass(frozen=True)
class Tokenized:
    """The files that the tokenizer wrote, its command and its output."""

    prefix: Path
    tokenizer: Path
    command: list[str]
    stdout: str


@pytest.fixture(scope="session")
def tokenized(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenized:
    """Return the corpus as .bin/.idx, written with two workers, once for all workers of pytest."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    with (directory / "tokenized.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _tokenize(corpus, directory / "tokenized")


def _tokenize(corpus: Path, directory: Path) -> Tokenized:
    prefix, tokenizer, record = directory / "text_document", directory / "bpe", directory.with_suffix(".json")
    if record.exists():
        return Tokenized(prefix, tokenizer, *json.loads(record.read_text()))
    node = {
        "inputs": [str(corpus)],
        "pattern": "*.txt",
        "format": "txt",
        "on_error": "skip",
        "max_errors": 1,
        "output_prefix": str(prefix),
        "tokenizer_dir": str(tokenizer),
        "vocab_size": VOCABULARY,
    }
    directory.mkdir()
    (directory / "preparation.yaml").write_text(yaml.safe_dump({"data_preparation": node}))
    command = [sys.executable, "-m", "slipway.corpus", "run", "--config-path", str(directory)]
    command += ["--config-name", "preparation"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, result.stderr
    record.write_text(json.dumps([command, result.stdout]))
    return Tokenized(prefix, tokenizer, command, result.stdout)


@pytest.fixture(scope="session")
def trainings(tokenized: Tokenized, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Return the trainings on the tokenized corpus."""
    return Trainings(tmp_path_factory.mktemp("trainings"), tokenized.prefix, tokenized.tokenizer, pool)

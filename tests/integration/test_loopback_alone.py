"""No verb contacts another machine unless it is told to, as SECURITY.md says.

Work is local and has no container, so that doctor asks no registry. The guard sees Python's connections.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from launcher.cli.verbs import VERBS
from tests.integration.conftest import SLIPWAY

# Imported as each Python starts: writes down whom it connects to, or whose name it looks up.
GUARD = """
import os, socket, sys

def guard(event, arguments, log=os.environ["CONNECTIONS"], own=socket.gethostname()):
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[-1] if event == "socket.sendto" else arguments[1]
        host = address[0] if isinstance(address, tuple) else None
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = arguments[0]
    else:
        return
    host = os.fsdecode(host) if host else host
    if host and host not in ("localhost", "::1", own) and not host.startswith("127."):
        with open(log, "a") as file:
            file.write(f"{event} {host} by {sys.orig_argv}\\n")

sys.addaudithook(guard)
"""

TINY = [
    *("cluster=local", "training=gpt3/tiny", "training.trainer.devices=1", "training.trainer.max_steps=2"),
    *("training.model.tensor_model_parallel_size=1", "training.model.data.data_impl=mock"),
    *("training.model.encoder_seq_length=32", "training.trainer.val_check_interval=2"),
    *("training.trainer.limit_val_batches=1", "training.model.optim.sched.warmup_steps=1"),
    *(
        "training.model.global_batch_size=2",
        "training.model.micro_batch_size=2",
        "training.trainer.num_nodes=1",
    ),
]
# Each verb of `slipway --help`, and the verbs below one; a run is there once the first has ended.
COMMANDS = [
    ["launch", *TINY],
    *(["check", *TINY], ["suggest", *TINY], ["doctor", *TINY], ["render", *TINY], ["diff", *TINY]),
    *(
        ["show", *TINY],
        ["list"],
        ["list", "runs"],
        ["status"],
        ["follow", "gpt3_tiny"],
        ["logs", "gpt3_tiny"],
    ),
    *(["plot", "gpt3_tiny"], ["history", "gpt3_tiny"], ["verify", "gpt3_tiny"], ["cancel", "gpt3_tiny"]),
    ["nodes"],
    *(["watch"], ["incident", "gpt3_tiny"], ["export", "gpt3_tiny", "--to", "mlflow"]),
    *(["hold", "gpt3_tiny"], ["release", "gpt3_tiny"], ["attach", "gpt3_tiny", "--", "true"]),
    ["sweep", "--dry-run", *TINY, "training.model.seed=1,2"],
    *(["convert", "gpt3_tiny"], ["evaluate", "gpt3_tiny"]),
    *(["generate", "gpt3_tiny", "a", "--max-tokens", "2"], ["resume", "gpt3_tiny", "--dry-run"]),
    *(["clean", "gpt3_tiny", "--keep-last", "1", "--yes"], ["adopt", "old_launcher"]),
    ["data", "prepare", "text.txt", "--vocab-size", "300"],
    *(["data", "lint", "text.txt"], ["data", "show", "data/corpus_text_document"]),
    *(["image", "list"], ["image", "render", "nemo"], ["image", "verify"], ["image", "prune"]),
    *(["sandbox", "status"], ["sandbox", "env"], ["init", "mine"], ["completion", "bash"]),
]


def test_every_verb_keeps_to_loopback(tmp_path: Path) -> None:
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard/sitecustomize.py").write_text(GUARD)
    (tmp_path / "text.txt").write_text("a sentence of some words\n\n" * 200)
    log = tmp_path / "connections"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SLIPWAY"))},
        "PYTHONPATH": str(tmp_path / "guard"),
        "CONNECTIONS": str(log),
        "SLIPWAY_CACHE_DIR": str(tmp_path / "cache"),
        "SLIPWAY_SANDBOX_DIR": str(tmp_path / "sandbox"),
        "OMP_NUM_THREADS": "1",
    }

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    probe = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 9))"
    run(sys.executable, "-c", probe)
    assert "socket.connect 192.0.2.1" in log.read_text()  # the guard sees what it is to see
    log.unlink()
    assert {words[0] for words in COMMANDS} == set(VERBS)
    for words in COMMANDS:
        done = run(SLIPWAY, *words)
        assert done.returncode in (range(5) if words != COMMANDS[0] else (0,)), (words, done.stderr)
        assert "Traceback" not in done.stderr, (words, done.stderr)
        assert not log.exists(), (words, log.read_text())
    assert list(tmp_path.glob("results/gpt3_tiny/checkpoints/*/complete.json"))

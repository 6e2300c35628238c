"""The calls of Slurm's controller, by its own count, are those of the table for administrators."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.sandbox import configuration
from launcher.sandbox.lifecycle import Sandbox
from slipway.common.node.marks import chain_end
from tests.forked_slipway import SLIPWAY, run_forked
from tests.jobs.on_slurm.sandbox_runs import HEADER
from tests.sandbox.fixtures import booted, slurm_is_at_least

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(os.geteuid() != 0, reason="needs several users")]

# Slurm runs jobs of users that the machine knows: nobody, daemon, bin and sys.
USERS = (65534, 1, 2, 3)
TRAINING = [
    "training=gpt3/tiny",
    "training.model.data.data_impl=mock",
    "training.trainer.num_nodes=1",
    "training.trainer.devices=1",
    "training.model.tensor_model_parallel_size=1",
    "cluster=sandbox",
]
TINY = [
    f"cluster.python={sys.executable}",
    "training.trainer.max_steps=1000000",
    "training.trainer.val_check_interval=100000",
    "training.model.encoder_seq_length=32",
    "training.model.max_position_embeddings=32",
    "training.model.num_layers=1",
    "training.model.hidden_size=32",
    "training.model.micro_batch_size=4",
    "training.model.global_batch_size=4",
    "+training.model.override_vocab_size=512",
]
# The second link completes; the first leaves to be continued.
LINKS = 2
CHAIN = f"""
echo >>"$0.links"
sleep 2
(($(wc -l <"$0.links") < {LINKS})) && exit 75
exit 0
"""
# The tightest that a site is known to use.
LIMITS = "SlurmctldParameters=rl_enable,rl_bucket_size=40,rl_refill_rate=4,rl_refill_period=60\n"


@dataclass
class User:
    """A user of a sandbox with a directory, whose calls Slurm counts: root's are those of the daemons too."""

    uid: int
    directory: Path
    environment: dict[str, str]
    others: Sequence[User] = ()

    def slipway(self, *words: str, code: int = 0, timeout: float = 300) -> str:
        done = run_forked(words, cwd=self.directory, env=self.environment, timeout=timeout, user=self.uid)
        assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def launch(self, run: str, body: str, *overrides: str) -> None:
        payload = self.directory / f"{run}.sh"
        payload.write_text(HEADER + body)
        payload.chmod(0o755)
        own = [f"training.run.name={run}", f"cluster.python={payload}"]
        self.slipway("launch", *TRAINING, *own, *overrides)

    def row(self, run: str) -> dict[str, Any]:
        (row,) = json.loads(self.slipway("status", run, "--json"))
        return dict(row)

    def wait_for_end(self, run: str) -> None:
        """Wait for the end of a chain by its marks alone."""
        directory = self.directory / "results" / run / "launches" / "1"
        deadline = time.monotonic() + 240
        while chain_end(directory) is None:
            assert time.monotonic() < deadline, list((directory / "marks").iterdir())
            time.sleep(0.5)
        time.sleep(3)  # its job ends

    def wait_for_step(self, run: str, after: int = 9) -> None:
        deadline = time.monotonic() + 120
        while ((row := self.row(run))["step"] or 0) <= after:
            assert row["state"] in ("PENDING", "RUNNING") and time.monotonic() < deadline, row
            time.sleep(1)

    def use_up_calls(self) -> None:
        """Call Slurm until it lets a command wait."""
        for _ in range(45):
            began = time.monotonic()
            subprocess.run(["squeue"], env=self.environment, user=self.uid, check=True, capture_output=True)
            if time.monotonic() - began > 3:
                return
        raise AssertionError("Slurm limits nothing")

    def calls(self) -> int:
        answer = subprocess.run(
            ["sdiag"], env=self.environment, check=True, capture_output=True, text=True
        ).stdout
        match = re.search(rf"\( *{self.uid}\) count:(\d+)", answer.partition("statistics by user")[2])
        return int(match[1]) if match else 0

    def count(self, action: Callable[[], object]) -> int:
        before = self.calls()
        action()
        return self.calls() - before


def make_user(sandbox: Sandbox, directory: Path) -> User:
    """Return a user who may read the checkout and reach the sandbox, and others."""
    for path in (directory, sandbox.directory, sandbox.directory.parent):
        path.chmod(path.stat().st_mode | 0o011)
    found = []
    for uid in USERS:
        home = directory / str(uid)
        home.mkdir()
        os.chown(home, uid, uid)
        own = {"HOME": str(home), "SLIPWAY_CACHE_DIR": str(home / "cache")}
        found.append(User(uid, home, {**os.environ, **sandbox.environment(), **own}))
    try:
        command = [SLIPWAY, "--version"]
        subprocess.run(command, cwd=found[0].directory, user=USERS[0], capture_output=True, check=True)
    except (PermissionError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the checkout is not for everybody to read: {error}")
    return replace(found[0], others=found[1:])


def find_ranks(user: User) -> list[int]:
    """Return the trainer's processes of a user in this sandbox, and of no other one on this machine."""
    of_sandbox = f"SLURM_CONF={user.environment['SLURM_CONF']}"
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, UnicodeDecodeError):
            program, *arguments = (process / "cmdline").read_text().split("\0")
            is_rank = program == sys.executable and "slipway.trainer.pretrain" in arguments
            if is_rank and of_sandbox in (process / "environ").read_text().split("\0"):
                found.append(int(process.name))
    return found


@contextmanager
def stopped(processes: Sequence[int]) -> Iterator[None]:
    """Keep processes from running in the block."""
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


def documented(repository: Path) -> dict[str, int]:
    """Return the calls by what makes them, of the table in the administrators' page."""
    text = (repository / "docs" / "administrators.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \|", text, re.MULTILINE)
    return {name.replace("`", ""): int(count) for name, count in rows}


def test_calls_are_as_documented(plain_sandbox: Sandbox, short_directory: Path, repository: Path) -> None:
    user = make_user(plain_sandbox, short_directory)
    payload = user.directory / "waits.sh"
    measured = {
        "slipway launch": user.count(lambda: user.launch("waits", "", "cluster.partition=cloud")),
        "slipway check": user.count(lambda: user.slipway("check", *TRAINING, f"cluster.python={payload}")),
        "slipway status": user.count(lambda: user.slipway("status")),
        "slipway watch": user.count(lambda: user.slipway("watch")),
        "slipway list runs": user.count(lambda: user.slipway("list", "runs")),
        "slipway history RUN": user.count(lambda: user.slipway("history", "waits")),
        "slipway hold RUN": user.count(lambda: user.slipway("hold", "waits")),
        "slipway release RUN": user.count(lambda: user.slipway("release", "waits")),
        "slipway cancel RUN": user.count(lambda: user.slipway("cancel", "waits")),
    }
    # Each link lives for some seconds, and a real one for hours: nobody watches.
    before = user.calls()
    user.launch("chain", CHAIN, f"resilience.links={LINKS + 1}")
    user.wait_for_end("chain")
    links = user.calls() - before - measured["slipway launch"]
    measured["a link of a chain"] = -(-links // LINKS)
    check_table(repository, measured)


def check_table(repository: Path, measured: dict[str, int]) -> None:
    table = documented(repository)
    assert {name: count for name, count in measured.items() if count > table.get(name, -1)} == {}, measured


@pytest.mark.trainer
def test_watching_a_training_that_hangs(
    plain_sandbox: Sandbox, short_directory: Path, repository: Path
) -> None:
    """A rank is stopped for a minute: its job tells, each view says so, and hardly calls Slurm."""
    user = make_user(plain_sandbox, short_directory)
    told = [
        "watch.chain.reaction=off",
        "watch.throughput.reaction=off",  # a busy machine may be slow before it hangs
        "watch.tell.every=2",
        f"watch.tell.command=[/bin/cp,/dev/stdin,{user.directory}/told.json]",
    ]
    user.slipway("launch", *TRAINING, *TINY, "training.run.name=hangs", *told)
    user.wait_for_step("hangs")
    assert user.row("hangs")["no_step_seconds"] is None
    ranks = find_ranks(user)
    assert len(ranks) == 1
    with stopped(ranks):
        before = user.calls()
        # The silence is unusual after a minute, which the views then see before their own is over.
        time.sleep(4)

        def watch(watcher: User, *words: str) -> tuple[int, str]:
            before = watcher.calls()
            with pytest.raises(subprocess.TimeoutExpired) as end:
                watcher.slipway(*words, "--base-results-dir", str(user.directory / "results"), timeout=59.5)
            return watcher.calls() - before, (end.value.stdout or b"").decode()

        watched = {
            "slipway follow RUN": ("follow", "hangs"),
            "slipway status --watch": ("status", "--watch"),
            "slipway logs -f RUN": ("logs", "-f", "hangs"),
        }
        with ThreadPoolExecutor() as pool:  # each is another user's
            views = list(
                pool.map(
                    lambda pair: watch(pair[0], *pair[1]), zip(user.others, watched.values(), strict=True)
                )
            )
        inquiry = user.calls() - before
        for _, output in views[:2]:
            assert re.search(r"no new step for 1 m \d+ s \(usual: [\d.e-]+ s\)", output), output
        row = user.row("hangs")
        assert row["state"] == "RUNNING" and row["no_step_seconds"] > 60 > row["step_seconds"]
        assert re.search("RUNNING .*no new step for 1 m", user.slipway("status"))
        deadline = time.monotonic() + 30
        while not (user.directory / "told.json").exists():
            assert time.monotonic() < deadline, user.row("hangs")["alerts"]
            time.sleep(1)
        message = json.loads((user.directory / "told.json").read_text())
        assert message["alert"] == user.row("hangs")["alerts"][0]["alert"] == "no_step-1"
        assert (message["event"], message["link"], message["job"]) == ("opened", 1, row["job_id"])
    user.wait_for_step("hangs", after=row["step"])
    assert user.row("hangs")["no_step_seconds"] is None
    user.slipway("cancel", "hangs", "--wait")
    counts = {f"a minute of {name}": count for name, (count, _) in zip(watched, views, strict=True)}
    assert max(counts.values()) <= 4
    check_table(repository, {**counts, "a job that asks its ranks where they hang": inquiry})


@pytest.mark.skipif(not slurm_is_at_least(23, 2), reason="Slurm limits the calls of a user from 23.02 on")
@pytest.mark.timeout(900)
def test_all_works_under_the_tightest_limit(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three users have just used up their calls; root, which is never limited, would not notice.

    It takes minutes, as everything does then.
    """
    monkeypatch.setattr(configuration, "_SLURM_CONF", configuration._SLURM_CONF + LIMITS)
    with booted(nodes=2) as sandbox:
        user = make_user(sandbox, short_directory)
        owner, launches, follows = user, *user.others[:2]
        owner.launch("chain", CHAIN, f"resilience.links={LINKS + 1}")

        def launch_and_cancel() -> str:
            launches.launch("hours", "exec sleep 3600", "resilience.links=2")
            return launches.slipway("cancel", "hours", "--wait", timeout=600)

        results = str(owner.directory / "results")
        with ThreadPoolExecutor() as pool:
            list(pool.map(User.use_up_calls, (owner, launches, follows)))
            watched = pool.submit(owner.slipway, "status", "--watch", "chain", timeout=800)
            cancelled = pool.submit(launch_and_cancel)
            followed = pool.submit(
                follows.slipway, "follow", "chain", "--base-results-dir", results, timeout=800
            )
            assert "COMPLETED" in watched.result()
            assert "COMPLETED" in followed.result()
            assert "cancelled" in cancelled.result()

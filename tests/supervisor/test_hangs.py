"""The answers of ranks in a hang, and the rank that is named."""

from __future__ import annotations

import contextlib
import os
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from slipway.supervisor import hang_probe, nccl_ras
from slipway.supervisor.hang_judge import Rank, judge
from slipway.supervisor.hang_probe import find_main_stack, find_ranks, look_at_ranks, read_answers
from slipway.supervisor.nccl_ras import Communicator
from tests.supervisor.test_every_python import MINORS, interpreter

RECORDED = Path(__file__).parent / "recorded"
TAG = "20261127-200510-0d668a"
TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
REDUCE = (
    (f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce"),
    (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
    ("/code/train.py", 40, "step"),
)
LOAD = (("/usr/lib/python3.11/selectors.py", 415, "select"), ("/code/loader.py", 88, "fetch"))


def four(**odd: Mapping[str, Any]) -> list[Rank]:
    """Return four ranks on two nodes that wait in a collective, but for what `r1` and so on say."""
    ranks = [Rank(number, f"n{number // 2 + 1}", 100 + number, "S", frames=REDUCE) for number in range(4)]
    return [rank._replace(**odd.get(f"r{rank.rank}", {})) for rank in ranks]


def recorded(*begun: int, waits: str = "gloo:all_reduce") -> list[Rank]:
    """Return ranks with equal stacks that have begun so many collectives of the first group."""
    return [
        Rank(number, "n1", frames=REDUCE, state="S", collectives={"0": [each, min(begun), waits]})
        for number, each in enumerate(begun)
    ]


WAITS = " while 3 ranks wait in all_reduce"
JUDGED = {
    "stopped": (four(r2={"state": "T", "frames": ()}), "rank 2 on n2 is stopped (state T)" + WAITS, ("n2",)),
    "gone": (four(r1={"state": ""}), "rank 1 on n1 has no process any more" + WAITS, ("n1",)),
    "mount": (
        four(r3={"state": "D", "kernel": "[<0>] rpc_wait_bit_killable+0x1e/0xa0", "frames": LOAD}),
        "rank 3 on n2 waits for the kernel: a file server or a device (state D, rpc_wait_bit_killable)"
        + WAITS,
        ("n2",),
    ),
    "loader": (
        four(r0={"frames": LOAD}),
        "rank 0 on n1 stands in loader.py:88 (fetch, in select)" + WAITS,
        ("n1",),
    ),
    "deaf": (four(r0={"answers": False, "frames": ()}), "rank 0 on n1 does not answer" + WAITS, ("n1",)),
    "two nodes": (
        four(r0={"frames": LOAD}, r3={"frames": LOAD}),
        "ranks 0, 3 on n1, n2 stand in loader.py:88 (fetch, in select) while 2 ranks wait in all_reduce",
        (),
    ),
    "all": (
        four(**{f"r{each}": {"frames": LOAD} for each in range(4)}),
        "ranks 0, 1, 2, 3 on n1, n2 stand in loader.py:88 (fetch, in select): no rank stands out",
        (),
    ),
    # The line is another one: the collective is not.
    "other line": (
        four(r1={"frames": (*REDUCE[:2], ("/code/train.py", 44, "step"))}),
        "rank 1 on n1 stands in train.py:44 (step, in all_reduce)" + WAITS,
        ("n1",),
    ),
    # The recorder knows better than equal stacks: rank 1 has skipped one.
    "recorder": (
        recorded(4, 3, 4),
        "rank 1 on n1 stands in train.py:40 (step, in all_reduce) while 2 ranks wait in all_reduce",
        ("n1",),
    ),
    # Rank 0 waits for rank 1, and that for rank 2 in another group.
    "chain of groups": (
        [
            Rank(0, "n1", state="S", frames=REDUCE, collectives={"1": [9, 8, "nccl:send"]}),
            Rank(1, "n1", state="S", frames=REDUCE, collectives={"1": [8, 8, ""], "2": [5, 4, "nccl:send"]}),
            Rank(2, "n2", state="S", frames=REDUCE, collectives={"2": [4, 4, ""]}),
        ],
        "rank 2 on n2 stands in train.py:40 (step, in all_reduce) while 2 ranks wait in send",
        ("n2",),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "why", "hosts"), JUDGED.values(), ids=JUDGED)
def test_the_rank_that_the_others_wait_for_is_named(
    ranks: list[Rank], why: str, hosts: tuple[str, ...]
) -> None:
    hang = judge(ranks, {})
    assert (hang.why, hang.hosts, hang.moves) == (why, hosts, False)


def test_a_node_that_does_not_answer_is_named_first() -> None:
    hang = judge(four(r0={"state": "T"})[:2], {"n2": [2, 3]})
    assert (hang.why, hang.hosts) == ("n2 does not answer (ranks 2, 3)", ("n2",))
    assert hang.suspects == (2, 3)


# --- NCCL's RAS


@pytest.fixture
def ras(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A server of RAS's protocol that sends the answer of NVIDIA's guide; yields the requests."""
    requests: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                requests.append(line.decode().strip())
                if requests[-1].endswith("STATUS"):
                    self.wfile.write((RECORDED / "nccl_ras.json").read_bytes())
                    return
                self.wfile.write(b"SERVER PROTOCOL 2\n" if len(requests) == 1 else b"OK\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{server.server_address[1]}")
        yield requests
        server.shutdown()


def test_nccl_names_the_rank_that_it_misses(ras: list[str]) -> None:
    communicators = nccl_ras.ask()
    assert ras == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "SET FORMAT json", "VERBOSE STATUS"]
    address = "172.16.64.245"
    assert communicators == [Communicator({(address, 1524344): 0}, [(address, 1524345)])]
    ranks = [Rank(6, "n7", 1524344, "S", frames=REDUCE), Rank(7, "n7", 1524345, "S", frames=REDUCE)]
    assert judge(ranks, {}, communicators).suspects == (7,)
    others = [rank._replace(pid=rank.pid + 9) for rank in ranks]  # another job's NCCL
    assert judge(others, {}, communicators).suspects == ()


def test_nccl_names_the_rank_that_has_launched_the_fewest_collectives() -> None:
    launched = {
        ("10.0.0.1", 100): 6650,
        ("10.0.0.1", 101): 6650,
        ("10.0.0.2", 102): 6649,
        ("10.0.0.2", 103): 6650,
    }
    hang = judge(four(), {}, [Communicator(launched, [])])
    assert (hang.suspects, hang.hosts) == ((2,), ("n2",))


def test_no_nccl_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", "127.0.0.1:1")
    assert nccl_ras.ask() == []
    assert nccl_ras.read({"communicators": [{"ranks": 3}]}) == []


# --- what ranks answer


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look twice alone."""
    monkeypatch.setattr(hang_probe, "_LOOKS", 2)


@contextlib.contextmanager
def running(
    repository: Path, rank: int, code: str, path: str = "", python: str = sys.executable
) -> Iterator[subprocess.Popen[str]]:
    """Run a program as a rank, until it has printed a line."""
    python_path = f"{repository}/templates/python{path and ':' + path}"
    environment = {**os.environ, "SLIPWAY_TAG": TAG, "RANK": str(rank), "PYTHONPATH": python_path}
    command = [python, "-W", "error", "-c", f"{code}"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


SLEEPS = "import time\ndef fetch():\n    print(1, flush=True)\n    time.sleep(99)\nfetch()"
HOLDS_LOCK = "def spin():\n    print(1, flush=True)\n    sum(iter(int, 1))\nspin()"
# Stands where it is, and answers nothing.
OUTSIDE = "import signal, time\nsignal.signal(57, signal.SIG_DFL)\nprint(1, flush=True)\ntime.sleep(99)"


def test_each_rank_says_where_it_stands(repository: Path) -> None:
    with contextlib.ExitStack() as stack:
        programs = (SLEEPS, HOLDS_LOCK, SLEEPS, OUTSIDE)
        ranks = [
            stack.enter_context(running(repository, number, code)) for number, code in enumerate(programs)
        ]
        ranks[2].send_signal(signal.SIGSTOP)
        answers = look_at_ranks(TAG)
        assert all(process.poll() is None for process in ranks)
    assert [each["rank"] for each in answers] == [0, 1, 2, 3]
    assert [each["frames"][:1] for each in answers] == [
        [("<string>", 4, "fetch")],
        [("<string>", 3, "spin")],
        [],
        [],
    ]
    assert [each["state"] in "RS" for each in answers] == [True, True, False, True]
    assert answers[2]["state"] == "T"
    assert not any(each["moves"] for each in answers)


@pytest.mark.parametrize("version", [f"3.{minor}" for minor in MINORS])
def test_a_rank_of_every_python_runs_and_those_that_can_answer_do(repository: Path, version: str) -> None:
    with running(repository, 0, SLEEPS, python=interpreter(version)):
        (answer,) = look_at_ranks(TAG)
    names = [name for _, _, name in answer["frames"]]
    assert names == (["fetch", "<module>"] if int(version[2:]) >= 8 else [])  # a file in memory


# It becomes another program, as megatron_lm.py does, and that has a helper.
BECOMES = """
import os, subprocess, sys
if len(sys.argv) == 1:
    code = open("/proc/self/cmdline").read().split("\\0")[4]
    os.execv(sys.executable, [sys.executable, "-c", code, "again"])
subprocess.run([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(99)"])
"""


def test_a_rank_that_becomes_another_program_answers_and_its_helper_does_not(repository: Path) -> None:
    with running(repository, 0, BECOMES) as process:
        (found,) = find_ranks(TAG)
        assert (found.pid, found.file is not None) == (process.pid, True)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        links = [str(link.readlink()) for link in Path(f"/proc/{children[0]}/fd").iterdir()]
        assert links and not any("slipway" in link for link in links)
        os.kill(int(children[0]), signal.SIGKILL)


# The interpreter gives the signal back when it ends.
ENDS = """
import faulthandler, os
faulthandler.unregister(57)
print(1, flush=True)
os.kill(os.getpid(), 57)
"""


def test_a_rank_that_ends_while_it_is_asked_ends_well(repository: Path) -> None:
    with running(repository, 0, ENDS) as process:
        assert process.wait(10) == 0


def test_the_sitecustomize_of_an_image_runs(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.of_the_image = 1")
    code = "import sys; print(sys.of_the_image, 'templates/python' in str(sys.path), flush=True); input()"
    with running(repository, 0, code, path=str(tmp_path)):
        pass
    environment = {
        **os.environ,
        "SLIPWAY_TAG": TAG,
        "RANK": "0",
        "PYTHONPATH": f"{repository}/templates/python",
    }
    command = [sys.executable, "-c", "import sys; print(sys.path, sys.modules['sitecustomize'])"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "templates/python" not in done.stdout
    assert done.stderr == ""


# A recorder that PyTorch's own is for the rank.
RECORDER = """
import sys, time, types
module = types.ModuleType("torch._C._distributed_c10d")
module.{function} = lambda collectives, active: open({path!r}, "rb").read()
sys.modules[module.__name__] = module
print(1, flush=True)
time.sleep(99)
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gloo_0", {"0": [4, 3, "gloo:all_reduce"], "1": [1, 1, ""]}),
        ("gloo_1", {"0": [3, 3, ""], "1": [1, 1, ""]}),
        ("nccl", {"0": [12, 12, ""], "5": [41, 40, "nccl:_reduce_scatter_base"]}),
    ],
)
def test_the_flight_recorder_says_what_a_rank_has_begun(
    repository: Path, name: str, expected: dict[str, list[Any]]
) -> None:
    function = "_dump_nccl_trace_json" if name == "nccl" else "_dump_fr_trace_json"
    path = str(RECORDED / f"flight_recorder_{name}.json")
    with running(repository, 0, RECORDER.format(function=function, path=path)):
        (answer,) = look_at_ranks(TAG)
    assert answer["collectives"] == expected


def test_a_rank_that_goes_on_moves(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_probe, "_LOOKS", 9)
    code = "import time\ndef a(): time.sleep(0.4)\ndef b(): time.sleep(0.7)\nprint(1, flush=True)\n"
    with running(repository, 0, code + "while True: a(); b()"):
        assert look_at_ranks(TAG)[0]["moves"]


def test_lines_of_nodes_that_print_at_once_are_told_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {}
    for node in ("n1", "n2"):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        monkeypatch.setattr(
            hang_probe, "look_at_ranks", lambda tag, node=node: [{"rank": node, "stacks": "x" * 2000}]
        )
        hang_probe.print_ranks(TAG)
        lines[node] = capsys.readouterr().out.splitlines()
        assert max(map(len, lines[node])) < 1000
    mixed = [line for pair in zip(*lines.values(), strict=True) for line in pair]
    answers = read_answers("\n".join(["srun: a line of its own", *mixed]))
    assert {node: own[0]["rank"] for node, own in answers.items()} == {"n1": "n1", "n2": "n2"}
    assert list(read_answers("\n".join(mixed[:-1]))) == ["n1"]  # n2 was cut off
    assert list(read_answers("\n".join([*lines["n1"][1:], *lines["n2"]]))) == [
        "n2"
    ]  # the first of n1 is lost


def test_the_main_thread_is_the_one_that_took_the_signal() -> None:
    text = """Thread 0x00007fbc83d016c0 [worker] (most recent call first):
  File "/usr/lib/python3.14/threading.py", line 975 in run

Current thread 0x00007fbc847c52c0 [python] (most recent call first):
  File "/code/a b.py", line 3 in Loader.fetch
  File "/code/train.py", line 5 in <module>
"""
    assert find_main_stack(text) == [("/code/a b.py", 3, "Loader.fetch"), ("/code/train.py", 5, "<module>")]
    assert find_main_stack(text.replace("Current thread", "Thread"))[0][1] == 3  # the oldest comes last
    assert find_main_stack("") == []

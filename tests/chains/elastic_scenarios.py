"""Chains whose links take as many nodes as there are: the first one two, the second one one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.chains.chain_runs import CHAIN, ChainRuns
from tests.chains.chain_training import FAST, Training

# No other chain uses these nodes.
STAYS, LEAVES = "n11", "n12"
BOTH = f"{STAYS},{LEAVES}"
RANGE = "resilience.nodes={min:1,max:2}"
PRINTING, FEWER, FIXED, NAMESAKE = "told", "fewer", "fixed", "namesake"
STEPS = 12
# So long that it is stopped long before its end, on a busy machine too.
PACE = "3"


def until_both_are_free(runs: ChainRuns) -> None:
    """Wait for both nodes: a range takes the idle nodes alone."""

    def are_free() -> bool:
        output = runs.slurm(
            "sinfo", "--noheader", "--Node", f"--nodes={BOTH}", "--format=%T", "--partition=gpu"
        )
        return output.split() == ["idle", "idle"]

    runs.until(f"{BOTH} are free", are_free)


@contextmanager
def drained(runs: ChainRuns) -> Iterator[None]:
    """Drain one of the nodes, as before maintenance; its running jobs go on."""
    runs.slurm("scontrol", "update", f"NodeName={LEAVES}", "State=DRAIN", "Reason=maintenance")
    try:
        yield
    finally:
        runs.slurm("scontrol", "update", f"NodeName={LEAVES}", "State=RESUME")


def print_arguments(runs: ChainRuns, run: str) -> None:
    """Launch a chain whose payload, in NeMo's place, prints its arguments."""
    body = 'echo "link $link: rank $RANK of $WORLD_SIZE, ${!#}"\n((link > 1)) || wait_to_save 3\n'
    script = runs.directory / "examples/nlp/language_modeling/megatron_gpt_pretraining.py"
    script.parent.mkdir(parents=True)
    script.touch()
    settings = ["engine=nemo", f"nemo_path={runs.directory}", RANGE, "resilience.links=3"]
    settings += [f"training.model.tokenizer.{file}=null" for file in ("vocab_file", "merge_file")]
    # One task a node: with a number of tasks, sbatch would give as few nodes as the smallest size needs.
    size = ["training.trainer.devices=1", "training.model.tensor_model_parallel_size=1"]
    batch = ["training.model.micro_batch_size=1", "training.model.global_batch_size=4"]
    until_both_are_free(runs)
    runs.chain(run, body, *settings, *size, *batch, nodes=BOTH)
    runs.until_ready(run, 1)
    job = runs.job(run, 1)
    with drained(runs):
        runs.slurm("scancel", "--signal=USR1", "--batch", job)
        runs.until_over(run)


def fewer(runs: ChainRuns, run: str) -> None:
    """Launch a training that loses a node on its way, and the same training on the node that stays."""
    changes = [f"training.trainer.max_steps={STEPS}", "training.trainer.val_check_interval=6"]
    changes += ["training.model.hidden_dropout=0", "training.model.attention_dropout=0"]
    training = Training(runs, run, BOTH)
    until_both_are_free(runs)
    training.launch(*changes, RANGE, "resilience.links=3", pace=PACE)
    job = training.wait_for_steps(1)
    with drained(runs):
        runs.slurm("scancel", "--signal=USR1", "--batch", job)
        training.wait_for_steps(2, steps=0)
        training.set_pace(FAST)
    Training(runs, FIXED, LEAVES).launch(*changes, "training.trainer.num_nodes=1", pace=FAST)
    runs.until_over(run)
    runs.until_over(FIXED)


MEETING = """#!{python}
import os, pathlib, socket, sys, time
if "SLURM_JOB_ID" not in os.environ:
    sys.exit()
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
tag, rank = os.environ["SLIPWAY_TAG"], os.environ["RANK"]
if rank == "0":
    other = socket.create_server(("", place[1])).accept()[0]
else:
    while True:
        try:
            other = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
other.sendall(tag.encode())
work = pathlib.Path(__file__).parent
(work / f"{{tag}}.met-{{rank}}").write_text(other.recv(1000).decode())
while len(list(work.glob("*.met-*"))) < 4:
    time.sleep(0.1)
"""


def namesakes(runs: ChainRuns, run: str) -> None:
    """Launch two jobs of one name on one host: both are there until the ranks of both have met."""
    work = runs.work(run)
    work.mkdir()
    payload = work / "payload"
    payload.write_text(MEETING.format(python=sys.executable))
    payload.chmod(0o755)
    both = [f"training.run.name={run}", "training.run.dependency=null", "cluster.exclusive=False"]
    both += ["training.trainer.devices=2", f"cluster.python={payload}", "--no-check=run.singleton"]
    for name in ("one", "other"):
        done = runs.begin(*CHAIN, *both, f"base_results_dir={work}/{name}", nodes=STAYS)
        assert done.returncode == 0, done
    runs.until_over(run)


def elastic(runs: ChainRuns, run: str) -> None:
    """Run the scenarios one after the other, since they share the nodes; the run is that of the last one."""
    namesakes(runs, NAMESAKE)
    print_arguments(runs, PRINTING)
    fewer(runs, run)

"""A soak: faults one after the other, several runs at a time, each recorded in a line of JSON.

    python -m benchmarks.soak [--faults N] [--first SEED]     faults of the seeds SEED, SEED + 1, ...
    python -m benchmarks.soak --seed N                        one fault again

Interrupted, it goes on: seeds that are on record are not done again (--fresh sets the record aside). The
files of a failed run are kept beside the record.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak import oracle
from benchmarks.soak.boot import boot_clusters
from benchmarks.soak.cluster import ROOT, Cluster, NotPossible
from benchmarks.soak.faults import FAULTS, STOPPED, Fault, leave_undisturbed, revive_nodes
from benchmarks.soak.trial import SHAPES, Trial
from launcher.errors import UserError
from slipway.watch.alerts import Alert

KINDS = list(FAULTS)
# The nodes of each run: two to use and one to move to.
NODES = 3
DISKS = 4
Row = dict[str, Any]
# Seeds, and shapes that are to be done undisturbed.
Work = queue.SimpleQueue[int | str]


@dataclass
class Soak:
    """Some faults on some clusters: the first for most, the others for those that break all of it."""

    clusters: Sequence[Cluster]
    keep: Path | None = None

    def __post_init__(self) -> None:
        self._undisturbed: dict[str, oracle.Losses] = {}
        self._is_done = {shape: threading.Event() for shape in SHAPES}
        self._is_closing = False
        self._mounts = {cluster.directory: cluster.mounts() for cluster in self.clusters}
        self._lock = threading.Lock()

    def reference(self, shape: str, cluster: Cluster, nodes: list[str]) -> None:
        """Do the training of a shape undisturbed."""
        trial = Trial(0, f"undisturbed_{shape}", shape, cluster, nodes, random.Random(0))
        try:
            leave_undisturbed(trial)
            trial.finish(0)
            losses = oracle.losses(trial)
            if problems := oracle.judge(trial, losses, self._mounts[cluster.directory]):
                raise RuntimeError(f"{trial.run}, which nothing disturbs: {problems}; {trial.notes}")
            self._undisturbed[shape] = losses
        finally:
            self._is_done[shape].set()

    def run(self, seeds: Sequence[int], record: Any) -> None:
        """Do the faults of the seeds; `record` takes the row of each."""
        shared: Work = queue.SimpleQueue()
        alone: Work = queue.SimpleQueue()
        for shape in sorted({chance_of(seed)[1] for seed in seeds}):
            shared.put(shape)  # first, as the faults wait for it
        for seed in seeds:
            (alone if FAULTS[kind_of(seed)].alone else shared).put(seed)
        slices = self.clusters[0].size // NODES
        lanes = [(self.clusters[0], _slice(number), shared) for number in range(slices)]
        lanes += [(cluster, _slice(0), alone) for cluster in self.clusters[1:]]
        threads = [threading.Thread(target=self._lane, args=(*lane, record), daemon=True) for lane in lanes]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._is_closing = True  # a fault that is cut off is not recorded

    def _lane(self, cluster: Cluster, nodes: list[str], work: Work, record: Any) -> None:
        while True:
            try:
                item = work.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, str):
                self.reference(item, cluster, nodes)
                continue
            row = self.trial(item, cluster, nodes)
            if not cluster.is_whole:
                raise RuntimeError(f"a zygote has ended; what failed since is on no record, as seed {item}")
            with self._lock:
                if not self._is_closing:
                    record(row)

    def trial(self, seed: int, cluster: Cluster, nodes: list[str]) -> Row:
        """Do the fault of a seed; return its row."""
        kind, (chance, shape) = kind_of(seed), chance_of(seed)
        trial = Trial(seed, kind, shape, cluster, nodes, chance)
        start, row = time.monotonic(), {"seed": seed, "fault": kind, "shape": shape}
        try:
            problems = self._break(trial, FAULTS[kind])
        except NotPossible as error:
            return row | {"skipped": str(error)}
        except Exception:
            problems = [*trial.violations, f"the soak itself: {traceback.format_exc(limit=-3)}"]
        finally:
            revive_nodes(trial)
            if trial.is_forgotten:
                # It would give numbers anew that the nodes still know, and they refuse such jobs.
                cluster.kill_controller(signal.SIGTERM)
                cluster.start_controller(forgetful=True)
            cluster.resume_nodes()
            for node in nodes:
                cluster.set_clock(node, None)
        row |= {"violations": problems, "notes": trial.notes, "launches": trial.launches}
        row |= {"links": sum(line["event"] == "begin" and line["rank"] == "0" for line in trial.journal())}
        row |= {"alerts": [_describe(alert) for alert in trial.alerts()]}
        row |= {"seconds": round(time.monotonic() - start, 1)}
        if problems and self.keep:
            _keep(trial, self.keep / f"seed-{seed}")
        shutil.rmtree(trial.run_dir, ignore_errors=True)
        return row

    def _break(self, trial: Trial, fault: Fault) -> list[str]:
        try:
            fault.strike(trial)
        finally:
            trial.release()
        trial.violations += oracle.unknown_jobs(trial)
        trial.finish(max(fault.relaunches, trial.is_forgotten))
        revive_nodes(trial)
        self._is_done[trial.shape].wait()
        if trial.shape not in self._undisturbed:
            raise RuntimeError(f"the training of shape {trial.shape} that nothing disturbs failed")
        return [
            *oracle.judge(trial, self._undisturbed[trial.shape], self._mounts[trial.cluster.directory]),
            *oracle.wrong_alerts(trial.alerts(), right_alerts(trial, fault)),
        ]


def right_alerts(trial: Trial, fault: Fault) -> tuple[tuple[str, ...], ...]:
    """Return the sets of alerts that are right for a run."""
    if trial.has_stopped:  # an alert of an earlier fault may be resolved
        return (*STOPPED, *((*before, own) for before in trial.right_alerts for (own,) in STOPPED))
    return trial.right_alerts or fault.alerts


def _describe(alert: Alert) -> Row:
    until = None if alert.is_open else alert.newest.time
    link = alert.first.origin.link
    return {"detector": alert.first.detector, "why": alert.first.why, "opened": alert.first.time} | {
        "resolved": until, "because": alert.newest.why, "link": link
    }  # fmt: skip


def kind_of(seed: int) -> str:
    """Return the fault that a seed stands for: each comes once in as many seeds as there are faults."""
    return KINDS[seed % len(KINDS)]


def chance_of(seed: int) -> tuple[random.Random, str]:
    """Return the random numbers of a fault, and the shape of its training, which is drawn first."""
    chance = random.Random(seed)
    return chance, chance.choices(list(SHAPES), (7, 2, 2))[0]


def _slice(number: int) -> list[str]:
    return [f"n{number * NODES + index + 1}" for index in range(NODES)]


def _keep(trial: Trial, target: Path) -> None:
    """Keep the files of a failed run, except its checkpoints; nothing that was kept before is overwritten."""
    while target.exists():
        target = target.with_name(f"{target.name}-again")
    ignored = shutil.ignore_patterns("checkpoints", "code")
    shutil.copytree(trial.run_dir, target, symlinks=True, ignore=ignored, dirs_exist_ok=True)
    log = trial.cluster.controller_log
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - (1 << 18)))
        (target / log.name).write_bytes(file.read())
    (target / "ranks.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in trial.journal()))


def table(rows: Sequence[Row]) -> str:
    """Return the table by fault, in Markdown."""
    heads = ["fault", "effect", "runs", "violations", "alerts"]
    heads += ["links", "launches", "seconds", "seeds that failed"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for kind, fault in FAULTS.items():
        kind_rows = [row for row in rows if row["fault"] == kind]
        completed = [row for row in kind_rows if "skipped" not in row]
        if not kind_rows:
            continue
        description = (fault.strike.__doc__ or "").splitlines()[0].rstrip(".")
        if skipped := [row for row in kind_rows if "skipped" in row]:
            description += f" ({len(skipped)} skipped: {skipped[0]['skipped']})"
        failed_seeds = [str(row["seed"]) for row in completed if row["violations"]]
        cells = [kind.replace("_", " "), description, str(len(completed)), str(len(failed_seeds))]
        cells += ["; ".join(f"{count} {name}" for name, count in count_alerts(completed).most_common())]
        cells += [
            f"{statistics.fmean(row[name] for row in completed):.1f}" if completed else ""
            for name in ("links", "launches")
        ]
        cells += [f"{statistics.median(row['seconds'] for row in completed):.0f}" if completed else ""]
        lines.append(f"| {' | '.join([*cells, ', '.join(failed_seeds) or '-'])} |")
    return "\n".join(lines)


def count_alerts(rows: Sequence[Row]) -> Counter[str]:
    """Return how many runs had which alerts, by their detectors."""
    alerts = [row["alerts"] for row in rows if "alerts" in row]  # records of before have none
    return Counter(" and ".join(each["detector"] for each in own) or "none" for own in alerts)


def read_record(path: Path) -> list[Row]:
    """Return the rows on record; the last may be cut off."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _commit() -> str:
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Soak, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=300, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of their seeds")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="the fault of this seed alone, whatever is on record"
    )
    parser.add_argument("--at-once", type=int, default=10, metavar="N", help="runs on the shared cluster")
    parser.add_argument(
        "--lanes", type=int, default=2, metavar="N", help="clusters for faults of a whole one"
    )
    parser.add_argument("--record", type=Path, default=ROOT / "results" / "soak" / "soak.jsonl")
    parser.add_argument("--fresh", action="store_true", help="set the record aside and begin anew")
    parser.add_argument("--table", action="store_true", help="print the table of the record and do nothing")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    path: Path = args.record
    path.parent.mkdir(parents=True, exist_ok=True)
    if args.fresh and path.exists():
        path.rename(path.with_name(f"{path.stem}-until-{time.strftime('%Y%m%d-%H%M%S')}{path.suffix}"))
    rows = read_record(path)
    seeds = list(range(args.first, args.first + args.faults))
    if args.seed is not None:
        seeds, rows = [args.seed], []
    known = {row["seed"] for row in rows}
    todo = [seed for seed in seeds if seed not in known]
    if not args.table and todo:
        commit, start = _commit(), time.monotonic()

        def record(row: Row) -> None:
            rows.append(row)
            with path.open("a") as file:
                file.write(json.dumps({**row, "commit": commit}) + "\n")
            bad = row.get("violations") or ([f"skipped: {row['skipped']}"] if "skipped" in row else [])
            print(
                f"{time.monotonic() - start:6.0f} s  {len(rows)}/{len(known) + len(todo)}  seed {row['seed']}"
                f"  {row['fault']} ({row['shape']}): {'; '.join(row.get('notes', []))}",
                *(f"         {problem}" for problem in bad),
                sep="\n",
                flush=True,
            )

        slices = max(min(args.at_once, len(todo)), len(SHAPES))
        with boot_clusters(slices * NODES, DISKS, 1 + min(args.lanes, len(todo))) as clusters:
            soak = Soak(clusters, path.parent)
            soak.run(todo, record)
    chosen = [row for row in rows if args.table or row["seed"] in set(seeds)]
    print(table(chosen))
    return 1 if any(row.get("violations") for row in chosen) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"{error.message}{f': {error.hint}' if error.hint else ''}")
    except KeyboardInterrupt:
        print("interrupted: the same command goes on with the seeds that are not on record", file=sys.stderr)
        sys.exit(130)

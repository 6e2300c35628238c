"""Tokens per CPU-second from JSONL, next to `tokenizers` as Megatron's ``preprocess_data.py`` calls it.

    python benchmarks/perf/tokenizing.py [--megabytes N] [--rounds N]

Commands read the same JSONL with the same tokenizer, in turn, so that a noisy machine slows all of them:

- `corpus tokenize` with one process and with two;
- the loop of Megatron's script: a pool whose workers parse a line and encode its text, and a parent that
  writes with megatron-core's builder. It has the first part of the text alone, as it takes so much longer.

All ids are compared. CPU seconds are the kernel's own account of each command with its children; for the
rates, the start is subtracted: what the command takes for two documents. Then `corpus merge` and `cat` join
the same shards of the large text. Memory is that of the largest process.

The text is what the machine has: sources and documentation of Python and its packages, cut into documents of
some 3,500 characters, and the large text repeats it. The vocabulary of 32,768 tokens is trained on it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launch_latency import ROOT, Cost, measure
from rich.console import Console
from rich.table import Table

VOCABULARY = 32768
_SUFFIXES = (".py", ".pyi", ".rst", ".md", ".txt", ".html", ".h")
_DOCUMENT = 4000

# By program, text and number of processes.
Costs = dict[tuple[str, str, int], list[Cost]]

# Megatron-LM core_v0.16.1, tools/preprocess_data.py: Encoder.initializer, Encoder.encode and
# Partition.process_json_file, without the sentence splitter.
PEER = """
import json, multiprocessing, sys
from tokenizers import ByteLevelBPETokenizer
source, prefix, vocab, merges, vocabulary, workers = sys.argv[1:]

class Encoder:
    tokenizer = None
    def initializer(self):
        Encoder.tokenizer = ByteLevelBPETokenizer(vocab, merges)
        Encoder.eod = Encoder.tokenizer.token_to_id('<|endoftext|>')
    def encode(self, line):
        text = json.loads(line)['text']
        ids = Encoder.tokenizer.encode(text).ids
        if ids:
            ids.append(Encoder.eod)
        return ids, len(line)

if __name__ == '__main__':
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    encoder = Encoder()
    with multiprocessing.get_context('fork').Pool(int(workers), initializer=encoder.initializer) as pool:
        builder = IndexedDatasetBuilder(prefix + '.bin', dtype=DType.optimal_dtype(int(vocabulary)))
        for ids, size in pool.imap(encoder.encode, open(source, encoding='utf-8'), 32):
            builder.add_document(torch.IntTensor(ids), [len(ids)])
        builder.finalize(prefix + '.idx')
        pool.close()
        pool.join()
"""


def documents() -> Iterator[str]:
    """Yield the text files of this Python, in an order drawn by seed, in pieces that end at a line."""
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = sorted(path for root in roots for path in root.rglob("*") if path.suffix in _SUFFIXES)
    random.Random(1).shuffle(files)
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, ValueError):
            continue
        text = ""
        for line in lines:
            text += line[:_DOCUMENT]
            if len(text) >= _DOCUMENT:
                yield text
                text = ""
        if text:
            yield text


def write_jsonl(path: Path, size: int, unique: int | None = None) -> None:
    """Write documents until the file has `size` bytes; after `unique` bytes, those before again."""
    with path.open("w", encoding="utf-8") as stream:
        for text in documents():
            print(json.dumps({"text": text}, ensure_ascii=False), file=stream)
            if stream.tell() >= min(size, unique or size):
                break
    begin = path.read_bytes()
    with path.open("ab") as stream:
        while stream.tell() < size:
            stream.write(begin)


def preparation(directory: Path, name: str, source: Path, workers: int) -> list[str]:
    """Return the start of the command for a specification that this writes."""
    node = {
        "inputs": [str(source)],
        "output_prefix": str(directory / name),
        "tokenizer_dir": str(directory / "tokenizer"),
        "vocab_size": VOCABULARY,
        "workers": workers,
    }
    if source.stat().st_size < 4 * _DOCUMENT:
        node["shard_bytes"] = 1024
    path = directory / f"{name}.yaml"
    path.write_text(json.dumps({"data_preparation": node}), encoding="utf-8")
    return [
        sys.executable,
        "-m",
        "slipway.corpus",
        "PHASE",
        "--config-path",
        str(directory),
        "--config-name",
        path.name,
    ]


def run(command: list[str], phase: str) -> Cost:
    """Run a phase; return its cost."""
    return measure([phase if word == "PHASE" else word for word in command], cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--megabytes", type=int, default=200, help="of text (default: %(default)s)")
    add("--peer-megabytes", type=int, default=16, help="for the peer (default: %(default)s)")
    add("--large-megabytes", type=int, default=1000, help="to merge (default: %(default)s)")
    add("--rounds", type=int, default=3, help="runs of each (default: %(default)s)")
    options = parser.parse_args()
    # On a disk: writing to a file system in memory would cost nothing.
    cache = ROOT / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        measure_all(Path(name), options)


def measure_all(directory: Path, options: argparse.Namespace) -> None:
    """Prepare the text, measure and print the tables."""
    sources = {name: directory / f"{name}.jsonl" for name in ("text", "part", "start", "large")}
    write_jsonl(sources["text"], options.megabytes << 20)
    write_jsonl(sources["part"], options.peer_megabytes << 20)
    # Two units, so that two processes start.
    write_jsonl(sources["start"], _DOCUMENT + 1)
    write_jsonl(sources["large"], options.large_megabytes << 20, options.megabytes << 20)
    ours = {
        (name, workers): preparation(directory, f"{name}{workers}", sources[name], workers)
        for name in ("text", "start")
        for workers in (1, 2)
    }
    for command in ours.values():
        run(command, "fetch")
    costs: Costs = {}
    for _ in range(options.rounds):
        for (name, workers), command in ours.items():
            costs.setdefault(("ours", name, workers), []).append(run(command, "tokenize"))
            peer_command = peer(directory, sources["part" if name == "text" else name], workers)
            costs.setdefault(("peer", name, workers), []).append(measure(peer_command, cwd=ROOT))
            run(command, "merge")
            if name == "text":
                tokens = compare(directory, f"text{workers}", f"peer{workers}")
            remove_outputs(directory, command)
    report(options, costs, tokens)
    report_merge(options, *merges(directory, sources["large"], options.rounds))


def peer(directory: Path, source: Path, workers: int) -> list[str]:
    """Return the peer's command."""
    files = [str(directory / "tokenizer" / name) for name in ("vocab.json", "merges.txt")]
    prefix = str(directory / f"peer{workers}")
    return [sys.executable, "-c", PEER, str(source), prefix, *files, str(VOCABULARY), str(workers)]


def compare(directory: Path, mine: str, theirs: str) -> dict[str, int]:
    """Return the tokens of both, of which the peer has fewer; raise AssertionError if one of them differs."""
    with (directory / f"{mine}.bin").open("rb") as left, (directory / f"{theirs}.bin").open("rb") as right:
        while part := right.read(1 << 20):
            assert part == left.read(len(part)), "ids other than those of the peer"
        tokens = {"peer": right.tell() // 2}
        left.seek(0, os.SEEK_END)
        return tokens | {"ours": left.tell() // 2}


def remove_outputs(directory: Path, command: list[str]) -> None:
    """Remove the outputs of a preparation, so that it is done anew."""
    for path in directory.glob(f"{Path(command[-1]).stem}.*"):
        if path.is_file() and path.suffix != ".yaml":
            path.unlink()


def merges(directory: Path, source: Path, rounds: int) -> tuple[Cost, dict[str, list[Cost]], int]:
    """Return the cost of tokenizing a text, those of merging its shards and of `cat`, and their bytes."""
    command = preparation(directory, "large", source, 2)
    run(command, "fetch")
    cost = run(command, "tokenize")
    units, saved_units = directory / "large.work" / "units", directory / "kept"
    units.rename(saved_units)
    shards = " ".join(str(path) for path in sorted(saved_units.glob("*.bin")))
    target = directory / "cat"
    costs: dict[str, list[Cost]] = {"cat": [], "corpus merge": []}
    for _ in range(rounds):
        costs["cat"].append(measure(["/bin/sh", "-c", f"cat {shards} > {target} && sync {target}"]))
        # The merge removes what it has read.
        shutil.copytree(saved_units, units, copy_function=os.link)
        costs["corpus merge"].append(run(command, "merge"))
        size = target.stat().st_size
        assert size == (directory / "large.bin").stat().st_size
        target.unlink()
        remove_outputs(directory, command)
    return cost, costs, size


def report(options: argparse.Namespace, costs: Costs, tokens: dict[str, int]) -> None:
    """Print the table of tokenizing."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"Medians of {options.rounds} interleaved rounds; {os.cpu_count()} cores, load {load}")
    print(f"{tokens['ours']:,} tokens; the peer encoded the first {tokens['peer']:,}, with the same ids\n")
    table = Table("", "processes", "CPU [s]", "start [s]", "M tokens\n/ CPU s", "min-max", "ratio", "MB")
    rates = {}
    for workers in (1, 2):
        for who in ("peer", "ours"):
            start = statistics.median(cost.cpu for cost in costs[who, "start", workers])
            values = costs[who, "text", workers]
            rates[who] = sorted(tokens[who] / (cost.cpu - start) / 1e6 for cost in values)
            rate = statistics.median(rates[who])
            table.add_row(
                "corpus tokenize" if who == "ours" else "Megatron's loop",
                str(workers),
                f"{statistics.median(cost.cpu for cost in values):.2f}",
                f"{start:.2f}",
                f"{rate:.2f}",
                f"{rates[who][0]:.2f}-{rates[who][-1]:.2f}",
                f"{rate / statistics.median(rates['peer']):.1f}",
                f"{max(cost.memory for cost in values):.0f}",
            )
    Console().print(table)
    for who in ("ours", "peer"):
        pairs = list(zip(costs[who, "text", 1], costs[who, "text", 2], strict=True))
        faster = statistics.median(single.wall / double.wall for single, double in pairs)
        more = statistics.median(double.cpu / single.cpu for single, double in pairs)
        single, double = (
            statistics.median(cost.cpu for cost in costs[who, "text", workers])
            - statistics.median(cost.cpu for cost in costs[who, "start", workers])
            for workers in (1, 2)
        )
        print(
            f"{who}: two processes {faster:.2f} times as fast as one by the clock, with {more:.2f} times the "
            f"CPU seconds, {double / single:.2f} times without the start"
        )


def report_merge(options: argparse.Namespace, cost: Cost, costs: dict[str, list[Cost]], size: int) -> None:
    """Print the table of merging."""
    print(
        f"\n{options.large_megabytes} MB of text: the largest process of `tokenize` had {cost.memory:.0f} MB"
    )
    table = Table(f"{size / 1e6:.0f} MB of tokens", "CPU [s]", "wall [s]", "MB/s", "ratio", "MB")
    floor = statistics.median(cost.wall for cost in costs["cat"])
    for name, values in costs.items():
        wall = statistics.median(cost.wall for cost in values)
        cpu = statistics.median(cost.cpu for cost in values)
        memory = f"{max(cost.memory for cost in values):.0f}"
        table.add_row(
            name, f"{cpu:.2f}", f"{wall:.2f}", f"{size / wall / 1e6:.0f}", f"{wall / floor:.1f}", memory
        )
    Console().print(table)
    print(
        "\nAims: 20 times the tokens per CPU-second; two processes 1.9 times one; at most 300 MB a process."
    )


if __name__ == "__main__":
    main()

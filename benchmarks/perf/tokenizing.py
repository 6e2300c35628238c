"""Tokens per CPU-second from JSONL, next to `tokenizers` as Megatron's ``preprocess_data.py`` calls it.

    python benchmarks/perf/tokenizing.py [--megabytes N] [--rounds N]

Commands read the same JSONL with the same tokenizer, in turn, so that a noisy machine slows all of them:

- `corpus tokenize` with one process and with two;
- the loop of Megatron's script: a pool whose workers parse a line and encode its text, and a parent that
  writes with megatron-core's builder. The text is a part of the other's, as it takes so much longer.

The ids are compared, all of them. Then `corpus merge` and `cat` join the same shards. CPU seconds are the
kernel's own account of each command with its children, its start included; memory is the largest process's.
The text is what the machine has: sources and documentation of Python and its packages, cut into documents of
some 3,500 characters; the vocabulary of 32,768 tokens is trained on it.
"""

from __future__ import annotations

import argparse
import hashlib
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
        while stream.tell() + len(begin) <= size:
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
    path = directory / f"{name}.yaml"
    path.write_text(json.dumps({"data_preparation": node}), encoding="utf-8")
    return [
        sys.executable,
        "-m",
        "corpus",
        "PHASE",
        "--config-path",
        str(directory),
        "--config-name",
        path.name,
    ]


def run(command: list[str], phase: str) -> Cost:
    """Run a phase; return its cost."""
    return measure([phase if word == "PHASE" else word for word in command], cwd=ROOT)


def tokens(prefix: Path) -> int:
    """Return the tokens of a finished data set."""
    return int(json.loads(Path(f"{prefix}.manifest.json").read_bytes())["counts"]["tokens"])


def digest(path: Path, size: int | None = None) -> str:
    """Return the SHA-256 of the first bytes of a file."""
    with path.open("rb") as stream:
        return hashlib.sha256(stream.read(-1 if size is None else size)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=200, help="of text (default: 200)")
    parser.add_argument("--peer-megabytes", type=int, default=16, help="for the peer (default: 16)")
    parser.add_argument(
        "--memory-megabytes", type=int, default=1000, help="to take the peak of (default: 1000)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: 5)")
    options = parser.parse_args()
    # On a disk: a file system in memory would count as the processes' memory nowhere.
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache" if (ROOT / ".cache").is_dir() else None) as name:
        measure_all(Path(name), options)


def measure_all(directory: Path, options: argparse.Namespace) -> None:
    """Prepare the text, measure and print the tables."""
    source, part, large = (directory / f"{name}.jsonl" for name in ("source", "part", "large"))
    write_jsonl(source, options.megabytes << 20)
    write_jsonl(part, options.peer_megabytes << 20)
    write_jsonl(large, options.memory_megabytes << 20, options.megabytes << 20)
    ours = {workers: preparation(directory, f"ours{workers}", source, workers) for workers in (1, 2)}
    vocabulary = [str(directory / "tokenizer" / name) for name in ("vocab.json", "merges.txt")]
    peers = {
        workers: [
            sys.executable,
            "-c",
            PEER,
            str(part),
            str(directory / f"peer{workers}"),
            *vocabulary,
            str(VOCABULARY),
            str(workers),
        ]
        for workers in (1, 2)
    }
    for command in ours.values():
        run(command, "fetch")
    costs: dict[tuple[str, int], list[Cost]] = {(who, n): [] for who in ("ours", "peer") for n in (1, 2)}
    merges: dict[str, list[Cost]] = {"corpus merge": [], "cat": []}
    for _ in range(options.rounds):
        for workers in (1, 2):
            costs["ours", workers].append(run(ours[workers], "tokenize"))
            costs["peer", workers].append(measure(peers[workers], cwd=ROOT))
        shards = sorted((directory / "ours1.work" / "units").glob("*.bin"))
        copy = f"cat {' '.join(map(str, shards))} > {directory / 'cat.bin'} && sync {directory / 'cat.bin'}"
        merges["cat"].append(measure(["/bin/sh", "-c", copy]))
        same = digest(directory / "cat.bin")
        (directory / "cat.bin").unlink()
        merges["corpus merge"].append(run(ours[1], "merge"))
        run(ours[2], "merge")
        assert same == digest(directory / "ours1.bin") == digest(directory / "ours2.bin"), "other tokens"
        counts = {"ours": tokens(directory / "ours1"), "peer": (directory / "peer1.bin").stat().st_size // 2}
        size = counts["peer"] * 2
        assert digest(directory / "peer1.bin") == digest(directory / "ours1.bin", size), (
            "other ids than the peer"
        )
        bytes_merged = (directory / "ours1.bin").stat().st_size
        for command in ours.values():
            again(directory, command)
    memory = preparation(directory, "large", large, 2)
    run(memory, "fetch")
    peak = run(memory, "tokenize")
    largest = run(memory, "merge")
    report(options, costs, counts, merges, bytes_merged, peak, largest)


def again(directory: Path, command: list[str]) -> None:
    """Remove the outputs of a preparation, so that it is done anew."""
    name = Path(command[-1]).stem
    for path in directory.glob(f"{name}.*"):
        if path.is_file() and path.suffix != ".yaml":
            path.unlink()
    shutil.rmtree(directory / f"{name}.work" / "units", ignore_errors=True)


def report(
    options: argparse.Namespace,
    costs: dict[tuple[str, int], list[Cost]],
    counts: dict[str, int],
    merges: dict[str, list[Cost]],
    size: int,
    peak: Cost,
    largest: Cost,
) -> None:
    """Print the tables."""
    console = Console()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"Medians of {options.rounds} interleaved rounds; {os.cpu_count()} cores, load {load}")
    print(
        f"{counts['ours']:,} tokens of {options.megabytes} MB; "
        f"the peer encoded the first {counts['peer']:,}, with the same ids\n"
    )
    table = Table(
        "", "processes", "CPU [s]", "M tokens / CPU s", "min-max", "ratio", "wall [s]", "M tokens / s", "MB"
    )
    rate = {key: [counts[key[0]] / cost.cpu / 1e6 for cost in values] for key, values in costs.items()}
    for (who, workers), values in costs.items():
        rates = sorted(rate[who, workers])
        wall = statistics.median(cost.wall for cost in values)
        table.add_row(
            "corpus tokenize" if who == "ours" else "tokenizers, as Megatron",
            str(workers),
            f"{statistics.median(cost.cpu for cost in values):.2f}",
            f"{statistics.median(rates):.2f}",
            f"{rates[0]:.2f}-{rates[-1]:.2f}",
            f"{statistics.median(rates) / statistics.median(rate['peer', workers]):.1f}",
            f"{wall:.2f}",
            f"{counts[who] / wall / 1e6:.2f}",
            f"{statistics.median(cost.memory for cost in values):.0f}",
        )
    console.print(table)
    for who in ("ours", "peer"):
        one, two = (statistics.median(cost.wall for cost in costs[who, n]) for n in (1, 2))
        more = [b.cpu / a.cpu for a, b in zip(costs[who, 1], costs[who, 2], strict=True)]
        print(
            f"{who}: two processes {one / two:.2f} times as fast as one by the clock, "
            f"with {statistics.median(more):.2f} times the CPU seconds"
        )
    table = Table("", "CPU [s]", "wall [s]", "MB/s", "ratio of wall")
    floor = statistics.median(cost.wall for cost in merges["cat"])
    for name, values in merges.items():
        wall = statistics.median(cost.wall for cost in values)
        cpu = statistics.median(cost.cpu for cost in values)
        table.add_row(name, f"{cpu:.2f}", f"{wall:.2f}", f"{size / wall / 1e6:.0f}", f"{wall / floor:.1f}")
    console.print(table)
    print(
        f"{options.memory_megabytes} MB of text: peak of a process {peak.memory:.0f} MB, "
        f"of merge {largest.memory:.0f} MB"
    )
    print(
        "\nAims: 20 times the tokens per CPU-second; two processes 1.9 times one; at most 300 MB a process."
    )


if __name__ == "__main__":
    main()

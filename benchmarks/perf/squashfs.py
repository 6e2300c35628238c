"""The costs of an image by compressor: to build, to keep, to start and to read, next to Enroot's default.

    python benchmarks/perf/squashfs.py [--runs N] [--megabytes N] [--directory DIR] [--only NAME,NAME]

`--quick` takes a tree of 40 MB and one run. Twice the size of the tree is needed in DIR, the temporary
directory unless said. The tree is made of this machine's Python packages and libraries: the largest one, and
others drawn until it is large enough. That is an image's mixture of many small files and a few large ones.

In each run every compressor builds the image and is measured with it before the next one's turn, so that a
noisy machine slows all of them. Seconds are of the clock and, for mksquashfs and unsquashfs, of the processor
too, which a busy machine disturbs less. Quote ratios of medians.

Each measurement of an image begins with none of it in the page cache:

extract  `unsquashfs` of all of it, as Pyxis does by default at the start of a container; into memory
         (/dev/shm) where that has room, so that no disk is measured
start    mounted, and the first 100 small files read: what happens before a program's first line
small    1,500 small files in random order      large  the largest file, from its beginning to its end

An image is mounted by squashfuse, as Enroot does (`enroot start IMAGE.sqsh`), and by the kernel, as Apptainer
does; each where it is there and allowed, which is tried first. Without both there is only `extract`.

Shared storage is not measured but computed, for bandwidths that the table states: the image is read at a
node's share of the bandwidth while it is decompressed, so whichever of both takes longer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import shutil
import stat
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launcher.images.squashfs import SQUASH_OPTIONS  # noqa: E402

# Enroot's ENROOT_SQUASH_OPTIONS where nobody sets it.
PEER = "lzo -noD (Enroot)"
OPTIONS = {
    PEER: ["-comp", "lzo", "-noD", "-exit-on-error"],
    "lzo -noD -noF": ["-comp", "lzo", "-noD", "-noF"],
    "zstd 1 (ours)": SQUASH_OPTIONS["zstd"],
    "zstd 1 in 1M blocks": ["-comp", "zstd", "-Xcompression-level", "1", "-b", "1M"],
    "lz4 (ours)": SQUASH_OPTIONS["lz4"],
    "lz4 high": ["-comp", "lz4", "-Xhc"],
    "gzip 1": SQUASH_OPTIONS["gzip"],
    "gzip 9": ["-comp", "gzip"],
    "none": SQUASH_OPTIONS["none"],
}
# Slower than the peer, so nobody's choice: the first run is enough to show that.
SLOW = ("lz4 high", "gzip 9")
FIRST_FILES, SMALL_FILES, SMALL_BYTES = 100, 1500, 64 << 10
# A node's share, in MB/s: from a file server that many nodes ask at once to a fast parallel file system.
BANDWIDTHS = (50, 100, 200, 500, 1000, 2000)
# No file is more of the tree than this, so that a small tree is a mixture too.
LARGEST_SHARE = 0.25
PATIENCE_SECONDS = 10
MEMORY = Path("/dev/shm")


@dataclass
class Tree:
    """A directory that resembles an image's, and those of its files that are read."""

    directory: Path
    files: int
    size: int
    first: list[Path]
    small: list[Path]
    large: Path
    large_bytes: int


@dataclass
class Costs:
    """The costs of one compressor, a value of each run."""

    size: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, column: str, value: float) -> None:
        self.seconds.setdefault(column, []).append(value)

    def median(self, column: str) -> float:
        return statistics.median(self.seconds[column])


def sources() -> list[Path]:
    """Return the regular files of this machine's Python packages and libraries."""
    paths = sysconfig.get_paths()
    files: set[str] = set()
    for root in {paths["purelib"], paths["stdlib"], "/usr/lib"}:
        for directory, _, names in os.walk(root):
            files.update(f"{directory}/{name}" for name in names)
    return [Path(name) for name in sorted(files) if stat.S_ISREG(os.lstat(name).st_mode)]


def make_tree(directory: Path, target_size: int) -> Tree:
    """Copy files of this machine until they weigh `wanted` bytes."""
    order = random.Random(0)
    lengths = {path: path.stat().st_size for path in sources()}
    candidates = [path for path, length in lengths.items() if 0 < length <= target_size * LARGEST_SHARE]
    order.shuffle(candidates)
    candidates.insert(0, candidates.pop(candidates.index(max(candidates, key=lengths.__getitem__))))
    copied: dict[Path, int] = {}
    turn = 0
    while sum(copied.values()) < target_size:
        turn, size = turn + 1, sum(copied.values())
        for path in candidates:
            if size >= target_size or not os.access(path, os.R_OK):
                continue
            target = directory / "opt" / str(turn) / path.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes()
            # A file that is copied again has to differ: mksquashfs stores equal files once.
            target.write_bytes(content if turn == 1 else b"%08d" % turn + content[8:])
            copied[target.relative_to(directory)] = len(content)
            size += len(content)
    small = [path for path, length in copied.items() if length <= SMALL_BYTES]
    chosen = order.sample(small, min(len(small), FIRST_FILES + SMALL_FILES))
    large = max(copied, key=copied.__getitem__)
    first, remaining = chosen[:FIRST_FILES], chosen[FIRST_FILES:]
    return Tree(directory, len(copied), sum(copied.values()), first, remaining, large, copied[large])


def run_timed(command: list[str]) -> tuple[float, float]:
    """Run a command; return its seconds of the clock, and of the processor with its children."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def forget(image: Path) -> None:
    """Leave none of a file in the page cache."""
    descriptor = os.open(image, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read(root: Path, files: list[Path]) -> int:
    """Read files to their ends, as programs do: a part at a time."""
    total = 0
    for path in files:
        with (root / path).open("rb", buffering=0) as file:
            while part := file.read(1 << 17):
                total += len(part)
    return total


@contextlib.contextmanager
def mount(way: str, image: Path, point: Path) -> Iterator[Path]:
    """Mount the image at a directory; raise CalledProcessError or OSError where this machine forbids it."""
    point.mkdir(exist_ok=True)
    words = {"kernel": ["mount", "-t", "squashfs", "-o", "loop,ro"], "squashfuse": ["squashfuse"]}[way]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    subprocess.run([*words, str(image), str(point)], check=True, timeout=PATIENCE_SECONDS, text=True, **quiet)
    try:
        yield point
    finally:
        fusermount = shutil.which("fusermount3") or "fusermount"
        unmount = ["umount"] if way == "kernel" else [fusermount, "-u"]
        deadline = time.monotonic() + PATIENCE_SECONDS
        # Busy for a moment, where something of the machine looks into new mounts.
        while subprocess.run([*unmount, str(point)], check=False, **quiet).returncode:
            if time.monotonic() > deadline:
                raise SystemExit(f"{point} is still mounted: {' '.join(unmount)} {point}")
            time.sleep(0.05)


def mountable_ways(directory: Path) -> list[str]:
    """Mount a very small image in each way; return the ways that are allowed and print the others."""
    image, content = directory / "try.sqsh", directory / "try"
    content.mkdir()
    (content / "file").write_text("read me")
    run_timed(["mksquashfs", str(content), str(image), "-noappend", "-quiet", "-no-progress"])
    allowed = []
    for way in ("squashfuse", "kernel"):
        try:
            with mount(way, image, directory / "point") as point:
                read(point, [Path("file")])
        except (OSError, subprocess.SubprocessError) as error:
            lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            print(f"Not measured, {way}: {lines[-1] if lines else 'it failed'}")
        else:
            allowed.append(way)
    return allowed


class Bench:
    """The measurement of compressors, one image at a time."""

    def __init__(self, tree: Tree, directory: Path, extracted: Path, allowed: list[str]) -> None:
        self._tree, self._directory, self._extracted, self._ways = tree, directory, extracted, allowed

    def measure(self, words: Sequence[str], costs: Costs) -> None:
        """Build the image and take all its costs once."""
        image = self._directory / "image.sqsh"
        quiet = ["-all-root", "-noappend", "-quiet", "-no-progress"]
        command = ["mksquashfs", str(self._tree.directory), str(image), *quiet, *words]
        self._add(costs, "build", run_timed(command))
        costs.size = image.stat().st_size
        for way in self._ways:
            self._mount(way, image, costs)
        forget(image)
        command = ["unsquashfs", "-no-progress", "-d", str(self._extracted), str(image)]
        self._add(costs, "extract", run_timed(command))
        image.unlink()
        shutil.rmtree(self._extracted)
        os.sync()  # what is left to write is not the next one's to wait for

    def _add(self, costs: Costs, column: str, seconds: tuple[float, float]) -> None:
        costs.add(column, seconds[0])
        costs.add(f"{column} cpu", seconds[1])

    def _mount(self, way: str, image: Path, costs: Costs) -> None:
        def record_seconds(operation: str, action: Callable[[], object]) -> None:
            start = time.perf_counter()
            action()
            costs.add(f"{way} {operation}", time.perf_counter() - start)

        point = self._directory / "point"
        forget(image)
        start = time.perf_counter()
        with mount(way, image, point):
            read(point, self._tree.first)
            costs.add(f"{way} start", time.perf_counter() - start)
            record_seconds("small", lambda: read(point, self._tree.small))
            record_seconds("large", lambda: read(point, [self._tree.large]))


def print_tables(tree: Tree, costs: dict[str, Costs], allowed: list[str]) -> None:
    """Print the tables."""
    peer = costs[PEER]
    width = max(len(name) for name in costs) + 2
    heads = ("build [s]", "min-max", "CPU [s]", "faster", "size [MB]", "ratio")
    print(f"{'':{width}}" + "".join(f"{head:>11}" for head in heads))
    for name, cost in costs.items():
        build, values = cost.median("build"), cost.seconds["build"]
        cells = [f"{build:.2f}", f"{min(values):.1f}-{max(values):.1f}", f"{cost.median('build cpu'):.2f}"]
        cells += [
            f"{peer.median('build') / build:.1f}",
            f"{cost.size / 1e6:.0f}",
            f"{cost.size / peer.size:.2f}",
        ]
        print(f"{name:{width}}" + "".join(f"{cell:>11}" for cell in cells))

    columns = [f"{way} {operation}" for way in allowed for operation in ("start", "small", "large")]
    print(f"\n{'cold, seconds':{width}}{'extract':>18}" + "".join(f"{way:>27}" for way in allowed))
    heads = ("wall", "CPU", *("start", "small", "large") * len(allowed))
    print(f"{'':{width}}" + "".join(f"{head:>9}" for head in heads))
    for name, cost in costs.items():
        values = [cost.median(column) for column in ("extract", "extract cpu", *columns)]
        print(f"{name:{width}}" + "".join(f"{value:>9.2f}" for value in values))

    print("\nComputed: extraction from shared storage, seconds, by a node's share of the bandwidth in MB/s")
    print(f"{'':{width}}" + "".join(f"{bandwidth:>9,}" for bandwidth in BANDWIDTHS))
    for name, cost in costs.items():
        values = [max(cost.size / 1e6 / bandwidth, cost.median("extract")) for bandwidth in BANDWIDTHS]
        print(f"{name:{width}}" + "".join(f"{value:>9.1f}" for value in values))


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each (default: 3)")
    parser.add_argument("--megabytes", type=int, default=1000, help="of the tree (default: 1000)")
    parser.add_argument("--quick", action="store_true", help="one run on a tree of 40 MB")
    parser.add_argument("--directory", type=Path, help="where all of it is made (default: the temporary one)")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"of: {', '.join(OPTIONS)}")
    args = parser.parse_args()
    runs, megabytes = (1, 40) if args.quick else (args.runs, args.megabytes)
    if missing := [tool for tool in ("mksquashfs", "unsquashfs") if not shutil.which(tool)]:
        raise SystemExit(f"{', '.join(missing)}: not there; as root: apt-get install squashfs-tools")
    if unknown := set(args.only or ()) - OPTIONS.keys():
        raise SystemExit(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(OPTIONS)}")
    selected = {PEER, *(args.only or OPTIONS)}
    chosen = {name: words for name, words in OPTIONS.items() if name in selected}

    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="slipway-bench-", dir=args.directory))
        directory, extracted = Path(name), Path(name)
        if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 3_000_000 * megabytes:
            memory = tempfile.TemporaryDirectory(prefix="slipway-bench-", dir=MEMORY)
            extracted = Path(stack.enter_context(memory))
        allowed = mountable_ways(directory)
        tree = make_tree(directory / "tree", megabytes * 1_000_000)
        bench = Bench(tree, directory, extracted / "extracted", allowed)
        costs = {name: Costs() for name in chosen}
        for run in range(runs):
            for name, words in chosen.items():
                if run == 0 or name not in SLOW:
                    bench.measure(words, costs[name])
    version = subprocess.run(["mksquashfs", "-version"], capture_output=True, text=True, check=False).stdout
    once = " and ".join(name for name in SLOW if name in chosen)
    print(
        f"squashfs (medians of {runs} interleaved runs{once and f', {once} in one'}; "
        f"{' '.join(version.split()[:3])}, {os.cpu_count()} cores, load {load:.1f} before;\n"
        f"{tree.files:,} files of {tree.size / 1e6:,.0f} MB, the large one {tree.large_bytes / 1e6:,.0f} MB, "
        f"{len(tree.small):,} small ones of at most {SMALL_BYTES >> 10} KiB;\n"
        f"extracted into {'memory' if extracted != directory else 'the same directory'})\n"
    )
    print_tables(tree, costs, allowed)
    print("\nAim: ours builds at least 5 times faster than Enroot's, is no larger and starts no slower.")


if __name__ == "__main__":
    main()

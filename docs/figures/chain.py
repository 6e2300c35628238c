"""Draw the pictures of the README: a chain of jobs that survives a preemption and a dead node.

    python docs/figures/chain.py DATA_DIR

DATA_DIR holds the tokens of `make demo`. The run is real: a throw-away Slurm of four nodes, a job of a higher
partition that takes the nodes of the first link, and a node of the second link whose processes are killed.
`slipway history` is recorded as a terminal shows it, once for a dark and once for a light page.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from io import StringIO
from pathlib import Path

from PIL import Image, ImageOps
from rich.console import Console
from rich.terminal_theme import MONOKAI, TerminalTheme
from rich.text import Text

from launcher.sandbox import state
from launcher.sandbox.lifecycle import down, up
from launcher.sandbox.options import SandboxOptions

FIGURES = Path(__file__).resolve().parent
RUN, COLUMNS = "gpt3_tiny", 100
LIGHT = TerminalTheme(
    (246, 248, 250),
    (36, 41, 47),
    [(36, 41, 47), (207, 34, 46), (26, 127, 55), (154, 103, 0), (9, 105, 218), (130, 80, 223), (27, 124, 131),
     (110, 119, 129)],
)  # fmt: skip


class Chain:
    """A chain of jobs on a throw-away Slurm."""

    def __init__(self, directory: Path, data: Path) -> None:
        self.directory = directory
        self.results = directory / "results"
        sandbox = up(SandboxOptions(directory=directory / "sandbox", nodes=4))
        self.environment = os.environ | sandbox.environment()
        self.slipway(
            "launch", "training=gpt3/tiny", "cluster=sandbox", "cluster.partition=low", f"data_dir={data}",
            f"base_results_dir={self.results}", "resilience.links=6",
            "training.exp_manager.checkpoint_callback_params.every_n_train_steps=25",
        )  # fmt: skip

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def slipway(self, *words: str) -> str:
        return self.run(str(Path(sys.executable).with_name("slipway")), *words)

    def status(self) -> dict[str, object]:
        words = ("status", RUN, "--json", "--base-results-dir", str(self.results))
        (row,) = json.loads(self.slipway(*words))
        return dict(row)

    def wait_for_step(self, step: int) -> tuple[str, list[str]]:
        """Wait until the newest job has trained to a step; return its id and the names of its nodes."""
        while True:
            row = self.status()
            if row["state"] == "RUNNING" and int(str(row["step"] or 0)) >= step:
                job = str(row["job_id"])
                nodes = self.run("squeue", "--noheader", "--format=%N", f"--jobs={job}")
                return job, self.run("scontrol", "show", "hostnames", nodes).split()
            time.sleep(0.3)

    def preempt(self, job: str, nodes: list[str]) -> None:
        rival = self.run(
            "sbatch", "--parsable", "--output=/dev/null", "--partition=high", f"--nodelist={','.join(nodes)}",
            "--exclusive", "--wrap=exec sleep 600",
        )  # fmt: skip
        while self.run("squeue", "--noheader", "--states=R,CG,S", f"--jobs={job}"):
            time.sleep(0.3)
        self.run("scancel", rival)

    def kill_node(self, name: str) -> None:
        """End all processes of a node at once, slurmd first, so that nothing can report it."""
        record = state.load(self.directory / "sandbox")
        assert record
        daemon = record.daemons[name]
        namespace = state.mount_namespace(daemon.pid)
        with namespace.open("rb"):  # kept, so that its number is not given to another
            inode = namespace.stat().st_ino
            daemon.signal(signal.SIGKILL)
            while mates := [pid for pid in state.processes() if _namespace(pid) == inode]:
                for pid in mates:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
                state.reap(daemon.pid)

    def wait(self) -> None:
        while str(self.status()["state"]) in ("PENDING", "RUNNING", "COMPLETING"):
            time.sleep(1)


def _namespace(pid: int) -> int | None:
    try:
        return state.mount_namespace(pid).stat().st_ino
    except OSError:
        return None


def record(command: str, environment: dict[str, str]) -> str:
    """Return what a command prints on a terminal."""
    words = ["script", "--quiet", "--return", "--command", f"stty cols {COLUMNS}; {command}", "/dev/null"]
    environment = environment | {"TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    done = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.replace("\r\n", "\n").rstrip()


def draw(path: Path, title: str, text: str, theme: TerminalTheme) -> None:
    """Write a terminal's text as an SVG file that asks no server for a font."""
    console = Console(width=COLUMNS, record=True, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text), soft_wrap=True)
    svg = console.export_svg(title=title, theme=theme, unique_id=path.stem)
    svg = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)
    svg = svg.replace("rgba(255,255,255,0.35)", "rgba(128,128,128,0.5)")  # a frame on white pages too
    path.write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE))


def darken(path: Path) -> None:
    """Write a plot for dark pages beside that for light ones: its lightness is inverted, its hues stay."""
    hue, saturation, value = ImageOps.invert(Image.open(path).convert("RGB")).convert("HSV").split()
    turned = Image.merge("HSV", (hue.point(lambda h: (h + 128) % 256), saturation, value)).convert("RGB")
    darkest = (13, 17, 23)  # the background of the pages
    bands = [
        band.point(lambda v, low=low: low + v * (240 - low) // 255)
        for band, low in zip(turned.split(), darkest, strict=True)
    ]
    Image.merge("RGB", bands).save(path.with_name(f"{path.stem}_dark.png"), optimize=True)


def main() -> None:
    data = Path(sys.argv[1]).resolve()
    directory = Path(tempfile.mkdtemp(prefix="slipway-figures-", dir="/tmp"))
    chain = Chain(directory, data)
    try:
        chain.preempt(*chain.wait_for_step(60))
        _, nodes = chain.wait_for_step(130)
        chain.kill_node(nodes[-1])
        chain.wait()
        slipway = Path(sys.executable).with_name("slipway")
        base = f"--base-results-dir {chain.results}"
        text = f"$ slipway history {RUN}\n" + record(f"{slipway} history {RUN} {base}", chain.environment)
        for name, theme in (("dark", MONOKAI), ("light", LIGHT)):
            draw(FIGURES / f"history_{name}.svg", "a preemption, a dead node, one training", text, theme)
        chain.slipway("plot", RUN, "--no-terminal", "-o", str(FIGURES / "chain_loss.png"), *base.split())
        darken(FIGURES / "chain_loss.png")
        print(text)
        print(chain.slipway("verify", RUN, *base.split()))
    finally:
        down(directory / "sandbox")
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()

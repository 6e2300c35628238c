#!/usr/bin/env python3
"""Compare the outputs of commands that the documentation shows with those of the commands, or write them.

A comment `<!-- output -->` above a fenced block marks it: each line that begins with `$ ` is a command, which
runs in an empty directory, and the lines below it are its output. Options of the mark:

    columns=N      the command runs on a terminal of so many columns, and else in a pipe
    only=REGEX     keep the lines that match, and end with `   ...`
    head=N         keep the first lines, and end with `...`
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"<!-- output(?P<options>[^>]*?) -->\n+```\w*\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Block:
    """A marked block: its page, the line where its text begins, the options of its mark, and its text."""

    page: Path
    line: int
    options: Mapping[str, str]
    text: str

    @property
    def commands(self) -> list[str]:
        """Return the commands, without their prompt."""
        return [line.removeprefix("$ ") for line in self.text.splitlines() if line.startswith("$ ")]

    def actual(self) -> str:
        """Run the commands; return the block as it should be."""
        with tempfile.TemporaryDirectory(prefix="doc-") as directory:
            parts = [f"$ {command}\n{self._output(command, Path(directory))}" for command in self.commands]
        return "".join(parts)

    def _output(self, command: str, directory: Path) -> str:
        columns = self.options.get("columns")
        output = _run(command, directory, int(columns) if columns else None)
        lines = output.replace(f"{ROOT}/", "").replace(str(directory), "...").splitlines()
        if pattern := self.options.get("only"):
            lines = [*(line for line in lines if re.search(pattern, line)), "   ..."]
        if "head" in self.options:
            lines = [*lines[: int(self.options["head"])], "..."]
        return "".join(f"{line.rstrip()}\n" for line in lines)


def blocks() -> list[Block]:
    """Return the marked blocks of all pages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            options = dict(word.split("=", 1) for word in shlex.split(match["options"].lstrip(":")))
            found.append(Block(page, text.count("\n", 0, match.start("text")) + 1, options, match["text"]))
    return found


def main() -> int:
    """Show the stale blocks, or write them."""
    parser = argparse.ArgumentParser(description="Compare or write the outputs in the documentation.")
    parser.add_argument("--write", action="store_true", help="write what the commands print now")
    options = parser.parse_args()
    stale = 0
    for block in blocks():
        actual = block.actual()
        if actual == block.text:
            continue
        stale += 1
        where = f"{block.page.relative_to(ROOT)}:{block.line}"
        if options.write:
            page = block.page.read_text(encoding="utf-8")
            block.page.write_text(page.replace(block.text, actual, 1), encoding="utf-8")
            print(f"written: {where}")
        else:
            lines = difflib.unified_diff(
                block.text.splitlines(), actual.splitlines(), where, "now", lineterm=""
            )
            print("\n".join(lines))
    return 1 if stale and not options.write else 0


def _run(command: str, directory: Path, columns: int | None) -> str:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLIPWAY_", "SLURM"))},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLIPWAY_CACHE_DIR": str(directory / ".cache"),
        "NO_COLOR": "1",
        "TERM": "xterm",
    }
    environment.pop("COLUMNS", None)
    if columns is None:
        done = subprocess.run(
            ["bash", "-c", command], cwd=directory, env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.stdout
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=directory, env=environment, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    output = b""
    # Linux answers EIO when nobody has the other end open any more.
    with contextlib.suppress(OSError):
        while part := os.read(master, 65536):
            output += part
    process.wait()
    os.close(master)
    return _STYLE.sub("", output.decode()).replace("\r\n", "\n")


if __name__ == "__main__":
    sys.exit(main())

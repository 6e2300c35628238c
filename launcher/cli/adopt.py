"""`slipway adopt`: a NeMo Megatron launcher's configuration tree as one of Slipway's."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from launcher.cli.options import Verbs, add_option, add_verb
from launcher.config.adoption import Adoption, adopt
from launcher.errors import UserError
from launcher.runs.paths import display_path
from launcher.ui.tables import print_listing

REPORT = "ADOPTED.md"
_DEFAULT = Path("adopted")
_STYLES = {"taken over": "green", "changed": "yellow", "left out": "magenta"}

_HELP = """\
Make a configuration tree of a NeMo Megatron launcher's: its root, clusters and model sizes. Values, image and
script of each size stay the same; changed and left-out keys are printed, and listed in ADOPTED.md.

examples:
  slipway adopt ~/NeMo-Framework-Launcher/launcher_scripts/conf
  slipway adopt conf.template --output ~/pretraining/conf
  slipway launch --config-dir adopted training=gpt3/5b --dry-run     its script

Nothing is written into DIR, nor over an existing tree.

exit code:
  0  written
  2  DIR holds no such tree, or the output exists or cannot be written
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "adopt", run, "make a tree of your own from a NeMo launcher's conf/", _HELP)
    text = "the NeMo launcher's conf/, or a directory with it"
    parser.add_argument("directory", type=Path, metavar="DIR", help=text)
    add_option(parser, "-o --output DIR", f"the new tree (default: {_DEFAULT})", default=_DEFAULT)
    add_option(parser, "--json", "print a list of objects")


def run(args: argparse.Namespace) -> None:
    output = args.output.expanduser()
    adoption = write_adopted(args.directory.expanduser(), output)
    if args.json:
        print(json.dumps([asdict(note) for note in adoption.notes], indent=2))
        return
    rows = ((note.what, (note.outcome, _STYLES[note.outcome]), note.why) for note in adoption.notes)
    print_listing(("WHAT", "OUTCOME", "WHY"), rows, unfolded=(1,))
    shown = display_path(output)
    print(f"Written into {shown}: {len(adoption.files)} files; this table and more: {shown}/{REPORT}")
    print(f"  slipway launch --config-dir {shlex.quote(shown)} --dry-run    look at a script")


def write_adopted(directory: Path, output: Path) -> Adoption:
    """Write the tree that is made of another, all of it or nothing; raise UserError if it cannot be."""
    if os.path.lexists(output):
        message = f"nothing was written, because {display_path(output)} exists already"
        raise UserError(message, hint="choose another directory: slipway adopt DIR --output OTHER")
    adoption, target = adopt(directory), output.absolute()
    staging: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".adopting-", dir=target.parent))
        tree = staging / "tree"  # with the permissions that the umask gives
        for name, text in {**adoption.files, REPORT: "\n".join(_report(adoption))}.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text, encoding="utf-8")
        tree.replace(target)
    except OSError as error:
        raise UserError(
            f"nothing was written, because {error.filename or target}: {error.strerror}"
        ) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    return adoption


# Differences that every script has.
_DIFFERENCES = """\
- Each launch of a run has its own directory; the NeMo launcher's names are links to the newest.
- stdout and stderr share a log: `cluster.stderr_to_stdout=False` parts them.
- Jobs are warned before their end, so that NeMo saves, and are not requeued.
- `data_dir` is mounted read-only, `launcher_scripts_path` is not mounted.
- The NeMo launcher changes the number of nodes with `rampup_batch_size`, from job to job; here it stays.
"""


def _report(adoption: Adoption) -> Iterator[str]:
    yield f"# Adopted from {display_path(adoption.source.absolute())}\n"
    yield "| what | outcome | why |\n|---|---|---|"
    for note in adoption.notes:
        yield f"| `{note.what}` | {note.outcome} | {note.why.replace('|', '&#124;')} |"
    yield f"\nIn every script:\n\n{_DIFFERENCES}"

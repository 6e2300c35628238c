"""`slipway init`: a small configuration tree of the user's own, read before the one that Slipway ships."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher.cli.options import Verbs, add_config_dir, add_verb
from launcher.config.site_trees import site_trees
from launcher.errors import UserError
from launcher.runs.paths import display_path

STARTER = Path(__file__).parents[1] / "starter"

# The written files with their purpose, in the order in which one edits them.
FILES = {
    "conf/cluster/mine.yaml": "your cluster: partition, account, container",
    "conf/training/gpt3/mine.yaml": "a model size of your own",
    "templates/sbatch.sh.j2": "lines of your own in the job script, such as module load",
    "launch.sh": "slipway launch with these in front; your mounts and variables",
}

_HELP = """\
Write a small tree of your own to edit: a cluster, a model size, a template of the job script, and
launch.sh, which launches with them.

examples:
  slipway init                      into the current directory
  slipway init ~/pretraining        into another one, which is created if necessary
  ~/pretraining/launch.sh --dry-run training.trainer.num_nodes=2

Existing files are never overwritten: if one of the files exists, nothing is written.

exit code:
  0  written
  2  one of the files exists, or the directory cannot be written
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "init", run, text=_HELP)
    text = "target directory (default: the current one)"
    parser.add_argument("directory", nargs="?", type=Path, default=Path(), metavar="DIR", help=text)
    add_config_dir(parser)


def run(args: argparse.Namespace) -> None:
    directory = args.directory.expanduser().absolute()
    write_starter(directory, args.config_dirs)
    width = max(map(len, FILES))
    print(f"Written into {display_path(directory)}:")
    for name, purpose in FILES.items():
        print(f"  {name:<{width}}  {purpose}")
    paths = [display_path(directory / name) for name in FILES]
    typed = [path if "/" in path else f"./{path}" for path in paths]  # as a command needs it
    first, launch = shlex.quote(typed[0]), shlex.quote(typed[-1])
    print(f"Edit {first} first. Then:")
    print(f"  {launch} --dry-run    look at the script")
    print(f"  {launch}              submit it")
    ours = ((STARTER.parent / name).resolve() for name in ("conf", "templates"))
    sites = f"{', '.join(map(display_path, args.config_dirs))}, and on " if args.config_dirs else ""
    print(f"They build on {sites}Slipway's own: {', '.join(map(display_path, ours))}")


def write_starter(directory: Path, trees: Sequence[Path] = ()) -> None:
    """Write the starter tree, all of it or nothing; raise UserError if a file exists or cannot be written."""
    existing = [name for name in FILES if os.path.lexists(directory / name)]
    if existing:
        message = f"nothing was written, because {display_path(directory)} already has: {', '.join(existing)}"
        raise UserError(message, hint="choose another directory: slipway init DIR")
    created: list[Path] = []
    try:
        for name in FILES:
            parent = (directory / name).parent
            for missing in reversed([path for path in (parent, *parent.parents) if not path.exists()]):
                missing.mkdir()
                created.append(missing)
            text = (STARTER / name).read_text(encoding="utf-8")
            own = Path(sys.executable).with_name("slipway")
            if shutil.which("slipway") is None and own.exists():
                text = text.replace("exec slipway", f"exec {shlex.quote(str(own))}")
            _write_new(directory / name, _adapt_to_trees(text, trees) if trees else text, created)
    except BaseException as error:
        for path in reversed(created):
            with suppress(OSError):  # a directory with files of others stays
                path.rmdir() if path.is_dir() else path.unlink()
        if isinstance(error, OSError):
            message = f"nothing was written, because {error.filename or directory}: {error.strerror}"
            raise UserError(message) from error
        raise


def _adapt_to_trees(text: str, trees: Sequence[Path]) -> str:
    """Let a file build on the cluster that the trees choose, and launch with those that no variable names."""
    from launcher.config.compose import compose  # late: Hydra, which a new tree alone does not need

    typed = (str(tree.absolute()) for tree in trees if tree not in site_trees())
    options = "".join(f" --config-dir {shlex.quote(tree)}" for tree in typed)
    cluster = compose([], tuple(trees)).choices["cluster"]
    text = text.replace("Slipway's `bcm`, a Slurm with 8 GPUs a node, Enroot and Pyxis.", f"`{cluster}`.")
    return text.replace("  - bcm\n", f"  - {cluster}\n").replace('"$here/conf"', f'"$here/conf"{options}')


def _write_new(path: Path, text: str, created: list[Path]) -> None:
    # "x" refuses a file that was created in the meantime.
    with path.open("x", encoding="utf-8") as stream:
        created.append(path)
        stream.write(text)
    if path.suffix == ".sh":
        # Executable for everyone who may read it.
        path.chmod(path.stat().st_mode | (path.stat().st_mode & 0o444) >> 2)

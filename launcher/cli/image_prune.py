"""`slipway image prune`: remove the images that no run needs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.image_options import Verbs, add_overrides, add_store, add_verb, chosen_store
from launcher.cli.runs import add_base_results_dir
from launcher.errors import UserError, explain_refusal, one_line
from launcher.ui.tables import print_listing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.images.named_containers import Named
    from launcher.images.pruning import Choice

_EPILOG = """\
examples:
  slipway image prune --dry-run                what would go, and why the others stay
  slipway image prune --older-than 30d         what no run was ever launched with, and is older than that
  slipway image prune --ended --keep 3         also images of runs that have ended; the newest 3 stay
  slipway image prune --yes                    without a question
  slipway image prune --named nemo cluster=bcm containers of this name on the nodes, not images
  slipway image prune --named '*' cluster=bcm cluster.nodelist=n1,n2 --dry-run

An image stays while a job that was launched with it waits or runs, or where nobody can tell whether one does.
Known are the launches in results/, in the directories that $SLIPWAY_RESULTS_DIR lists and in those where
`slipway` saw runs before; of jobs that were not launched with `slipway`, and of colleagues' in other
directories, nothing is known. An image without a record beside it was not made by `slipway`, and stays,
and so does an image of another user's.
What a killed import had written so far goes too.

With --named: containers that launches of yours left on nodes (container_options.name), with what was written
in them; of any image, unless a process runs in it. A short job looks on each node of the partition. A node
that has no room for it within 20 s is named, and not looked at.

exit code:
  0  removed, or there was nothing to remove
  1  an image could not be removed
  2  a mistake in what was asked for; or no terminal to ask on, and no --yes
"""


def add_parsers(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "prune",
        "remove what no run needs",
        "Remove the images of the store that no run was launched with, and ask before.",
        _EPILOG,
        run,
    )
    add_overrides(parser)
    add_store(parser)
    add_base_results_dir(parser)
    parser.add_argument("--dry-run", action="store_true", help="remove nothing")
    parser.add_argument("--keep", type=int, default=0, metavar="N", help="the newest N of them stay")
    parser.add_argument(
        "--older-than", metavar="AGE", help="only those made longer ago, such as 30d, 12h, 2w"
    )
    parser.add_argument("--ended", action="store_true", help="also those of runs that have ended")
    parser.add_argument(
        "--named", metavar="NAME", help="no images, but containers of this name on the nodes; '*' for all"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print a list of objects; asks nothing")


def run(args: argparse.Namespace) -> int:
    """Tell what goes, ask, and remove it; return the exit code."""
    from launcher.images.images_in_use import images_in_use
    from launcher.images.pruning import Rules, choose, left_over, parse_age

    if args.named is not None:
        return _prune_named(args)
    if args.keep < 0:
        raise UserError(f"--keep {args.keep}: this is no number of images", hint="0 or more")
    older = parse_age(args.older_than) if args.older_than is not None else 0.0
    store = chosen_store(args, args.overrides)

    def looked() -> list[Choice]:
        uses = images_in_use(args.base_results_dir, store.directory)
        choices = choose(store.entries(), uses, Rules(args.keep, older, args.ended), time.time())
        return choices + left_over(store.directory, uses)

    choices = looked()
    going = [choice for choice in choices if choice.remove]
    if not args.json:
        _tell(choices, store.directory)
    failed: dict[Path, str] = {}
    if going and not args.dry_run:
        if _agree(args, len(going)):
            # A launch may have been given one of them while the question stood there.
            now = {choice.entry.path for choice in looked() if choice.remove}
            needed = [choice.entry.path for choice in going if choice.entry.path not in now]
            failed = {path: f"{one_line(str(path))}: needed just now; it stays" for path in needed}
            going = [choice for choice in going if choice.entry.path in now]
        failed |= _remove(going)
        for words in failed.values():
            print(f"slipway: {words}", file=sys.stderr)
    if args.json:
        print(json.dumps([_to_json(choice, args.dry_run, failed) for choice in choices], indent=2))
    return 1 if failed else 0


def _prune_named(args: argparse.Namespace) -> int:
    """Remove containers with names from the nodes; return the exit code."""
    from launcher.config.compose import compose
    from launcher.images import named_containers

    if args.keep or args.older_than is not None or args.ended:
        raise UserError("--named: containers have no --keep, --older-than and --ended")
    cluster = compose(args.overrides, args.config_dir).config.cluster
    found, blind = named_containers.look(cluster, named_containers.nodes_of(cluster), args.named)
    going = [one for one in found if one.state == "idle"]
    if not args.json:
        _tell_named(found, args.named)
    if going and not args.dry_run:
        _agree(args, len(going))
        gone, silent = named_containers.remove(cluster, going)
        states = {(one.node, one.container): one.state for one in gone}
        found = [replace(one, state=states.get((one.node, one.container), one.state)) for one in found]
        blind += silent
    failed = [one for one in found if one in going and not args.dry_run]
    for place in blind:
        print(f"slipway: {place.node}: not looked at: {place.why}", file=sys.stderr)
    for one in failed:
        print(f"slipway: {one.node}: {one.name} is there still", file=sys.stderr)
    if args.json:
        print(json.dumps([{"node": o.node, "name": o.name, "state": o.state} for o in found], indent=2))
    return 1 if blind or failed else 0


def _tell_named(found: Sequence[Named], pattern: str) -> None:
    if not found:
        print(f"no container that a launch of yours named {one_line(pattern)}", file=sys.stderr)
        return
    rows = [(one.node, one_line(one.name), "remove" if one.state == "idle" else one.state) for one in found]
    print_listing(("NODE", "CONTAINER", ""), rows)


def _tell(choices: Sequence[Choice], directory: Path) -> None:
    from launcher.images.progress import megabytes

    if not choices:
        print(f"there is no image in {one_line(str(directory))}", file=sys.stderr)
        return
    rows = [
        (
            one_line(one.entry.path.name),
            megabytes(one.entry.size),
            "remove" if one.remove else "stays",
            one.why,
        )
        for one in choices
    ]
    print_listing(("IMAGE", "SIZE", "", "WHY"), rows, numbers=1)
    going = [one.entry.size for one in choices if one.remove]
    print(f"{len(going)} of {len(choices)} to remove: {megabytes(sum(going))}")


def _agree(args: argparse.Namespace, count: int) -> bool:
    """Go on if the user says so; tell whether they had to be asked.

    Raises
    ------
    UserError
        If they do not, or cannot be asked.
    """
    if args.yes:
        return False
    if args.json or not sys.stdin.isatty():
        raise UserError("nothing was removed: there is nobody to ask", hint="to remove them: --yes")
    print(f"remove {count}? [y/N] ", end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError("nothing was removed")
    return True


def _remove(going: Sequence[Choice]) -> dict[Path, str]:
    from launcher.images.pruning import remove

    failed = {}
    for choice in going:
        try:
            remove(choice.entry)
        except UserError as error:
            failed[choice.entry.path] = str(error)
        except OSError as error:
            told = explain_refusal(error)
            failed[choice.entry.path] = str(told) if told else f"{choice.entry.path}: {error.strerror}"
    return failed


def _to_json(choice: Choice, dry: bool, failed: dict[Path, str]) -> dict[str, Any]:
    path = choice.entry.path
    return {
        "path": str(path),
        "size": choice.entry.size,
        "remove": choice.remove,
        "removed": choice.remove and not dry and path not in failed,
        "why": failed.get(path, choice.why),
    }

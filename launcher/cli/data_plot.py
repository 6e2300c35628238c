"""`slipway data plot`: the documents of a data set by length, and those that were dropped by reason."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from arithmetic.indexed import manifest_path
from launcher.errors import UserError, nearest_files
from launcher.exit_codes import DONE
from launcher.ui.data_plots import DataCounts, draw, read_counts, write_png
from launcher.ui.tables import print_pairs
from launcher.ui.terminal import unescaped

_SUFFIXES = (".manifest.json", ".bin", ".idx")
_DESCRIPTION = """\
Plot the documents of a data set that `slipway data` prepared: by length, and those that were dropped by
reason, in the terminal and as a PNG. The numbers are those of PREFIX.manifest.json, all splits together.

examples:
  slipway data plot data/corpus_text_document                    the plots, and PREFIX.png
  slipway data plot data/corpus_text_document -o lengths.png --no-terminal
  slipway data plot data/corpus_text_document --json             the numbers, without plots

exit code:
  0  printed
  2  there is no such manifest, or the plot cannot be written"""


def add_parsers(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "plot",
        help="plot the lengths of documents, and the reasons for which they were dropped",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prefix", metavar="PREFIX", help="path of the .bin and .idx without extension")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="PNG file (default: PREFIX.png)")
    parser.add_argument("--no-terminal", action="store_true", help="no plot in the terminal")
    parser.add_argument("--json", action="store_true", help="print the counts as one object, without plots")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print and draw."""
    prefix = Path(
        next((args.prefix.removesuffix(s) for s in _SUFFIXES if args.prefix.endswith(s)), args.prefix)
    )
    manifest = _read(prefix)
    data = read_counts(prefix.name, manifest)
    if args.json:
        keys = ("counts", "lengths", "samples")
        print(json.dumps({key: manifest.get(key) for key in keys}, indent=2, ensure_ascii=False))
        if args.output is not None:
            write_png(args.output, data)
        return DONE
    print_pairs(data.name, _rows(data))
    if not args.no_terminal:
        coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        plot = draw(data, shutil.get_terminal_size().columns, coloured=coloured)
        # Unescaped: the plot has numbers and escaped names alone, and the colours are ours.
        print(f"\n{plot}", file=unescaped(sys.stdout))
    path = args.output or Path(f"{prefix}.png")
    write_png(path, data)
    print(f"\nplot: {path}")
    return DONE


def _read(prefix: Path) -> dict[str, Any]:
    path = manifest_path(prefix)
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        near = nearest_files(path, ".manifest.json")
        hint = near or "only data that `slipway data` prepared have a manifest"
        raise UserError(f"{path}: there is no such file", hint=hint) from None
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except ValueError as error:
        raise UserError(f"{path}: not a manifest of data: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a manifest of data: expected an object")
    return content


def _rows(data: DataCounts) -> list[tuple[str, str]]:
    rows = [("documents", f"{data.documents:,}"), ("tokens", f"{data.tokens:,}")]
    if data.documents:
        rows.append(("mean length", f"{data.tokens / data.documents:,.1f} tokens"))
    rows.append(("dropped", f"{sum(data.dropped.values()):,}"))
    return rows

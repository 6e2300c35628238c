"""What `slipway image build` and `import` share: the options of an import, and what is told at its end."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from launcher.errors import one_line
from launcher.images.references import whole_path
from launcher.images.squashing import AUTO, COMPRESSIONS

if TYPE_CHECKING:
    from launcher.images.importing import Imported, ImportOptions


def add_import_options(parser: argparse.ArgumentParser) -> None:
    """Add how a squashfs is made."""
    parser.add_argument("--force", action="store_true", help="make it anew, even if it is there")
    parser.add_argument(
        "--compression",
        choices=COMPRESSIONS,
        default=AUTO,
        metavar="NAME",
        help=f"{', '.join(COMPRESSIONS)} (default: {AUTO}, what suits the file system of the image)",
    )
    parser.add_argument(
        "--temp-dir",
        type=whole_path,
        metavar="DIR",
        help="where to unpack (default: where there is most room)",
    )
    add_access(parser)
    parser.add_argument("--json", action="store_true", help="print an object, and no progress")


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add how a registry is spoken to."""
    parser.add_argument(
        "--authfile", type=whole_path, metavar="FILE", help="logins, as `skopeo login --authfile` writes them"
    )
    parser.add_argument("--plain-http", action="store_true", help="the registry has no TLS")


def import_options(args: argparse.Namespace, via: str | None = None) -> ImportOptions:
    """The options as importing takes them."""
    from launcher.images.importing import ImportOptions
    from launcher.images.routes import AUTO as ANY_ROUTE

    return ImportOptions(
        compression=args.compression,
        temp_dir=args.temp_dir,
        force=args.force,
        via=via or ANY_ROUTE,
        plain_http=args.plain_http,
        authfile=args.authfile,
    )


def tell(imported: Imported, as_json: bool) -> None:
    """Print where it is, and how a launch is given it."""
    from launcher.images.progress import megabytes

    record = imported.sidecar
    if as_json:
        print(
            json.dumps(
                {
                    "path": str(imported.path),
                    "digest": imported.digest,
                    "reused": imported.reused,
                    "sha256": record.sha256 if record else None,
                    "size": imported.path.stat().st_size,
                    "compression": record.compression if record else None,
                    "notes": list(imported.notes),
                },
                indent=2,
            )
        )
        return
    path = one_line(str(imported.path))
    packed = f", {record.compression}" if record else ""
    was_there = "there already: " if imported.reused else ""
    print(f"{was_there}{path} ({megabytes(imported.path.stat().st_size)}{packed})")
    print(f"use it: container={path}")

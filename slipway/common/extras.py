"""The command that installs an extra of this package, by the path that it was installed from.

The package is not on an index, where its name may be somebody else's.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

_UNKNOWN = ", where PATH is Slipway's checkout or wheel"


def install_command(extra: str, python: str | None = None) -> str:
    """Return the command for an interpreter, by default this one, or whom to ask for it."""
    where, option = _origin()
    prefix = Path(python).parent.parent if python else Path(sys.prefix)
    who = "" if os.access(str(prefix), os.W_OK) else "ask whoever installed it: "
    words = [python or sys.executable, "-m", "pip", "install", *option, f"{where or 'PATH'}[{extra}]"]
    return f"{who}{shlex.join(words)}{'' if where else _UNKNOWN}"


def _origin() -> tuple[str | None, list[str]]:
    """Return the checkout or the wheel that this package was installed from, and pip's option for it."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "setup.cfg").is_file():
        return str(checkout), ["-e"]
    # Imported late: few commands name one.
    from importlib import metadata

    try:
        content = json.loads(metadata.distribution("slipway").read_text("direct_url.json") or "")
        url, is_editable = urlsplit(content["url"]), content.get("dir_info", {}).get("editable", False)
        path = Path(unquote(url.path))
        is_here = url.scheme == "file" and path.exists()
    except (metadata.PackageNotFoundError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None, []
    return (str(path), ["-e"] if is_editable else []) if is_here else (None, [])

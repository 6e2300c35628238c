"""Names and paths that users give: those that scripts, containers and file systems can take."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from launcher.errors import literal, setting_error
from launcher.plan import RENDEZVOUS
from launcher.secrecy import MASK, hidden

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")
# Sites ask for names such as `account-project:run`; in names of files a `-` replaces the other signs.
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=:@-]*")

VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)

# Names that mean something else in the script. To some of bash's own it assigns by evaluating the value.
_TAKEN = re.compile(
    r"(?P<bash>BASH\w*|SHELLOPTS|POSIXLY_CORRECT|S?RANDOM|SECONDS|LINENO|EPOCH\w*|OPT(IND|ARG|ERR)|E?UID|PPID"
    r"|GROUPS|DIRSTACK|FUNCNAME|PIPESTATUS|HISTCMD|COMP_\w+|IFS|ENV|PS4|TMOUT|GLOBIGNORE|_|REPLY|MAPFILE)"
    r"|(?P<slurm>SBATCH_\w+|SLURM_(JOB|STEP|TASK|ARRAY|RESTART|SUBMIT|NODE)\w*"
    r"|SLURM_(PROCID|LOCALID|GTIDS|CPUS_ON_NODE|N(TASKS|NODES|PROCS)\w*))"
    r"|(?P<rendezvous>RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)"
    r"|(?P<ours>SLIPWAY_\w+)",
    re.ASCII,
)
_TAKEN_BY = {
    "bash": "bash has its own use for this variable",
    "slurm": "Slurm sets this variable in the job",
    "rendezvous": "the job sets this variable for each task",
    "ours": "names that begin with SLIPWAY_ are Slipway's own",
}


def check_variables(key: str, names: Iterable[str]) -> None:
    """Refuse what no shell variable can be called."""
    for name in names:
        path, message, hint = f"{key}.{name}", None, "choose another name"
        if not VARIABLE.fullmatch(name):
            message = "not a name that a shell variable can have"
            hint = "valid: letters, digits and _ with no digit first"
        elif taken := _TAKEN.fullmatch(name):
            message = _TAKEN_BY[taken.lastgroup or ""]
            if name in RENDEZVOUS:
                hint = f"each task may change it: env_expand.{name}=..., such as '\\${{MASTER_ADDR}}i'"
        if message is not None:
            raise setting_error(f"{path}: {message}", hint=hint)


def check_path(value: str, key: str, *, is_on_host: bool = True) -> str:
    """Require an absolute path, as tasks start in another directory than the user's; raise UserError.

    For a path that is not `is_on_host` but in the container no path of this machine is suggested.
    """
    if not Path(value).is_absolute():
        secret = hidden(key, value) == MASK  # in the place of its file's path
        raise setting_error(
            f"{key}={MASK if secret else literal(value)}: a whole path is needed",
            hint=f"{key}={'/path/of/the/file' if secret else _absolute(value)}" if is_on_host else None,
        )
    return value.rstrip("/") or "/"


def is_program(value: str) -> bool:
    """Return True if a value is a name to look for on PATH, or an absolute path."""
    return bool(value) and ("/" not in value or Path(value).is_absolute())


def require_program(value: str, key: str, *, is_on_host: bool = True) -> str:
    """Require a program that is found wherever the job starts; raise UserError for a relative path.

    For one that is not `is_on_host` but in the container no path of this machine is suggested.
    """
    if not is_program(value):
        raise setting_error(
            f"{key}={literal(value)}: a name or a whole path is needed",
            hint=f"{key}={_absolute(value)}" if value and is_on_host else None,
        )
    return value


def _absolute(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser().absolute()

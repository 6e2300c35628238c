"""Hydra, set up: our resolvers, and the files of our tree with the user's own in front of it.

The resolvers `multiply`, `divide_ceil` and `divide_floor` are the NeMo Megatron launcher's: users' own trees
have them.
"""

from __future__ import annotations

import builtins
import functools
import math
import os
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader  # no public name: what OmegaConf takes for a number
from omegaconf.errors import OmegaConfBaseException

from launcher.errors import UserError, escape
from launcher.runs.paths import display_path
from launcher.sandbox import default_directory, is_sandbox, slurm_conf_path
from launcher.slurm.notations import format_days, training_seconds

# Of a file with its aliases expanded, and of a number (Python converts up to 4,300 digits).
_MOST_VALUES, _MOST_DIGITS = 100_000, 1000
_ROOTS: ContextVar[Sequence[Path]] = ContextVar("roots", default=())
_MAPPING = "a file of the tree holds KEY: VALUE lines"


@contextmanager
def start_hydra(roots: Sequence[Path]) -> Iterator[ConfigLoader]:
    """Initialize Hydra with the trees of `roots`; the first has precedence."""
    register_resolvers()
    for plugin in (_SearchPath, TreeSource):
        Plugins.instance().register(plugin)
    token = _ROOTS.set(roots)
    try:
        with initialize_config_dir(str(roots[-1].absolute()), job_name="slipway", version_base="1.3"):
            yield GlobalHydra.instance().config_loader()
    finally:
        _ROOTS.reset(token)


class _SearchPath(SearchPathPlugin):
    """The trees, in front of all others: `hydra.searchpath` only appends, and replaces no file of ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for root in reversed(_ROOTS.get()):
            search_path.prepend("slipway", f"{TreeSource.scheme()}://{root.absolute()}")


class TreeSource(ConfigSource):
    """The files of a tree; each text is parsed once a process."""

    @staticmethod
    def scheme() -> str:
        return "slipway"

    def load_config(self, config_path: str) -> ConfigResult:
        text, content = read_mapping(self._path_of(config_path))
        _build_on_next(content, _name_and_skipped(config_path)[0], self._number + 1)
        return ConfigResult(self.provider, self.full_path(), content, self._get_header_dict(text))

    def is_group(self, config_path: str) -> bool:
        return os.path.isdir(Path(self.path, config_path))  # noqa: PTH112  # no error for any name

    def is_config(self, config_path: str) -> bool:
        is_behind = self._number >= _name_and_skipped(config_path)[1]
        return is_behind and os.path.isfile(self._path_of(config_path))  # noqa: PTH113

    def available(self) -> bool:
        return self.is_group("")

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        return sorted(path.stem for path in Path(self.path, config_path).glob("*.yaml"))

    @property
    def _number(self) -> int:
        return [str(root.absolute()) for root in _ROOTS.get()].index(self.path)

    def _path_of(self, config_path: str) -> Path:
        return Path(self.path, f"{_name_and_skipped(config_path)[0]}.yaml")


# A file of a tree that builds on its own name builds on the file of that name in the trees behind: NAME~2 is
# the first that is not in the first two trees.
def _name_and_skipped(config_path: str) -> tuple[str, int]:
    whole = config_path.removesuffix(".yaml")
    name, _, number = whole.rpartition("~")
    return (name, int(number)) if number.isdecimal() and name else (whole, 0)


def find_file(config_path: str, roots: Sequence[Path]) -> Path | None:
    """Return the file that Hydra reads for a name in its lists of defaults."""
    name, skipped = _name_and_skipped(config_path)
    return next((file for root in roots[skipped:] if (file := root / f"{name}.yaml").is_file()), None)


def _build_on_next(content: DictConfig, name: str, skipped: int) -> None:
    """Let a file that has its own name among its defaults build on the file that it hides, if any.

    A cluster without defaults does too, as those of the NeMo launcher are.
    """
    behind, own = f"{name}~{skipped}", (name.rpartition("/")[2], f"/{name}@_here_")
    is_of_nemo = name.startswith("cluster/") and "defaults" not in content
    if not (is_of_nemo or "defaults" in content) or find_file(behind, _ROOTS.get()) is None:
        return
    if is_of_nemo:
        content.defaults = [own[0], "_self_"]
    for position, node in enumerate(content.defaults._iter_ex(resolve=False)):
        if node in own:
            # Relative names in a folder of a group would be looked for in the group.
            content.defaults[position] = f"/{behind}@_here_" if "/" in name else behind


_LIBYAML = (yaml.CSafeLoader,) if yaml.__with_libyaml__ else ()


class TreeLoader(*_LIBYAML, get_yaml_loader()):  # type: ignore[misc]
    """OmegaConf's loader with libyaml, which refuses texts that take all memory, and too long numbers."""

    def construct_document(self, node: yaml.Node) -> Any:
        _count_values(node, {})
        return super().construct_document(node)


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> bytes | None:
    """Return the keys of a file of the tree, pickled; ``None`` if it is no mapping.

    Hydra changes its input: unpickling makes a copy in a fifth of the time of `copy.deepcopy`.
    """
    content = yaml.load(text, Loader=TreeLoader)
    return pickle.dumps(OmegaConf.create(content or {})) if isinstance(content, dict | None) else None


def read_mapping(path: Path) -> tuple[str, DictConfig]:
    """Return the text of a file of the tree, and its keys; raise UserError if it cannot be read."""
    name, text = escape(display_path(path)), ""
    try:
        text = path.read_text(encoding="utf-8")
        pickled = _parse(text)
        if pickled is None:
            raise UserError(f"{name}: not a mapping of keys to values", hint=_MAPPING)
        content = pickle.loads(pickled)
        defaults = content.get("defaults", OmegaConf.create([]))
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not valid UTF-8", hint="save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"{name}: {(error.strerror or str(error)).lower()}") from error
    except yaml.YAMLError as error:
        raise _explain_yaml_error(name, text, error) from error
    except OmegaConfBaseException as error:
        message = f"{name}: {error.full_key}: not an interpolation: {escape(str(error).splitlines()[0])}"
        raise UserError(message, hint="it is ${KEY}") from error
    if not OmegaConf.is_list(defaults):
        hint = "such as defaults: [_base, _self_]"
        raise UserError(f"{name}: defaults={defaults!r}: expected a list", hint=hint)
    return text, content


def _explain_yaml_error(name: str, text: str, error: yaml.YAMLError) -> UserError:
    if not isinstance(error, yaml.MarkedYAMLError):
        return UserError(f"{name}: not valid YAML: {escape(str(error).splitlines()[0])}")
    begin, mark = error.context_mark, error.problem_mark or error.context_mark
    line = f":{mark.line + 1}" if mark else ""
    hint = f"{error.context}, line {begin.line + 1}" if begin else None
    if mark and text[mark.index : mark.index + 1] == "\t":
        hint = "indent with spaces, not with tabs"
    return UserError(f"{name}{line}: not valid YAML: {error.problem}", hint=hint)


def _count_values(node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
    """Return how many values a node has with its aliases expanded; raise YAMLError if they are too many."""
    if counts.get(node) == 0:
        raise yaml.MarkedYAMLError(None, None, "an alias of the node around it", node.start_mark)
    if node not in counts:
        counts[node], below = 0, 0
        if isinstance(node, yaml.CollectionNode):
            pairs = node.value if isinstance(node, yaml.MappingNode) else [node.value]
            below = sum(_count_values(child, counts) for pair in pairs for child in pair)
        elif node.tag.endswith(":int") and len(node.value) > _MOST_DIGITS:
            raise yaml.MarkedYAMLError(None, None, "a number of too many digits", node.start_mark)
        counts[node] = 1 + below
        if counts[node] > _MOST_VALUES:
            raise yaml.MarkedYAMLError(None, None, "aliases that make too many values", node.start_mark)
    return counts[node]


def register_resolvers() -> None:
    """Make the resolvers known to OmegaConf; calling it again changes nothing."""
    for name, function in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


_NO_DEFAULT: Any = object()


def _environment_variable(name: str, default: Any = _NO_DEFAULT) -> str | None:
    """Return a variable of the environment, or the default where it is not set or is empty.

    OmegaConf's own resolver takes an empty variable for a value: ``#SBATCH --partition=""``. A shell's
    ``${NAME:-DEFAULT}`` and the job's script do not.
    """
    value = os.environ.get(name)
    if value:
        return value
    if default is not _NO_DEFAULT:
        return None if default is None else str(default)
    state, remedy = ("not set", "export it") if value is None else ("empty", "give it a value")
    hint = f"{remedy}, or give a default: ${{oc.env:{name},DEFAULT}}"
    raise LookupError(f"the environment variable {name} is {state}\n{hint}")


def _max_time(time_limit: Any) -> str | None:
    """Return the job's time limit as Lightning's ``DD:HH:MM:SS``, less a margin for the last checkpoint."""
    try:
        seconds = training_seconds(str(time_limit)) if time_limit is not None else None
    except ValueError:
        return None  # the schema refuses the limit
    return format_days(seconds) if seconds is not None else None


# gpu:8, gpu:a100:8, also in a list
_GPU_GRES = re.compile(r"(?<![^,])(gpu(?::[\w.-]+)?):(\d+)(?![^,])")


def _node_gpus(gpus_per_node: Any, gres: Any, default: int) -> Any:
    """Return the GPUs of a node by the cluster's keys, else `default`."""
    named = _GPU_GRES.search(str(gres))
    return gpus_per_node or (named and int(named[2])) or default


def _gpu_gres(gpus: Any, default: int) -> str:
    return f"gpu:{default if gpus is None else gpus}"


def replace_gpus(gres: str, gpus: int) -> str:
    """Return a request for GPUs with another number of them; one for something else as it is."""
    return _GPU_GRES.sub(rf"\g<1>:{gpus}", gres, count=1)


def _sandbox_slurm_conf() -> str:
    """Return the configuration of the sandbox that the shell points at, or of the default one.

    Never another Slurm: a site's profile may export SLURM_CONF.
    """
    named = os.environ.get("SLURM_CONF")
    if named and is_sandbox(Path(named).parent.parent):
        return named
    return str(slurm_conf_path(default_directory()))


def _where_we_stand() -> str:
    """Return the scheduler of `cluster=interactive`: the shell's allocation, else this machine."""
    return "allocation" if os.environ.get("SLURM_JOB_ID") else "local"


RESOLVERS: dict[str, Callable[..., Any]] = {
    "multiply": lambda *factors: math.prod(factors),
    "divide_ceil": lambda a, b: -(-a // b),
    "divide_floor": lambda a, b: a // b,
    "max_time": _max_time,
    "node_gpus": _node_gpus,
    "gpu_gres": _gpu_gres,
    "oc.env": _environment_variable,
    "sandbox_slurm_conf": _sandbox_slurm_conf,
    "where_we_stand": _where_we_stand,
}

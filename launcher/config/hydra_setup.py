"""Hydra and OmegaConf, set up: our resolvers, the user's own tree in front of ours, libyaml.

The resolvers `multiply`, `divide_ceil` and `divide_floor` are the NeMo Megatron launcher's: users' own trees
have them.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.utils import JobRuntime, setup_globals
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf, _utils, flag_override

from launcher.sandbox import default_directory, is_sandbox, slurm_conf_path
from launcher.slurm.notations import format_days, training_seconds

_P = ParamSpec("_P")
_T = TypeVar("_T")
# Of a file with its aliases expanded, and of a number, of which Python converts 4,300.
_MOST_VALUES, _MOST_DIGITS = 100_000, 1000
_MEMORY: ContextVar[dict[Any, Any] | None] = ContextVar("memory", default=None)


@contextmanager
def unchanged_tree() -> Iterator[None]:
    """Take the files of the trees as unchanged inside, where a mistake is explained by many compositions."""
    token = _MEMORY.set({})
    try:
        yield
    finally:
        _MEMORY.reset(token)


def once_in_unchanged_tree(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Call a function once with the same positional arguments, inside `unchanged_tree`."""

    @wraps(function)
    def remembered(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        memory = _MEMORY.get()
        if memory is None:
            return function(*args, **kwargs)
        if (key := (function, args)) not in memory:
            memory[key] = function(*args, **kwargs)
        return cast("_T", memory[key])

    return remembered


class TreeFiles(ConfigRepository):
    """Hydra's view of the tree, in which each file is parsed once, unless it is read only `once`."""

    def __init__(self, config_search_path: ConfigSearchPath, once: bool) -> None:
        self._once = once
        super().__init__(config_search_path)

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        super().initialize_sources(config_search_path)
        self._results: dict[str, bytes] = {}
        self._groups: dict[str, bool] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> TreeFiles:
        return copy.copy(self)  # each composition would copy the files, and so parse them again

    def load_config(self, config_path: str) -> ConfigResult | None:
        if self._once:
            return super().load_config(config_path)
        if config_path not in self._results:
            self._results[config_path] = pickle.dumps(super().load_config(config_path))
        # Merging takes the nodes over: a copy each time, in a fifth of the time of `copy.deepcopy`.
        return cast("ConfigResult | None", pickle.loads(self._results[config_path]))

    def group_exists(self, config_path: str) -> bool:
        if config_path not in self._groups:
            self._groups[config_path] = super().group_exists(config_path)
        return self._groups[config_path]


class _Loader(ConfigLoaderImpl):
    """Hydra's loader, which takes over the nodes of a file: copying them is a fifth of a composition."""

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        result = super()._load_single_config(default, repo)
        # Another default may have the same file, and is to have nodes of its own.
        cast("CachingConfigRepository", repo).cache.pop(f"config_path={default.config_path}")
        return result

    @staticmethod
    def _embed_result_config(ret: ConfigResult, package_override: str | None) -> ConfigResult:
        package = ret.header["package"] if package_override is None else package_override
        if not package:
            return ret
        config = OmegaConf.create()
        with flag_override(config, "no_deepcopy_set_nodes", True):
            OmegaConf.update(config, package, ret.config, merge=False)
        return dataclasses.replace(ret, config=config)


@once_in_unchanged_tree
def config_loader(roots: tuple[Path, ...], *, once: bool = True) -> ConfigLoaderImpl:
    """Return Hydra's loader of our tree, the last of `roots`, with the user's own in front of it."""
    use_libyaml()
    register_resolvers()
    setup_globals()
    version.setbase("1.3")
    JobRuntime().set("name", "slipway")
    search_path = create_config_search_path(str(roots[-1]))
    for root in roots[:-1]:  # Hydra's `hydra.searchpath` only appends, and replaces no file of ours
        search_path.prepend("user", f"file://{root.absolute()}")
    loader = _Loader(search_path)
    loader.repository = TreeFiles(search_path, once and _MEMORY.get() is None)
    return loader


@cache
def use_libyaml() -> None:
    """Let OmegaConf, which has no setting for it, use libyaml: the parser in Python is slow."""
    loader: Any = _utils.get_yaml_loader()

    class BoundedLoader(loader):  # type: ignore[misc]
        """OmegaConf's loader, which refuses what would take all memory, or is no number for Python."""

        def construct_document(self, node: yaml.Node) -> Any:
            _count_values(node, {})
            return super().construct_document(node)

    _utils.get_yaml_loader = lambda: BoundedLoader
    if not yaml.__with_libyaml__:
        return
    from yaml._yaml import CParser

    class LibyamlLoader(CParser, BoundedLoader):
        """OmegaConf's loader with libyaml's parser."""

        def __init__(self, stream: Any) -> None:
            self._text = stream if isinstance(stream, str) else stream.read()
            self._name = getattr(stream, "name", None)
            CParser.__init__(self, self._text)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

        def get_single_data(self) -> Any:
            try:
                return super().get_single_data()
            except yaml.YAMLError:
                # Read again for the message: libyaml's names neither the file nor the column.
                stream = io.StringIO(self._text)
                if self._name is not None:
                    stream.name = self._name
                return BoundedLoader(stream).get_single_data()

    _utils.get_yaml_loader = lambda: LibyamlLoader


def _count_values(node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
    """Return how many values a node has with its aliases expanded; raise YAMLError if they are too many."""
    if node not in counts:
        counts[node] = 1
        if isinstance(node, yaml.CollectionNode):
            pairs = node.value if isinstance(node, yaml.MappingNode) else [node.value]
            counts[node] += sum(_count_values(child, counts) for pair in pairs for child in pair)
        elif node.tag.endswith(":int") and len(node.value) > _MOST_DIGITS:
            raise yaml.MarkedYAMLError(None, None, "a number of too many digits", node.start_mark)
        if counts[node] > _MOST_VALUES:
            raise yaml.MarkedYAMLError(None, None, "aliases that make too many values", node.start_mark)
    return counts[node]


def register_resolvers() -> None:
    """Make the resolvers known to OmegaConf; calling it again changes nothing."""
    for name, function in PURE.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    OmegaConf.register_new_resolver("oc.env", _environment_variable, replace=True)
    OmegaConf.register_new_resolver("sandbox_slurm_conf", _sandbox_slurm_conf, replace=True)
    OmegaConf.register_new_resolver("where_we_stand", _where_we_stand, replace=True)


_NO_DEFAULT: Any = object()


def _environment_variable(name: str, default: Any = _NO_DEFAULT) -> str | None:
    """Return a variable of the environment, or the default where it is not set or is empty.

    OmegaConf's own resolver takes an empty variable for a value: ``#SBATCH --partition=""``. In a shell's
    ``${NAME:-DEFAULT}`` and in the job's script it is none either.
    """
    value = os.environ.get(name)
    if value:
        return value
    if default is not _NO_DEFAULT:
        return None if default is None else str(default)
    raise KeyError(f"Environment variable '{name}' {'not found' if value is None else 'is empty'}")


def _max_time(time_limit: Any) -> str | None:
    """Return the job's time limit as Lightning's ``DD:HH:MM:SS``, less a margin for the last checkpoint."""
    try:
        seconds = training_seconds(str(time_limit)) if time_limit is not None else None
    except ValueError:
        return None  # the schema refuses the limit, and says what is valid
    return format_days(seconds) if seconds is not None else None


# gpu:8, gpu:a100:8
_GPU_GRES = re.compile(r"(gpu(?::[\w.-]+)?):(\d+)")


def _node_gpus(gpus_per_node: Any, gres: Any, default: int) -> Any:
    """Return the GPUs of a node by the cluster's keys, else `default`."""
    named = _GPU_GRES.fullmatch(str(gres))
    return gpus_per_node or (named and int(named[2])) or default


def _gpu_gres(gpus: Any, default: int) -> str:
    return f"gpu:{default if gpus is None else gpus}"


def with_gpus(gres: str, gpus: int) -> str:
    """Return a request for GPUs with another number of them; one for something else as it is."""
    return _GPU_GRES.sub(rf"\g<1>:{gpus}", gres) if _GPU_GRES.fullmatch(gres) else gres


# Functions of their arguments alone.
PURE: dict[str, Callable[..., Any]] = {
    "multiply": lambda *factors: math.prod(factors),
    "divide_ceil": lambda a, b: -(-a // b),
    "divide_floor": lambda a, b: a // b,
    "max_time": _max_time,
    "node_gpus": _node_gpus,
    "gpu_gres": _gpu_gres,
}


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

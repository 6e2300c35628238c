"""The NeMo Megatron launcher's `conf/` as a tree of our own: its files, and what became of each key.

Pure: the files are texts by their names below the new tree, which `launcher.cli.adopt` writes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf

from launcher.config.compose import CONF_DIR, BatchComposer, Composition
from launcher.config.hydra_setup import read_mapping
from launcher.config.nemo_launcher import OTHER_SCRIPTS, STAGES, model_type_of, other_script, way
from launcher.config.overrides import STAGES as OURS
from launcher.config.schema import ClusterConfig, NumaMapping
from launcher.errors import UserError, escape, shortened
from launcher.runs.paths import display_path
from launcher.slurm.sbatch_options import checked_name

ROOT = "config.yaml"
Outcome = Literal["taken over", "changed", "left out"]

# Keys of the root that mean the same here.
_SAME = (
    *("launcher_scripts_path", "data_dir", "base_results_dir", "container", "wandb_api_key_file"),
    "enable_vboost",
)
# Keys that are read elsewhere, that only its other schedulers read, or Hydra; as the choices in NAME_config.
_KNOWN = (
    *(*_SAME, "container_mounts", "stages", "defaults", "hydra", "cluster_type"),
    *("debug", "bcp_no_redirect", "wandb_api_bcp_secret_key"),
)
_VARIABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}", re.ASCII)
# A name that a choice, a file and a terminal can have.
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)?", re.ASCII)
# A key of a file in `cluster/` that only Kubernetes has.
_KUBERNETES = {"shm_size", "pull_secret", "dns_policy", "ib_interfaces", "nfs_server"}
# What only our sizes say, and what NeMo is not handed or reads as if it were not there.
_OWN = re.compile(r"(run\.(model_type|preprocessed_dir|blending_alpha)|resume\..*|name|restore_from_path)$")

_PART = "_nemo_"
_FROM = "# From the NeMo launcher's {}, by `slipway adopt`.\n"


@dataclass(frozen=True, slots=True)
class Note:
    """What became of a key or a file of the old tree, and why."""

    what: str
    outcome: Outcome
    why: str


@dataclass
class Adoption:
    """The files of the new tree, by their names in it, and what became of everything."""

    source: Path
    files: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    # The sizes of the new tree, with their files in the old one.
    sizes: dict[str, Path] = field(default_factory=dict)

    def note(self, what: str, outcome: Outcome, why: str) -> None:
        """Record what became of something."""
        self.notes.append(Note(what, outcome, why))


def adopt(directory: Path) -> Adoption:
    """Read a NeMo launcher's tree; raise UserError if the directory holds none."""
    places = (directory, directory / "conf", directory / "launcher_scripts/conf", directory / "conf.template")
    parts = (ROOT, "cluster", "training")
    source = next((place for place in places if any((place / part).exists() for part in parts)), None)
    if source is None:
        hint = "it is launcher_scripts/conf in a NeMo launcher, with config.yaml, cluster/ and training/"
        raise UserError(f"{display_path(directory)}: no configuration tree", hint=hint)
    adoption = Adoption(source)
    root = _plain(source / ROOT) if (source / ROOT).is_file() else {}
    _adopt_clusters(adoption, root)
    _adopt_sizes(adoption)
    _adopt_root(adoption, root)
    _leave_groups(adoption)
    return adoption


def _plain(path: Path) -> dict[str, Any]:
    """Return the keys of a file as they are written, with references."""
    content: Any = OmegaConf.to_container(read_mapping(path)[1])
    return dict(content)


def _dump(content: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=110)


# --- the root


def _adopt_root(adoption: Adoption, root: Mapping[str, Any]) -> None:
    if not root:
        return
    values, choices = dict(_root_values(adoption, root)), dict(_choices(adoption, root))
    lines = [f"  - override {group}: {choice}\n" for group, choice in choices.items()]
    head = _FROM.format(ROOT) + "# It builds on Slipway's own config.yaml, whose keys it lists all.\n"
    adoption.files[ROOT] = f"{head}defaults:\n  - config\n  - _self_\n{''.join(lines)}\n{_dump(values)}"


def _root_values(adoption: Adoption, root: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    _note_stages(adoption, root.get("stages") or [])
    for key, value in {"launcher_scripts_path": "???", **root}.items():
        if key == "launcher_scripts_path" and value == "???":
            yield key, str(adoption.source.absolute().parent)
            adoption.note(key, "changed", "it had no value, and is the directory that conf/ was in")
        elif key in _SAME and value not in (None, "???"):
            yield key, _with_variables(adoption, key, value)
        elif key == "container_mounts" and any(value or []):
            yield key, [_with_variables(adoption, key, mount) for mount in value if mount]
        elif key == "env_vars" and isinstance(value, dict):
            ours = {name: None for name in _plain(CONF_DIR / ROOT)[key] if name not in value}
            given = {name: item for name, item in value.items() if item is not None or name in ours}
            yield key, {name: _as_text(item) for name, item in given.items()} | ours
            adoption.note(key, "taken over", ", ".join(given))
        elif key == "numa_mapping" and isinstance(value, dict):
            yield from _numa_mapping(adoption, value)
        elif key not in _KNOWN and not key.endswith("_config"):
            adoption.note(escape(key), "left out", way(key) or "Slipway has no such key")
    if str(root.get("cluster_type", "bcm")) not in ("bcm", "interactive"):
        adoption.note(
            f"cluster_type={escape(str(root['cluster_type']))}", "left out", "Slipway launches to Slurm"
        )


def _note_stages(adoption: Adoption, stages: Iterable[Any]) -> None:
    """Record how to launch the stages; only the command line names them here."""
    names = [str(stage) for stage in stages]
    # NeMo's checkpoints are not evaluated here.
    kept = [stage for stage in names if stage in OURS and stage != "evaluation"]
    if kept:
        why = f"the command line names them: stages=[{','.join(kept)}]; without, stages=[training]"
        adoption.note("stages", "changed", why)
    for stage in names:
        if stage not in kept:
            why = way(stage) or "engine=nemo has no evaluation: stages=[command] with NeMo's script"
            adoption.note(escape(f"stages: {stage}"), "left out", why)


def _numa_mapping(adoption: Adoption, value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    try:
        NumaMapping.model_validate({**_plain(CONF_DIR / ROOT)["numa_mapping"], **value})
    except ValueError:
        why = "mode, scope or cores that only the old one had; the shipped one, unique_contiguous, is in its place"
        adoption.note("numa_mapping", "changed", why)
        return
    adoption.note("numa_mapping", "taken over", "")
    yield "numa_mapping", dict(value)


def _choices(adoption: Adoption, root: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the choices of the root's list of defaults that are choices here too."""
    clusters = {Path(name).stem for name in adoption.files if name.startswith("cluster/")}
    pairs = [pair for item in root.get("defaults", []) if isinstance(item, dict) for pair in item.items()]
    for group, choice in pairs:
        if choice is None or "hydra" in group or group.strip() in STAGES:
            continue  # a stage that is not here: `_leave_groups` says it of all its files
        if group == "conversion":
            adoption.note(
                f"conversion={choice}", "changed", "conversion=nemo, which makes the same .nemo file"
            )
            yield "conversion", "nemo"
        elif (group == "cluster" and choice in clusters) or (
            group == "training" and choice in adoption.sizes
        ):
            yield group, choice
        elif group == "training" and (CONF_DIR / f"training/{choice}.yaml").is_file():
            yield group, choice
        else:
            adoption.note(
                f"{group}={choice}", "left out", way(group, str(choice)) or "there is no such choice"
            )


def _with_variables(adoption: Adoption, key: str, value: Any) -> Any:
    """Let Hydra read what the old tree left to envsubst."""
    text = _VARIABLE.sub(r"${oc.env:\1}", value) if isinstance(value, str) else value
    if text == value:
        adoption.note(key, "taken over", escape(str(value)))
    else:
        adoption.note(key, "changed", f"{escape(value)} is read from the environment, without envsubst")
    return text


def _as_text(value: Any) -> str | None:
    return value if value is None else _VARIABLE.sub(r"${oc.env:\1}", str(value))


# --- clusters


def _adopt_clusters(adoption: Adoption, root: Mapping[str, Any]) -> None:
    folder = adoption.source / "cluster"
    if (folder / "cluster").is_dir():
        adoption.note(
            "cluster/cluster/", "left out", "a copy inside the folder, which the old launcher read not either"
        )
    for path in sorted(folder.glob("*.yaml")):
        name, content = f"cluster/{path.name}", _plain(path)
        if not _NAME.fullmatch(path.stem):
            adoption.note(escape(name), "left out", "such a name is no choice")
        elif _KUBERNETES & content.keys():
            adoption.note(name, "left out", "a Kubernetes cluster: Slipway launches to Slurm")
        else:
            adoption.files[name] = _cluster_text(
                adoption, name, content, has_container=bool(root.get("container"))
            )


def _cluster_text(adoption: Adoption, name: str, content: dict[str, Any], *, has_container: bool) -> str:
    """Return a cluster that means what it meant: NeMo in its container, and no more of Slurm than it says."""
    defaults = content.pop("defaults", ["_base", "_self_"])
    given = content.pop("additional_parameters", None)
    content |= given if isinstance(given, dict) else {}
    kept = {key: value for key, value in content.items() if key in ClusterConfig.model_fields}
    further: dict[str, Any] = {}
    for key in content.keys() - kept.keys():
        try:
            further[checked_name(key)] = content[key]
            adoption.note(f"{name}: {key}", "changed", f"cluster.sbatch.{key}, further options of sbatch")
        except ValueError as error:
            adoption.note(f"{name}: {key}", "left out", str(error))
    image = {} if has_container else {"container": _plain(CONF_DIR / "cluster/bcm.yaml")["container"]}
    kept = {"engine": "nemo", **image, **kept, **({"sbatch": further} if further else {})}
    adoption.note(name, "taken over", "engine=nemo, which it meant")
    head = _FROM.format(name) + "# The keys of all clusters: cluster/_base.yaml of Slipway.\n"
    return f"{head}{_dump({'defaults': defaults})}\n{_dump(kept)}"


# --- sizes


def _adopt_sizes(adoption: Adoption) -> None:
    folder = adoption.source / "training"
    paths = {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.yaml"))}
    others = [choice.partition("/")[0] for choice in paths if choice.partition("/")[0] in OTHER_SCRIPTS]
    for family, count in Counter(others).items():
        adoption.note(f"training/{family}/ ({count})", "left out", other_script(family))
    read = {
        choice: content for choice, path in paths.items() if (content := _read_size(adoption, choice, path))
    }
    # Parts that several sizes include, such as tp_overlap/…, by names that are no choices, nor shipped.
    parts = {choice for choice, (_, content) in read.items() if "run" not in content}
    for choice, (text, content) in read.items():
        folder_name, _, name = choice.rpartition("/")
        if choice in parts:
            adoption.files[f"training/{folder_name}/{_PART}{name}.yaml"] = text
            continue
        for part in {part.rpartition("/")[0] for part in parts}:
            text = re.sub(rf"(\b{re.escape(part)}@[\w.]+: *)(?!null)(?=\w)", rf"\1{_PART}", text)
        adoption.files[f"training/{choice}.yaml"] = _size_text(choice, text, content)
        adoption.sizes[choice] = paths[choice]


def _read_size(adoption: Adoption, choice: str, path: Path) -> tuple[str, DictConfig] | None:
    name, why = escape(f"training/{choice}"), "such a name is no choice"
    if choice.partition("/")[0] in OTHER_SCRIPTS:
        return None
    if _NAME.fullmatch(choice):
        try:
            return read_mapping(path)
        except UserError as error:
            why = error.message
    adoption.note(name, "left out", why)
    return None


def _size_text(choice: str, text: str, content: DictConfig) -> str:
    """Return a size as it is, with its script named and without NeMo's search path."""
    node = yaml.compose(text)
    lines = text.splitlines(keepends=True)
    starts = [(key.value, key.start_mark.line) for key, _ in node.value] if node is not None else []
    ends = [start for _, start in starts[1:]] + [len(lines)]
    spans = {name: (start, end) for (name, start), end in zip(starts, ends, strict=True)}
    model_type = model_type_of(choice, content.get("model") or {})
    run = next((value for key, value in node.value if key.value == "run"), None) if node is not None else None
    if run is not None and run.value and "model_type" not in content.run and not run.flow_style:
        first = run.value[0][0].start_mark
        lines[first.line] = f"{' ' * first.column}model_type: {model_type}\n{lines[first.line]}"
    if "hydra" in spans:
        del lines[slice(*spans["hydra"])]
    return _FROM.format(f"training/{choice}.yaml") + "".join(lines)


def without_variables(files: Mapping[str, str]) -> dict[str, str]:
    """Return files that compose whatever the environment holds."""
    return {name: re.sub(r"\$\{oc\.env:(\w+)\}", r"/\1", text) for name, text in files.items()}


def reduce_sizes(adoption: Adoption, root: Path, tree: Path) -> None:
    """State only what differs of sizes that the shipped ones of their names can carry; compose each once.

    `tree` holds the files of the adoption, and `root` those that are no sizes. A size stays whole if the shipped one has keys that it lacks: there
    the shipped value would count in place of NeMo's default.
    """
    ours, theirs = (BatchComposer(["stages=[training]"], directory) for directory in (root, tree))
    for choice, path in adoption.sizes.items():
        name = f"training/{choice}"
        try:
            new = _leaves(theirs.compose([f"training={choice}"]))
            why = "no shipped size has this name"
            if (CONF_DIR / f"{name}.yaml").is_file():
                shipped = ours.compose([f"training={choice}"])
                old = _leaves(shipped)
                more = [
                    key for key, value in old.items() if not (key in new or value is None or _OWN.match(key))
                ]
                why = f"the shipped size has {', '.join(more)} besides" if more else ""
                if not why and _builds_on_others(shipped, name, adoption):
                    why = "the shipped size builds on another one that was taken over"
        except UserError as error:
            adoption.note(name, "taken over", f"as it is, and refused: {error.mistakes[0].message}")
            continue
        if why:
            adoption.note(name, "taken over", f"whole: {shortened(why)}")
            continue
        differing = [key for key, value in new.items() if key not in old or old[key] != value]
        values = _nested(differing, new, _plain(path))
        defaults = {"defaults": [f"/training/{choice}@_here_", "_self_"]}
        adoption.files[f"{name}.yaml"] = f"{_FROM.format(name)}{_dump(defaults)}\n{_dump(values)}"
        adoption.note(name, "taken over", f"the shipped size, but for {shortened(', '.join(differing))}")
    text = "".join(text for name, text in adoption.files.items() if _PART not in name)
    for name in [name for name in adoption.files if _PART in name and Path(name).stem not in text]:
        del adoption.files[name]


def _builds_on_others(shipped: Composition, name: str, adoption: Adoption) -> bool:
    """Return True if a shipped size would build on a file of the new tree."""
    paths = [file.path for file in shipped.sources().files if file.path.is_relative_to(CONF_DIR / "training")]
    return any(str(path.relative_to(CONF_DIR)) in adoption.files.keys() - {f"{name}.yaml"} for path in paths)


def _leaves(composed: Composition) -> dict[str, Any]:
    training = composed.config.training
    assert training is not None
    return dict(_flat(training.model_dump(), ""))


def _flat(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, node


def _nested(keys: Iterable[str], values: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys below each other, with the values as they are written where they are."""
    as_written, nested = dict(_flat(written, "")), dict[str, Any]()
    for key in keys:
        node, (*parents, name) = nested, key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = as_written.get(key, values[key])
    return nested


# --- what is not here


def _leave_groups(adoption: Adoption) -> None:
    for folder in sorted(path for path in adoption.source.iterdir() if path.is_dir()):
        group = folder.name
        if group in ("cluster", "training"):
            continue
        count = sum(1 for _ in folder.rglob("*.yaml"))
        why = way(group, "/") or "there is no such stage"
        adoption.note(escape(f"{group}/ ({count})"), "left out", why)

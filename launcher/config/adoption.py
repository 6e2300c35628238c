"""The NeMo Megatron launcher's `conf/` as a tree of our own: its files, and what became of each key.

Pure: the files are texts by their names below the new tree, which `launcher.cli.adopt` writes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf

from launcher.config.compose import CONF_DIR
from launcher.config.hydra_setup import read_mapping
from launcher.config.nemo_launcher import OTHER_SCRIPTS, STAGES, describe_other_script, model_type_of, way
from launcher.config.overrides import STAGES as OURS
from launcher.config.schema import ClusterConfig, NumaMapping
from launcher.errors import UserError, escape
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
_KNOWN = [
    *(*_SAME, "container_mounts", "stages", "defaults", "hydra", "cluster_type"),
    *("debug", "bcp_no_redirect", "wandb_api_bcp_secret_key"),
]
_REFERENCE = re.compile(r"\$[A-Za-z_]")
_VARIABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}", re.ASCII)
# A name that a choice, a file and a terminal can have.
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)?", re.ASCII)
# A key of a file in `cluster/` that only Kubernetes has.
_KUBERNETES = {"shm_size", "pull_secret", "dns_policy", "ib_interfaces", "nfs_server"}
# In front of the names of files that are parts of sizes, such as tp_overlap/…: no choices, and none of ours.
_PART = "_nemo_"
_FROM = "# From the NeMo launcher's {}, by `slipway adopt`.\n"


@dataclass(frozen=True, slots=True)
class Note:
    """A part of the old tree, with its outcome and the reason."""

    what: str
    outcome: Outcome
    why: str


@dataclass
class Adoption:
    """The files of the new tree, by their names in it, and a note on each part of the old one."""

    source: Path
    files: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

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
    for folder in sorted(path for path in source.iterdir() if path.is_dir()):
        if folder.name not in ("cluster", "training"):
            count = sum(1 for _ in folder.rglob("*.yaml"))
            why = way(folder.name, "/") or "there is no such stage"
            adoption.note(escape(f"{folder.name}/ ({count})"), "left out", why)
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
    head = _FROM.format(ROOT) + "# It builds on Slipway's own config.yaml, and lists all of its keys.\n"
    adoption.files[ROOT] = f"{head}defaults:\n  - config\n  - _self_\n{''.join(lines)}\n{_dump(values)}"


def _root_values(adoption: Adoption, root: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    _note_stages(adoption, root.get("stages") or [])
    for key, value in {"launcher_scripts_path": "???", **root}.items():
        if key == "launcher_scripts_path" and value == "???":
            yield key, str(adoption.source.absolute().parent)
            adoption.note(key, "changed", "it had no value, and is the directory that conf/ was in")
        elif key in _SAME and value not in (None, "???"):
            yield key, _with_variables(adoption, key, value)
        elif key == "container_mounts" and isinstance(value, list):
            yield key, [_with_variables(adoption, key, mount) for mount in value if mount]
        elif key == "env_vars" and isinstance(value, dict):
            given = {name: _as_text(item) for name, item in value.items() if item is not None}
            # Its script exported them unquoted.
            expanded = {name: text for name, text in given.items() if _REFERENCE.search(text)}
            plain = {name: text for name, text in given.items() if name not in expanded}
            yield key, plain | {name: None for name in _plain(CONF_DIR / ROOT)[key] if name not in plain}
            adoption.note(key, "taken over", ", ".join(plain))
            if expanded:
                yield "env_expand", expanded
                why = f"{', '.join(expanded)}: each task expands them, as the old script did"
                adoption.note("env_expand", "changed", why)
        elif key == "numa_mapping" and isinstance(value, dict):
            is_known = _is_valid_mapping(value)
            yield from [(key, value)] if is_known else []
            why = f"mode {value.get('mode')}" if is_known else "Slipway has the mode unique_contiguous alone"
            adoption.note(key, "taken over" if is_known else "changed", why)
        elif key not in _KNOWN and not key.endswith("_config"):
            adoption.note(escape(key), "left out", way(key) or "Slipway has no such key")
    if (kind := str(root.get("cluster_type", "bcm"))) not in ("bcm", "interactive"):
        adoption.note(f"cluster_type={escape(kind)}", "left out", "Slipway launches to Slurm")


def _note_stages(adoption: Adoption, stages: Iterable[Any]) -> None:
    """Record how to launch the stages; only the command line names them here."""
    names = [stages] if isinstance(stages, str) else [str(stage) for stage in stages]
    # NeMo's checkpoints are not evaluated here.
    kept = [stage for stage in names if stage in OURS and stage != "evaluation"]
    if kept:
        why = f"the command line names them: stages=[{','.join(kept)}]; without, stages=[training]"
        adoption.note("stages", "changed", why)
    for stage in names:
        if stage not in kept:
            why = way(stage) or "engine=nemo has no evaluation: stages=[command] with NeMo's script"
            adoption.note(escape(f"stages: {stage}"), "left out", why)


def _is_valid_mapping(value: Mapping[str, Any]) -> bool:
    with suppress(ValueError):
        return bool(NumaMapping.model_validate({**_plain(CONF_DIR / ROOT)["numa_mapping"], **value}))
    return False


def _choices(adoption: Adoption, root: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the choices of the root's list of defaults that are choices here too."""
    pairs = [pair for item in root.get("defaults", []) if isinstance(item, dict) for pair in item.items()]
    for group, choice in pairs:
        if choice is None or "hydra" in group or group.strip() in STAGES:
            continue  # of an unknown stage, which has a note on its files
        if group == "conversion":
            adoption.note(f"{group}={choice}", "changed", "conversion=nemo, which makes the same .nemo file")
            yield group, "nemo"
        elif f"{group}/{choice}.yaml" in adoption.files or (CONF_DIR / group / f"{choice}.yaml").is_file():
            yield group, choice
        else:
            why = way(group, str(choice)) or "there is no such choice"
            adoption.note(escape(f"{group}={choice}"), "left out", why)


def _with_variables(adoption: Adoption, key: str, value: Any) -> Any:
    """Let Hydra read the variables that the old tree left to envsubst."""
    text = _VARIABLE.sub(r"${oc.env:\1}", value) if isinstance(value, str) else value
    if text == value:
        adoption.note(key, "taken over", escape(str(value)))
    else:
        adoption.note(key, "changed", f"{escape(value)} is read from the environment, without envsubst")
    return text


def _as_text(value: Any) -> str:
    return _VARIABLE.sub(r"${oc.env:\1}", str(value))


# --- clusters


def _adopt_clusters(adoption: Adoption, root: Mapping[str, Any]) -> None:
    folder = adoption.source / "cluster"
    if (folder / "cluster").is_dir():
        adoption.note("cluster/cluster/", "left out", "a copy inside the folder, which nothing reads")
    for path in sorted(folder.glob("*.yaml")):
        name, content = f"cluster/{path.name}", _plain(path)
        if not _NAME.fullmatch(path.stem):
            adoption.note(escape(name), "left out", "such a name is no choice")
        elif _KUBERNETES & content.keys():
            adoption.note(name, "left out", "a Kubernetes cluster: Slipway launches to Slurm")
        else:
            has_image = root.get("container") not in (None, "???")
            adoption.files[name] = _cluster_text(adoption, name, content, has_image=has_image)


def _cluster_text(adoption: Adoption, name: str, content: dict[str, Any], *, has_image: bool) -> str:
    """Return an equivalent cluster: NeMo in its container, and no Slurm options but the file's."""
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
    image = {} if has_image else {"container": _plain(CONF_DIR / "cluster/bcm.yaml")["container"]}
    kept = {"engine": "nemo", **image, **kept, **({"sbatch": further} if further else {})}
    adoption.note(name, "taken over", "engine=nemo, which it meant")
    head = _FROM.format(name) + "# The keys of all clusters: cluster/_base.yaml of Slipway.\n"
    return f"{head}{_dump({'defaults': defaults})}\n{_dump(kept)}"


# --- sizes


def _adopt_sizes(adoption: Adoption) -> None:
    """Take over every size as it is, with its comments; those that no engine trains are left out."""
    folder = adoption.source / "training"
    if not folder.is_dir():
        why = "none is here: the sizes are Slipway's own; adopt a conf/ with sizes and these files for others"
        adoption.note("training/", "changed", why)
    families, parts, sizes = Counter[str](), set[str](), dict[str, str]()
    for path in sorted(folder.rglob("*.yaml")):
        choice = str(path.relative_to(folder).with_suffix(""))
        family, _, name = choice.rpartition("/")
        top = family.partition("/")[0]
        if top in OTHER_SCRIPTS:
            families[top] += 1
            continue
        try:
            if not _NAME.fullmatch(choice):
                raise UserError("such a name is no choice")
            text, content = read_mapping(path)
        except UserError as error:
            adoption.note(escape(f"training/{choice}"), "left out", error.message)
            continue
        families[family] += 1
        if "run" in content:
            sizes[choice] = _size_text(choice, text, model_type_of(choice, content.get("model") or {}))
        else:
            parts.add(family)
            adoption.files[f"training/{family}/{_PART}{name}.yaml"] = text
    for choice, text in sizes.items():
        for part in parts:
            text = re.sub(rf"(\b{re.escape(part)}@[\w.]+: *)(?!null)(?=\w)", rf"\1{_PART}", text)
        adoption.files[f"training/{choice}.yaml"] = text
    for family, count in families.items():
        what = escape(f"training/{family}/ ({count})")
        if family in OTHER_SCRIPTS:
            adoption.note(what, "left out", describe_other_script(family))
        elif family in parts:
            adoption.note(
                what, "changed", f"their names begin with {_PART}: they are parts of sizes, and none"
            )
        else:
            adoption.note(what, "taken over", "as they are, in front of any shipped ones of their names")


def _size_text(choice: str, text: str, model_type: str) -> str:
    """Return a size with its script named, and without the search path that only Hydra's own root reads."""
    text = re.sub(r"^hydra:.*\n(?:[ \t]+.*\n|[ \t]*\n)*", "", text, flags=re.MULTILINE)
    if "model_type:" not in text:
        run = re.compile(r"^(run:[^\n]*\n(?:[ \t]*#.*\n)*)([ \t]+)(?=\w)", re.MULTILINE)
        text = run.sub(rf"\1\2model_type: {model_type}\n\2", text, count=1)
    return _FROM.format(f"training/{choice}.yaml") + text

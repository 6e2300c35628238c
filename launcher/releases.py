"""Releases of NVIDIA's images and of Megatron-LM, and their contents.

The facts are those of `releases.json`, each with its source. A fact that could not be verified is not there,
and is ``None`` here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

NVIDIA = "nvcr.io"
Family = Literal["nemo", "pytorch"]
# NVIDIA's names for NeMo's image over the years; the last two are only NVIDIA's, under any owner.
_REPOSITORIES: Mapping[str, Family] = {
    "nvidia/nemo": "nemo",
    "nemofw-training": "nemo",
    "bignlp-training": "nemo",
    "nvidia/pytorch": "pytorch",
}
_VERSION = re.compile(r"\d+(?:\.\d+)*")
_EARLY_ACCESS = re.compile(r"\d\d\.\d\d(\.\d\d)?(-py3)?")
# The tags of NVIDIA's own releases of an image, such as `25.07.01`, `24.01.framework` and `26.06-py3`; others
# (`24.01.speech`, `25.11.nemotron_3_nano`) may hold something else than the release of their month does.
_RELEASES: Mapping[str, re.Pattern[str]] = {
    "nvidia/nemo": re.compile(r"\d\d\.\d\d(\.\d\d)?(\.framework)?"),
    "ea-bignlp/bignlp-training": _EARLY_ACCESS,
    "ea-bignlp/nemofw-training": _EARLY_ACCESS,
    "ea-bignlp/ga-participants/nemofw-training": _EARLY_ACCESS,
    "nvidia/pytorch": re.compile(r"\d\d\.\d\d-py3"),
}
# 25.07 of `25.07`, `25.07.01`, `26.06-py3`, `25.11.nemotron_3_nano`.
_MONTH = re.compile(r"(\d\d\.\d\d)(?![\d])")
# `nvidia+nemo+25.07.sqsh`, as Enroot and the store call it, and `nemo-25.07.sqsh` or
# `aws-nemo-megatron_23.07-py3.sqsh`, as people do.
_FILE = re.compile(
    r"(?<![a-z0-9])(?:(?P<family>pytorch)|nemo(?:fw)?|bignlp)(?:[_-]?(?:megatron|framework|launcher|training))*"
    r"[+_:-](?P<month>\d\d\.\d\d)(?!\d)",
    re.IGNORECASE,
)


# Facts that the Python of an image reports.
_ASKED = ("nemo", "megatron_core", "python", "cuda", "transformer_engine")


class Source(NamedTuple):
    """The origin of a fact: `primary` is NVIDIA's word or file, `secondary` another's, or an inference."""

    kind: Literal["primary", "secondary"]
    date: str
    where: str


class Contents(NamedTuple):
    """The known contents of an image; ``None`` is unknown."""

    # The release that it is, or was built on: ``nvcr.io/nvidia/nemo:25.07``.
    origin: str
    # NVIDIA's image of that name; ``None`` for another one.
    family: Family | None = None
    month: str | None = None
    # False if only the name of a file suggests the origin.
    is_certain: bool = True
    # Its own Python listed the installed packages: a missing one is not installed.
    was_asked: bool = False
    nemo: str | None = None
    megatron_core: str | None = None
    # The release of NVIDIA's PyTorch image that it is built on.
    pytorch: str | None = None
    python: str | None = None
    cuda: str | None = None
    transformer_engine: str | None = None
    # It has NeMo's scripts megatron_*_pretraining.py and the models that they import.
    pretraining: bool | None = None
    # Its NeMo knows the optimizer `mcore_distributed_optim`.
    mcore_optimizer: bool | None = None
    # Its own value of NCCL_NET_PLUGIN.
    nccl_net_plugin: str | None = None
    # Its aws-ofi-nccl: the path, where NCCL does not take it by itself, and the version.
    efa_plugin: str | None = None
    aws_ofi_nccl: str | None = None


class MegatronLm(NamedTuple):
    """A release of Megatron-LM: `scripts` are the paths of its programs by type of model."""

    tag: str
    date: str
    megatron_core: str
    python: str | None
    scripts: Mapping[str, str]


@cache
def table() -> Mapping[str, Any]:
    text = Path(__file__).with_name("releases.json").read_text(encoding="utf-8")
    content: Mapping[str, Any] = json.loads(text)
    return content


@cache
def sources() -> Mapping[str, Source]:
    """Return the sources of the facts, by the words that the facts name them with."""
    return {name: Source(**source) for name, source in table()["sources"].items()}


@cache
def images() -> tuple[Contents, ...]:
    """Return the images of the table, the oldest first within a family."""
    rows = []
    for row in table()["images"]:
        facts = {name: value for name, (value, _) in row["facts"].items()}
        family = _find_family(row["image"])
        rows.append(Contents(f"{row['image']}:{row['tag']}", family, row["tag"], **facts))
    return tuple(rows)


@cache
def megatron_lm() -> tuple[MegatronLm, ...]:
    """Return the releases of Megatron-LM, the oldest first."""
    return tuple(
        MegatronLm(**{name: row[name] for name in MegatronLm._fields}) for row in table()["megatron_lm"]
    )


def contents_of(
    registry: str | None, repository: str, tag: str | None, digest: str | None = None
) -> Contents | None:
    """Return the contents of an image in the table by its name; ``None`` for one that is not NVIDIA's.

    An image of another repository with a name that ends in ``nvidia/nemo`` counts as a copy, and a longer tag
    than a release's as that release with changes: neither is certain.
    """
    family = _find_family(repository)
    if family is None:
        return None
    month = _MONTH.match(tag or "")
    end = f"@{digest}" if tag is None and digest is not None else f":{tag or 'latest'}"
    name = f"{registry}/" * bool(registry) + repository + end
    is_certain = registry == NVIDIA and repository in _RELEASES
    if month is None:
        return _find_named(name, family, None, is_certain=is_certain)
    is_release = is_certain and _RELEASES[repository].fullmatch(tag or "") is not None
    return _find_named(name, family, month[1], is_certain=is_release)


def contents_by_file_name(name: str) -> Contents | None:
    """Return the contents of a squashfs in the table by the name of its file, which is not certain."""
    match = _FILE.search(name)
    if match is None:
        return None
    family: Family = "pytorch" if match["family"] else "nemo"
    return _find_named(None, family, match["month"], is_certain=False)


def _find_named(name: str | None, family: Family, month: str | None, *, is_certain: bool) -> Contents:
    for row in images():
        if (row.family, row.month) == (family, month):
            return row._replace(origin=name or row.origin, is_certain=is_certain)
    return Contents(name or f"{NVIDIA}/nvidia/{family}:{month}", family, is_certain=is_certain)


def _find_family(repository: str) -> Family | None:
    return next((of for name, of in _REPOSITORIES.items() if f"/{repository}".endswith(f"/{name}")), None)


def add_installed(contents: Contents, installed: Mapping[str, str | None]) -> Contents:
    """Return the contents with the facts of the image's own Python (`launcher.images.inspecting`)."""
    facts: dict[str, Any] = {name: installed[name] for name in _ASKED if name in installed}
    if "nemo_models" in installed:
        kinds = [set((installed.get(name) or "").split()) for name in ("nemo_models", "nemo_scripts")]
        facts["pretraining"] = bool(kinds[0] & kinds[1])
    return contents._replace(was_asked=True, is_certain=True, **facts)


def version(text: str | None) -> tuple[int, ...]:
    """Return the numbers of a version; an empty tuple for another text."""
    match = _VERSION.match((text or "").strip())
    return tuple(map(int, match[0].split("."))) if match else ()


def newest_with_pretraining() -> Contents:
    """Return the newest image that has NeMo's Megatron scripts and models."""
    return [row for row in images() if row.pretraining][-1]


def newest_with_core(least: tuple[int, ...], below: tuple[int, ...]) -> Contents:
    """Return the newest image with a megatron-core from `least` on, and older than `below`."""
    return [row for row in images() if row.megatron_core and least <= version(row.megatron_core) < below][-1]


def for_pyxis(contents: Contents) -> str:
    """Return the name of an image of the table as `container` takes it: ``nvcr.io#nvidia/nemo:25.07``."""
    return contents.origin.replace("/", "#", 1)

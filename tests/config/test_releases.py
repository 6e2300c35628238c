"""The table of releases: every fact has a source, and the page, the tree and the recipes agree with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.images.references import Reference, contents_of_reference
from launcher.releases import (
    Contents,
    contents_by_file_name,
    contents_of,
    for_pyxis,
    images,
    megatron_lm,
    newest_with_pretraining,
    sources,
    table,
    version,
)


def test_the_page_is_not_stale(repository: Path) -> None:
    command = [sys.executable, repository / "scripts" / "releases_page.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_fact_has_a_source_and_no_source_is_idle() -> None:
    used = {source for row in table()["images"] for _, source in row["facts"].values()}
    used |= {row["source"] for row in table()["megatron_lm"]}
    assert used == set(sources())
    for source in sources().values():
        assert source.kind in ("primary", "secondary") and source.date[:3] == "202"
        assert source.where.startswith("https://")


def test_every_fact_is_a_field_of_contents() -> None:
    names = {*Contents._fields} - {"origin", "family", "month", "is_certain", "was_asked"}
    for row in table()["images"]:
        assert set(row["facts"]) <= names
        assert all(value is not None for value, _ in row["facts"].values())


@pytest.mark.parametrize("family", ["nemo", "pytorch"])
def test_releases_are_in_their_order(family: str) -> None:
    months = [version(row.month) for row in images() if row.family == family]
    assert months == sorted(set(months))


def test_releases_of_megatron_lm_are_in_their_order() -> None:
    cores = [version(release.megatron_core) for release in megatron_lm()]
    assert cores == sorted(cores)
    assert [release.date for release in megatron_lm()][-1] == "2026-08-22"


def test_the_tree_has_the_newest_image_that_works(repository: Path) -> None:
    best = for_pyxis(newest_with_pretraining())
    bcm = yaml.safe_load((repository / "conf/cluster/bcm.yaml").read_text())
    nemo = yaml.safe_load((repository / "conf/image/nemo.yaml").read_text())
    assert bcm["container"] == nemo["base"] == best == "nvcr.io#nvidia/nemo:25.07"


@pytest.mark.parametrize(
    ("registry", "repository", "tag", "month", "is_certain"),
    [
        ("nvcr.io", "nvidia/nemo", "25.07", "25.07", True),
        ("nvcr.io", "nvidia/nemo", "25.07.01", "25.07", True),
        ("nvcr.io", "nvidia/nemo", "24.01.01.framework", "24.01", True),
        ("nvcr.io", "ea-bignlp/nemofw-training", "23.07-py3", "23.07", True),
        ("nvcr.io", "ea-bignlp/bignlp-training", "23.07-py3", "23.07", True),
        ("nvcr.io", "ea-bignlp/ga-participants/nemofw-training", "23.08.03", "23.08", True),
        ("docker.io", "library/bignlp-training", "23.07-py3", "23.07", False),
        ("registry.example.org", "ml/nemofw-training", "23.11", "23.11", False),
        ("nvcr.io", "ea-bignlp/bignlp-training", "22.11-py3", None, True),
        ("nvcr.io", "nvidia/pytorch", "26.06-py3", "26.06", True),
        ("registry.example.org:5000", "mirror/nvidia/nemo", "25.07", "25.07", False),
        ("nvcr.io", "nvidia/nemo", "25.071", None, True),
        ("nvcr.io", "nvidia/nemo", "26.12", None, True),
        ("nvcr.io", "nvidia/nemo", None, None, True),
    ],
)
def test_an_image_is_found_by_its_name(
    registry: str, repository: str, tag: str | None, month: str | None, is_certain: bool
) -> None:
    contents = contents_of(registry, repository, tag)
    assert contents is not None and (contents.month, contents.is_certain) == (month, is_certain)


@pytest.mark.parametrize(
    "text",
    [
        "nvcr.io#nvidia/nemo:26.04",
        "nvcr.io/nvidia/nemo:26.04",
        "docker://nvcr.io/nvidia/nemo:26.04",
        "docker://nvcr.io#nvidia/nemo:26.04",
        "$oauthtoken@nvcr.io#nvidia/nemo:26.04",
        "docker://$oauthtoken@nvcr.io/nvidia/nemo:26.04",
    ],
)
def test_a_name_is_read_as_images_read_it(text: str) -> None:
    assert contents_of_reference(Reference.parse(text)) == contents_of("nvcr.io", "nvidia/nemo", "26.04")


@pytest.mark.parametrize(
    "repository", ["library/python", "nvidia/cuda", "team/nemo", "othernvidia/nemo", "ml/mybignlp-training"]
)
def test_images_of_others_are_not_guessed(repository: str) -> None:
    assert contents_of("nvcr.io", repository, "25.07") is None


@pytest.mark.parametrize(
    ("name", "month"),
    [
        ("nvidia+nemo+25.07.sqsh", "25.07"),
        ("nvidia+nemo+25.07.01.sqsh", "25.07"),
        ("NeMo-24.07.sqsh", "24.07"),
        ("nvcr.io+nvidia+pytorch+26.06-py3.sqsh", "26.06"),
        ("aws-nemo-megatron_23.07-py3.sqsh", "23.07"),
        ("ea-bignlp+bignlp-training+23.07-py3.sqsh", "23.07"),
        ("ea-bignlp+ga-participants+nemofw-training+23.08.03.sqsh", "23.08"),
        ("nemo_megatron-23.07.sqsh", "23.07"),
        ("nemo-launcher-23.11.sqsh", "23.11"),
        ("nvidia+nemo+24.01.framework.sqsh", "24.01"),
        ("nemo.sqsh", None),
        ("nemofw-inference-23.10.sqsh", None),
        ("nemo-retriever-24.08.sqsh", None),
        ("nemo-run-308e1f6dbc6f.sqsh", None),
        ("mynemo-25.07.sqsh", None),
        ("nemo-125.07.sqsh", None),
    ],
)
def test_a_file_name_tells_a_release_without_certainty(name: str, month: str | None) -> None:
    contents = contents_by_file_name(name)
    assert (contents.month if contents else None) == month
    assert contents is None or not contents.is_certain


def test_a_file_name_tells_nvidias_own_name_of_the_release() -> None:
    contents = contents_by_file_name("aws-nemo-megatron_23.07-py3.sqsh")
    assert contents is not None and contents.origin == "nvcr.io/ea-bignlp/nemofw-training:23.07"

"""The store: which files are its images, and which records are believed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.images.registry import _image_config
from launcher.images.store import (
    ImageConfig,
    RecipeOrigin,
    Sidecar,
    list_images,
    read_sidecar,
    read_stored,
    sidecar_path,
)

RECORD = Sidecar(
    source="nvcr.io#nvidia/nemo:24.07",
    digest=f"sha256:{'0' * 64}",
    sha256="1" * 64,
    size=5,
    compression="lz4",
    squash_options=("-comp", "lz4"),
    block_size=131072,
    created="2026-01-02T03:04:05+00:00",
    made_by="slipway",
    config=ImageConfig("amd64", ("A=ü",), "/w", ("a", "b"), ("c",), ("/data",), {"x": "y"}),
    recipe=RecipeOrigin("nemo", "run", "abc"),
)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "nemo.sqsh"
    path.write_bytes(b"hsqs.")
    RECORD.write(path)
    return path


def test_a_record_is_read_as_it_was_written(image: Path) -> None:
    assert read_sidecar(image) == RECORD
    entry = read_stored(image)
    assert entry
    assert (entry.path, entry.size, entry.sidecar) == (image, 5, RECORD)


def test_only_whole_files_are_images(image: Path) -> None:
    directory = image.parent
    for name in (".nemo.sqsh.tmp-1", ".nemo.sqsh.lock", "notes.txt", "slipway-image-1"):
        (directory / name).touch()
    (directory / "unpacked.sqsh").mkdir()
    (directory / "gone.sqsh").symlink_to(directory / "nowhere")
    (directory / "colleague.squashfs").write_bytes(b"hsqs")
    entries = list_images(directory)
    assert [(entry.path.name, entry.sidecar is None) for entry in entries] == [
        ("colleague.squashfs", True),
        ("nemo.sqsh", False),
    ]
    assert list_images(directory / "none") == []
    assert read_stored(directory / "none.sqsh") is None


def test_fields_of_later_versions_are_ignored(image: Path) -> None:
    record = json.loads(sidecar_path(image).read_text())
    record["new"] = record["config"]["new"] = 1
    sidecar_path(image).write_text(json.dumps(record))
    assert read_sidecar(image) == RECORD


@pytest.mark.parametrize(
    "change",
    [
        {"size": 6},  # of another file
        {"version": 2},
        {"config": None},
        {"recipe": []},
    ],
)
def test_a_record_of_another_file_is_ignored(image: Path, change: dict[str, object]) -> None:
    record = json.loads(sidecar_path(image).read_text())
    sidecar_path(image).write_text(json.dumps({**record, **change}))
    assert read_sidecar(image) is None
    assert [entry.sidecar for entry in list_images(image.parent)] == [None]


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_a_broken_record_is_ignored(image: Path, text: str) -> None:
    sidecar_path(image).write_text(text)
    assert read_sidecar(image) is None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("workdir", None, ""),
        ("architecture", None, ""),
        ("env", None, ()),
        ("labels", None, {}),
        ("labels", {"maintainer": None, "layers": 3}, {"maintainer": "", "layers": "3"}),
    ],
)
def test_a_record_with_odd_values_of_the_image_is_read(
    image: Path, name: str, value: object, expected: object
) -> None:
    record = json.loads(sidecar_path(image).read_text())
    record["config"][name] = value
    sidecar_path(image).write_text(json.dumps(record))
    sidecar = read_sidecar(image)
    assert sidecar is not None and getattr(sidecar.config, name) == expected


@pytest.mark.parametrize("change", [{"created": None}, {"made_by": None}, {"modified": 1.5}])
def test_a_record_with_odd_values_is_read(image: Path, change: dict[str, object]) -> None:
    record = json.loads(sidecar_path(image).read_text())
    sidecar_path(image).write_text(json.dumps(record | change))
    sidecar = read_sidecar(image)
    assert sidecar is not None and sidecar.digest == RECORD.digest


@pytest.mark.parametrize("name", ["version", "config", "recipe"])
def test_a_record_without_a_field_of_every_version_is_ignored(image: Path, name: str) -> None:
    record = json.loads(sidecar_path(image).read_text())
    del record[name]
    sidecar_path(image).write_text(json.dumps(record))
    assert read_sidecar(image) is None


@pytest.mark.parametrize("name", ["modified", "pushed", "installed"])
def test_a_record_of_an_earlier_version_is_read(image: Path, name: str) -> None:
    record = json.loads(sidecar_path(image).read_text())
    del record[name]
    sidecar_path(image).write_text(json.dumps(record))
    assert read_sidecar(image) == RECORD


def test_labels_of_an_image_are_text_in_its_record(image: Path) -> None:
    config = _image_config({"config": {"Labels": {"maintainer": None, "layers": 3, "x": "y"}}})
    assert config.labels == {"maintainer": "", "layers": "3", "x": "y"}
    replace(RECORD, config=config).write(image)
    sidecar = read_sidecar(image)
    assert sidecar is not None and sidecar.config == config

"""Answers of registries, and records of images, that have another shape than their specification's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import UserError
from launcher.images import registry
from launcher.images.references import Reference
from launcher.images.registry import Access, architecture, list_tags, look_up
from launcher.images.store import read_sidecar, sidecar_path

SOURCE = Reference.parse("registry.example#a/b:1")
DEEP = "[" * 200_000
PLATFORM = {"architecture": architecture(), "os": "linux"}
MANIFEST: dict[str, Any] = {"layers": [{"size": 5, "mediaType": "x+gzip"}]}
CONFIG: dict[str, Any] = {"architecture": "amd64", "config": {"Env": ["A=b"], "Volumes": {"/v": {}}}}


def answer(monkeypatch: pytest.MonkeyPatch, raw: object, config: object = CONFIG) -> None:
    texts = [text if isinstance(text, str) else json.dumps(text) for text in (raw, config)]
    monkeypatch.setattr(registry.tools, "run", lambda command, **_: texts["--config" in command])


def test_a_manifest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, MANIFEST)
    image = look_up(SOURCE, Access())
    assert image.config is not None
    assert (image.packed, image.config.env, image.config.volumes) == (5, ("A=b",), ("/v",))


@pytest.mark.parametrize(
    "raw",
    [
        *(
            DEEP,
            '{"layers": ' + DEEP,
            "",
            "null",
            "5",
            "[]",
            '"x"',
            '{"layers": [{"size": ' + "9" * 5000 + "}]}",
        ),
        *({"manifests": value} for value in ("x", 5, [5], ["x"], [[]], {"a": 1}, [{"platform": 5}])),
        *(
            {"manifests": [{"platform": PLATFORM, "digest": digest}]}
            for digest in ("--help", "", 5, None, "sha256:x", "sha256:" + "a" * 64 + "\n", "\x1b]52;c;x\x07")
        ),
        {"manifests": [{"platform": PLATFORM}]},
        *({"layers": value} for value in (5, "x", [5], ["x"], [[]], [{"size": "x"}], [{"size": [1]}])),
        *(
            {"layers": [{"size": size, "mediaType": "x+gzip"}]}
            for size in (float("inf"), float("nan"), 10**400)
        ),
    ],
    ids=lambda raw: str(raw)[:40],
)
def test_a_manifest_of_another_shape_is_none(monkeypatch: pytest.MonkeyPatch, raw: object) -> None:
    answer(monkeypatch, raw)
    with pytest.raises(UserError, match="the answer is no manifest"):
        look_up(SOURCE, Access())


@pytest.mark.parametrize(
    "config",
    [
        *(DEEP, "", "[]", "5", {"config": 5}, {"config": "x"}, {"config": [1]}),
        *({"config": {"Env": value}} for value in (5, "A=b", [5], [None], [["A=b"]])),
        *({"config": {"Labels": value}} for value in (5, "x", ["x"])),
        *({"config": {name: [5]}} for name in ("Cmd", "Entrypoint", "Volumes")),
    ],
    ids=lambda config: str(config)[:40],
)
def test_a_configuration_of_another_shape_is_none(monkeypatch: pytest.MonkeyPatch, config: object) -> None:
    answer(monkeypatch, MANIFEST, config)
    with pytest.raises(UserError, match="the answer is no manifest"):
        look_up(SOURCE, Access())


@pytest.mark.parametrize("text", [DEEP, "", "5", '{"Tags": 5}', '{"Tags": [5]}', '{"Tags": "x"}', "{}"])
def test_tags_of_another_shape_are_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    answer(monkeypatch, text)
    assert list_tags(SOURCE, Access()) == []


@pytest.mark.parametrize(
    "text", [DEEP, "[]", '{"version": 1}', '{"version": 1, "config": ' + DEEP, '{"a": ' + "9" * 5000 + "}"]
)
def test_a_record_of_another_shape_is_none(tmp_path: Path, text: str) -> None:
    image = tmp_path / "a.sqsh"
    image.touch()
    sidecar_path(image).write_text(text)
    assert read_sidecar(image) is None

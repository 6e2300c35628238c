"""An image for all tests of images, and registries for it: made when a test first requests them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.images.tiny import Registry, make_layout, make_rootfs, need, serving

# Variables that decide where logins are looked for, and which engine is asked.
_USER_VARIABLES = (
    *("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "DOCKER_HOST"),
    *("CONTAINER_HOST", "STORAGE_DRIVER", "ENROOT_CONFIG_PATH", "ENROOT_CACHE_PATH", "ENROOT_TEMP_PATH"),
)


@pytest.fixture(scope="session")
def tiny_rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system of a few megabytes with a shell; not to be changed."""
    need("ldd")
    return make_rootfs(tmp_path_factory.mktemp("rootfs") / "root")


@pytest.fixture(scope="session")
def tiny_layout(tiny_rootfs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OCI directory with that file system as image `1`; `tests.images.tiny` has its configuration."""
    need("umoci", "skopeo")
    return make_layout(tiny_rootfs, tmp_path_factory.mktemp("layout") / "tiny")


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that lets everybody in; push under a name of your own: tests share it."""
    with serving(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture(scope="session")
def guarded_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that asks for a name and a password."""
    with serving(tmp_path_factory.mktemp("guarded"), guarded=True) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_image(registry: Registry, tiny_layout: Path) -> str:
    """The image in the registry, `127.0.0.1:PORT/team/tiny:1`; needs plain HTTP."""
    return registry.push(tiny_layout, "team/tiny")


@pytest.fixture(autouse=True)
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the user's own logins from the tests, and leave them as they are."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    for name in _USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("home", "runtime"):
        (tmp_path / name).mkdir()

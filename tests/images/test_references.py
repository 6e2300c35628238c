"""Names of images: the forms that users write, and the form that each tool takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.overrides import recipe_and_flavor
from launcher.errors import UserError
from launcher.images.references import Kind, Reference

DIGEST = "sha256:" + "0123456789abcdef" * 4

# Columns: as written, as printed, for Pyxis, for Enroot, for skopeo, the file's name.
_REGISTRY = [
    (
        "nvcr.io#nvidia/nemo:24.07",
        "nvcr.io#nvidia/nemo:24.07",
        "nvcr.io#nvidia/nemo:24.07",
        "docker://nvcr.io#nvidia/nemo:24.07",
        "docker://nvcr.io/nvidia/nemo:24.07",
        "nvidia+nemo+24.07.sqsh",
    ),
    (
        "ubuntu",
        "ubuntu:latest",
        "ubuntu:latest",
        "docker://ubuntu:latest",
        "docker://docker.io/library/ubuntu:latest",
        "ubuntu+latest.sqsh",
    ),
    (
        "docker://nvidia/cuda:12.4.1-base",
        "nvidia/cuda:12.4.1-base",
        "nvidia/cuda:12.4.1-base",
        "docker://nvidia/cuda:12.4.1-base",
        "docker://docker.io/nvidia/cuda:12.4.1-base",
        "docker.io+nvidia+cuda+12.4.1-base.sqsh",
    ),
    (
        "docker://registry-1.docker.io/ubuntu:22.04",
        "ubuntu:22.04",
        "ubuntu:22.04",
        "docker://ubuntu:22.04",
        "docker://docker.io/library/ubuntu:22.04",
        "ubuntu+22.04.sqsh",
    ),
    (
        "localhost:5000/team/nemo:1",
        "localhost:5000#team/nemo:1",
        "localhost:5000#team/nemo:1",
        "docker://localhost:5000#team/nemo:1",
        "docker://localhost:5000/team/nemo:1",
        "localhost+5000+team+nemo+1.sqsh",
    ),
    (
        "[::1]:5000#nemo",
        "[::1]:5000#nemo:latest",
        "[::1]:5000#nemo:latest",
        "docker://[::1]:5000#nemo:latest",
        "docker://[::1]:5000/nemo:latest",
        "[++1]+5000+nemo+latest.sqsh",
    ),
    (
        "docker://$oauthtoken@nvcr.io#nvidia/nemo:24.07",
        "$oauthtoken@nvcr.io#nvidia/nemo:24.07",
        "$oauthtoken@nvcr.io#nvidia/nemo:24.07",
        "docker://$oauthtoken@nvcr.io#nvidia/nemo:24.07",
        "docker://nvcr.io/nvidia/nemo:24.07",
        "nvidia+nemo+24.07.sqsh",
    ),
    (
        f"nvcr.io/nvidia/nemo:24.07@{DIGEST}",
        f"nvcr.io#nvidia/nemo:24.07@{DIGEST}",
        f"nvcr.io#nvidia/nemo:{DIGEST}",
        f"docker://nvcr.io#nvidia/nemo:{DIGEST}",
        f"docker://nvcr.io/nvidia/nemo@{DIGEST}",
        "nvidia+nemo+24.07+sha256-0123456789ab.sqsh",
    ),
    (
        f"nvcr.io#nvidia/nemo:{DIGEST}",
        f"nvcr.io#nvidia/nemo@{DIGEST}",
        f"nvcr.io#nvidia/nemo:{DIGEST}",
        f"docker://nvcr.io#nvidia/nemo:{DIGEST}",
        f"docker://nvcr.io/nvidia/nemo@{DIGEST}",
        "nvidia+nemo+sha256-0123456789ab.sqsh",
    ),
]


@pytest.mark.parametrize(("text", "printed", "pyxis", "enroot", "skopeo", "file_name"), _REGISTRY)
def test_registry_images_have_a_form_for_each_tool(
    text: str, printed: str, pyxis: str, enroot: str, skopeo: str, file_name: str
) -> None:
    reference = Reference.parse(text)
    assert reference.kind is Kind.REGISTRY
    assert (str(reference), reference.for_pyxis, reference.for_enroot) == (printed, pyxis, enroot)
    assert (reference.for_skopeo, reference.file_name) == (skopeo, file_name)


@pytest.mark.parametrize("form", ["nvcr.io#{}", "nvcr.io/{}", "docker://nvcr.io#{}", "docker://nvcr.io/{}"])
def test_all_forms_name_the_same_registry(form: str) -> None:
    reference = Reference.parse(form.format("nvidia/nemo:24.07"))
    assert reference == Reference(Kind.REGISTRY, "nvidia/nemo", "nvcr.io", "24.07")


@pytest.mark.parametrize(
    ("text", "kind", "enroot", "skopeo", "file_name"),
    [
        (
            "dockerd://nemo:dev",
            Kind.DOCKER_ENGINE,
            "dockerd://nemo:dev",
            "docker-daemon:nemo:dev",
            "nemo+dev",
        ),
        (
            "docker-daemon:nemo",
            Kind.DOCKER_ENGINE,
            "dockerd://nemo:latest",
            "docker-daemon:nemo:latest",
            None,
        ),
        (
            "podman://localhost/nemo:dev",
            Kind.PODMAN,
            "podman://localhost/nemo:dev",
            "containers-storage:localhost/nemo:dev",
            "localhost+nemo+dev",
        ),
        (
            "containers-storage:localhost:5000/a/b",
            Kind.PODMAN,
            "podman://localhost:5000/a/b:latest",
            "containers-storage:localhost:5000/a/b:latest",
            "localhost+5000+a+b+latest",
        ),
        (f"podman://nemo@{DIGEST}", Kind.PODMAN, None, f"containers-storage:nemo@{DIGEST}", None),
    ],
)
def test_engine_images_have_a_form_for_each_tool(
    text: str, kind: Kind, enroot: str | None, skopeo: str, file_name: str | None
) -> None:
    reference = Reference.parse(text)
    assert (reference.kind, reference.for_pyxis) == (kind, None)
    assert (reference.for_enroot, reference.for_skopeo) == (enroot, skopeo)
    assert file_name is None or reference.file_name == f"{file_name}.sqsh"


@pytest.mark.parametrize(
    ("text", "skopeo", "file_name"),
    [
        ("oci:/a/nemo", "oci:/a/nemo", "nemo"),
        ("oci:/a/nemo:run", "oci:/a/nemo:run", "nemo+run"),
        ("oci-archive:/a/nemo.tar", "oci-archive:/a/nemo.tar", "nemo"),
        ("docker-archive:/a/nemo.tar.gz", "docker-archive:/a/nemo.tar.gz", "nemo"),
    ],
)
def test_images_in_directories_and_archives_are_for_skopeo(text: str, skopeo: str, file_name: str) -> None:
    reference = Reference.parse(text)
    assert str(reference) == text
    assert (reference.for_pyxis, reference.for_enroot, reference.for_skopeo) == (None, None, skopeo)
    assert reference.file_name == f"{file_name}.sqsh"


def test_relative_paths_start_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Reference.parse("oci:images/nemo:run").for_skopeo == f"oci:{tmp_path}/images/nemo:run"
    assert Reference.parse("nemo.sqsh").for_pyxis == f"{tmp_path}/nemo.sqsh"


@pytest.mark.parametrize("text", ["/a/b.sqsh", "./b.sqsh", "b.squashfs", "~/b.sqsh", "/a/b", "/a/b:c.sqsh"])
def test_a_path_is_a_squashfs_file(text: str) -> None:
    reference = Reference.parse(text)
    assert reference.kind is Kind.SQUASHFS
    assert reference.for_pyxis == str(Path(os.path.expanduser(text)).absolute())  # noqa: PTH111
    assert (reference.for_enroot, reference.for_skopeo) == (None, None)
    assert reference.file_name == Path(text).name


def test_two_registries_do_not_share_a_file() -> None:
    names = [
        "nvcr.io#nvidia/cuda:1",
        "docker.io#nvidia/cuda:1",
        "a.b#nvidia/cuda:1",
        "nvcr.io#a.b/nvidia/cuda:1",
    ]
    assert len({Reference.parse(name).file_name for name in names}) == len(names)


def test_a_tag_is_pinned_by_its_digest() -> None:
    reference = Reference.parse("nvcr.io#nvidia/nemo:24.07")
    assert not reference.is_pinned
    pinned = reference.pin(DIGEST)
    assert pinned.is_pinned
    assert pinned.for_build == f"nvcr.io/nvidia/nemo@{DIGEST}"
    with pytest.raises(ValueError, match="no digest"):
        reference.pin("sha256:1234")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not the name of an image"),
        (" nemo", "not the name of an image"),
        ("ne\nmo", "not the name of an image"),
        ("dokcer://nemo:1", "did you mean docker://…?"),
        ("https://nvcr.io/nvidia/nemo", "an image is REGISTRY#NAME:TAG"),
        ("nvcr.io#nvidia/NeMo:24.07", "nvcr.io#nvidia/nemo:24.07"),
        ("nvcr.io#nvidia//nemo", "'nvidia//nemo' is not the name of an image"),
        ("nvcr.io#nvidia/nemo:", "'' is no tag"),
        ("nvcr.io#nvidia/nemo:24 07", "'24 07' is no tag"),
        ("-x.io#nemo", "'-x.io' is no registry"),
        ("nemo@sha256:12", "a digest is sha256: and 64"),
        ("nemo:sha256:12", "a digest is sha256: and 64"),
        ("/a/nemo.tar", "oci-archive:/a/nemo.tar"),
        ("oci:", "a path is missing"),
        ("dockerd://-x/y", "'-x/y' is not the name of an image"),
    ],
)
def test_a_wrong_name_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        Reference.parse(text, key="container")
    assert message in str(caught.value)
    assert str(caught.value).startswith("container=")
    assert caught.value.key == "container"


@pytest.mark.parametrize("text", ["me:hunter2@nvcr.io#nvidia/nemo", "https://me:hunter2@nvcr.io/nvidia/nemo"])
def test_a_password_in_a_name_is_not_shown(text: str) -> None:
    with pytest.raises(UserError) as caught:
        Reference.parse(text)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nemo", ("nemo", None)),
        ("nemo-aws:dev", ("nemo-aws", "dev")),
        ("nvcr.io#nvidia/nemo", None),
        ("nvidia/nemo", None),
        ("ubuntu:22.04", None),
        ("nemo.sqsh", None),
        ("nemo:", None),
    ],
)
def test_recipe_names_differ_from_image_names(text: str, expected: tuple[str, str | None] | None) -> None:
    assert recipe_and_flavor(text) == expected


_parts = st.from_regex(r"[a-z0-9]+((\.|_|__|-)[a-z0-9]+)?", fullmatch=True)
_registries = st.sampled_from(["docker.io", "nvcr.io", "localhost", "localhost:5000", "[::1]:443", "a.b"])


@given(
    registry=_registries,
    path=st.lists(_parts, min_size=2, max_size=3),
    tag=st.none() | st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,9}", fullmatch=True),
    digest=st.none() | st.just(DIGEST),
    user=st.none() | st.sampled_from(["$oauthtoken", "me"]),
)
def test_a_printed_reference_parses_to_the_same(
    registry: str, path: list[str], tag: str | None, digest: str | None, user: str | None
) -> None:
    # On Docker Hub the first part of a name is an owner, which has no dot.
    path[0] = path[0].replace(".", "-")
    tag = tag or (None if digest else "latest")
    reference = Reference(Kind.REGISTRY, "/".join(path), registry, tag, digest, user)
    assert Reference.parse(str(reference)) == reference
    assert reference.for_pyxis is not None
    pyxis = Reference.parse(reference.for_pyxis)
    assert (pyxis.name, pyxis.registry, pyxis.digest) == (reference.name, registry, digest)


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        reference = Reference.parse(text)
    except UserError:
        return
    assert Reference.parse(str(reference)) == reference


@pytest.mark.parametrize("text", ["~nobody-of-this-name/x.sqsh", "oci:~nobody-of-this-name/x"])
def test_the_home_of_an_unknown_user_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="no such user's home"):
        print(Reference.parse(text).file_name)

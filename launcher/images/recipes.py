"""A recipe: what an image is built from, and what it is called before it is there.

The hash is of everything that decides what is in the image: the Dockerfile with all its values, the files
that are copied, the platform. Two recipes of one hash give the same image, so that a launch can tell by a
file's name whether it is built. Not in it are the commit and whether it was changed, which are in the labels
of a built image, nor our trainer's code, of which a launch brings its own copy: otherwise each change of ours
would ask for a new image.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import __version__
from launcher.config.image import ImageComposition, ImageConfig, compose_image, recipe_names
from launcher.errors import UserError, nearest_files, shown
from launcher.images.dockerfiles import TEMPLATE_DIR, render_dockerfile, text
from launcher.images.references import Kind, Reference, whole_path
from launcher.runs.paths import TASK_PACKAGES
from launcher.runs.provenance import checkout_of, user

__all__ = ["Recipe", "build_labels", "recipe", "recipe_names"]

_SCRIPT = "dev-script.sh"
_SHORT = 12
_HASH_LABEL = "slipway.recipe.hash"
_LOCAL = "localhost"  # what podman and buildah call images of this machine


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe with all its values.

    Attributes
    ----------
    name, flavor
        Such as ``nemo`` and ``dev``.
    config
        Its configuration, checked.
    base
        The image that it builds on.
    dockerfile
        The text to build from.
    context
        The files that the Dockerfile copies, by their names beside it.
    labels
        Those in the Dockerfile.
    hash
        SHA-256 of all that decides what is in the image, but for our trainer's code.
    warnings
        What is to be told whenever it is rendered or built.
    """

    name: str
    flavor: str
    config: ImageConfig
    base: Reference
    dockerfile: str
    context: dict[str, bytes]
    labels: dict[str, str]
    hash: str
    warnings: tuple[str, ...]

    @property
    def short_hash(self) -> str:
        """The digits of the hash that are in names."""
        return self.hash[:_SHORT]

    @property
    def file_name(self) -> str:
        """The squashfs' name in the store."""
        return f"{self.name}-{self.flavor}-{self.short_hash}.sqsh"

    @property
    def tag(self) -> str:
        """The image's tag."""
        return self.config.tag or f"{self.flavor}-{self.short_hash}"

    @property
    def image_name(self) -> str:
        """What the built image is called: ``localhost/me/nemo:run-0123456789ab``."""
        return self.name_in(self.config.registry or _LOCAL)

    def name_in(self, registry: str) -> str:
        """What it is called in a registry."""
        owner = self.config.owner or _user()
        return f"{registry}/{owner}/{self.name.lower()}:{self.tag}"


def recipe(
    name: str,
    flavor: str | None = None,
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    template_dir: Path | None = None,
) -> Recipe:
    """Read a recipe, and render its Dockerfile.

    Parameters
    ----------
    name
        A file of the configuration group `image`: ``nemo-aws``.
    flavor
        `run` or `dev`, over what the configuration says.
    overrides
        Hydra's overrides of its keys, such as ``image.versions.nccl=2.27.7-1``.
    config_dir, template_dir
        Trees of the user's own, looked at before ours.

    Raises
    ------
    UserError
        If there is no such recipe or flavor, a value is not valid, or a file of the user's cannot be read.
    """
    chosen = [*overrides, *([f"image.flavor={flavor}"] if flavor else [])]
    composition = compose_image(name, chosen, config_dir)
    try:
        return _recipe_of(composition, template_dir)
    except UserError as error:
        composition.annotate(error)
        raise


def build_labels(config_dir: Path | None = None) -> dict[str, str]:
    """Labels for what a build finds, beside those in the Dockerfile: the commit, and whether it was changed.

    Parameters
    ----------
    config_dir
        The user's own tree, whose commit is told too.
    """
    labels = {"slipway.version": __version__}
    for prefix, directory in (("", TEMPLATE_DIR), ("config.", config_dir)):
        checkout = checkout_of(directory) if directory is not None else None
        if checkout is not None:
            revision = "slipway.config.revision" if prefix else "org.opencontainers.image.revision"
            dirty = {True: "true", False: "false", None: "unknown"}[checkout.dirty]
            labels |= {revision: checkout.commit, f"slipway.{prefix}dirty": dirty}
    return labels


def _recipe_of(composition: ImageComposition, template_dir: Path | None) -> Recipe:
    config, name = composition.config, composition.name
    base = _base(config)
    context = dict(_script(config))
    labels = _labels(name, config, base)
    is_dev = config.flavor == "dev"
    dockerfile = render_dockerfile(
        config.template,
        {
            "name": name,
            "flavor": config.flavor,
            "config": config,
            "base": base.for_build,
            "versions": config.versions,
            "packages": [*config.packages, *(config.dev_packages if is_dev else [])],
            "script": _SCRIPT if _SCRIPT in context else None,
            "labels": labels,
        },
        template_dir,
    )
    digest = _hash(dockerfile, context, config.platform)
    dockerfile += f"LABEL {_HASH_LABEL}={text(digest)}\n"
    for package in TASK_PACKAGES:
        if re.search(rf"^COPY {package.name} ", dockerfile, re.MULTILINE):
            context |= _files_of(package)
    return Recipe(
        name=name,
        flavor=config.flavor,
        config=config,
        base=base,
        dockerfile=dockerfile,
        context=context,
        labels=labels | {_HASH_LABEL: digest},
        hash=digest,
        warnings=tuple(_warnings(config, base)),
    )


def _base(config: ImageConfig) -> Reference:
    base = Reference.parse(config.base, "image.base")
    if base.kind not in (Kind.REGISTRY, Kind.DOCKER_ENGINE, Kind.PODMAN):
        raise UserError(
            f"image.base={config.base!r}: an image is built on one of a registry or of an engine's storage",
            key="image.base",
            hint="load an archive first: podman load --input FILE",
        )
    if config.digest is None:
        return base
    if base.digest not in (None, config.digest):
        raise UserError(
            f"image.digest={config.digest!r}: image.base has another digest",
            key="image.digest",
            also=["image.base"],
            hint="keep one of the two",
        )
    return base.at(config.digest)


def _warnings(config: ImageConfig, base: Reference) -> Iterator[str]:
    if not base.is_pinned:
        yield (
            f"image.base={base} is not pinned: a tag may move, and a build tomorrow may give another image. "
            f"Pin it: image.digest=$(skopeo inspect --format '{{{{.Digest}}}}' {base.for_skopeo})"
        )
    if config.dev_script and config.flavor != "dev":
        yield "image.dev_script is for the dev flavor, and does nothing here"


def _script(config: ImageConfig) -> Iterator[tuple[str, bytes]]:
    """The user's own script, if the flavor runs it."""
    if config.dev_script is None or config.flavor != "dev":
        return
    path = whole_path(config.dev_script, "image.dev_script")
    try:
        yield _SCRIPT, path.read_bytes()
    except OSError as error:
        raise UserError(
            f"image.dev_script={shown(config.dev_script)}: {(error.strerror or str(error)).lower()}",
            key="image.dev_script",
            hint=nearest_files(path),
        ) from error


def _files_of(package: Path) -> dict[str, bytes]:
    files = (path for path in sorted(package.rglob("*")) if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(package.parent)): path.read_bytes() for path in files}


def _labels(name: str, config: ImageConfig, base: Reference) -> dict[str, str]:
    """The labels that the recipe decides, the Open Container Initiative's among them."""
    told = {
        "org.opencontainers.image.title": name,
        "org.opencontainers.image.base.name": f"{base.registry}/{base.name}" if base.registry else base.name,
        "slipway.recipe.name": name,
        "slipway.recipe.flavor": config.flavor,
    }
    told["org.opencontainers.image.base.name"] += f":{base.tag}" if base.tag else ""
    if base.digest:
        told["org.opencontainers.image.base.digest"] = base.digest
    versions = {f"slipway.versions.{part}": value for part, value in config.versions.items() if value}
    return told | versions | config.labels


def _hash(dockerfile: str, context: dict[str, bytes], platform: str) -> str:
    files = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(context.items())}
    parts = json.dumps([dockerfile, files, platform])
    return hashlib.sha256(parts.encode()).hexdigest()


def _user() -> str:
    """Who builds, in the letters that an image's name may have."""
    return re.sub(r"[^a-z0-9]+", "-", user().lower()).strip("-") or "slipway"

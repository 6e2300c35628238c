"""Recipes: a Dockerfile with all its values, the files that it copies, and the names of the image.

The hash covers everything that determines the image's content: the Dockerfile with its values, the files that
are copied, the platform. Two recipes of one hash make the same image, so that a launch recognizes a built one
by its file's name. The hash leaves out the commit and its changes, which are in the labels of a built image,
and our trainer's code, which a launch copies: otherwise each change of ours would need a new image.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from launcher import __version__
from launcher.config.compose import compose_file, list_options, tree_roots
from launcher.config.overrides import choice_hint, recipe_and_flavor
from launcher.config.sources import Sources
from launcher.config.stage_schema import StrictModel
from launcher.config.values import Line, LineList, Text, Whole, matching
from launcher.errors import (
    UserError,
    absolute_path,
    check_directory,
    did_you_mean,
    escape,
    literal,
    nearest,
    nearest_files,
    setting_error,
)
from launcher.images.references import Kind, Reference
from launcher.rendering.quoting import RawShell, blaming_templates, quote, template_environment
from launcher.runs.paths import PACKAGE
from launcher.runs.provenance import checkout_of, user
from launcher.secrecy import is_secret_name

GROUP = "image"  # of the configuration tree: one file for each recipe, which no launch composes

# In the wheel a directory, in a checkout a link.
TEMPLATE_DIR = (Path(__file__).parents[1] / "dockerfiles").resolve()
_SUFFIX = ".Dockerfile.j2"
_SCRIPT = "dev-script.sh"
_SHORT = 12
_HASH_LABEL = "slipway.recipe.hash"
_LOCAL_REGISTRY = "localhost"  # podman and buildah call images of this machine so

# `git@` of an address of ssh is no secret.
_LOGIN = re.compile(r"(?<!ssh)://[^/\s@]*@|://[^/\s@]*:[^/\s@]*@", re.IGNORECASE)


def _refuse_password(value: Any) -> Any:
    if any(map(_LOGIN.search, [value] if isinstance(value, str) else value)):
        raise ValueError("a name or a password in it would be in the image for all to read")
    return value


def _refuse_secrets(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if value and is_secret_name(name.upper()):
            raise ValueError(
                f"{name} would be in the image for all to read: give it to the job, in env_files"
            )
    return env


def _flatten(value: Any) -> Any:
    """Join nested keys: labels have dots in their names, which Hydra's overrides take for keys below keys."""
    if not isinstance(value, dict):
        return value
    flat: dict[str, Any] = {}
    for name, below in value.items():
        inner = _flatten(below)
        flat |= {f"{name}.{end}": inner[end] for end in inner} if isinstance(inner, dict) else {name: inner}
    return flat


_HOST = r"[A-Za-z0-9][\w.-]*(:\d+)?"
_Debian = Annotated[
    LineList, matching(r"[a-z0-9][a-z0-9+.-]+(=\S+)?", "expected Debian packages, as in numactl")
]
_Variable = Annotated[Line, matching(r"[A-Za-z_]\w*", "expected a name that a variable can have")]
_Label = Annotated[Line, matching(r"[A-Za-z0-9][\w./-]*", "expected a label's name, as in org.team")]
_Version = Annotated[Text, matching(r"\w[\w.+-]*", "expected a version, such as 2.27.7-1")]


class RecipeConfig(StrictModel):
    """The keys of a recipe; see `conf/image/_base.yaml`."""

    flavor: Literal["run", "dev"]
    template: Annotated[Line, matching(r"\w[\w-]*", "expected a template's name, such as nemo")]
    base: Line
    digest: Annotated[Text, matching(r"sha256:[0-9a-f]{64}", "expected sha256: and 64 digits")] | None
    platform: Literal["linux/amd64", "linux/arm64"]
    builder: Literal["docker", "podman", "buildah"] | None
    registry: Annotated[Text, matching(_HOST, "expected HOST or HOST:PORT")] | None
    registries: Annotated[LineList, matching(_HOST, "expected HOST or HOST:PORT of each")]
    owner: Annotated[Text, matching(r"[a-z0-9]+([._/-]+[a-z0-9]+)*", "expected lower case, as in me")] | None
    tag: Annotated[Text, matching(r"\w[\w.-]{0,127}", "expected a tag, such as 24.09-1")] | None
    packages: _Debian
    dev_packages: _Debian
    dev_script: Line | None
    python_packages: Annotated[LineList, AfterValidator(_refuse_password)]
    pip_index: Annotated[Line, AfterValidator(_refuse_password)] | None
    versions: dict[_Variable, _Version | None]
    cuda_archs: list[Whole]
    env: Annotated[dict[_Variable, Text], AfterValidator(_refuse_secrets)]
    workdir: Annotated[Line, matching(r"/.*", "expected an absolute path")]
    labels: Annotated[dict[_Label, Text], BeforeValidator(_flatten)]


class _Tree(StrictModel):
    image: RecipeConfig


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe with all its values.

    `name` and `flavor` are such as ``nemo`` and ``dev``; `hash` is the SHA-256 of all that determines
    the image, except our trainer's code; `warnings` are printed whenever it is rendered or built.
    """

    name: str
    flavor: str
    config: RecipeConfig
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
    def image_name(self) -> str:
        """The name of the built image: ``localhost/me/nemo:run-0123456789ab``."""
        return self.name_in(self.config.registry or _LOCAL_REGISTRY)

    def name_in(self, registry: str) -> str:
        # A user's name may have letters that an image's may not.
        owner = self.config.owner or re.sub(r"[^a-z0-9]+", "-", user().lower()).strip("-") or "slipway"
        tag = self.config.tag or f"{self.flavor}-{self.short_hash}"
        return f"{registry}/{owner}/{self.name.lower()}:{tag}"


def recipe_names(config_dirs: tuple[Path, ...] = ()) -> list[str]:
    """Return the names of all recipes, the user's own among them."""
    return [name for name in list_options(GROUP, config_dirs) if recipe_and_flavor(name) == (name, None)]


def read_recipe(
    name: str,
    flavor: str | None = None,
    overrides: Sequence[str] = (),
    config_dirs: tuple[Path, ...] = (),
    template_dir: Path | None = None,
) -> Recipe:
    """Read a recipe, and render its Dockerfile; `flavor` overrides the configuration's.

    `config_dirs` and `template_dir` are trees of the user's own, read before ours. Raise UserError for a
    mistake in the configuration, in an override or in a template.
    """
    names = recipe_names(config_dirs)
    if name not in names:
        raise UserError(f"{escape(name)}: there is no such recipe", hint=choice_hint(name, names))
    file, texts = f"{GROUP}/{name}", [*overrides, *([f"{GROUP}.flavor={flavor}"] if flavor else [])]
    config = compose_file(file, texts, _Tree, config_dirs).image
    try:
        return _render_recipe(name, config, template_dir)
    except UserError as error:
        Sources(texts, tree_roots(config_dirs), primary=file).annotate(error)
        raise


def build_labels(config_dirs: tuple[Path, ...] = ()) -> dict[str, str]:
    """Return labels to add to the Dockerfile's: the commit, and whether it was changed."""
    labels = {"slipway.version": __version__}
    for prefix, directories in (("", (TEMPLATE_DIR,)), ("config.", config_dirs)):
        checkout = next(filter(None, map(checkout_of, directories)), None)
        if checkout is not None:
            revision = "slipway.config.revision" if prefix else "org.opencontainers.image.revision"
            dirty = {True: "true", False: "false", None: "unknown"}[checkout.dirty]
            labels |= {revision: checkout.commit, f"slipway.{prefix}dirty": dirty}
    return labels


def _render_recipe(name: str, config: RecipeConfig, template_dir: Path | None) -> Recipe:
    base = _base(config)
    is_dev = config.flavor == "dev"
    context = _dev_script(config) if is_dev and config.dev_script else {}
    labels = _recipe_labels(name, config, base)
    dockerfile = render_dockerfile(
        config.template,
        {
            "name": name,
            "flavor": config.flavor,
            "config": config,
            "base": base.for_build,
            "versions": config.versions,
            "packages": [*config.packages, *(config.dev_packages if is_dev else [])],
            "script": _SCRIPT if context else None,
            "labels": labels,
        },
        template_dir,
    )
    checksums = {path: hashlib.sha256(content).hexdigest() for path, content in sorted(context.items())}
    parts = json.dumps([dockerfile, checksums, config.platform])
    digest = hashlib.sha256(parts.encode()).hexdigest()
    dockerfile += f"LABEL {_HASH_LABEL}={quote_for_dockerfile(digest)}\n"
    if re.search(rf"^COPY {PACKAGE.name} ", dockerfile, re.MULTILINE):
        files = (path for path in sorted(PACKAGE.rglob("*")) if path.is_file() and path.suffix != ".pyc")
        context |= {str(path.relative_to(PACKAGE.parent)): path.read_bytes() for path in files}
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


def _base(config: RecipeConfig) -> Reference:
    base = Reference.parse(config.base, "image.base")
    if base.kind not in (Kind.REGISTRY, Kind.DOCKER_ENGINE, Kind.PODMAN):
        raise setting_error(
            f"image.base={config.base!r}: the base must be an image of a registry or of an engine's storage",
            hint="load an archive first: podman load --input FILE",
        )
    if config.digest is None:
        return base
    if base.digest not in (None, config.digest):
        message = f"image.digest={config.digest!r}: image.base has another digest"
        raise setting_error(message, hint="keep one of the two", also=["image.base"])
    return base.pin(config.digest)


def _warnings(config: RecipeConfig, base: Reference) -> Iterator[str]:
    if not base.is_pinned:
        yield (
            f"image.base={base} is not pinned: a tag may move, and a build tomorrow may give another image. "
            f"Pin it: image.digest=$(skopeo inspect --format '{{{{.Digest}}}}' {base.for_skopeo})"
        )
    if config.dev_script and config.flavor != "dev":
        yield "image.dev_script is for the dev flavor, and does nothing here"


def _dev_script(config: RecipeConfig) -> dict[str, bytes]:
    path = absolute_path(config.dev_script or "", "image.dev_script")
    try:
        return {_SCRIPT: path.read_bytes()}
    except OSError as error:
        raise setting_error(
            f"image.dev_script={literal(config.dev_script)}: {(error.strerror or str(error)).lower()}",
            hint=nearest_files(path),
        ) from error


def _recipe_labels(name: str, config: RecipeConfig, base: Reference) -> dict[str, str]:
    base_name = f"{base.registry}/{base.name}" if base.registry else base.name
    labels = {
        "org.opencontainers.image.title": name,
        "org.opencontainers.image.base.name": f"{base_name}:{base.tag}" if base.tag else base_name,
        "slipway.recipe.name": name,
        "slipway.recipe.flavor": config.flavor,
    }
    if base.digest:
        labels["org.opencontainers.image.base.digest"] = base.digest
    versions = {f"slipway.versions.{part}": value for part, value in config.versions.items() if value}
    return labels | versions | config.labels


def render_dockerfile(template: str, values: Mapping[str, Any], template_dir: Path | None = None) -> str:
    """Render a template of a recipe; each entry of ``versions`` must be used.

    A template in `template_dir`, the user's own directory, is read before ours. It may start with
    ``{% extends "slipway/nemo.Dockerfile.j2" %}`` and override single blocks.
    """
    if template_dir is not None:
        check_directory("--template-dir", template_dir)
    folders = [TEMPLATE_DIR] if template_dir is None else [template_dir, TEMPLATE_DIR]
    files = {path.name for folder in folders for path in folder.glob(f"*{_SUFFIX}")}
    if f"{template}{_SUFFIX}" not in files:
        names = sorted(name.removesuffix(_SUFFIX) for name in files if not name.startswith("_"))
        near = [f"did you mean {name!r}?" for name in nearest(template, names)]
        raise setting_error(
            f"image.template={template!r}: there is no template {template}{_SUFFIX}",
            hint=" ".join([*near, f"valid: {', '.join(names)}"]),
        )
    versions = _Versions(values["versions"])
    environment = template_environment(TEMPLATE_DIR, template_dir, **_FILTERS)
    with blaming_templates(template_dir):
        text = environment.get_template(f"{template}{_SUFFIX}").render({**values, "versions": versions})
    unused = next((name for name in versions if name not in versions.used), None)
    if unused is not None:
        raise setting_error(
            f"image.versions.{unused}: the template {template} builds no such thing",
            hint=did_you_mean(unused, versions.used),
        )
    return text


class _Versions(UserDict[str, str | None]):
    """The versions of a recipe, recording which of them a template used: a misspelt one is found."""

    def __init__(self, versions: Mapping[str, str | None]) -> None:
        super().__init__(versions)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> str | None:
        self.used.add(name)
        return super().__getitem__(name)

    __contains__ = Mapping.__contains__  # by reading it: a dict's own would not


def quote_for_dockerfile(value: Any) -> RawShell:
    r"""Quote a value for an instruction: in double quotes a Dockerfile reads ``\``, ``"`` and ``$``."""
    return RawShell('"' + re.sub(r'([\\"$])', r"\\\1", str(value)) + '"')


def _pairs(values: Mapping[str, Any], indent: int) -> RawShell:
    """Lay out what ENV and LABEL take, a name and its value on each line; the names were checked."""
    separator = " \\\n" + " " * indent
    return RawShell(separator.join(f"{key}={quote_for_dockerfile(value)}" for key, value in values.items()))


def _gencode(archs: Iterable[int]) -> RawShell:
    """Return nvcc's options for the GPUs to compile for; the newest also as PTX, for later GPUs."""
    ordered = sorted(archs)
    words = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ordered]
    if ordered:
        words.append(f"-gencode=arch=compute_{ordered[-1]},code=compute_{ordered[-1]}")
    return RawShell(quote(" ".join(words)))


# Quotes are by `quote`, as for shells: no value reaches a RUN unquoted.
_FILTERS = {
    "text": quote_for_dockerfile,
    "pairs": _pairs,
    "gencode": _gencode,
    "raw": RawShell,  # for constants of a template that the build expands
}

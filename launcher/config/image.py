"""The configuration of a recipe: one file of the group `image`, checked like a launch's.

It is composed by itself, so that a launch does not read it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from launcher.config.compose import compose_file, list_options, tree_roots
from launcher.config.overrides import choice_hint, parse_override
from launcher.config.sources import Sources
from launcher.config.stage_schema import StrictModel
from launcher.config.values import Line, LineList, Text, Whole, matching
from launcher.errors import UserError, nearest, one_line
from launcher.secrecy import is_secret_name

GROUP = "image"
_RECIPE = r"[A-Za-z0-9][\w-]*"  # what may be in the names of images and files, and in container=NAME


# `git@` of an address of ssh is no secret.
_LOGIN = re.compile(r"(?<!ssh)://[^/\s@]*@|://[^/\s@]*:[^/\s@]*@", re.IGNORECASE)


def _without_password(value: Any) -> Any:
    if any(map(_LOGIN.search, [value] if isinstance(value, str) else value)):
        raise ValueError("a name or a password in it would be in the image for all to read")
    return value


def _without_secrets(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if value and is_secret_name(name.upper()):
            raise ValueError(
                f"{name} would be in the image for all to read: give it to the job, in env_files"
            )
    return env


def _flat(value: Any) -> Any:
    """Join nested keys: labels have dots in their names, which Hydra's overrides take for keys below keys."""
    if not isinstance(value, dict):
        return value
    flat: dict[str, Any] = {}
    for name, below in value.items():
        inner = _flat(below)
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
    python_packages: Annotated[LineList, AfterValidator(_without_password)]
    pip_index: Annotated[Line, AfterValidator(_without_password)] | None
    versions: dict[_Variable, _Version | None]
    cuda_archs: list[Whole]
    env: Annotated[dict[_Variable, Text], AfterValidator(_without_secrets)]
    workdir: Annotated[Line, matching(r"/.*", "expected an absolute path")]
    labels: Annotated[dict[_Label, Text], BeforeValidator(_flat)]


class _Tree(StrictModel):
    image: RecipeConfig


@dataclass(frozen=True, slots=True)
class RecipeComposition:
    """A recipe's composed and checked configuration."""

    name: str
    config: RecipeConfig
    overrides: tuple[str, ...]
    config_dir: Path | None

    def annotate(self, error: UserError) -> None:
        """Add the sources of the offending values to an error."""
        roots = tree_roots(self.config_dir)
        Sources(self.overrides, roots, primary=_file_of(self.name)).annotate(error)


def recipe_names(config_dir: Path | None = None) -> list[str]:
    """Return the names of all recipes, the user's own among them."""
    return [name for name in list_options(GROUP, config_dir) if re.fullmatch(_RECIPE, name, re.ASCII)]


def compose_recipe(name: str, overrides: Sequence[str], config_dir: Path | None = None) -> RecipeComposition:
    """Compose a recipe's configuration and check it; raise UserError for a mistake, as `compose` does."""
    names = recipe_names(config_dir)
    if name not in names:
        raise UserError(f"{one_line(name)}: there is no such recipe", hint=choice_hint(name, names))
    for text in overrides:
        _check_override(text)
    tree: _Tree = compose_file(_file_of(name), overrides, _Tree, config_dir)
    return RecipeComposition(name, tree.image, tuple(overrides), config_dir)


def _file_of(name: str) -> str:
    return f"{GROUP}/{name}"


def _check_override(text: str) -> None:
    override = parse_override(text)
    if override.key.startswith(f"{GROUP}."):
        return
    near = nearest(override.key, RecipeConfig.model_fields) if override.key != GROUP else []
    hint = f"keys of a recipe are such as {GROUP}.flavor=dev"
    if near:
        hint = f"did you mean '{GROUP}.{one_line(text) if near[0] == override.key else near[0]}'?"
    raise UserError(f"{one_line(text)}: a recipe has no such key", key=override.key, hint=hint)

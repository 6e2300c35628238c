"""Building a recipe into an image of a builder's storage, and that into a squashfs of the store."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.errors import UserError
from launcher.images import tools
from launcher.images.importing import Imported, ImportOptions, import_image, make_directory, reuse
from launcher.images.progress import SILENT, ImageProgress
from launcher.images.recipes import Recipe, build_labels
from launcher.images.references import Kind, Reference
from launcher.images.registry import Access, architecture, borrow_login, hint_names
from launcher.images.scratch import lock_image, scratch_directory
from launcher.images.store import RecipeOrigin, match_stored, read_stored
from launcher.images.tools import NO_SPACE, ToolError

# Plain copies of the layers: slower, but they work where the kernel refuses overlay mounts.
_PLAIN_STORAGE = {"STORAGE_DRIVER": "vfs"}
# Without new namespaces, and without a runtime that would have to be installed.
_ISOLATION = {"BUILDAH_ISOLATION": "chroot"}
_LOCAL_HOSTS = ("localhost", "127.0.0.1")
# In the output of `podman info` and `buildah info`.
_DRIVER = re.compile(r"graphDriverName\W+(\w+)", re.IGNORECASE)
# The builders' lines about an instruction: `STEP 3/10: RUN ...`, `#7 [3/8] RUN ...`.
_STEP = re.compile(r"(?:STEP (?P<steps>\d+/\d+)|#\d+ \[\S* ?(?P<layers>\d+/\d+)\]):? (?P<instruction>.*)")
_SHOWN_LETTERS = 60


@dataclass(frozen=True, slots=True)
class Builder:
    """A program that builds images; it `copies` if its storage keeps a whole copy for each layer."""

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    copies: bool = False

    def reference(self, name: str) -> Reference:
        """Return an image in its storage, by the name that it was built with."""
        transport = Kind.DOCKER_ENGINE if self.name == "docker" else Kind.PODMAN
        return Reference.parse(f"{transport}://{name}")

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Let other programs find its storage meanwhile: skopeo takes the driver from the environment too."""
        before = {name: os.environ[name] for name in self.env if name in os.environ}
        os.environ.update(self.env)
        try:
            yield
        finally:
            for name in self.env:
                os.environ.pop(name, None)
            os.environ.update(before)

    def command(self, recipe: Recipe, directory: Path, labels: dict[str, str], access: Access) -> list[str]:
        """Return the command that builds a recipe from a directory with its Dockerfile and context."""
        # Without --force-rm a build that fails leaves its containers, and their mounts.
        options = ["--format", "docker", "--force-rm"]
        # One layer for each instruction is a cache, and a full disk where each is a copy of all.
        options += [f"--layers={str(not self.copies).lower()}"]
        words = {
            "docker": ["docker", "build", "--progress", "plain"],
            "podman": ["podman", "build", *options],
            "buildah": ["buildah", "bud", *options],
        }[self.name]
        base, platform = recipe.base, recipe.config.platform
        host = (base.registry or "").partition(":")[0]
        if base.kind is Kind.REGISTRY and not base.is_pinned and host not in _LOCAL_HOSTS:
            # Its tag may have moved: a cache gives a base of months ago otherwise.
            words += ["--pull=newer" if self.name == "podman" else "--pull"]
        login = access.options()
        if login and self.name == "docker":
            raise UserError(
                f"docker build does not take {login[0].partition('=')[0]}",
                hint="docker's own settings count: `docker login`, insecure-registries; or --builder buildah",
            )
        words += [*login, "--file", str(directory / "Dockerfile"), "--tag", recipe.image_name]
        words += [word for label in labels.items() for word in ("--label", "=".join(label))]
        words += ["--platform", platform] if platform != f"linux/{architecture()}" else []
        return [*words, str(directory / "context")]

    @property
    def cleanup(self) -> str:
        """The command that removes what earlier builds left and no image needs."""
        # `buildah prune` is not in 1.28 (Debian 12).
        prunes = {"docker": "docker builder prune", "podman": "podman image prune"}
        return prunes.get(self.name, "buildah rmi --prune")


def find_builder(preferred: str | None = None) -> Builder:
    """Return the preferred builder, or the first that works here; the error has the answer of each."""
    answers: list[str] = []
    for name in (preferred,) if preferred else tools.BUILDERS:
        try:
            return _working_builder(name)
        except UserError as error:
            answers.append(f"{name}: {error.message.splitlines()[-1]}")
    message = f"{preferred} does not work here" if preferred else "no program that builds images works here"
    raise UserError(
        "\n".join([message, *answers]),
        hint=f"{tools.explain_install('buildah')}\nor build elsewhere: slipway image build ... --on-cluster",
    )


def _working_builder(name: str) -> Builder:
    """Return a builder; raise UserError if it does not work."""
    if tools.find_program(name) is None:
        raise UserError("not on PATH")
    if name == "docker":
        version = tools.run(["docker", "version"], doing="reach docker's daemon")
        # Where `docker` is podman, its images are in podman's storage.
        return _working_builder("podman") if "podman" in version.lower() else Builder("docker")
    env = {**_ISOLATION, **{key: os.environ[key] for key in _ISOLATION if key in os.environ}}
    try:
        return _make_builder(name, env)
    except UserError:
        if "STORAGE_DRIVER" not in os.environ:
            with suppress(UserError):
                return _make_builder(name, env | _PLAIN_STORAGE)
        raise


def _make_builder(name: str, env: dict[str, str]) -> Builder:
    driver = _DRIVER.search(tools.run([name, "info"], doing=f"run {name}", env=env))
    return Builder(name, env, driver is not None and driver[1] == "vfs")


def build_recipe(
    recipe: Recipe, builder: Builder, labels: dict[str, str], progress: ImageProgress, access: Access
) -> Reference:
    """Build a recipe, and return the image in the builder's storage."""
    with scratch_directory(Path(tempfile.gettempdir())) as (scratch, locks):
        context = scratch / "context"
        context.mkdir()
        for name, content in recipe.context.items():
            path = context / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        # Outside the context, so that no instruction can copy it.
        (scratch / "Dockerfile").write_text(recipe.dockerfile, encoding="utf-8")
        progress.step(f"building {recipe.image_name} with {builder.name}")
        try:
            tools.run(
                builder.command(recipe, scratch, labels, access),
                doing=f"build {recipe.image_name}",
                env=builder.env,
                names=hint_names(recipe.base),
                on_line=_show_instructions(progress),
                keep=(*locks, *access.descriptors),
            )
        except ToolError as error:
            if error.why == NO_SPACE:
                layers = f"{builder.name} keeps layers of earlier builds: `{builder.cleanup}`"
                error.hint = f"{layers}\n{error.hint}"
            raise
    return builder.reference(recipe.image_name)


def build_into_store(
    recipe: Recipe,
    store: Path,
    options: ImportOptions | None = None,
    progress: ImageProgress = SILENT,
    *,
    builder: str | None = None,
    config_dirs: tuple[Path, ...] = (),
) -> Imported:
    """Build a recipe and import it, unless its image is in the store already.

    `options` are of the import; `force` also builds again. The store is unchanged if it fails.
    """
    target = store / recipe.file_name
    origin = RecipeOrigin(recipe.name, recipe.flavor, recipe.hash)
    options = replace(options or ImportOptions(), recipe=origin)

    def reuse_built() -> Imported | None:
        entry = read_stored(target)
        record = entry.sidecar if entry else None
        if entry is None or record is None or record.recipe is None or record.recipe.hash != recipe.hash:
            return None
        return reuse(entry) if match_stored(entry, record.digest, options.compression)[0] else None

    def wait_for(holder: str) -> None:
        progress.note(f"{target.name} is being built by {holder}: waiting for it")
        progress.step(f"waiting for {holder}")

    with tools.ending_cleanly():
        if not options.force and (image := reuse_built()) is not None:
            return image
        program = find_builder(builder or recipe.config.builder)
        make_directory(target.parent)
        # One process builds; the others wait, and find the image. Importing has its own lock.
        with lock_image(target.with_name(f"{target.name}.build"), wait_for) as lock:
            # Another may have made it meanwhile, also while this one looked for a builder.
            if (lock.waited or not options.force) and (image := reuse_built()) is not None:
                return image
            access = Access(options.plain_http, options.authfile)
            # docker has its own logins alone.
            has_own = program.name == "docker"
            with nullcontext(access) if has_own else borrow_login(access, recipe.base) as access:
                reference = build_recipe(recipe, program, build_labels(config_dirs), progress, access)
            # A file of that name is of another recipe, or incomplete, or not wanted.
            with program.environment():
                return import_image(reference, target, replace(options, force=True), progress)


def _show_instructions(progress: ImageProgress) -> Callable[[str], None]:
    """Return a callback that makes each instruction a step, and prints the output of its programs."""

    def show(line: str) -> None:
        match = _STEP.match(line)
        if match:
            steps = match["steps"] or match["layers"]
            progress.step(f"{steps} {match['instruction'][:_SHOWN_LETTERS]}")
        elif not line.startswith("--> "):  # the name of a layer
            progress.note(f"  {line}")

    return show

"""A recipe becomes an image of a builder's storage, and that a squashfs of the store."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.images import tools
from launcher.images.builders import Builder, builder_for
from launcher.images.complaints import NO_SPACE, Complaint
from launcher.images.credentials import lent
from launcher.images.importing import Imported, ImportOptions, import_image, make_directory
from launcher.images.interrupts import ending_cleanly
from launcher.images.locking import locked
from launcher.images.progress import Progress, Silent
from launcher.images.recipes import Recipe, build_labels
from launcher.images.references import Reference
from launcher.images.remote import Access, names_of
from launcher.images.reuse import reusable
from launcher.images.store import RecipeOrigin, Store, Stored, stored
from launcher.images.working import working_in

_DOCKERFILE = "Dockerfile"
# What the builders say when they begin with an instruction: `STEP 3/10: RUN ...`, `#7 [3/8] RUN ...`.
_STEP = re.compile(r"(?:STEP (?P<steps>\d+/\d+)|#\d+ \[\S* ?(?P<layers>\d+/\d+)\]):? (?P<what>.*)")
_SHOWN_LETTERS = 60


@dataclass(frozen=True, slots=True)
class Built:
    """An image in a builder's storage."""

    reference: Reference
    builder: Builder


def build(
    recipe: Recipe,
    builder: Builder,
    labels: dict[str, str],
    progress: Progress,
    access: Access | None = None,
) -> Built:
    """Build a recipe; the builder's cache makes the second time quick.

    Parameters
    ----------
    labels
        Such as the commit: what tells of this build, and not of what is in it.
    access
        To the registry of the base.

    Raises
    ------
    UserError
        If an instruction fails, with what it said.
    """
    with working_in(Path(tempfile.gettempdir())) as work:
        context = work.path / "context"
        context.mkdir()
        for name, content in recipe.context.items():
            path = context / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        # Beside the context: it is nothing that an instruction could copy.
        dockerfile = work.path / _DOCKERFILE
        dockerfile.write_text(recipe.dockerfile, encoding="utf-8")
        command = builder.command(
            context,
            dockerfile,
            recipe.image_name,
            base=recipe.base,
            labels=labels,
            platform=recipe.config.platform,
            access=access,
        )
        progress.step(f"building {recipe.image_name} with {builder.name}")
        try:
            tools.run(
                command,
                doing=f"build {recipe.image_name}",
                env=dict(builder.env),
                names=names_of(recipe.base),
                on_line=_telling(progress),
                keep=(work.descriptor, *(access.descriptors if access else ())),
            )
        except Complaint as error:
            if error.why == NO_SPACE:
                error.hint = (
                    f"{builder.name} keeps layers of earlier builds: `{builder.cleanup}`\n{error.hint}"
                )
            raise
    return Built(builder.reference(recipe.image_name), builder)


def build_into_store(
    recipe: Recipe,
    store: Store,
    options: ImportOptions | None = None,
    progress: Progress | None = None,
    *,
    builder: str | None = None,
    config_dir: Path | None = None,
) -> Imported:
    """Build a recipe and import it, unless what it determines is in the store already.

    Parameters
    ----------
    options
        Of the import; `force` also builds anew.
    builder
        The one to take; by default the recipe's, or the first that works.
    config_dir
        The user's own tree, whose commit is written into the labels too.

    Raises
    ------
    UserError
        With what to do next; the store is as it was.
    """
    progress = progress or Silent()
    target = store.path(recipe.file_name)
    options = replace(
        options or ImportOptions(), recipe=RecipeOrigin(recipe.name, recipe.flavor, recipe.hash)
    )
    with ending_cleanly():
        found = stored(target)
        if not options.force and found is not None and _is_of(recipe, found, options):
            return _as_it_is(found)
        works = builder_for(builder or recipe.config.builder)
        make_directory(target.parent)
        # One builds; the others wait, and find the image. Importing has a lock of its own.
        with locked(target.with_name(f"{target.name}.build"), _waiting(target, progress)) as lock:
            # Another may have made it meanwhile, also while this one looked for a builder.
            found = stored(target)
            may_serve = lock.waited or not options.force
            if may_serve and found is not None and _is_of(recipe, found, options):
                return _as_it_is(found)
            with _access(options, works, recipe.base) as access:
                built = build(recipe, works, build_labels(config_dir), progress, access)
            # What is there under that name is not of this recipe, or not whole, or not wanted.
            with built.builder.environment():
                return import_image(built.reference, target, replace(options, force=True), progress)


@contextmanager
def _access(options: ImportOptions, builder: Builder, base: Reference) -> Iterator[Access]:
    given = Access(options.plain_http, options.authfile)
    with lent(given, base) if builder.takes_logins else nullcontext(given) as access:
        yield access


def _is_of(recipe: Recipe, found: Stored, options: ImportOptions) -> bool:
    """Whether a file of the store is what the recipe, as it is now, becomes."""
    recorded = found.sidecar
    if recorded is None or recorded.recipe is None or recorded.recipe.hash != recipe.hash:
        return False
    return reusable(found, recorded.digest, options.compression).yes


def _as_it_is(found: Stored) -> Imported:
    return Imported(found.path, found.sidecar.digest if found.sidecar else None, True, found.sidecar)


def _waiting(target: Path, progress: Progress) -> Callable[[str], None]:
    def tell(holder: str) -> None:
        progress.note(f"{target.name} is being built by {holder}: waiting for it")
        progress.step(f"waiting for {holder}")

    return tell


def _telling(progress: Progress) -> Callable[[str], None]:
    """Make each instruction a step, and show what the programs in it say."""

    def tell(line: str) -> None:
        found = _STEP.match(line)
        if line.startswith("--> "):
            return  # the name of a layer
        if found:
            steps = found["steps"] or found["layers"]
            progress.step(f"{steps} {found['what'][:_SHOWN_LETTERS]}")
        else:
            progress.note(f"  {line}")

    return tell

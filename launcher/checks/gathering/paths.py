"""Find a job's files and directories on this machine, by reading alone."""

from __future__ import annotations

import errno
import glob
import json
import os
import shlex
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.checks.facts import MissingPath, PathFacts
from launcher.checks.gathering.checkpoints import find_missing_checkpoint, find_missing_source
from launcher.checks.gathering.data import (
    data_of_other_tokenizers,
    data_sets,
    find_missing_data,
    find_missing_tokenizer,
    tokenizer_files,
)
from launcher.checks.gathering.images import find_fetched_at_once, find_missing_image
from launcher.checks.gathering.path_resolver import PathResolver, is_there, is_visible, opened
from launcher.config.late_stages import DataPreparationConfig
from launcher.drafting import Draft
from launcher.errors import did_you_mean, explain_os_error, nearest_files
from launcher.estimates.values import full
from launcher.file_systems import existing, find_local_mount, is_shared, mount_of, room_at
from launcher.plan import SOURCES_WITHOUT_PATH, Mount, Plan
from launcher.releases import megatron_lm
from launcher.stages.command import STAGE as COMMAND
from launcher.stages.data_preparation import directory_of, entries, local_inputs

_KEYS = {"nemo": "nemo_path", "megatron_lm": "megatron_lm_path"}
# The job's places of Megatron-LM's script for a type of model, as in templates/megatron_lm.py.
MEGATRON_LM_PLACES = ("pretrain_{0}.py", "examples/{0}/pretrain_{0}.py")
# Local directories, as a rule installed alike on all machines.
_INSTALLED = ("/bin/", "/opt/", "/usr/")
_AS_LINES = ("auto", "jsonl")
_LONGEST_LINE = 1 << 24  # of a document that is read to see its keys


def path_facts(draft: Draft) -> PathFacts:
    """Gather the facts about a job's files and directories on this machine."""
    resolver = PathResolver(draft)
    local, checkpoints = find_local_paths(resolver), _checkpoints(resolver)
    room, source = room_at(checkpoints), find_missing_source(resolver)
    missing, tokens = {}, data_of_other_tokenizers(resolver)
    if isinstance(tokens, str):
        missing["tokens"], tokens = tokens, None
    if local is None:
        missing["local"] = "the file systems of this machine are unknown"
    if room is None:
        missing["free_bytes"] = "the free space for the results is unknown"
    facts = PathFacts(
        tokenizer=find_missing_tokenizer(resolver),
        data=find_missing_data(resolver),
        tokens=tokens,
        checkpoint=find_missing_checkpoint(resolver),
        image=find_missing_image(resolver),
        fetched=find_fetched_at_once(resolver),
        script=find_missing_script(resolver),
        mounts=find_missing_mounts(resolver),
        sources=find_missing_sources(resolver) if source is None else source,
        secrets=find_missing_secrets(resolver),
        results=_find_write_fault(draft),
        local=local,
        is_own_disk=any(path.key == draft.results_key for path in local or ()),
        checkpoints_there=_entries(checkpoints),
        missing=missing,
    )
    return replace(facts, free_bytes=room.free_bytes, free_by=room.by) if room is not None else facts


def _checkpoints(resolver: PathResolver) -> Path:
    """Return the directory of a training's checkpoints, or that of a conversion's outputs."""
    job = resolver.plan.job
    value = job.chain.checkpoints if job.stage != "conversion" else str(next(iter(job.directories)))
    directory = resolver.host(value) if value is not None else None
    return directory if directory is not None else resolver.plan.paths.checkpoints


def _entries(directory: Path) -> int | None:
    try:
        # Neither the link to the newest, nor the damaged ones that our trainer set aside.
        ignored = ("latest", "damaged")
        names = (entry.name for entry in directory.iterdir())
        return sum(not name.startswith(".") and name not in ignored for name in names)
    except FileNotFoundError:
        return 0
    except OSError:
        return None


def _find_write_fault(draft: Draft) -> tuple[MissingPath, ...]:
    """Return why the directory of the run cannot be written: the launcher itself writes it, here."""
    run_dir, key, code = draft.plan.paths.run_dir, draft.results_key, None
    place = existing(run_dir)
    try:
        system = os.statvfs(place)
        # Some file systems count no files, and some in user space no blocks either.
        is_full = (system.f_blocks and not system.f_bavail) or (system.f_files and not system.f_favail)
        if not place.is_dir():
            code = errno.ENOTDIR
        elif system.f_flag & os.ST_RDONLY:
            code = errno.EROFS
        elif not os.access(place, os.W_OK | os.X_OK):
            code = errno.EACCES
        elif is_full:
            code = errno.ENOSPC
    except OSError as error:
        code = error.errno
    if code is None:
        return ()
    report = explain_os_error(OSError(code, os.strerror(code)), run_dir, key)
    return (MissingPath(key, results_value(draft), report.message, True, report.hint),)


def find_missing_mounts(resolver: PathResolver) -> tuple[MissingPath, ...] | None:
    """Return the mounts of sources that will not exist when the job begins."""
    container = resolver.plan.job.container
    if container is None or not resolver.in_container:
        return None
    lost = []
    for source in dict.fromkeys(mount.source for mount in container.mounts):
        path = Path(source)
        if source not in SOURCES_WITHOUT_PATH and not is_there(path) and not resolver.creates(path):
            key, fix = _find_mount_key(resolver, path)
            why = "there is no such file or directory to mount"
            lost.append(resolver.missing(key, source, why, fix, at=path))
    return (*lost, *_find_hidden_mounts(container.mounts))


def _find_hidden_mounts(mounts: Sequence[Mount]) -> Iterator[MissingPath]:
    """Yield the mounts that a later mount of another source covers."""
    for number, mount in enumerate(mounts):
        for later in mounts[number + 1 :]:
            target = Path(mount.target)
            if not target.is_relative_to(later.target) or later.source in SOURCES_WITHOUT_PATH:
                continue
            if Path(later.source, target.relative_to(later.target)) != Path(mount.source):
                why = f"{later.source}:{later.target} is mounted after it, and hides it"
                fix = "the outer directory first, and one mount for each target"
                yield MissingPath("container_mounts", f"{mount.source}:{mount.target}", why, False, fix)
                break


def _find_mount_key(resolver: PathResolver, path: Path) -> tuple[str, str | None]:
    """Return the key that a mount comes from, and a remedy."""
    config = resolver.draft.composition.config
    for key, value in (("data_dir", config.data_dir), ("base_results_dir", config.base_results_dir)):
        if path == Path(value):
            return key, f"mkdir -p {shlex.quote(value)}, or {key}=..."
    preparation = config.data_preparation
    if preparation is not None and path in map(directory_of, local_inputs(preparation)):
        return "data_preparation.inputs", nearest_files(path)
    return "container_mounts", None


def find_missing_sources(resolver: PathResolver) -> tuple[MissingPath, ...] | None:
    """Return missing local sources, and files of the tokenizer, of a data preparation."""
    preparation = resolver.draft.composition.config.data_preparation
    if preparation is None or preparation.phase in ("tokenize", "merge"):
        return None  # the first part looks at them
    node, lost = "data_preparation", []
    for path in local_inputs(preparation):
        place = directory_of(path)
        why = _why_no_source(path, place) if not resolver.is_created_later(place) else None
        if why is not None:
            fix = nearest_files(place)
            lost.append(resolver.missing(f"{node}.inputs", str(path), why, fix, at=place))
    lost += _find_wrong_text_key(resolver, preparation) if not lost else []
    file = preparation.tokenizer.file
    if file is not None and not file.is_file():
        key, why, fix = f"{node}.tokenizer.file", "there is no such file", nearest_files(file)
        lost.append(resolver.missing(key, str(file), why, fix, at=file))
    names = ("vocab.json", "merges.txt", "tokenizer.json")
    vocab, merges, whole = (preparation.tokenizer_dir / name for name in names)
    if is_there(vocab) != is_there(merges) and not is_there(whole):
        there, missing = (vocab, merges) if is_there(vocab) else (merges, vocab)
        why = f"it has {there.name} and no {missing.name}, and both make a tokenizer"
        lost.append(resolver.missing(f"{node}.tokenizer_dir", str(there.parent), why))
    return tuple(lost)


def _find_wrong_text_key(resolver: PathResolver, preparation: DataPreparationConfig) -> list[MissingPath]:
    """Look for the text key in the first document, if that is a line of a local JSONL file."""
    entry, path = next(iter(entries(preparation)))
    is_skipped = preparation.on_error == "skip" or (entry.format or preparation.format) not in _AS_LINES
    if path is None or is_skipped:
        return []
    pattern = f"{glob.escape(str(path))}/{preparation.pattern}" if path.is_dir() else str(path)
    name = str(path) if path.is_file() else next(glob.iglob(pattern, recursive=True), "")  # noqa: PTH207
    key = entry.text_key or preparation.text_key
    try:
        with opened(Path(name)) as stream:
            record = json.loads(stream.readline(_LONGEST_LINE)) if name.endswith(".jsonl") else None
    except (OSError, ValueError):
        return []  # the job reports the mistake
    if not isinstance(record, dict) or key in record:
        return []
    why = f"the first document of {name} has no such key"
    fix = did_you_mean(key, [word for word, value in record.items() if isinstance(value, str)])
    return [resolver.missing("data_preparation.text_key", key, why, fix, at=path)]


def _why_no_source(path: Path, place: Path) -> str | None:
    """Return the fault of a path or glob; `place` is the directory that a glob searches."""
    if not is_there(place):
        return "there is no such file or directory"
    if path == place:
        return None if os.access(path, os.R_OK) else "you may not read it"
    matches = glob.iglob(str(path.relative_to(place)), root_dir=place, recursive=True)  # noqa: PTH207
    return None if any(matches) else "no file has a name of this pattern"


def find_missing_script(resolver: PathResolver) -> tuple[MissingPath, ...] | None:
    """Return the program if its checkout exists here without it; else the image has it."""
    job = resolver.plan.job
    if job.stage == COMMAND:
        return _find_missing_program(resolver, job.payload.argv[0])
    key, root = _KEYS.get(job.engine), job.payload.working_dir
    if key is None or job.config is None:
        return None
    places = _places(resolver.plan)
    if not places:
        return None
    checkout, paths = resolver.host(root), [resolver.host(f"{root}/{place}") for place in places]
    if checkout is None or not checkout.is_dir() or any(path is None or path.is_file() for path in paths):
        return ()
    why = f"there is no {' and no '.join(places)} in this checkout"
    fix = "a checkout of NeMo up to v2.4.0"
    if job.engine == "megatron_lm":
        fix = f"a checkout of Megatron-LM from {megatron_lm()[0].tag} on, which has one of them"
    # A checkout on a disk of this machine alone may be another one on the nodes.
    certain = resolver.nodes_are_here or is_shared(checkout)
    return (resolver.missing(key, root, why, fix, certain=certain),)


def _find_missing_program(resolver: PathResolver, program: str) -> tuple[MissingPath, ...]:
    """Return a site's own program if the nodes cannot run it; a container's contents are unknown."""
    key, why, path = "command.argv", "there is no such program", resolver.host(program)
    if resolver.in_container and (path is None or "/" not in program):
        return ()
    if "/" not in program:
        if shutil.which(program) is not None:
            return ()
        fix = "its whole path, or an image that has it: command.container=..."
        return (resolver.missing(key, program, why, fix, certain=resolver.nodes_are_here),)
    assert path is not None
    if resolver.is_created_later(path) or (path.is_file() and os.access(path, os.X_OK)):
        return ()
    fix = nearest_files(path)
    if path.is_dir():
        why, fix = "a directory, not a program", ""
    elif is_there(path):
        why, fix = "it may not be executed", f"chmod +x {shlex.quote(str(path))}"
    return (resolver.missing(key, program, why, fix, at=path),)


def _places(plan: Plan) -> list[str]:
    """Return the possible paths of the program in the checkout: one is enough."""
    root, argv = plan.job.payload.working_dir, plan.job.payload.argv
    if plan.job.engine == "megatron_lm":
        # The script's starter is the launch's own, and has the checkout and the type of model after it.
        model_type = argv[argv.index(str(plan.paths.megatron_lm)) + 2]
        return list(dict.fromkeys(place.format(model_type) for place in MEGATRON_LM_PLACES))
    return [word.removeprefix(f"{root}/") for word in argv if word.endswith(".py")][:1]


def find_open_secrets(draft: Draft) -> dict[str, str]:
    """Return the files of secrets on this machine that others than the owner may read."""
    files = {}
    for variable, path in draft.plan.job.environment_files.items():
        try:
            mode = Path(path).stat().st_mode
        except OSError:
            continue
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            files[variable] = path
    return files


def find_missing_secrets(resolver: PathResolver) -> tuple[MissingPath, ...]:
    """Return the files of secrets that do not exist, or that the user may not read."""
    config, lost = resolver.draft.composition.config, []
    paths = dict(config.watch.tell.files())
    for variable, path in resolver.plan.job.environment_files.items():
        paths[f"env_files.{variable}" if variable in config.env_files else "wandb_api_key_file"] = path
    for key, path in paths.items():
        if (why := _why_lost(path)) is not None:
            fix = f"the whole path of a file whose first line is the secret, or {key}=null"
            lost.append(resolver.missing(key, path, why, fix, certain=is_visible(Path(path))))
    return tuple(lost)


def _why_lost(path: str) -> str | None:
    """Return why a file cannot be read; None if it can."""
    try:
        mode = Path(path).stat().st_mode
    except PermissionError:
        return "its directory may not be entered"
    except OSError:
        return "there is no such file"
    if stat.S_ISDIR(mode):
        return "a directory, not a file"
    if not stat.S_ISREG(mode):
        return "a FIFO or a device, not a file: the job would wait for it"
    return None if os.access(path, os.R_OK) else "you may not read this file"


def find_local_paths(resolver: PathResolver) -> tuple[MissingPath, ...] | None:
    """Return the paths that the nodes of a job share, and that are on local disks of this machine.

    None if the file systems are unknown.
    """
    most, draft = max(resolver.plan.job.resources.node_counts), resolver.draft
    if resolver.nodes_are_here or most < 2:
        return ()
    if mount_of(Path("/")) is None:
        return None
    results = (draft.results_key, results_value(draft), resolver.plan.paths.run_dir)
    local = []
    for key, value, path in (results, *_inputs(resolver)):
        if (mount := find_local_mount(path)) is None:
            continue
        why = f"it is on a local file system of this machine ({mount.kind}, mounted at {mount.point}); "
        if (key, value, path) == results:
            why += f"the job's {most} nodes write to this directory together"
            fix = f"a directory that all nodes share: {full(key)}=..."
        else:
            why += f"each of the job's {most} nodes must have it"
            fix = "put it where all nodes share it, or a copy on each of them"
        local.append(MissingPath(key, value, why, False, fix))
    return tuple(local)


def results_value(draft: Draft) -> str:
    """Return the value of the key that sets the directory of the run."""
    whole = draft.results_key == "base_results_dir"
    return draft.composition.config.base_results_dir if whole else str(draft.plan.paths.run_dir)


def _inputs(resolver: PathResolver) -> Iterator[tuple[str, str, Path]]:
    """Yield the job's inputs that exist here: other checks report missing ones."""
    job = resolver.plan.job
    inputs: list[tuple[str, str, Path | None]] = []
    if job.container is not None and resolver.in_container:
        inputs.append(("container", job.container.image, Path(job.container.image)))
    elif not job.payload.argv[0].startswith(_INSTALLED):
        inputs.append(("cluster.python", job.payload.argv[0], Path(job.payload.argv[0])))
    for key, prefix in data_sets(resolver.values):
        path = resolver.host(prefix)
        inputs.append((key, prefix, path.with_name(f"{path.name}.bin") if path is not None else None))
    files = tokenizer_files(resolver.values, job.engine)
    inputs += [(key, value, resolver.host(value)) for key, value in files]
    for key, value, path in inputs:
        if path is not None and path.is_absolute() and os.access(path, os.F_OK):
            yield key, value, path

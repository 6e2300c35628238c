"""The choice of the checkpoint that a launch starts from. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipway.common.errors import UserError, suggest
from slipway.common.owners import why_untrusted
from slipway.trainer.checkpoint import store
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.config.resume import Resume
from slipway.trainer.config.saving import Saving
from slipway.trainer.logs import LOGGER

_KEY = "resume.checkpoint"


@dataclass(frozen=True)
class Choice:
    """The checkpoint that a launch starts from, and how.

    Attributes
    ----------
    load_optimizer
        Whether the optimizer's states are taken over too; ``masters`` are its fp32 weights alone.
    is_branch
        Whether the training goes on from an earlier point: its new checkpoints must be distinguished from
        those that it saved on its first way from there.
    """

    checkpoint: Checkpoint
    load_optimizer: bool | Literal["masters"]
    is_branch: bool


class Chooser:
    """The choice of the checkpoint to start from, and of the next if it is damaged; rank 0 alone chooses.

    Parameters
    ----------
    report
        Called with each damaged checkpoint once: its path, the reason, and where it was moved, unless it had
        to stay.
    """

    def __init__(
        self,
        saving: Saving,
        resume: Resume,
        report: Callable[[Path, str, Path | None], None] = lambda *_: None,
    ) -> None:
        self._saving, self._resume, self._report = saving, resume, report
        self._damaged: dict[Path, str] = {}

    def choose(self) -> Choice | None:
        """Return what to start from; None for step 0, where there was never a checkpoint.

        An intervention that the newest checkpoint comes after has been made. A launch that is killed before
        its first checkpoint leaves the newest as it was, and the next one makes the intervention again, from
        the same point.

        Raises
        ------
        UserError
            If ``resume.checkpoint`` names no complete checkpoint, if all checkpoints are damaged, or
            if the one to start from is another user's.
        """
        checkpoint, torn = store.find_newest(self._saving.directory, self._damaged)
        choice = self._choose_intended(checkpoint)
        if choice:
            directory = self._saving.directory if self._saving.enabled else None
            check_owners(choice.checkpoint.path, directory, self._resume.trust_owner)
        # Only now: a launch that is refused changes nothing.
        self._tidy(checkpoint, torn)
        if choice is None:
            self._check_nothing_is_lost()
        return choice

    def reject(self, choice: Choice, reason: str) -> None:
        """Take note that the files of a choice are damaged; :meth:`choose` then returns another.

        Raises
        ------
        UserError
            If the configuration names this checkpoint: it is not replaced by another.
        """
        if choice.is_branch:
            raise UserError(
                f"{_KEY}={self._resume.checkpoint}: {choice.checkpoint.path} is damaged ({reason})"
                f"{_list_complete(self._saving.directory, {choice.checkpoint.path})}"
            )
        self._set_aside(choice.checkpoint.path, reason)

    def _choose_intended(self, newest: Checkpoint | None) -> Choice | None:
        resume = self._resume
        if newest and resume.was_made(newest.marker.resume):
            return Choice(newest, True, False)
        checkpoint = newest
        if resume.checkpoint is not None:
            checkpoint = _open_named(resume.checkpoint, self._saving.directory)
            LOGGER.info("%s=%s: going back to step %d", _KEY, resume.checkpoint, checkpoint.marker.step)
        if checkpoint is None:
            return None
        if resume.load_optimizer is not True:
            what = "Adam's moments start" if resume.load_optimizer else "the optimizer starts"
            step = checkpoint.marker.step
            LOGGER.info("resume.load_optimizer=%s: %s anew at step %d", resume.load_optimizer, what, step)
        return Choice(checkpoint, resume.load_optimizer, is_branch=resume.checkpoint is not None)

    def _tidy(self, newest: Checkpoint | None, torn: Mapping[Path, str]) -> None:
        for path, reason in torn.items():
            if not path.name.startswith(".") and store.is_ours(path):
                self._set_aside(path, reason)
            else:
                LOGGER.warning("skipping %s: it is not a complete checkpoint (%s)", path, reason)
        if newest and self._saving.enabled:
            # The launch before may have been killed between naming a checkpoint and this.
            store.point_latest(newest.path)

    def _set_aside(self, path: Path, reason: str) -> None:
        moved_to, stays = None, ""
        if self._saving.enabled:
            try:
                moved_to = store.set_aside(path)
            except OSError as error:
                stays = f", and cannot be moved: {error.strerror}"
        self._damaged[path] = reason
        where = f"; it is now {moved_to}" if moved_to else stays
        LOGGER.warning("the checkpoint %s is damaged (%s)%s", path, reason, where)
        self._report(path, reason, moved_to)

    def _check_nothing_is_lost(self) -> None:
        """Raise if there were checkpoints: a training that starts again at step 0 has to be asked for."""
        directory = self._saving.directory
        aside = store.list_damaged(directory)
        lost = [f"{path} ({reason})" for path, reason in self._damaged.items()]
        if not lost and not aside:
            return
        summary = "; ".join(lost) or f"{len(aside)} set aside by earlier launches"
        remains = f" Their files are in {directory / store.DAMAGED}." if aside else ""
        raise UserError(
            f"no whole checkpoint is left in {directory}: all are damaged: {summary}.{remains} To go on, put "
            f"a whole copy there, or name one: training.{_KEY}=/path/of/it; to start again at step 0, move "
            f"{'that directory' if aside else 'them'} away or train under another training.run.name"
        )


def _open_named(name: str, directory: Path) -> Checkpoint:
    path = Path(name) if "/" in name else directory / name
    checkpoint, wrong = store.open_checkpoint(path)
    if checkpoint is None:
        wrong = wrong if path.is_dir() else "there is no such directory"
        raise UserError(
            f"{_KEY}={name}: {path} is not a complete checkpoint ({wrong})"
            f"{_list_complete(directory, (), name)}"
        )
    return checkpoint


def _list_complete(directory: Path, without: Collection[Path], name: str = "") -> str:
    whole = [
        checkpoint for checkpoint in store.list_complete(directory) if store.find_damage(checkpoint) is None
    ]
    names = [checkpoint.path.name for checkpoint in whole if checkpoint.path not in without]
    return f"; complete ones in {directory} are {', '.join(names)}{suggest(name, names)}" if names else ""


def check_owners(checkpoint: Path, directory: Path | None, trusted: str | None) -> None:
    """Hold the owners of a checkpoint's directory and files against those that are trusted.

    Parameters
    ----------
    directory
        Where this training writes; a file there shows as whose this process's files are, which on an NFS
        export that maps users is another number. None if it writes nowhere.
    trusted
        Name or number of one user more.

    Raises
    ------
    UserError
        If any of them is somebody else's.
    """
    untrusted = why_untrusted(checkpoint, {os.geteuid(), 0, *_find_shown_owner(directory)}, trusted)
    if untrusted is not None:
        raise UserError(". ".join(untrusted))


def _find_shown_owner(directory: Path | None) -> set[int]:
    if directory is None:
        return set()
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return {os.fstat(file.fileno()).st_uid}
    except OSError:
        return set()

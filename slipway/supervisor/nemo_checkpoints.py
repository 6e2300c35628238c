"""Set aside the unfinished NeMo checkpoints of killed jobs before NeMo starts.

NeMo refuses to start with a second ``-last``, or if the only one is incomplete, and deletes incomplete
ones: all these are moved into a directory where nothing is overwritten. NeMo continues from a ``-last``
alone; where a whole checkpoint is newer, it is made one by hard links, which take no room.
"""

import os
import sys
from contextlib import suppress
from typing import Callable

from slipway.common.files import names_in
from slipway.common.node.checkpoints import LAST, UNFINISHED, find_newest_nemo, find_whole_nemo

Say = Callable[..., None]


def tidy(directory: str, attempt: str, say: Say) -> None:
    """Set aside what would keep NeMo from continuing; what cannot be moved is said and stays.

    Parameters
    ----------
    attempt
        The attempt of the job, which names the directory for files set aside.
    say
        Called with each message, and with ``stream`` where it is of something that went wrong.
    """
    _Tidying(directory.rstrip("/"), attempt, say).run()


class _Tidying:
    def __init__(self, directory: str, attempt: str, say: Say) -> None:
        self._directory, self._say = directory, say
        self._aside = os.path.join(directory + "-set-aside", attempt)

    def run(self) -> None:
        for name in names_in(self._directory):
            if name.endswith(UNFINISHED) and os.path.isfile(os.path.join(self._directory, name)):
                self._remove_unfinished(name)
        last = self._choose_last()
        for saved in find_whole_nemo(self._directory):
            if saved.is_last and os.path.dirname(saved.path) == self._directory and saved.path != last:
                why = f"NeMo takes one `-last` only, {os.path.basename(last)}"
                self._set_aside(saved.path, why)

    def _remove_unfinished(self, marker: str) -> None:
        name = marker[: -len(UNFINISHED)]
        places = [os.path.join(self._directory, name)]
        inside = [os.path.join(self._directory, part) for part in names_in(self._directory)]
        places += [os.path.join(folder, name + ".ckpt") for folder in [self._directory, *inside]]
        why = "a job ended while it wrote or removed it"
        moved = [self._set_aside(path, why) for path in places if os.path.exists(path)]
        # The marker last: without it an incomplete checkpoint would look whole.
        if all(moved):
            self._set_aside(os.path.join(self._directory, marker))

    def _choose_last(self) -> str:
        """Return the path of the one ``-last`` that stays, made of a newer checkpoint where there is one."""
        newest = find_newest_nemo(self._directory)
        lasts = [saved for saved in find_whole_nemo(self._directory) if saved.is_last]
        best = max(lasts, key=lambda saved: (saved.step, saved.time)).path if lasts else ""
        if newest is None or newest.is_last:
            return best
        if not os.path.isdir(newest.path) or os.path.dirname(newest.path) != self._directory:
            return best  # files of single ranks are left to NeMo
        name = os.path.basename(newest.path)
        temporary = os.path.join(self._aside, "." + name)
        import shutil  # late: it takes long, and there is seldom anything to tidy

        try:
            os.makedirs(self._aside, exist_ok=True)
            shutil.copytree(newest.path, temporary, symlinks=True, copy_function=_link)
            os.rename(temporary, newest.path + LAST)
        except (OSError, shutil.Error):
            shutil.rmtree(temporary, ignore_errors=True)
            self._say(f"could not make a `-last` of {newest.path}, the newest checkpoint", stream=sys.stderr)
        else:
            best = newest.path + LAST
            message = "NeMo continues from {}, which is newer than any `-last`: linked as {}"
            self._say(message.format(name, os.path.basename(best)))
        with suppress(OSError):  # unless something lies there
            os.rmdir(self._aside)
            os.rmdir(os.path.dirname(self._aside))
        return best

    def _set_aside(self, path: str, why: str = "") -> bool:
        import shutil

        to = self._aside + path[len(self._directory) :]
        while os.path.lexists(to):  # one attempt tidies twice
            to += ".again"
        try:
            os.makedirs(os.path.dirname(to), exist_ok=True)
            shutil.move(path, to)  # the directory may be a link to another file system
        except OSError:
            self._say(f"could not set {path} aside", stream=sys.stderr)
            return False
        if why:
            message = "set aside {}, because {}: it is now {}"
            self._say(message.format(os.path.basename(path), why, to))
        return True


def _link(source: str, target: str, *, follow_symlinks: bool = True) -> None:
    os.link(source, target, follow_symlinks=False)

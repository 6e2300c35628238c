"""A checkpoint that is being written, on this thread or beside the training."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import CheckpointException

from trainer.checkpoint import store
from trainer.checkpoint.marker import Marker
from trainer.checkpoint.writer import make_strategy, take_snapshot
from trainer.distributed import Place, any_rank, from_main
from trainer.logs import LOGGER


class Pending:
    """A save that has begun; every rank has one, and calls its methods at the same steps.

    Once it has begun nothing of it refers to the state any more: training may go on. The files are written
    under a hidden name, by a thread of each rank if so asked. The thread joins in no collective, for their
    order is the training's; :meth:`finish` has them all, and makes the checkpoint complete.

    Parameters
    ----------
    directory, name
        Where, and under which name.
    state
        megatron-core's sharded state.
    marker
        What is known of the checkpoint beforehand; its files and its serial are filled in.
    place
        This process.
    background
        Whether a thread writes. On a CPU the state is copied for it, on CUDA it is copied in either case.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        state: dict[str, Any],
        marker: Marker,
        place: Place,
        background: bool,
    ) -> None:
        self.marker = marker
        self._name, self._place = name, place
        self._unfinished = from_main(lambda: store.begin(directory, name))
        with self._as_exception():
            self._request = dist_checkpointing.save(
                state, str(self._unfinished), make_strategy(), async_sharded_save=True
            )
        self._error: str | None = None
        self._checksums: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        # A rank may have nothing to write: its shards are other ranks' too.
        if self._request.async_fn is not None:
            take_snapshot(self._request.async_fn_args[1], copy=background)
        if background:
            # A daemon, so that it keeps no process from ending: what it has not finished stays hidden.
            self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write()

    def is_written(self) -> bool:
        """Whether every rank has written its files, so that :meth:`finish` waits for none."""
        writing = self._thread is not None and self._thread.is_alive()
        return not any_rank(writing, self._place.device)

    def finish(self) -> store.Found:
        """Wait until every rank has its files on disk, and give the checkpoint its name.

        Raises
        ------
        RuntimeError
            If a rank could not write, on every rank; the hidden directory stays.
        """
        if self._thread is not None:
            self._thread.join()
        with self._as_exception():
            for finalize in self._request.finalize_fns:
                finalize()
        files, checksums = self._files()
        marker = replace(self.marker, files=files, checksums=checksums)
        return from_main(lambda: store.finish(self._unfinished, self._name, marker))

    def _write(self) -> None:
        try:
            if self._request.async_fn is not None:
                self._request.async_fn(*self._request.async_fn_args)
            # Beside the training too: waiting for the disk is the longest part. Before that the files are
            # still in memory, whatever the disk is.
            self._checksums = store.checksum_part(self._unfinished, self._place.world.rank)
            store.sync_part(self._unfinished, self._place.world.rank)
        except Exception as error:
            LOGGER.error("cannot write the checkpoint %s: %s", self._unfinished, error)
            self._error = str(error)

    def _files(self) -> tuple[dict[str, int], dict[str, str]]:
        """Gather the sizes and checksums of all ranks' files; when this returns they are all on disk."""
        rank = self._place.world.rank
        part: tuple[dict[str, int], dict[str, str], str | None] = ({}, {}, self._error)
        try:
            # What rank 0 wrote since then; a file that is there has its checksum already.
            checksums = store.checksum_part(self._unfinished, rank, self._checksums)
            part = (store.sync_part(self._unfinished, rank), checksums, self._error)
        except OSError as error:
            part = ({}, {}, str(error))
        parts: list[Any] = [None] * self._place.layout.world
        dist.all_gather_object(parts, part)
        for other, (_, _, told) in enumerate(parts):
            if told is not None:
                raise RuntimeError(f"{self._failed()}: rank {other}: {told}")
        sizes, checksums = {}, {}
        for written, checked, _ in parts:
            sizes.update(written)
            checksums.update(checked)
        return sizes, checksums

    def _failed(self) -> str:
        return f"the checkpoint {self._unfinished} cannot be written"

    @contextlib.contextmanager
    def _as_exception(self) -> Iterator[None]:
        """Turn torch's CheckpointException, which is no Exception and would be handled as an interrupt."""
        try:
            yield
        except CheckpointException as error:
            raise RuntimeError(self._failed()) from error

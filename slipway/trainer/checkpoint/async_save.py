"""Writing a checkpoint on this thread or in the background, by megatron-core's writer in this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from slipway.trainer.checkpoint import store
from slipway.trainer.checkpoint.marker import Marker
from slipway.trainer.checkpoint.strategies import SaveStrategy
from slipway.trainer.distributed import RankContext, broadcast_from_rank0
from slipway.trainer.logs import LOGGER


class AsyncSave:
    """A save that has begun; every rank has one, and calls its methods at the same steps.

    Once it has begun nothing of it refers to the state any more: training may go on. The files are written
    under a hidden name, by a thread of each rank if so asked. The thread joins in no collective, for their
    order is the training's; :meth:`finish` has them all, and makes the checkpoint complete.

    Parameters
    ----------
    marker
        The checkpoint's marker; its files and its serial are filled in.
    background
        Whether a thread writes. On a CPU the state is copied for it, on CUDA it is copied in either case.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        state: dict[str, Any],
        marker: Marker,
        rank_context: RankContext,
        strategy: SaveStrategy,
        background: bool,
    ) -> None:
        self.marker = marker
        self._name, self._rank_context = name, rank_context
        self._unfinished = broadcast_from_rank0(lambda: store.begin(directory, name, parents=False))
        self._failure = f"the checkpoint {self._unfinished} cannot be written"
        with self._raise_as_exception():
            self._request = strategy.begin(state, self._unfinished)
        self._error: str | None = None
        self._sizes: dict[str, int] = {}
        self._checksums: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        # A rank may have nothing to write: its shards are other ranks' too.
        if self._request.async_fn is not None:
            take_snapshot(self._request.async_fn_args[1], copy=background)
        if background:
            # A daemon keeps no process from ending; an unfinished checkpoint stays hidden.
            self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write()

    def is_writing(self) -> bool:
        """Return whether this rank's files are still being written."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> store.Checkpoint:
        """Wait until every rank has its files on disk, and give the checkpoint its name.

        Raises
        ------
        RuntimeError
            If a rank could not write, on every rank; the hidden directory stays.
        """
        if self._thread is not None:
            self._thread.join()
        with self._raise_as_exception():
            for finalize in self._request.finalize_fns:
                finalize()
        files, checksums = self._files()
        marker = replace(self.marker, files=files, checksums=checksums)
        return broadcast_from_rank0(lambda: store.finish(self._unfinished, self._name, marker))

    def _write(self) -> None:
        try:
            if self._request.async_fn is not None:
                self._request.async_fn(*self._request.async_fn_args)
            # In the background too: waiting for the disk is the longest part. Until then the page cache
            # holds the files, even if the disk is slow.
            self._checksums = store.checksum_part(self._unfinished, self._rank_context.world.rank)
            self._sizes = store.sync_part(self._unfinished, self._rank_context.world.rank)
        except Exception as error:
            LOGGER.error("cannot write the checkpoint %s: %s", self._unfinished, error)
            self._error = str(error)

    def _files(self) -> tuple[dict[str, int], dict[str, str]]:
        """Gather the sizes and checksums of all ranks' files; when this returns they are all on disk."""
        rank = self._rank_context.world.rank
        part: tuple[dict[str, int], dict[str, str], str | None]
        part = (self._sizes, self._checksums, self._error)
        if rank == 0:
            # The index, which rank 0 wrote since then; a file that was there has its checksum already.
            try:
                checksums = store.checksum_part(self._unfinished, rank, self._checksums)
                part = (store.sync_part(self._unfinished, rank), checksums, self._error)
            except OSError as error:
                part = ({}, {}, str(error))
        parts: list[Any] = [None] * self._rank_context.layout.world
        dist.all_gather_object(parts, part)
        for other, (_, _, failure) in enumerate(parts):
            if failure is not None:
                raise RuntimeError(f"{self._failure}: rank {other}: {failure}")
        sizes, checksums = {}, {}
        for written, checked, _ in parts:
            sizes.update(written)
            checksums.update(checked)
        return sizes, checksums

    @contextlib.contextmanager
    def _raise_as_exception(self) -> Iterator[None]:
        """Turn torch's CheckpointException, which is no Exception and would be handled as an interrupt."""
        try:
            yield
        except CheckpointException as error:
            raise RuntimeError(self._failure) from error


def take_snapshot(buckets: list[Any], copy: bool) -> None:
    """Replace the tensors that are going to be written by such in host memory.

    Parameters
    ----------
    buckets
        megatron-core's: for each file its path, its name and its content. Objects are bytes already.
    copy
        Whether the training goes on before they are written: tensors in host memory are then copied as well.
    """
    # In place, so that megatron-core's writer does not keep the tensors of the device.
    buckets[:] = [
        (path, name, (objects, [(item, _fetch(tensor, copy)) for item, tensor in tensors]))
        for path, name, (objects, tensors) in buckets
    ]
    # Copies from a device may still be under way.
    torch.cuda.synchronize()


def _fetch(tensor: Any, copy: bool) -> Any:
    if tensor.is_cpu:
        return tensor.clone() if copy else tensor
    return tensor.to("cpu", non_blocking=True)

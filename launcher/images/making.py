"""What both ways of making a squashfs are given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.images.progress import Progress
from launcher.images.references import Kind, Reference
from launcher.images.remote import Access, Remote
from launcher.images.working import Work


@dataclass(frozen=True, slots=True)
class Job:
    """An image that is to be made.

    Attributes
    ----------
    remote
        What is known of it beforehand; ``None`` where nothing could be asked.
    digest
        Of the image that was looked up; ``None`` where nothing could be asked.
    output
        The file to write, which is not there yet.
    descriptors
        Locks that the programs hold too.
    """

    source: Reference
    remote: Remote | None
    digest: str | None
    output: Path
    compression: str
    squash_options: tuple[str, ...]
    access: Access
    work: Work
    descriptors: tuple[int, ...]
    progress: Progress

    @property
    def source_pinned(self) -> Reference:
        """The image that was looked up, even if its tag has moved since."""
        if self.digest is None or self.source.kind is not Kind.REGISTRY:
            return self.source
        return self.source.at(self.digest)

    @property
    def packed(self) -> int:
        return self.remote.packed if self.remote else 0

    @property
    def unpacked(self) -> int:
        return self.remote.unpacked if self.remote else 0

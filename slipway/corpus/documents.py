"""Documents: the unit of text that is cleaned, deduplicated and encoded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """Text of one document, and its place in the sources.

    Attributes
    ----------
    text
        Empty, or of white space alone, if the source has none; such a document is dropped.
    file
        Number of the source file.
    offset
        Byte offset of the line in the uncompressed file; number of the row, page or member otherwise; 0 if
        the file is the document.
    id
        Identifier within the source, if it has one.
    """

    text: str
    file: int
    offset: int
    id: str | None = None

    @property
    def is_empty(self) -> bool:
        """Return True if it has no text."""
        return not self.text or self.text.isspace()

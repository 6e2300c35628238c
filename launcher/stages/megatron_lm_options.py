"""Options of a program, written one after the other."""

from __future__ import annotations

from collections.abc import Iterable


class Options(list[str]):
    """An argument vector under construction: what is ``None`` or ``False`` is left out."""

    def value(self, name: str, value: object) -> None:
        if value is not None:
            self += [name, str(value)]

    def values(self, name: str, values: Iterable[object] | None) -> None:
        written = [str(value) for value in values or ()]
        if written:
            self += [name, *written]

    def flag(self, name: str, wanted: object) -> None:
        if wanted:
            self.append(name)

    def __add__(self, other: list[str]) -> Options:  # type: ignore[override]
        return Options([*self, *other])

"""Write the tables of releases into docs/recipes.md, from launcher/releases.json.

    python scripts/releases_page.py [--check]

They stand between two comments; what is around them is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launcher.doctor.tool_rules import minimum_driver  # noqa: E402
from launcher.releases import (  # noqa: E402
    Contents,
    for_pyxis,
    images,
    megatron_lm,
    newest_with_pretraining,
    sources,
    table,
)
from scripts.generated_pages import main  # noqa: E402

_BEGIN = "<!-- Written by scripts/releases_page.py from launcher/releases.json: change that. -->"
_END = "<!-- End of what scripts/releases_page.py writes. -->"
_BLOCK = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)

_COLUMNS = {
    "nemo": "NeMo",
    "megatron_core": "megatron-core",
    "pytorch": "on PyTorch",
    "python": "Python",
    "cuda": "CUDA",
    "transformer_engine": "Transformer Engine",
    "pretraining": "scripts and models",
}
_WORDS = {True: "yes", False: "**no**"}
_UNKNOWN = ""


def page(text: str) -> str:
    """Return the page with its tables written anew."""
    return _BLOCK.sub(lambda _: "\n".join((_BEGIN, *_tables(), _END)), text)


def _tables() -> Iterator[str]:
    numbers = {name: number for number, name in enumerate(sources(), 1)}
    yield ""
    yield from _row("image", *_COLUMNS.values(), "driver from")
    yield from _row(*["---"] * (len(_COLUMNS) + 2))
    for known, row in zip(images(), table()["images"], strict=True):
        yield from _row(_name(known), *_facts(row["facts"], numbers), _driver(known))
    yield ""
    yield from _row("Megatron-LM", "of", "megatron-core", "Python from", "GPT", "T5", "BERT")
    yield from _row(*["---"] * 7)
    for release in megatron_lm():
        scripts = (f"`{release.scripts[kind]}`" for kind in ("gpt", "t5", "bert"))
        yield from _row(
            f"`{release.tag}`", release.date, release.megatron_core, release.python or _UNKNOWN, *scripts
        )
    yield ""
    yield "Where each fact is from, with the date of the source:"
    yield ""
    for name, source in sources().items():
        yield f"{numbers[name]}. {source.kind}, {source.date}: {_linked(source.where)}"
    yield ""


def _row(*cells: str) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _name(known: Contents) -> str:
    is_best = known == newest_with_pretraining()
    name = f"`{for_pyxis(known).removeprefix('nvcr.io#')}`"
    return f"**{name}**, the recipes'" if is_best else name


def _facts(facts: Mapping[str, Any], numbers: Mapping[str, int]) -> Iterator[str]:
    for key in _COLUMNS:
        value, source = facts.get(key, (None, None))
        told = _WORDS.get(value, str(value)) if value is not None else _UNKNOWN
        yield f"{told} [{numbers[source]}]" if value is not None else told


def _driver(known: Contents) -> str:
    least = minimum_driver(known.cuda) if known.cuda is not None else None
    return ".".join(f"{number:02}" for number in least) if least is not None else _UNKNOWN


def _linked(text: str) -> str:
    address, _, rest = text.partition(" ")
    return f"<{address}> {rest}".strip()


if __name__ == "__main__":
    sys.exit(main("recipes.md", page))

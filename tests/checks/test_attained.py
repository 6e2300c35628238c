"""The constants of the speed model, and a site's changes to them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import launcher.attained as module
from launcher.attained import InvalidEntry, attained
from launcher.config.compose import compose
from slipway.arithmetic.gpus import GPUS

DOCS = Path(__file__).parents[2] / "docs" / "time.md"
TABLE = Path(module.__file__).with_name("attained.json")


def test_every_known_gpu_has_constants() -> None:
    for gpu in GPUS.values():
        products = attained().products(gpu.generation, gpu.capability)
        assert 0 < products.half < 1
        assert 0 < products.attention < 1
    assert attained().products("h200", (9, 0)).measured == "h100"
    assert attained().products("h200", (9, 0)).is_alike
    # Nobody published steps on an L40S: it counts as the GPU of its compute capability, and says so.
    assert attained().products("l40s", (8, 9))[-2:] == ("a100", False)


def test_every_constant_has_a_source() -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    sources = " ".join((*table["sources"], table["sources"]["fitted"]))
    for name in set(table) - {"about", "sources", "assumed", "gpus"}:
        assert name in sources
    for name in table["gpus"]:
        assert name in sources


def test_site_changes_some_constants() -> None:
    changes = {"gpus": {"h100": {"half": 0.5}, "mi300": {"half": 0.4, "attention": 0.3}}, "links": 0.7}
    constants = attained(changes)
    assert constants.links == 0.7
    assert constants.products("h100", (9, 0))[:2] == (0.5, attained().products("h100", (9, 0)).fp8)
    assert constants.products("mi300", (9, 4))[:3] == (0.4, None, 0.3)
    assert attained(changes | {"like": {"l4": "h100"}}).products("l4", (8, 9)).half == 0.5
    assert attained({}) == attained()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"link": 0.7}, "link: no such key; did you mean links?"),
        ({"gpus": {"h100": {"bf16": 0.5}}}, "gpus.h100.bf16: no such key; valid: "),
        ({"gpus": {"h100": {"half": 1.5}}}, "gpus.h100.half=1.5: expected a part of the peak"),
        ({"gpus": {"new": {"bf16": 0.5}}}, "gpus.new.bf16: no such key; valid: half, fp8, attention"),
        ({"gpus": {"h100": 0.5}}, "gpus.h100=0.5: expected a mapping"),
        ({"gpus": {"new": {"half": 0.5}}}, "gpus.new: needed too: attention"),
        ({"gpus": {"h100": {"half": None}}}, "gpus.h100.half=None: expected a part of the peak"),
        ({"memory": "much"}, "memory=much: expected a part of the bandwidth, above 0 and up to 1"),
        ({"memory": True}, "memory=True: expected a part of the bandwidth"),
        ({"memory": 0}, "memory=0: expected a part of the bandwidth, above 0 and up to 1"),
        ({"memory": 100}, "memory=100: expected a part of the bandwidth"),
        ({"memory": float("nan")}, "memory=nan: expected a part of the bandwidth"),
        ({"links": 0}, "links=0: expected a part of the bandwidth"),
        ({"engines": {"nemo": 0}}, "engines.nemo=0: expected a factor, from 0.1 and up to 100"),
        ({"engines": {"nemo": 1e300}}, "engines.nemo=1e+300: expected a factor"),
        ({"families": {"gpt": 0}}, "families.gpt=0: expected a factor, from 0.1 and up to 100"),
        ({"tile": {"half": 1e200}}, "tile.half=1e+200: expected rows or columns, from 0 and up to 4096"),
        ({"launch": 2}, "launch=2: expected seconds, from 0 and up to 1"),
        ({"step": 1e6}, "step=1000000.0: expected seconds, from 0 and up to 600"),
        ({"megatron": {"step": 2}}, "megatron.step=2: expected seconds, from 0 and up to 1"),
        ({"megatron": {"compiled": 0}}, "megatron.compiled=0: expected a factor, from 0.1 and up to 100"),
        ({"like": {"h100": [1]}}, "like.h100=[1]: expected one of v100, a100"),
        ({"like": {"h100": {"a": 1}}}, "like.h100={'a': 1}: expected one of v100, a100"),
        ({"like": {"h100": 1}}, "like.h100=1: expected one of v100, a100"),
        ({"like": {"l4": "h1000"}}, "like.l4=h1000: expected one of v100, a100"),
        ({"exposed": {"data": -1}}, "exposed.data=-1: expected a part, from 0 and up to 1"),
    ],
)
def test_invalid_constants_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidEntry, match="^" + re.escape(message)):
        attained(changes)


def test_every_shipped_constant_is_within_its_bounds() -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    assert attained({key: table[key] for key in set(table) - {"about", "sources", "assumed"}}) == attained()
    # Another GPU may be like one that the site adds.
    own = {"gpus": {"mi300": {"half": 0.4, "attention": 0.3}}, "like": {"mi300x": "mi300"}}
    assert attained(own).products("mi300x", (9, 4)).half == 0.4


def test_documented_change_works() -> None:
    (command,) = re.findall(r"^(\S*estimates\.attained=.*)$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    composed = compose([*shlex.split(command)])
    assert attained(composed.config.estimates.attained).links == 0.7

"""The number of tasks is nowhere written down: a job has as many as it got, and each is told how many."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from launcher.config.compose import BatchComposer
from launcher.drafting import Draft, Request, drafts
from launcher.launching.writing import files_of, manifest_of
from launcher.runs import provenance

NODES, GPUS = (1, 2, 8, 16, 64), (1, 4, 8)
# Prime, so that their products with the others are no number that stands there for another reason.
OTHER_NODES, OTHER_GPUS = 89, 7

# The image file is only named.
ENGINES = {
    "nemo": ("training=gpt3/126m", "cluster=bcm", "container=/apps/nemo.sqsh"),
    "megatron": ("training=gpt3/126m", "cluster=bcm", "engine=megatron", "container=null"),
    "megatron_lm": ("training=gpt3/126m", "cluster=bcm", "engine=megatron_lm", "container=null"),
    "t5": ("training=t5/220m", "cluster=bcm", "resilience.links=3"),
    "allocation": ("training=gpt3/126m", "cluster=bcm", "cluster.scheduler=allocation", "container=null"),
    "local": ("training=gpt3/126m", "cluster=local"),
}


class Renderer:
    """Every text that a launch writes, by the name of its file, for numbers of nodes and of GPUs."""

    def __init__(self, engine: str) -> None:
        self._base = [*ENGINES[engine], "base_results_dir=/r", "data_dir=/d", "cluster.python=/bin/python"]
        self._sweep = BatchComposer(self._base)
        self._texts: dict[tuple[int, int], Mapping[str, str]] = {}

    def texts(self, nodes: int, gpus: int) -> Mapping[str, str]:
        if (nodes, gpus) not in self._texts:
            words = [f"training.trainer.num_nodes={nodes}", f"cluster.gpus_per_node={gpus}"]
            request = Request([*self._base, *words], ["slipway", *words], number=1, tag="tag")
            (made,) = drafts(request, [self._sweep.compose(words)])
            self._texts[nodes, gpus] = _texts(made, request)
        return self._texts[nodes, gpus]


def _texts(made: Draft, request: Request) -> Mapping[str, str]:
    manifest = manifest_of(made, request, provenance.Origin({}, {}))
    contents = files_of(made, manifest, request)
    texts = {path.name: text for path, text in contents.items() if isinstance(text, str)}
    # When it was launched, and by which process.
    texts["launcher.json"] = re.sub(r'"(created|launcher_pid)": .*', "", texts["launcher.json"])
    return texts


@pytest.fixture(scope="module", params=ENGINES)
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return Renderer(request.param)


def differing(one: str, other: str) -> set[tuple[str, str]]:
    """The numbers in which two texts differ, in pairs; all else must be the same."""
    assert re.sub(r"\d+", "0", one) == re.sub(r"\d+", "0", other)
    pairs = zip(re.findall(r"\d+", one), re.findall(r"\d+", other), strict=True)
    return {(left, right) for left, right in pairs if left != right}


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("nodes", NODES)
def test_no_file_of_a_launch_holds_the_number_of_tasks(renderer: Renderer, nodes: int, gpus: int) -> None:
    """With other nodes a file differs in their number alone, and with other GPUs in that of these."""
    texts = renderer.texts(nodes, gpus)
    for name, text in renderer.texts(OTHER_NODES, gpus).items():
        assert differing(texts[name], text) <= {(str(nodes), str(OTHER_NODES))}, name
    for name, text in renderer.texts(nodes, OTHER_GPUS).items():
        assert differing(texts[name], text) <= {(str(gpus), str(OTHER_GPUS))}, name
    assert not [text for text in texts.values() if re.search(r"WORLD_SIZE=\"?\d", text)]


def test_differences_are_seen() -> None:
    assert differing("WORLD_SIZE=16 --nodes=2", "WORLD_SIZE=712 --nodes=89") == {("16", "712"), ("2", "89")}

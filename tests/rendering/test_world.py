"""No file of a launch holds the number of tasks: each task learns it from its job."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from launcher.config.compose import BatchComposer
from launcher.drafting import Draft, Request, drafts
from launcher.launching.writing import files_of, manifest_of
from launcher.runs import provenance

NODES, GPUS = (1, 2, 8, 16, 64), (1, 4, 8)
# Prime, so that no product with the others stands in a file for another reason.
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
            (draft,) = drafts(request, [self._sweep.compose(words)])
            self._texts[nodes, gpus] = _texts(draft, request)
        return self._texts[nodes, gpus]


def _texts(draft: Draft, request: Request) -> Mapping[str, str]:
    manifest = manifest_of(draft, request, provenance.Origin({}, {}))
    contents = files_of(draft, manifest, request)
    texts = {path.name: text for path, text in contents.items() if isinstance(text, str)}
    # When it was launched, and by which process.
    texts["launcher.json"] = re.sub(r'"(created|launcher_pid)": .*', "", texts["launcher.json"])
    return texts


@pytest.fixture(scope="module", params=ENGINES)
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return Renderer(request.param)


def differing_numbers(text: str, other_text: str) -> set[tuple[str, str]]:
    """Return the pairs of numbers in which two texts differ; all else must be the same."""
    assert re.sub(r"\d+", "0", text) == re.sub(r"\d+", "0", other_text)
    pairs = zip(re.findall(r"\d+", text), re.findall(r"\d+", other_text), strict=True)
    return {(left, right) for left, right in pairs if left != right}


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("nodes", NODES)
def test_no_file_of_a_launch_holds_the_number_of_tasks(renderer: Renderer, nodes: int, gpus: int) -> None:
    """A file differs in the number of nodes alone for other nodes, and in that of GPUs for other GPUs."""
    texts = renderer.texts(nodes, gpus)
    for name, text in renderer.texts(OTHER_NODES, gpus).items():
        assert differing_numbers(texts[name], text) <= {(str(nodes), str(OTHER_NODES))}, name
    for name, text in renderer.texts(nodes, OTHER_GPUS).items():
        assert differing_numbers(texts[name], text) <= {(str(gpus), str(OTHER_GPUS))}, name
    assert not [text for text in texts.values() if re.search(r"WORLD_SIZE=\"?\d", text)]


def test_differences_are_seen() -> None:
    assert differing_numbers("WORLD_SIZE=16 --nodes=2", "WORLD_SIZE=712 --nodes=89") == {
        ("16", "712"),
        ("2", "89"),
    }

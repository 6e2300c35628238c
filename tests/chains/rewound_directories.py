"""Chains whose payload lays the checkpoint directory of a real training that went back, moment by moment."""

from __future__ import annotations

import shlex
import sys
from functools import partial

from tests.chains import recorded_directories
from tests.chains.chain_runs import CHAIN, ChainRuns
from tests.chains.recorded_directories import RECORDED, lay, moments

# One launch, the way back by hand, and three links of the next launch; a fourth has nothing left to do.
MOMENTS = 5
LINKS = MOMENTS - 2
_BODY = """
into=${{work%/*}}/results/${{work##*/}}/checkpoints
((link > 1 + {links})) || {lay} $((link == 1 ? 0 : link)) "$into" || exit 2
((link == 1 || link > 1 + {links})) || exit 1
"""


def replay_rewind(engine: str, runs: ChainRuns, run: str) -> None:
    """Replay a recording: each link crashes after it saved a lower step than the first launch left."""
    recording = RECORDED / f"{engine}.json"
    source = runs.directory / f"{run}-source"
    script = source / "examples" / "nlp" / "language_modeling" / "megatron_gpt_pretraining.py"
    for path in (script, source / "pretrain_gpt.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    command = shlex.join([sys.executable, recorded_directories.__file__, str(recording)])
    settings = [f"engine={engine}", "container=null", f"{engine}_path={source}", f"data_dir={source}/data"]
    runs.chain(run, _BODY.format(lay=command, links=LINKS), *settings, nodes="n1")
    runs.until_over(run)
    lay(moments(recording)[1], runs.directory / "results" / run / "checkpoints")
    own = [f"training.run.name={run}", f"cluster.python={runs.directory / f'{run}.sh'}"]
    chain = [f"resilience.links={LINKS + 2}", f"resilience.max_failures={LINKS}"]
    done = runs.begin(*CHAIN, *own, *settings, *chain, nodes="n1")
    assert done.returncode == 0, done
    runs.until_over(run)


# The runs, by their names.
REWOUND = {f"rewound_{engine}": partial(replay_rewind, engine) for engine in ("nemo", "megatron_lm")}

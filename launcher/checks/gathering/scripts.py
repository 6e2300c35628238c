"""The program that an engine's tasks run, in a checkout of NeMo or Megatron-LM that this machine has."""

from __future__ import annotations

from launcher.checks.gathering.path_resolver import Ground
from launcher.checks.path_facts import Lack
from launcher.file_systems import is_shared
from launcher.plan import Plan
from launcher.releases import megatron_lm

_KEYS = {"nemo": "nemo_path", "megatron_lm": "megatron_lm_path"}

# Where the job looks for Megatron-LM's script of a type of model: those of templates/megatron_lm.py.
MEGATRON_LM_PLACES = ("pretrain_{0}.py", "examples/{0}/pretrain_{0}.py")


def lost_script(ground: Ground) -> tuple[Lack, ...] | None:
    """Return the program if the checkout that it should be in is here and lacks it; else the image has it."""
    job = ground.plan.job
    key, root = _KEYS.get(job.engine), job.payload.working_dir
    if key is None or job.config is None:
        return None
    places = _places(ground.plan)
    if not places:
        return None
    checkout, paths = ground.host(root), [ground.host(f"{root}/{place}") for place in places]
    if checkout is None or not checkout.is_dir() or any(path is None or path.is_file() for path in paths):
        return ()
    why = f"there is no {' and no '.join(places)} in this checkout"
    certain = ground.nodes_are_here or is_shared(checkout)
    return (ground.lost(key, root, why, certain=certain, fix=_fix(job.engine)),)


def _places(plan: Plan) -> list[str]:
    """Return the paths within the checkout that the program may have: one of them is enough."""
    root, argv = plan.job.payload.working_dir, plan.job.payload.argv
    if plan.job.engine == "megatron_lm":
        # What starts the script is the launch's own, and has the checkout and the type of model after it.
        model_type = argv[argv.index(str(plan.paths.megatron_lm)) + 2]
        return list(dict.fromkeys(place.format(model_type) for place in MEGATRON_LM_PLACES))
    return [word.removeprefix(f"{root}/") for word in argv if word.endswith(".py")][:1]


def _fix(engine: str) -> str:
    if engine == "nemo":
        return "a checkout of NeMo up to v2.4.0"
    return f"a checkout of Megatron-LM from {megatron_lm()[0].tag} on, which has one of them"

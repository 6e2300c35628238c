"""Python reads this at its start when its directory is on PYTHONPATH: Megatron-LM then trains without a GPU.

For the tests alone. Nothing is imported here: a process that never imports Megatron-LM pays nothing.
"""

import os

# Megatron-LM compiles its fused functions; as they are, they give the same numbers and start much sooner.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import megatron_lm_on_cpu  # noqa: F401

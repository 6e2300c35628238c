"""Stand-ins on a CPU for what NeMo 2.4 and megatron-core 0.12 expect of a GPU machine: made up, or left out.

Every change is made right after the import of the module that it concerns, by a hook; NeMo's own code is
untouched. Where CUDA is available nothing is changed.
"""

from nemo_on_cpu import megatron_core, nemo, torch_calls  # noqa: F401
from nemo_on_cpu.hooks import install

install()

"""Stand-ins for the tools that know a node's health: each node of a sandbox has the faults of its file."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.programs import write_programs

# A node has eight idle GPUs, unless its file says something else.
NVIDIA_SMI = """
state={state}/$SLURMD_NODENAME
case $1 in
--query-gpu=*)
    gpus=8 ecc=0 heat="Not Active"
    [[ ! -e $state ]] || source "$state"
    for ((gpu = 0; gpu < gpus; gpu++)); do
        echo "$gpu, 0, $ecc, No, No, None, $heat, Not Active"
    done ;;
esac
"""
DMESG = """
read -r uptime _ </proc/uptime
[[ ! -e {state}/$SLURMD_NODENAME ]] || source {state}/$SLURMD_NODENAME
[[ -z ${{xid-}} ]] || echo "[$uptime] NVRM: Xid (PCI:0000:c3:00): $xid, GPU has fallen off the bus."
"""
# In the words of the contract of `resilience.health_command`.
SITE_TOOL = """
[[ ! -e {state}/$SLURMD_NODENAME ]] || source {state}/$SLURMD_NODENAME
[[ -z ${{verdict-}} ]] || printf '{{"verdict": "%s", "reasons": ["fan 2 stands"]}}' "$verdict"
"""


def write_node_tools(folder: Path, state: Path) -> Path:
    """Write the stand-ins, which read `state`/NODE: lines such as ``gpus=7``, ``ecc=2`` or ``xid=79``."""
    bodies = {"nvidia-smi": NVIDIA_SMI, "dmesg": DMESG, "site-tool": SITE_TOOL}
    return write_programs(folder, {name: body.format(state=state) for name, body in bodies.items()})

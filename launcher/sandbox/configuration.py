"""The text of the sandbox's configuration files, as pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable

from launcher.sandbox.options import Ports, SandboxOptions, SandboxPaths

CLUSTER = "sandbox"
# The host name of slurmctld and slurmdbd; Slurm compares it with SlurmctldHost and DbdHost.
CONTROLLER = "controller"
DATABASE = "slurm_acct_db"
# A claim like the processors: memory is neither counted nor limited (SelectTypeParameters=CR_CPU).
_REAL_MEMORY_MB = 500_000

# Unknown keys are fatal to every command of Slurm: each of these exists in 22.05 and is documented in 26.05.
# What Slurm calls none (TaskPlugin, SwitchType, MpiDefault and, without accounting, AccountingStorageType and
# JobAcctGatherType) is the default, and no longer has a name since 23.11.
_SLURM_CONF = """\
# Written by `slipway sandbox up`. After a change: scontrol reconfigure.
ClusterName={cluster}
SlurmctldHost={controller}(127.0.0.1)
SlurmctldPort={ports.slurmctld}
# Another number at each boot: a run of an earlier sandbox must not be taken for a job of this one.
FirstJobId={first_job_id}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={paths.munge_socket}
# Daemons listen on loopback only. It cannot be set for everyone: a client would listen on the address that
# the machine's own name resolves to, and job steps answer to 127.0.0.1.
Include {paths.communication}

StateSaveLocation={paths.controller_state}
SlurmdSpoolDir={paths.spool}/%n
SlurmctldPidFile={paths.run}/slurmctld.pid
SlurmdPidFile={paths.run}/%n.pid
SlurmctldLogFile={paths.logs}/slurmctld.log
SlurmdLogFile={paths.logs}/%n.log
SlurmctldDebug=info
SlurmdDebug=info
PlugStackConfig={paths.plugstack_conf}
MailProg=/bin/true
JobCompType=jobcomp/filetxt
JobCompLoc={paths.logs}/jobcomp.txt

# No control groups: they are absent from many containers.
ProctrackType=proctrack/linuxproc
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# This file, and not the machine, defines the resources of nodes.
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0{requeue}
{signal}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
# Short: a killed node is noticed in seconds, and comes back by itself.
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=5
InactiveLimit=0
# Ended jobs stay in squeue and scontrol for ten minutes, for those who have no sacct.
MinJobAge=600
{accounting}
NodeName={nodes} NodeAddr=127.0.0.1 Port={node_ports} {offer} State=UNKNOWN
PartitionName=gpu Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
PartitionName=high Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=20 PreemptMode=OFF
"""

# AccountingStoragePass is the munge socket; without it slurmctld waits for the system's for minutes.
_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={ports.slurmdbd}
AccountingStoragePass={paths.munge_socket}
AccountingStorageTRES={tres}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5
PriorityType=priority/multifactor
"""

# CLOUD nodes need no slurmd, and are not pinged, until a job is given to them: --test-only accepts a script
# for a thousand of them in 20 ms. What makes the partition unusable in earnest is State=DOWN: jobs may queue
# (reason PartitionDown) but never start, and --test-only does not look at it. With State=UP a job would be
# "started" and wait in CONFIGURING for nodes that never boot. The two programs do nothing; 22.05 judges
# scripts without them too, but whoever sets the partition UP needs them. SuspendTime=INFINITE keeps Slurm
# from ever powering a node down, n1 and its like included.
_CLOUD = """
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=INFINITE
{private}NodeName={cloud} {offer} State=CLOUD
PartitionName=cloud Nodes={cloud} MaxTime=INFINITE State=DOWN
"""

# slurm.conf includes the first; the daemons see the second mounted over it.
CLIENT_COMMUNICATION = "# Empty for clients. The daemons see another file here, mounted over this one.\n"
DAEMON_COMMUNICATION = "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny\n"

_SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={paths.munge_socket}
DbdHost={controller}
DbdAddr=127.0.0.1
DbdPort={ports.slurmdbd}
CommunicationParameters=NoInAddrAny
SlurmUser=root
PidFile={paths.run}/slurmdbd.pid
LogFile={paths.logs}/slurmdbd.log
DebugLevel=info
StorageType=accounting_storage/mysql
# "localhost" means the Unix socket, which slurmdbd finds through MYSQL_UNIX_PORT: the database has no port.
StorageHost=localhost
StorageUser=root
StorageLoc={database}
"""


def slurm_conf(options: SandboxOptions, ports: Ports, version: tuple[int, int], first_job_id: int = 1) -> str:
    """Return the text of slurm.conf for a version of Slurm."""
    paths = SandboxPaths(options.directory)
    gres = "gpu" if options.gpu_type is None else f"gpu:{options.gpu_type}"
    offer = f"CPUs={options.cpus} RealMemory={_REAL_MEMORY_MB} Gres={gres}:{options.gpus}"
    accounting = ""
    if options.accounting:
        tres = ",".join(dict.fromkeys(["gres/gpu", f"gres/{gres}"]))
        accounting = _ACCOUNTING.format(paths=paths, ports=ports, tres=tres)
        if options.is_enforced:  # Slurm has no word for nothing here
            accounting += "AccountingStorageEnforce=associations,limits,qos\n"
    text = _SLURM_CONF.format(
        cluster=CLUSTER,
        controller=CONTROLLER,
        paths=paths,
        ports=ports,
        first_job_id=first_job_id,
        # From 25.05 Slurm always requeues such a job, and the name means nothing.
        requeue=",requeue_setup_env_fail" if version < (25, 5) else "",
        signal=(
            "SlurmctldParameters=preempt_send_user_signal"
            if version < (23, 2)
            else "PreemptParameters=send_user_signal"
        ),
        accounting=accounting,
        nodes=_bracket("n", 1, options.nodes),
        node_ports=_bracket("", ports.slurmd[0], ports.slurmd[-1]),
        offer=offer,
    )
    if options.cloud_nodes:
        # From 23.02 sinfo shows nodes that are powered down by default.
        private = "PrivateData=cloud\n" if version < (23, 2) else ""
        text += _CLOUD.format(cloud=cloud_names(options.cloud_nodes), offer=offer, private=private)
    return text


def choose_first_job_id(now: float) -> int:
    """Return a job number for a boot at `now` (Unix seconds), larger by 61 with every quarter of a second.

    Sandboxes that boot within seconds then seldom have jobs of one number, which would meet at one port.
    """
    return int(now * 4) * 61 % 60_000_000 + 1


def slurmdbd_conf(paths: SandboxPaths, ports: Ports) -> str:
    return _SLURMDBD_CONF.format(controller=CONTROLLER, paths=paths, ports=ports, database=DATABASE)


def gres_conf(options: SandboxOptions) -> str:
    """Return the text of gres.conf: every node has the same fake GPUs, a cloud node too."""
    devices = SandboxPaths(options.directory).devices
    kind = "" if options.gpu_type is None else f" Type={options.gpu_type}"
    nodes = [_bracket("n", 1, options.nodes)]
    nodes += [cloud_names(options.cloud_nodes)] if options.cloud_nodes else []
    files = _bracket(f"{devices}/gpu", 0, options.gpus - 1)
    return "".join(f"NodeName={names} Name=gpu{kind} File={files}\n" for names in nodes)


def plugstack_conf(options: SandboxOptions) -> str:
    """Return the text of plugstack.conf; empty, the plug-ins of another Slurm on the machine are not loaded.

    Pyxis keeps images of a registry under a name made of the job's number and the step's: several nodes of
    one job must not share the folder.
    """
    if options.pyxis is None:
        return ""
    return f"required {options.pyxis} runtime_path={SandboxPaths(options.directory).own_containers}/pyxis\n"


def enroot_conf(paths: SandboxPaths, machine: str) -> str:
    """Return the enroot.conf of the nodes: own folders, the rest as in the machine's file.

    Pyxis keeps ENROOT_DATA_PATH and its like of a job's environment from Enroot, so that only this file can
    say it. Of two lines for a key Enroot takes the first; it calls a shell for the values.
    """
    own = paths.own_containers
    lines = [f"ENROOT_{name}_PATH {own}/{name.lower()}-$(id -u)" for name in ("DATA", "RUNTIME")]
    # Layers of a registry's images: fetched once for all nodes, as in a home directory that they share.
    lines.append(f"ENROOT_CACHE_PATH {paths.containers}/cache-$(id -u)")
    return "\n".join(["# Written by `slipway sandbox up`.", *lines, "", machine.rstrip("\n")]) + "\n"


def cgroup_conf(version: tuple[int, int]) -> str:
    """Return the text of cgroup.conf: no control groups.

    slurmd looks for them even where no plugin of slurm.conf uses them, and ends where it finds none. Before
    24.05 they cannot be disabled; the plugin for version 1 then starts without any.
    """
    return f"CgroupPlugin={'disabled' if version >= (24, 5) else 'cgroup/v1'}\n"


def hosts(options: SandboxOptions, name: str, machine: Iterable[str]) -> str:
    """Return the hosts file of the daemons: all nodes are this machine, after the names it knows already.

    slurmctld of 24.11 connects to srun by the machine's own `name`, even where it does not resolve, or to an
    address that the machine does not have; srun listens on all addresses. Names that the sandbox has too are
    not taken from the lines of the machine's own file.
    """
    ours = list(dict.fromkeys([*options.node_names, CONTROLLER, name, name.partition(".")[0]]))
    lines = ["127.0.0.1 localhost", f"127.0.0.1 {' '.join(ours)}"]
    for line in machine:
        words = line.split("#")[0].split()
        names = [name for name in words[1:] if name not in ours]
        if names:
            lines.append(" ".join([words[0], *names]))
    return "\n".join(lines) + "\n"


def nsswitch(machine: Iterable[str]) -> str:
    """Return the nsswitch.conf of a node: its hosts file answers before every other source of host names.

    The machine's own file, of these lines, may ask other sources first, and none after one that answered;
    without the file, glibc asks DNS first.
    """
    lines, sources = [], " dns"
    for line in machine:
        database, _, rest = line.partition(":")
        if database.strip() == "hosts":
            sources = re.sub(r"\s*\bfiles\b(\s*\[[^]]*\])*", "", rest.split("#")[0]).rstrip()
        else:
            lines.append(line)
    return "\n".join([*lines, f"hosts: files{sources}"]) + "\n"


def cloud_names(count: int) -> str:
    """Name the cloud nodes the way Slurm does: ``cloud[0001-1024]``."""
    width = max(4, len(str(count)))
    return f"cloud[{1:0{width}}-{count:0{width}}]"


def _bracket(prefix: str, first: int, last: int) -> str:
    return f"{prefix}{first}" if first == last else f"{prefix}[{first}-{last}]"

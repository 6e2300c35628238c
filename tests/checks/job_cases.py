"""Cases of the checks that look at the job: its time, its names, its files, its cluster."""

from __future__ import annotations

from dataclasses import replace

from launcher.checks.facts import (
    Change,
    ExcludeFile,
    Facts,
    HostFacts,
    Interpreter,
    PathFacts,
    RewrittenPast,
    SubmissionFacts,
)
from launcher.checks.findings import Severity
from launcher.slurm.cluster import ClusterFacts, Partition
from slipway.common.node.excluded import ExcludedNode
from tests.checks.cases import (
    LIMIT,
    PREFIX,
    SHIPPED,
    Case,
    added,
    bad,
    chain,
    cluster_request,
    conversion,
    earlier_training,
    good,
    in_container,
    in_image,
    missing_path,
    missing_secret,
    on_disks,
    sharded_checkpoint,
    tokenized,
    warns,
    with_array,
)
from tests.checks.clusters import CLUSTER, GPU
from tests.checks.plans import KNOWN

WORKERS = "model.data.num_workers"

# A plan without unusual requests is a good case of each of these.
CLUSTER_CHECKS = (
    "cluster.partition",
    "cluster.time_limit",
    "cluster.nodes",
    "cluster.gpus",
    "cluster.cpus",
    "cluster.memory",
    "cluster.account",
    "cluster.qos",
    "cluster.partitions",
)


def closed_to(field: str, name: str) -> dict[str, Facts]:
    """Return a job for the default partition, which is closed to an account or a QOS."""
    partition = Partition("gpu", is_default=True, total_nodes=4)._replace(**{field: (name,)})
    return {"facts": replace(KNOWN, cluster=replace(CLUSTER, partitions=(partition,)))}


# One partition is closed to the account, the other to the QOS.
CLOSED_TO_EACH = {
    "plan": {"queue": {"partition": "a,b"}},
    "facts": replace(
        KNOWN,
        cluster=replace(
            CLUSTER,
            partitions=(Partition("a", denied_accounts=("research",)), Partition("b", qos=("debug",))),
            nodes={"a": GPU, "b": GPU},
        ),
    ),
}

JOB_CASES = [
    # chains of jobs; further cases are in test_resilience_checks.py
    bad("chain.requeue", {}, "cluster.requeue=true", "the chain of 3 jobs", plan=chain(requeue=True)),
    bad("chain.requeue", {}, "may restart, by the site's default,", plan=chain(requeue=None)),
    good("chain.requeue", {}, plan=chain()),
    bad("chain.dependency", {}, "alternatives", plan=chain(dependency="afterok:1?afterok:2")),
    good("chain.dependency", {}, plan=chain(dependency="afterok:1,singleton")),
    bad("chain.resume", {"exp_manager.resume_if_exists": False}, "begin anew", plan=chain()),
    good("chain.resume", {"exp_manager.resume_if_exists": False}, plan=chain(links=1)),
    bad("time.save", {}, "as soon as it begins", plan=chain(links=1, signal="B:USR1@86400")),
    good("time.save", {}, plan=chain(links=1, signal="B:USR1@86399")),
    # images; further cases are in test_image_checks.py
    bad(
        "image.engine",
        {},
        "nemo:26.04 does not have NeMo's",
        "container=nvcr.io#nvidia/nemo:25.07",
        **in_image("26.04"),
    ),
    good("image.engine", {}, **in_image("25.07")),
    warns("image.network", {}, "spcx", "libnccl-net.so", **in_image("26.08", FI_PROVIDER="efa")),
    good("image.network", {}, **in_image("26.08")),
    bad(
        "path.script",
        {},
        "nemo_path='/no/x': there is no such file",
        facts=missing_path("script", "nemo_path"),
    ),
    good("path.script", {}, facts=replace(KNOWN, paths=PathFacts(script=()))),
    # time
    bad(
        "time.limit",
        {},
        "training.run.time_limit='banana'",
        "MINUTES",
        plan={"resources": {"time_limit": "banana"}},
    ),
    *(
        good("time.limit", {}, plan={"resources": {"time_limit": text}})
        for text in ("30", "30:00", "1:00:00", "2-12", "2-12:30", "2-12:30:00", "UNLIMITED", None)
    ),
    warns(
        "time.max_time",
        {"trainer.max_time": "01:00:00:00"},
        "time limit, 1-00:00:00",
        "'00:23:30:00' or less",
    ),
    bad("time.max_time", {"trainer.max_time": 1800}, "max_time=1800: expected days:hours:minutes:seconds"),
    bad("time.max_time", {LIMIT: "23:30:00"}, "max_time_per_run='23:30:00'"),
    bad("time.max_time", {"trainer.max_time": None, LIMIT: 30}, "training.trainer.max_time=30"),
    good("time.max_time", {"trainer.max_time": "09:00:00:00", LIMIT: "00:23:00:00"}),
    good("time.max_time", {"trainer.max_time": "09:00:00:00"}, plan={"resources": {"time_limit": None}}),
    good("time.max_time", {"trainer.max_time": None}),
    # names
    warns(
        "keys.unknown",
        {"model.micro_batchsize": 4},
        "training.model.micro_batchsize=4: no shipped configuration has this key",
        "did you mean training.model.micro_batch_size?",
        facts=Facts(("model.micro_batchsize",), SHIPPED, (), {}),
    ),
    # Our trainer refuses by itself what it does not know.
    good("keys.unknown", {"model.max_step": 4}, **added("model.max_step", "megatron")),
    good(
        "keys.unknown",
        {"model.torch_profile.ranks": [0]},
        plan={"engine": "megatron"},
        facts=Facts(("model.torch_profile.ranks",), frozenset({"model.nsys_profile.ranks"}), (), {}),
    ),
    good("keys.unknown", {"model.rotary_base": 4}, **added("model.rotary_base", "megatron")),
    warns(
        "keys.unknown",
        {"model.kd_teacher_load": "/x"},
        "training.model.kd_teacher_load='/x': no shipped configuration has this key, and NeMo ignores a key",
        **added("model.kd_teacher_load", "nemo"),
    ),
    # One line for all, as a tree of NeMo's own keys has many.
    warns(
        "keys.unknown",
        {f"model.{name}": 1 for name in ("a", "b", "c", "d", "e")},
        "training.model.a=1: no shipped configuration has this key, and NeMo ignores a key that it does not "
        "read; likewise training.model.b, training.model.c and 2 more",
        plan={"engine": "nemo"},
        facts=Facts(tuple(f"model.{name}" for name in ("a", "b", "c", "d", "e")), SHIPPED, (), {}),
    ),
    good(
        "keys.unknown",
        {"model.ub_tp_comm_overlap_cfg": "a"},
        **added("model.ub_tp_comm_overlap_cfg", "nemo"),
    ),
    good("keys.unknown", {"model.data.fim.rate": 0.5}, **added("model.data.fim.rate", "nemo")),
    good("keys.unknown", {"model.foo": None}, **added("model.foo", "nemo")),
    bad(
        "keys.unknown",
        {"model.foo": 1},
        "training.model.foo=1: engine=megatron_lm has no option for this key",
        **added("model.foo", "megatron_lm"),
    ),
    good("keys.unknown", {"model.foo": False}, **added("model.foo", "megatron_lm")),
    bad("keys.unknown", {"model.foo": 0}, "no option for this key", **added("model.foo", "megatron_lm")),
    bad(
        "engine.megatron",
        {},
        "training.model.activation='gleu': expected one of gelu; did you mean 'gelu'?",
        facts=replace(
            KNOWN, trainer_verdict="model.activation='gleu': expected one of gelu; did you mean 'gelu'?"
        ),
    ),
    good("engine.megatron", {}),
    warns(
        "job.python",
        {},
        "/usr/bin/python3 is 3.4.10, older than 3.6.2; on nodes that are like it",
        "slipway doctor --nodes",
        facts=replace(KNOWN, supervisor_python="/usr/bin/python3 is 3.4.10, older than 3.6.2"),
    ),
    bad(
        "job.python",
        {},
        "cluster.scheduler='local': this machine has no /usr/bin/python3",
        plan={"scheduler": "local"},
        facts=replace(KNOWN, supervisor_python="this machine has no /usr/bin/python3"),
    ),
    good("job.python", {}),
    # further cases are in test_host.py and test_gate.py
    bad(
        "machine",
        {},
        "cluster.python='/python': there is no such file",
        facts=replace(
            KNOWN,
            host=HostFacts(False, interpreter=Interpreter("/python", False, problem="there is no such file")),
        ),
    ),
    good("machine", {}, facts=replace(KNOWN, host=HostFacts(in_allocation=False))),
    bad(
        "machine",
        {},
        "heterogeneous",
        plan={"scheduler": "allocation"},
        facts=replace(KNOWN, host=HostFacts(in_allocation=True, is_heterogeneous=True)),
    ),
    warns(
        "machine",
        {},
        "cannot import torch on this machine; cluster.setup may add it on the nodes",
        facts=replace(
            KNOWN,
            host=HostFacts(
                in_allocation=False,
                interpreter=Interpreter(
                    "python3", False, "/bin/python3", None, None, ("torch",), "cluster.setup"
                ),
            ),
        ),
    ),
    warns(
        "keys.variables",
        {},
        "env_vars.LIB='/x:$LIB': $LIB stays as it is",
        "env_expand.LIB, in place of env_vars.LIB",
        facts=replace(KNOWN, unexpanded=(("env_vars.LIB", "/x:$LIB"),)),
    ),
    warns(
        "keys.variables",
        {},
        "base_results_dir='/x/$A'",
        "${oc.env:A}",
        facts=replace(KNOWN, unexpanded=(("base_results_dir", "/x/$A"),)),
    ),
    good("keys.variables", {}),
    bad(
        "scheduler",
        {},
        "Invalid account",
        facts=replace(
            KNOWN, submission=SubmissionFacts(True, "Slurm would refuse this job: Invalid account")
        ),
    ),
    warns(
        "scheduler",
        {},
        "the job would wait",
        facts=replace(
            KNOWN, submission=SubmissionFacts(False, waits="as the cluster is now, the job would wait")
        ),
    ),
    good("scheduler", {}, facts=replace(KNOWN, submission=SubmissionFacts(False))),
    warns(
        "run.singleton",
        {},
        "jobs of /a, /b, /c, ... are called nemo-megatron-run too",
        "training.run.dependency=null",
        facts=Facts((), frozenset(), ("/a", "/b", "/c", "/d"), {}),
    ),
    good(
        "run.singleton",
        {},
        plan={"dependency": None},
        facts=Facts((), frozenset(), ("/a",), {}),
    ),
    warns(
        "secret.permissions",
        {},
        "/home/u/key, which WANDB_API_KEY is read from",
        "chmod 600 /home/u/key",
        facts=Facts((), frozenset(), (), {"WANDB_API_KEY": "/home/u/key"}),
    ),
    good("secret.permissions", {}),
    bad("secret.file", {}, "env_files.HF_TOKEN='/no/x': there is no such file", facts=missing_secret(True)),
    warns("secret.file", {}, "there is no such file", facts=missing_secret(False)),
    good("secret.file", {}),
    # paths
    bad(
        "path.tokenizer",
        {},
        "tokenizer.model='/no/x': there",
        facts=missing_path("tokenizer", "model.tokenizer.model"),
    ),
    good("path.tokenizer", {}, facts=replace(KNOWN, paths=PathFacts(tokenizer=()))),
    bad("path.sources", {}, "'/no/x': there is no such file", facts=missing_path("sources", "inputs")),
    good("path.sources", {}, facts=replace(KNOWN, paths=PathFacts(sources=()))),
    bad("path.data", {}, "data_prefix='/no/x': there is no such file", facts=missing_path("data", PREFIX)),
    warns("path.data", {}, "data_prefix='/no/x': there", facts=missing_path("data", PREFIX, certain=False)),
    good("path.data", {}, facts=replace(KNOWN, paths=PathFacts(data=()))),
    bad(
        "path.checkpoint",
        {},
        "resume.checkpoint='/no/x': there",
        facts=missing_path("checkpoint", "resume.checkpoint"),
    ),
    good("path.checkpoint", {}, facts=replace(KNOWN, paths=PathFacts(checkpoint=()))),
    bad(
        "run.training",
        {},
        "launch 2 of this run trains another model or tokenizer: training.model.num_layers 12 → 24",
        "unique_output_dir=true",
        facts=earlier_training(Change("model.num_layers", 12, 24, True), Change("model.seed", 1, 2, False)),
    ),
    warns(
        "run.training",
        {},
        "launch 2 of this run had other settings: training.model.seed 1 → 2",
        "continues from its checkpoints",
        facts=earlier_training(Change("model.seed", 1, 2, False)),
    ),
    warns(
        "run.training",
        {},
        "training.model.data.data_prefix.train [1] → [2]",
        "to change the mixture and repeat no sample: training.resume.data_weights=[[SAMPLE, [WEIGHT, ...]]]",
        plan={"engine": "megatron"},
        facts=earlier_training(Change("model.data.data_prefix.train", [1], [2], False)),
    ),
    good("run.training", {}, facts=earlier_training()),
    warns(
        "run.training",
        {"trainer.max_steps": 20},
        "training.trainer.max_steps=20: launch 2 of this run had 10: it changes the learning rate of step 11",
        "from 0.00067 to 0.0031",
        "to keep it: +training.model.optim.sched.max_steps=10",
        plan={"engine": "megatron"},
        facts=earlier_training(steps=(10, 20), rate=(11, 6.7e-4, 3.1e-3)),
    ),
    # NeMo goes on with the schedule of its checkpoint.
    warns(
        "run.training",
        {"trainer.max_steps": 20},
        "launch 2 of this run had 10: megatron-core orders data that are read more than once",
        plan={"engine": "nemo"},
        facts=earlier_training(steps=(10, 20), rate=(11, 6.7e-4, 3.1e-3)),
    ),
    good("run.training", {}, plan={"engine": "megatron"}, facts=earlier_training(steps=(10, 20))),
    warns(
        "run.training",
        {"trainer.max_steps": 20},
        "training.trainer.max_steps=20: nothing left to do: the run has a checkpoint of step 30 already",
        "to continue: training.trainer.max_steps=... above 30",
        facts=earlier_training(saved=30),
    ),
    good("run.training", {"trainer.max_steps": 20}, facts=earlier_training(saved=19)),
    bad(
        "data.identity",
        {},
        "training.resume.accept_data=null: launch 2 was trained on other data: x.bin",
        "to continue with the new ones: training.resume.accept_data=data-1",
        facts=earlier_training(data=("x.bin",), accept="data-1"),
    ),
    warns(
        "data.identity",
        {},
        "you accepted data that differ from those of launch 2: x.bin",
        facts=earlier_training(data=("x.bin",), accept="data-1", accepted="data-1"),
    ),
    good("data.identity", {}, facts=earlier_training()),
    bad(
        "data.tokenizer",
        {},
        "training.model.data.data_prefix='/a': another; likewise /b, /c and 1 more",
        "of its own",
        facts=tokenized(*"abcd"),
    ),
    warns("data.tokenizer", {}, "data_prefix='/a': another", facts=tokenized("a", certain=False)),
    good("data.tokenizer", {}, facts=tokenized()),
    bad(
        "run.shards",
        {"model.tensor_model_parallel_size": 2},
        "training.model.tensor_model_parallel_size=2: the optimizer states of the checkpoint step=5 are in",
        "python -m slipway.trainer.checkpoint.reshard '/r/a b/step=5'",
        facts=sharded_checkpoint("/r/a b/step=5", 1, 1, 1),
    ),
    bad(
        "run.shards",
        {},
        "training.resume.load_optimizer=False",
        facts=sharded_checkpoint("/r/step=5", 1, 1, 2),
    ),
    good("run.shards", {}, facts=sharded_checkpoint("/r/step=5", 1, 1, 1)),
    bad(
        "run.order",
        {"resume.skip_samples": [[640, 960]]},
        "training.resume.skip_samples=[[640, 960]]: the checkpoint step=5 was trained up to sample",
        facts=earlier_training(rewritten=RewrittenPast("resume.skip_samples", [], 800, "step=5")),
    ),
    good("run.order", {}, facts=earlier_training()),
    bad(
        "path.image", {}, "container='/no/x': there is no such file", facts=missing_path("image", "container")
    ),
    good("path.image", {}, facts=replace(KNOWN, paths=PathFacts(image=()))),
    warns(
        "image.fetch",
        {},
        "container='/no/x': there is no such file",
        facts=missing_path("fetched", "container", certain=False),
    ),
    good("image.fetch", {}, facts=replace(KNOWN, paths=PathFacts(fetched=()))),
    bad("path.mounts", {}, "data_dir='/no/x': there is no such", facts=missing_path("mounts", "data_dir")),
    good("path.mounts", {}, facts=replace(KNOWN, paths=PathFacts(mounts=()))),
    bad("path.writable", {}, "base_results_dir='/no/x'", facts=missing_path("results", "base_results_dir")),
    good("path.writable", {}, facts=replace(KNOWN, paths=PathFacts(results=()))),
    warns("path.shared", {}, "base_results_dir='/x': it is on", "likewise container", facts=on_disks(1, 1)),
    good("path.shared", {}, facts=on_disks(0, 0)),
    # memory
    bad(
        "memory.fits",
        {"model.micro_batch_size": 16},
        "micro_batch_size=16: a GPU needs",
        "a100-80gb has 80.0 GiB (cluster.gpu)",
        "GiB too little",
        "would fit: training.model.",
        plan={"resources": {"gpu": "a100-80gb"}},
    ),
    bad("memory.fits", {"model.num_layers": 240}, "(assumed; cluster.gpu=... names another)"),
    warns("memory.fits", {"model.micro_batch_size": 8}, "(assumed; ", "too little", "would fit:"),
    good("memory.fits", {"model.micro_batch_size": 8}, plan={"resources": {"gpu": "h200-141gb"}}),
    good("memory.fits", {"model.num_layers": 96, "trainer.accelerator": "cpu"}),
    good("memory.fits", {}),
    # time and space; further cases are in test_training_time.py and test_checkpoint_space.py
    warns("time.training", {"trainer.max_steps": 10**7}, "more than a year"),
    good("time.training", {}),
    bad(
        "space.checkpoints", {}, "and 1 GB are free", facts=replace(KNOWN, paths=PathFacts(free_bytes=10**9))
    ),
    good("space.checkpoints", {}, facts=replace(KNOWN, paths=PathFacts(free_bytes=10**15))),
    bad("space.output", {}, "/shared/out", "takes about", "and 10 MB are free", **conversion(10**7)),
    good("space.output", {}, **conversion(10**12)),
    # the cluster; further cases are in test_cluster_checks.py
    bad("cluster.partition", {}, "no partition gup", **cluster_request(partition="gup")),
    bad(
        "cluster.time_limit",
        {},
        "limits a job to 1-00:00:00",
        **cluster_request({"time_limit": "2-00:00:00"}),
    ),
    bad("cluster.nodes", {"trainer.num_nodes": 16}, "partition gpu has 4 nodes", **cluster_request()),
    bad(
        "run.exclude_file",
        {},
        "resilience.exclude_file='/x': it cannot be read: no such file",
        facts=replace(KNOWN, exclude_file=ExcludeFile("/x", problem="it cannot be read: no such file")),
    ),
    Case(
        "run.exclude_file",
        {},
        ("leaves out n1 (Xid 79); passes over gone, not among the nodes to choose from",),
        severity=Severity.OK,
        facts=replace(
            KNOWN,
            cluster=CLUSTER,
            exclude_file=ExcludeFile(
                "/x", (ExcludedNode("n1", 9, "ada", "Xid 79"), ExcludedNode("gone", 9, "ada", "x"))
            ),
        ),
    ),
    good("run.exclude_file", {}, facts=replace(KNOWN, exclude_file=ExcludeFile("/x"))),
    bad(
        "cluster.gpus",
        {},
        "no node of partition gpu can give 16 GPUs",
        **cluster_request({"gpus_per_node": 16}),
    ),
    bad("cluster.cpus", {}, "can give 128 CPUs for 8 tasks", **cluster_request({"cpus_per_task": 16})),
    # the workers that read data, on the processors of a node
    warns(
        "data.workers",
        {WORKERS: 9},
        "num_workers=9: 8 tasks per node start 72 workers; a node has 64 CPUs",
        "training.model.data.num_workers=8 at most",
        **cluster_request(),
    ),
    warns(
        "data.workers",
        {WORKERS: 2},
        "8 tasks per node start 16 workers; cluster.cpus_per_task=1 gives them 8 CPUs",
        plan={"resources": {"cpus_per_task": 1}},
    ),
    bad(
        "data.workers",
        {WORKERS: 9},
        "for each worker that reads data (Slurm did not answer)",
        severity=Severity.SKIPPED,
        facts=replace(KNOWN, cluster=ClusterFacts(missing={"nodes": "Slurm did not answer"})),
    ),
    good("data.workers", {WORKERS: 8}, **cluster_request()),
    good("data.workers", {WORKERS: 9}),
    good("data.workers", {WORKERS: 9}, **cluster_request(partition="big")),  # its nodes are hidden
    good("data.workers", {WORKERS: 9}, plan={"engine": "megatron", "resources": {"cpus_per_task": 1}}),
    bad("cluster.memory", {}, "can give 1048576M of memory", **cluster_request({"memory": "1T"})),
    bad("cluster.account", {}, "no jobs of account research", **closed_to("denied_accounts", "research")),
    bad("cluster.qos", {}, "takes no jobs of QOS normal", **closed_to("denied_qos", "normal")),
    bad("cluster.partitions", {}, "all of them refuse the job", **CLOSED_TO_EACH),
    bad("cluster.array", {}, "this Slurm has room for", **with_array(10_001)),
    warns("cluster.pyxis", {}, "container-image", **in_container(pyxis=False)),
    *(good(check, {}, **cluster_request()) for check in CLUSTER_CHECKS),
    good("cluster.array", {}, **with_array(9)),
    good("cluster.pyxis", {}, **in_container(pyxis=True)),
]

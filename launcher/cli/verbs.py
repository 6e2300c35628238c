"""The table of verbs: the text of each in the help, its module, and other tools' words for it."""

from __future__ import annotations

# In the order of the help.
VERBS = {
    "launch": "plan a training and submit it",
    "resume": "repeat the newest launch of a run",
    "sweep": "launch a training for each combination of values",
    "check": "check a launch before it is submitted",
    "suggest": "suggest layouts that fit a model on its GPUs, the fastest first",
    "doctor": "examine this machine, the cluster and its nodes for a launch",
    "render": "print the script of the next launch",
    "diff": "show what another launch of a run would change",
    "show": "show the composed configuration, with the source of each value",
    "list": "list the stages, model sizes, clusters or runs",
    "status": "show the state of runs",
    "follow": "watch a launch until its job has ended",
    "logs": "print the log of a launch, or follow it",
    "watch": "look for what goes wrong in runs, and tell people",
    "plot": "summarize a run and plot its losses, or those of several runs",
    "history": "list the launches of a run, or show the provenance of one",
    "nodes": "show which nodes fail more often than others, and exclude them",
    "cancel": "cancel the jobs of runs",
    "hold": "keep pending jobs from starting",
    "release": "let held jobs start",
    "attach": "open a shell next to a running job",
    "verify": "check that a run did its work",
    "incident": "gather what a ticket about a launch needs",
    "export": "bring the steps of runs to Weights & Biases or MLflow",
    "clean": "remove checkpoints of a run, archive the run, or remove it",
    "convert": "convert a checkpoint to Hugging Face, or from it",
    "evaluate": "measure a checkpoint on held-out data, and with lm-eval",
    "generate": "write text with the model of a checkpoint",
    "data": "prepare training data, and look at it",
    "image": "build, import, inspect, push and prune container images",
    "sandbox": "run a real multi-node Slurm on this machine",
    "init": "write a small tree of your own to edit",
    "adopt": "make a tree of your own from a NeMo launcher's conf/",
    "completion": "print the completion script for bash or zsh",
}

# The modules of the verbs that are not called as their verb is.
MODULES = {
    "diff": "render",
    "follow": "logs",
    "plot": "history",
    **dict.fromkeys(("cancel", "hold", "release", "attach"), "acting"),
    **dict.fromkeys(("convert", "evaluate"), "checkpoints"),
}

# Other tools' names of verbs.
_SYNONYMS = {
    "launch": "train run submit start sbatch srun torchrun pretrain",
    "resume": "continue restart relaunch requeue",
    "render": "script",
    "check": "validate lint",
    "show": "config",
    "list": "ls runs models",
    "status": "ps squeue queue top jobs info",
    "follow": "monitor wait",
    "watch": "alert alerts notify health",
    "logs": "tail log cat",
    "history": "sacct describe",
    "nodes": "hosts sinfo exclude drain blacklist",
    "cancel": "stop kill scancel abort",
    "attach": "ssh exec shell",
    "clean": "prune archive",
    "clean --remove": "rm remove delete del",
    "evaluate": "eval",
    "generate": "sample infer inference chat complete",
    "data prepare": "preprocess tokenize prepare",
    "image build": "build",
    "init": "new",
    "adopt": "migrate import",
}
# Verbs of an earlier version, and what does their work now.
FORMER_VERBS = {"gpu-check": "in a checkout: python -m benchmarks.gpu_check (docs/gpu.md)"}

# What other programs call an option, and what does the same: Hydra's, such as the NeMo launcher; trainers.
_OPTIONS = {
    "--config-dir DIR, read in front of Slipway's own tree": "--config-path -cp -cd",
    "--config-dir DIR, with the root config.yaml": "--config-name -cn",
    "slipway sweep OVERRIDE…, with KEY=VALUE,VALUE": "--multirun -m",
    "slipway show OVERRIDE…": "--cfg -c",
    'slipway generate RUN "a text to continue"': "--prompt --prompts --text",
    "training.run.name=NAME": "--name --job-name",
    "training.run.time_limit=TIME": "--time --time-limit",
    "training.trainer.max_steps=N": "--steps --max-steps --max_steps --train-iters",
    "training.trainer.num_nodes=N": "--nodes --nnodes --num-nodes --num_nodes",
    "training.trainer.devices=N": "--gpus --devices --nproc-per-node --nproc_per_node",
    "training.model.global_batch_size=N": "--batch-size --global-batch-size",
    "training.model.optim.lr=RATE": "--lr --learning-rate",
}
OTHER_OPTIONS = {option: ours for ours, options in _OPTIONS.items() for option in options.split()}
OTHER_WORDS = {word: verb for verb, words in _SYNONYMS.items() for word in words.split()}

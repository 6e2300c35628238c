"""A small tree in the shape of a NeMo Megatron launcher's `conf/`."""

from __future__ import annotations

from pathlib import Path

ROOT = """\
defaults:
  - _self_
  - cluster: bcm
  - data_preparation: gpt3/download_gpt3_pile
  - training: gpt3/126m
  - conversion: gpt3/convert_gpt3
  - peft: null
  - evaluation: gpt3/evaluate_all
  - export: gpt3/export_gpt3
  - override hydra/job_logging: stdout

hydra:
  run:
    dir: .
  output_subdir: null

debug: False

stages:
  - training
  - conversion
  - evaluation
  - peft

cluster_type: bcm
launcher_scripts_path: ???
data_dir: ${launcher_scripts_path}/data
base_results_dir: ${WORK}/results
container_mounts:
  - null
  - /lustre
container: ${IMAGE}

wandb_api_key_file: null
api_log: False
enable_vboost: True

env_vars:
  NCCL_TOPO_FILE: null
  NCCL_IB_TIMEOUT: 22
  LD_LIBRARY_PATH: /opt/efa/lib:$LD_LIBRARY_PATH
  TRANSFORMERS_OFFLINE: 1

numa_mapping:
  enable: True
  mode: single
  scope: node
  cores: all_logical
  balanced: True
  min_cores: 1
  max_cores: 8

data_preparation_config: ${hydra:runtime.choices.data_preparation}
training_config: ${hydra:runtime.choices.training}
peft_config: ${hydra:runtime.choices.peft}
"""

CLUSTER = """\
partition: long
account: null
exclusive: True
gpus_per_task: null
gpus_per_node: 8
mem: 0
job_name_prefix: 'nemo-megatron-'
srun_args:
  - "--no-container-mount-home"
"""

_KUBERNETES = "pull_secret: null\nshm_size: 512Gi\nnfs_server: null\n"

_MODEL = """\
model:
  micro_batch_size: 4
  global_batch_size: 256
  tensor_model_parallel_size: 1
  pipeline_model_parallel_size: 1
  encoder_seq_length: 512
  max_position_embeddings: 512
  num_layers: 4
  hidden_size: 256
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 4
  tokenizer: {library: megatron, type: GPT2BPETokenizer, vocab_file: a.json, merge_file: b.txt}
  optim: {name: distributed_fused_adam, lr: 1e-4, sched: {name: CosineAnnealing, warmup_steps: 10}}
  data: {data_impl: mock, seq_length: 512, data_prefix: []}
"""


def size(name: str, more: str = "", defaults: str = "") -> str:
    """Return a size as that launcher has them: whole, with a search path of Hydra's."""
    return f"""\
{defaults}hydra:
  searchpath:
    - file:///opt/NeMo/examples/nlp/language_modeling/conf

run:
  name: {name}
  results_dir: ${{base_results_dir}}/${{.name}}
  time_limit: "0-04:00:00"
  dependency: "singleton"

trainer:
  num_nodes: 2
  devices: 8
  max_steps: 100
  precision: bf16

exp_manager:  # a comment of its user's
  explicit_log_dir: ${{training.run.results_dir}}/results

{_MODEL}{more}"""


_STACKS = "  seq_length: 512\n" + "".join(
    f"  {stack}: {{num_layers: 4, hidden_size: 256, num_attention_heads: 4}}\n"
    for stack in ("encoder", "decoder")
)
_TABLE = "defaults:\n  - _self_\n  - optional tp_overlap@model.ub_tp_comm_overlap_cfg: {}\n\n"

FILES = {
    "config.yaml": ROOT,
    "cluster/bcm.yaml": CLUSTER,
    "cluster/night.yaml": CLUSTER.replace("long", "night")
    + "wckey: llm\nadditional_parameters: {nice: 10}\n",
    "cluster/k8s.yaml": _KUBERNETES,
    "cluster/cluster/bcm.yaml": CLUSTER,
    "training/gpt3/ours.yaml": size("gpt3_ours", defaults=_TABLE.format("table")),
    "training/gpt3/plain.yaml": size("gpt3_plain", defaults=_TABLE.format("")),
    "training/bert/110m.yaml": size("bert_110m", "  bert_binary_head: False\n"),
    "training/t5/ours.yaml": size("t5_ours", _STACKS),
    "training/vit/b.yaml": size("vit_b"),
    "training/gpt3/broken.yaml": size("x") + "model: {}\n",
    "training/tp_overlap/table.yaml": "qkv_dgrad: {method: bulk, num_sm: 4}\n",
    "peft/llama/squad.yaml": "run: {name: a}\n",
    "evaluation/gpt3/evaluate_all.yaml": "run: {name: b}\n",
}


def write_old_tree(root: Path) -> Path:
    """Write the tree, and return its directory."""
    for name, text in FILES.items():
        path = root / "launcher_scripts/conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "launcher_scripts/conf"

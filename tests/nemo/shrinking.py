"""The stock sizes, small enough for a CPU: by overrides of their values only."""

from __future__ import annotations

import json
from pathlib import Path

END = "<|endoftext|>"

# Kernels that there are for GPUs alone.
_NO_KERNELS = [
    "training.trainer.accelerator=cpu",
    "training.model.transformer_engine=False",
    "training.model.use_cpu_initialization=True",
]

_SHORT = [
    "training.trainer.num_nodes=1",
    "training.trainer.val_check_interval=2",
    "training.trainer.limit_val_batches=1",
    "training.trainer.limit_test_batches=1",
    "training.trainer.log_every_n_steps=1",
    "training.model.micro_batch_size=1",
    "training.model.global_batch_size=2",
    "training.model.data.data_impl=mock",
    "training.model.data.num_workers=0",
]

GPT = [
    "training=gpt3/126m",
    *_NO_KERNELS,
    "training.model.persist_layer_norm=False",
    "training.model.gradient_accumulation_fusion=False",
    "training.model.masked_softmax_fusion=False",
    *_SHORT,
    "training.model.encoder_seq_length=64",
    "training.model.max_position_embeddings=64",
    "training.model.data.seq_length=64",
    "training.model.num_layers=2",
    "training.model.hidden_size=64",
    "training.model.num_attention_heads=4",
    "training.model.optim.sched.warmup_steps=2",
    "training.model.optim.sched.constant_steps=0",
    # No vocabulary is needed; the made-up texts have tokens beyond its 256 bytes.
    "training.model.tokenizer.library=byte-level",
    "training.model.tokenizer.type=null",
    "training.model.make_vocab_size_divisible_by=8192",
]

T5 = [
    "training=t5/220m",
    *_NO_KERNELS,
    *(
        f"training.model.{stack}.{switch}=False"
        for stack in ("encoder", "decoder")
        for switch in ("persist_layer_norm", "masked_softmax_fusion")
    ),
    *_SHORT,
    "training.model.seq_length=64",
    "training.model.data.seq_length=64",
    "training.model.data.seq_length_dec=32",
    "training.model.encoder.num_layers=2",
    "training.model.encoder.hidden_size=64",
    "training.model.encoder.ffn_hidden_size=128",
    "training.model.encoder.num_attention_heads=4",
    "training.model.encoder.kv_channels=16",
    "training.model.decoder.kv_channels=16",
    # Its own optimizer, distributed_fused_adam, is apex's, as is what mixed precision takes with another one;
    # mcore_distributed_optim is an error in NeMo 2.4's T5 classes.
    "training.trainer.precision=32",
    "training.model.megatron_amp_O2=False",
    "training.model.optim.name=adamw",
    "~training.model.optim.bucket_cap_mb",
    "~training.model.optim.overlap_grad_sync",
    "~training.model.optim.contiguous_grad_buffer",
]


def real_text(data: Path) -> list[str]:
    """Return overrides for the data of `slipway data tokenize`, with a vocabulary for transformers."""
    tokenizer = {"tokenizer_class": "GPT2Tokenizer", "unk_token": END, "bos_token": END, "eos_token": END}
    (data / "bpe" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return [
        "training.model.data.data_impl=mmap",
        f"training.model.data.data_prefix=[{data}/corpus_text_document]",
        "training.model.data.splits_string='80,10,10'",
        "training.model.tokenizer.library=huggingface",
        f"training.model.tokenizer.type={data}/bpe",
        "training.model.make_vocab_size_divisible_by=128",
    ]


def sentencepiece(model: str) -> list[str]:
    """Return overrides for T5's tokenizer, which must be a real one even for made-up texts."""
    return [
        "training.model.tokenizer.library=sentencepiece",
        "training.model.tokenizer.type=null",
        "training.model.tokenizer.vocab_file=null",
        f"training.model.tokenizer.model={model}",
    ]

"""The NeMo Megatron launcher's words that have no meaning here: its stages, groups, keys and families.

From NeMo-Framework-Launcher 23.11 to 24.12 (`main.py`, `nemo_launcher/core/*stages.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCRIPT = "stages=[command] command.argv=[python3, /opt/{}, …] runs the script in the container"
_MODELS = "NeMo/examples/nlp/language_modeling"
_CURATOR = "NVIDIA's NeMo Curator does it; slipway data prepare cleans text and removes duplicates"

# Its stages, each a group of its tree too: the script that it ran, or the way that is another here.
_SCRIPTS: Mapping[str, str] = {
    "peft": f"{_MODELS}/tuning/megatron_gpt_finetuning.py",
    "fine_tuning": f"{_MODELS}/tuning/megatron_gpt_finetuning.py",
    "prompt_learning": f"{_MODELS}/megatron_gpt_prompt_learning.py",
    "adapter_learning": f"{_MODELS}/tuning/megatron_gpt_adapter_tuning.py",
    "ia3_learning": f"{_MODELS}/tuning/megatron_gpt_ia3_tuning.py",
    "steerlm_reg": "NeMo-Aligner/examples/nlp/gpt/train_gpt_sft.py",
    "rlhf_rm": "NeMo-Aligner/examples/nlp/gpt/train_reward_model.py",
    "rlhf_ppo": "NeMo-Aligner/examples/nlp/gpt/train_gpt_ppo_actor.py",
    "ptq": f"{_MODELS}/megatron_gpt_ptq.py",
    "rag_indexing": "NeMo/examples/nlp/rag/rag_indexing.py",
    "rag_generating": "NeMo/examples/nlp/rag/rag_generating.py",
    "fw_inference": "NeMo/examples/multimodal/…",
    "external_conversion": "NeMo/examples/multimodal/…",
    "conversion_hf2nemo": "NeMo/scripts/checkpoint_converters/convert_llama_hf_to_nemo.py",
    "generic": "…",
}
STAGES: Mapping[str, str] = {
    **{stage: _SCRIPT.format(script) for stage, script in _SCRIPTS.items()},
    "export": "conversion=huggingface makes what TensorRT-LLM and vLLM read",
    "data_curation": _CURATOR,
    "quality_filtering": _CURATOR,
}

# How to replace a choice of a group of the same name, such as conversion=gpt3/convert_gpt3.
_CHOICES: Mapping[str, str] = {
    "data_preparation": "data_preparation=jsonl data_preparation.inputs=[URL, …] fetches and tokenizes",
    "conversion": "conversion=nemo makes the .nemo file that the NeMo launcher made",
    "evaluation": "evaluation.lm_eval.tasks=[…], with engine=megatron",
}

# Keys of its root, and of older wrappers.
_KEYS: Mapping[str, str] = {
    "auto_resume": "a run continues by itself when it is launched again; resilience.links=N makes a chain",
    **{f"{group}_config": f"the choice itself: {group}=…" for group in ("training", *_CHOICES)},
}

_OF_TYPE: Mapping[str, str] = {
    "gpt": "gpt3 llama baichuan2 nemotron falcon chatglm starcoder2 mistral mixtral grok qwen2",
    "t5": "t5 mt5",
    "bert": "bert",
}
# The families, and which of NeMo's scripts trained them: `model_type` chooses it here.
MODEL_TYPES: Mapping[str, str] = {
    family: model_type for model_type, families in _OF_TYPE.items() for family in families.split()
}
# Families that it trained with other scripts.
OTHER_SCRIPTS: Mapping[str, str] = {
    "retro": "nlp/language_modeling/megatron_retro_pretraining.py",
    "vit": "vision/vision_transformer/megatron_vit_classification_pretrain.py",
    "clip": "multimodal/vision_language_foundation/clip/megatron_clip_pretrain.py",
    "nsfw": "multimodal/vision_language_foundation/nsfw/megatron_nsfw_pretrain.py",
    "stable_diffusion": "multimodal/text_to_image/stable_diffusion/sd_train.py",
    "sdxl": "multimodal/text_to_image/stable_diffusion/sd_xl_train.py",
    "instruct_pix2pix": "multimodal/text_to_image/instruct_pix2pix/sd_finetune.py",
    "imagen": "multimodal/text_to_image/imagen/imagen_training.py",
    "dreambooth": "multimodal/text_to_image/dreambooth/dreambooth.py",
    "controlnet": "multimodal/text_to_image/controlnet/controlnet_train.py",
    "nerf": "multimodal/x_to_nerf/nerf/main.py",
    "neva": "multimodal/multimodal_llm/neva/neva_pretrain.py",
    "video_neva": "multimodal/multimodal_llm/neva/neva_pretrain.py",
}


def describe_other_script(family: str) -> str:
    """Return how to run the script of a family that no engine of ours trains."""
    return _SCRIPT.format(f"NeMo/examples/{OTHER_SCRIPTS[family]}")


def way(key: str, choice: str = "") -> str | None:
    """Return how to replace a key, stage or choice of the NeMo launcher; ``None`` if it is unknown."""
    name = key.removesuffix("_config")
    of_choice = _CHOICES.get(key) if "/" in choice else None
    return _KEYS.get(key) or STAGES.get(name) or of_choice


def model_type_of(choice: str, model: Any) -> str:
    """Return which script trains a size that does not say it: by its family, else by its model's keys."""
    family = choice.partition("/")[0]
    if family in MODEL_TYPES:
        return MODEL_TYPES[family]
    if "encoder" in model and "decoder" in model:
        return "t5"
    return "bert" if "bert_binary_head" in model else "gpt"

"""A tiny DreamZero checkpoint with random weights: 350 tensors, 17 million parameters, 36 MB, 2 s to write.

The layout is the published one (original tensor names in one safetensors file, the model's own
``config.json``, normalisation statistics, a tokenizer and a VAE folder): vLLM-Omni's loader runs unchanged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omni_tiny.checkpoint.dreamzero_names import checkpoint_names
from omni_tiny.tiny import TEXT_DIM

FRAMES_PER_BLOCK = 2
"""Latent frames that one step adds."""

_ACTION_HEAD: dict[str, Any] = {
    "action_dim": 8,
    "max_action_dim": 8,
    "max_state_dim": 16,
    "action_horizon": 8,
    "num_frame_per_block": FRAMES_PER_BLOCK,
    "num_frames": 33,
    "decouple_inference_noise": True,
    "video_inference_final_noise": 0.8,
}
TRANSFORMER: dict[str, Any] = {
    "_target_": "groot.vla.model.dreamzero.modules.wan_video_dit_action_casual_chunk.CausalWanModel",
    "model_type": "i2v",
    "frame_seqlen": 8,
    "text_len": 512,
    "text_dim": TEXT_DIM,
    "in_dim": 36,
    "out_dim": 16,
    "dim": 64,
    "ffn_dim": 128,
    "freq_dim": 32,
    "num_heads": 4,
    "num_layers": 2,
    "max_chunk_size": 4,
    "hidden_size": 32,
    "max_num_embodiments": 1,
    "num_action_per_block": 8,
    "num_state_per_block": 1,
}
_HEAD_TARGET = "groot.vla.model.dreamzero.action_head.wan_flow_matching_action_tf.WANPolicyHead"


def write_dreamzero(path: str | Path, *, seed: int = 0) -> Path:
    """Write the checkpoint into a folder, which is made where it is missing.

    Builds the real pipeline once in this process to learn its parameters; torch's distributed state is
    as it was afterwards.

    Args:
        path: The folder.
        seed: Two checkpoints of one seed are equal to the bit.

    Returns:
        The folder.
    """
    from omni_tiny.inproc import empty_pipeline

    root = Path(path)
    root.mkdir(parents=True, exist_ok=True)
    _write_configs(root)
    _write_tokenizer(root / "tokenizer")
    _write_vae(root / "vae")
    with empty_pipeline(root) as pipeline:
        _write_weights(pipeline, root / "model.safetensors", seed=seed)
    return root


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1))


def _write_configs(root: Path) -> None:
    head = {**_ACTION_HEAD, "diffusion_model_cfg": TRANSFORMER}
    _write_json(
        root / "config.json",
        {
            "model_type": "vla",
            "architectures": ["VLA"],
            "action_head_cfg": {"_target_": _HEAD_TARGET, "config": head},
        },
    )
    quantiles = {
        "joint_position": {"q01": [-2.0] * 7, "q99": [2.0] * 7},
        "gripper_position": {"q01": [0.0], "q99": [1.0]},
    }
    statistics = {"action": quantiles, "state": quantiles}
    _write_json(root / "experiment_cfg" / "metadata.json", {"oxe_droid": {"statistics": statistics}})


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # Byte level: every prompt maps to its own ids, so that a change of prompt is always seen.
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
    )
    fast.save_pretrained(path)


def _write_vae(path: Path) -> None:
    import torch
    from diffusers import AutoencoderKLWan
    from vllm.utils.torch_utils import set_default_torch_dtype

    # vLLM-Omni reads the configuration here and then puts the weights of the one safetensors file over these.
    with set_default_torch_dtype(torch.bfloat16), torch.random.fork_rng():
        torch.manual_seed(0)
        AutoencoderKLWan(base_dim=8).save_pretrained(path)


def _write_weights(pipeline: Any, path: Path, *, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for parameter, value in pipeline.named_parameters():
        names = checkpoint_names(parameter, type(pipeline))
        parts = [value] if len(names) == 1 else value.chunk(len(names), dim=0)
        for name, part in zip(names, parts, strict=True):
            tensors[name] = _random(parameter, part.shape, generator).to(torch.bfloat16)
    save_file(tensors, path)


def _random(name: str, shape: Any, generator: Any) -> Any:
    # Scaled so that outputs stay finite and depend on every input.
    import torch

    noise = torch.randn(shape, generator=generator, dtype=torch.float32)
    if name.endswith(".gamma") or (len(shape) == 1 and name.endswith("weight")):
        return 1.0 + 0.1 * noise
    if len(shape) <= 1 or name.endswith(".b"):
        return 0.05 * noise
    if "modulation" in name:
        return 0.2 * noise
    if "cls_embedding" in name or "pos_embedding" in name or "shared" in name:
        return noise
    fan_in = shape[-2] if name.endswith(".W") else noise[0].numel()
    return noise / fan_in**0.5

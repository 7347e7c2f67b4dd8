"""A Cosmos3 checkpoint of 1.3 MB with random weights, in the layout that the real loader reads.

Covers the four kinds of checkpoint that the pipeline tells apart: regular, edge, action, distilled.
Does not cover sound: its tokenizer is a model of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

Variant = Literal["regular", "edge", "action", "distilled"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Widths of the tiny transformer; the latent sizes are the ones that the pipeline insists on."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 96
    vocabulary: int = 512
    latent_channels: int = 48
    patch: int = 2
    action_dim: int = 8
    embodiments: int = 32

    @property
    def patch_values(self) -> int:
        """Values in one patch of the latent video."""
        return self.patch * self.patch * self.latent_channels


SIZES = Sizes()


def write_cosmos3(path: str | Path, *, variant: Variant = "regular", seed: int = 0) -> Path:
    """Write one checkpoint; the same arguments write the same weights.

    Args:
        path: Folder to write into; made if it is not there.
        variant: ``regular`` and ``action`` sample with UniPC, ``distilled`` with four fixed sigmas;
            ``edge`` has the Nemotron backbone; ``action`` adds the action projections.
        seed: Seed of every weight. The global random state is left as it was.

    Returns:
        The folder, for ``OmniDiffusionConfig(model=...)``.

    Raises:
        ValueError: If ``variant`` is none of the four.
    """
    if variant not in get_args(Variant):
        raise ValueError(f"variant={variant!r}: expected one of {', '.join(get_args(Variant))}")
    from safetensors.torch import save_file

    root = Path(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = _transformer_weights(SIZES, variant)
        _write_json(root / "transformer" / "config.json", _transformer_config(SIZES, variant))
        save_file(weights, str(root / "transformer" / "diffusion_pytorch_model.safetensors"))
        _write_vae(root / "vae", SIZES)
    scheduler = _scheduler_config(variant)
    _write_json(root / "scheduler" / "scheduler_config.json", scheduler)
    _write_tokenizer(root / "text_tokenizer")
    _write_json(
        root / "model_index.json",
        {
            "_class_name": "Cosmos3OmniDiffusersPipeline",
            "_diffusers_version": "0.40.0",
            "transformer": ["diffusers", "Cosmos3VFMTransformer"],
            "vae": ["diffusers", "AutoencoderKLWan"],
            "scheduler": ["diffusers", scheduler["_class_name"]],
            "text_tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        },
    )
    return root


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))


def _transformer_config(sizes: Sizes, variant: Variant) -> dict[str, Any]:
    config: dict[str, Any] = {
        "_class_name": "Cosmos3VFMTransformer",
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.mlp,
        "vocab_size": sizes.vocabulary,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5_000_000,
        "latent_patch_size": sizes.patch,
        "latent_channel": sizes.latent_channels,
        "temporal_compression_factor": 4,
        "timestep_scale": 0.001,
        "base_fps": 24.0,
        "rope_scaling": {"mrope_section": [4, 2, 2]},
        "mrope_section": [4, 2, 2],
        "sound_gen": False,
    }
    if variant == "edge":
        config |= {
            "backbone_type": "cosmos3_edge_nemotron_dense",
            "qk_norm_for_text": False,
            "use_und_k_norm_for_gen": True,
        }
    if variant == "action":
        config |= {
            "action_gen": True,
            "action_dim": sizes.action_dim,
            "num_embodiment_domains": sizes.embodiments,
        }
    return config


def _linear(out_features: int, in_features: int) -> torch.Tensor:
    return torch.randn(out_features, in_features) / in_features**0.5


def _small(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.02


def _norm(width: int) -> torch.Tensor:
    return 1.0 + 0.1 * torch.randn(width)


def _transformer_weights(sizes: Sizes, variant: Variant) -> dict[str, torch.Tensor]:
    hidden, patch = sizes.hidden, sizes.patch_values
    weights = {
        "embed_tokens.weight": torch.randn(sizes.vocabulary, hidden) * 0.5,
        "norm.weight": _norm(hidden),
        "norm_moe_gen.weight": _norm(hidden),
        "proj_in.weight": _linear(hidden, patch),
        "proj_in.bias": _small(hidden),
        "proj_out.weight": _linear(patch, hidden),
        "proj_out.bias": _small(patch),
        "time_embedder.linear_1.weight": _linear(hidden, 256),
        "time_embedder.linear_1.bias": _small(hidden),
        "time_embedder.linear_2.weight": _linear(hidden, hidden),
        "time_embedder.linear_2.bias": _small(hidden),
    }
    for layer in range(sizes.layers):
        for name, weight in _layer_weights(sizes, edge=variant == "edge").items():
            weights[f"layers.{layer}.{name}"] = weight
    if variant == "action":
        rows, action = sizes.embodiments, sizes.action_dim
        weights |= {
            "action_proj_in.fc.weight": _linear(rows, hidden * action) * hidden**0.5,
            "action_proj_in.bias.weight": _small(rows, hidden),
            "action_proj_out.fc.weight": _linear(rows, action * hidden) * action**0.5,
            "action_proj_out.bias.weight": _small(rows, action),
            "action_modality_embed": _small(hidden),
        }
    return weights


def _layer_weights(sizes: Sizes, *, edge: bool) -> dict[str, torch.Tensor]:
    """Weights of one layer: the text half and the generating half stand side by side in one layer."""
    hidden, queries, keys = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    weights = {}
    for text, generating, width in (
        ("to_q", "add_q_proj", queries),
        ("to_k", "add_k_proj", keys),
        ("to_v", "add_v_proj", keys),
    ):
        weights[f"self_attn.{text}.weight"] = _linear(width, hidden)
        weights[f"self_attn.{generating}.weight"] = _linear(width, hidden)
    weights["self_attn.to_out.weight"] = _linear(hidden, queries)
    weights["self_attn.to_add_out.weight"] = _linear(hidden, queries)
    text_norms = ("k_norm_und_for_gen",) if edge else ("norm_q", "norm_k")
    for name in (*text_norms, "norm_added_q", "norm_added_k"):
        weights[f"self_attn.{name}.weight"] = _norm(sizes.head_dim)
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.weight"] = _norm(hidden)
        weights[f"{name}_moe_gen.weight"] = _norm(hidden)
    for name in ("mlp", "mlp_moe_gen"):
        if not edge:  # the edge backbone squares a ReLU and has no gate
            weights[f"{name}.gate_proj.weight"] = _linear(sizes.mlp, hidden)
        weights[f"{name}.up_proj.weight"] = _linear(sizes.mlp, hidden)
        weights[f"{name}.down_proj.weight"] = _linear(hidden, sizes.mlp)
    return weights


def _write_vae(path: Path, sizes: Sizes) -> None:
    """Write the Wan 2.2 autoencoder: 16 times smaller in space, 4 times in time."""
    from diffusers import AutoencoderKLWan

    channels = sizes.latent_channels
    AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        dropout=0.0,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=4,
        scale_factor_spatial=16,
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
    ).save_pretrained(str(path))


def _scheduler_config(variant: Variant) -> dict[str, Any]:
    if variant == "distilled":
        return {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "num_train_timesteps": 1000,
            "shift": 1.0,
            "fixed_step_sampler_config": {"sample_type": "sde", "t_list": [1.0, 0.75, 0.5, 0.25]},
        }
    return {
        "_class_name": "UniPCMultistepScheduler",
        "_diffusers_version": "0.40.0",
        "num_train_timesteps": 1000,
        "solver_order": 2,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": 1.0,
    }


def _write_tokenizer(path: Path) -> None:
    """Write a byte-level tokenizer without merges: nothing to download, every prompt has a token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(specials + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|vision_start|>"],
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(str(path))

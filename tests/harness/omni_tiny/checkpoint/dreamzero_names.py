"""The names of a DreamZero checkpoint's tensors, found from the pipeline's parameter names.

The pipeline turns the original names into its own while loading; this is the way back. Every name it
finds is checked against the pipeline's forward mapping, so that a host that renames fails here, loudly.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_VAE_PREFIXES = {
    "encoder.conv_in.": "encoder.conv1.",
    "encoder.norm_out.": "encoder.head.0.",
    "encoder.conv_out.": "encoder.head.2.",
    "decoder.conv_in.": "decoder.conv1.",
    "decoder.norm_out.": "decoder.head.0.",
    "decoder.conv_out.": "decoder.head.2.",
    "post_quant_conv.": "conv2.",
    "quant_conv.": "conv1.",
}
_VAE_BLOCK = {
    "norm1.gamma": "residual.0.gamma",
    "conv1.weight": "residual.2.weight",
    "conv1.bias": "residual.2.bias",
    "norm2.gamma": "residual.3.gamma",
    "conv2.weight": "residual.6.weight",
    "conv2.bias": "residual.6.bias",
    "conv_shortcut.weight": "shortcut.weight",
    "conv_shortcut.bias": "shortcut.bias",
}
_TEXT = {"shared.weight": "token_embedding.weight", "encoder.final_layer_norm.weight": "norm.weight"}
_TEXT_BLOCK = {
    "layer.0.SelfAttention.q.weight": "attn.q.weight",
    "layer.0.SelfAttention.k.weight": "attn.k.weight",
    "layer.0.SelfAttention.v.weight": "attn.v.weight",
    "layer.0.SelfAttention.o.weight": "attn.o.weight",
    "layer.0.SelfAttention.relative_attention_bias.weight": "pos_embedding.embedding.weight",
    "layer.0.layer_norm.weight": "norm1.weight",
    "layer.1.layer_norm.weight": "norm2.weight",
    "layer.1.DenseReluDense.wi_0.weight": "ffn.gate.0.weight",
    "layer.1.DenseReluDense.wi_1.weight": "ffn.fc1.weight",
    "layer.1.DenseReluDense.wo.weight": "ffn.fc2.weight",
}
_TRANSFORMER = {
    "img_emb.norm1.": "img_emb.proj.0.",
    "img_emb.fc1.": "img_emb.proj.1.",
    "img_emb.fc2.": "img_emb.proj.3.",
    "img_emb.norm2.": "img_emb.proj.4.",
}


def _vae(name: str) -> Iterator[str]:
    for ours, theirs in _VAE_PREFIXES.items():
        if name.startswith(ours):
            yield theirs + name[len(ours) :]
    for side in ("encoder", "decoder"):
        if found := re.match(side + r"\.mid_block\.resnets\.(\d)\.(.*)", name):
            yield f"{side}.middle.{int(found[1]) * 2}.{_VAE_BLOCK[found[2]]}"
        if found := re.match(side + r"\.mid_block\.attentions\.0\.(.*)", name):
            yield f"{side}.middle.1.{found[1]}"
    if found := re.match(r"encoder\.down_blocks\.(\d+)\.(.*)", name):
        yield f"encoder.downsamples.{found[1]}.{_VAE_BLOCK.get(found[2], found[2])}"
    if found := re.match(r"decoder\.up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)\.(.*)", name):
        # Three residual blocks and one upsampler per stage, numbered through.
        index = int(found[1]) * 4 + (int(found[3]) if found[2] == "resnets" else 3)
        yield f"decoder.upsamples.{index}.{_VAE_BLOCK.get(found[4], found[4])}"


def _text(name: str) -> Iterator[str]:
    if name in _TEXT:
        yield _TEXT[name]
    if found := re.match(r"encoder\.block\.(\d+)\.(.*)", name):
        yield f"blocks.{found[1]}.{_TEXT_BLOCK[found[2]]}"


def checkpoint_names(parameter: str, pipeline: Any) -> list[str]:
    """Name the tensors of a checkpoint that fill one parameter of the pipeline.

    Args:
        parameter: As `torch.nn.Module.named_parameters` names it.
        pipeline: The pipeline's class, whose forward mapping each candidate must pass.

    Returns:
        One name, or three (query, key, value) where the pipeline fuses them along dimension 0.

    Raises:
        KeyError: No name leads to this parameter.
    """
    part, _, name = parameter.partition(".")
    if part == "transformer":
        for ours, theirs in _TRANSFORMER.items():
            name = name.replace(ours, theirs)
        name = f"action_head.model.{name}"
        if ".self_attn.qkv." in name:
            return [name.replace(".self_attn.qkv.", f".self_attn.{one}.") for one in "qkv"]
        return [name]
    if part == "image_encoder":
        return [f"action_head.{parameter}"]
    if part == "text_encoder":
        candidates = [f"action_head.text_encoder.{one}" for one in _text(name)]
        forward = pipeline._remap_text_encoder_key
    else:
        candidates = [f"action_head.vae.model.{one}" for one in _vae(name)]
        forward = pipeline._remap_vae_key
    for candidate in candidates:
        if forward(candidate) == name:
            return [candidate]
    raise KeyError(f"no checkpoint name leads to {parameter!r}; tried {candidates}")

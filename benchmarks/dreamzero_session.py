"""A DreamZero session at the shipped sizes, without the model: what a step does to the state, and on whose.

The pipeline is vLLM-Omni's own class, built without its networks. Where its method works on the state,
it is that method which runs; a network's output is replaced by a tensor of its shape, made once before.
The attention's K/V is not here: the AR-Diffusion engine owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from vllm_omni.diffusion.models.dreamzero.pipeline_dreamzero import DreamZeroPipeline
from vllm_omni.diffusion.models.dreamzero.utils import DEFAULT_NUM_INFERENCE_STEPS
from vllm_omni.experimental.world_models.session_state import SessionStateManager as InTreeManager

from benchmarks.feature_map import HEIGHT, LATENT, WIDTH, feature_map_shapes
from benchmarks.measure import LapClock
from vllm_omni_session_state.adapters.dreamzero import attach
from vllm_omni_session_state.adapters.patches import Patches
from vllm_omni_session_state.manager.manager import SessionStateManager

FRAMES_PER_BLOCK = 2
LOCAL_ATTN_SIZE = 4 * FRAMES_PER_BLOCK + 1  # max_chunk_size 4
SESSION = "bench"
KV = SimpleNamespace(session_id=SESSION)

BOOKS = "books: charge the session"
LOOKUP = "session lookup"
RESET = "window reset"
CONDITIONING = "conditioning"
FRAMES = "accumulate_frames"
APPEND = "encoder: append"
READ = "encoder: read"
QUANT_CONV = "encoder: quant_conv"
LATENTS = "append_video_latents"
STATE = (LOOKUP, RESET, CONDITIONING, FRAMES, APPEND, READ, QUANT_CONV, LATENTS)
ENCODER = (APPEND, READ, QUANT_CONV)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the networks and the robot would hand to the state; made once, given to every contender alike.

    Attributes:
        stitched: Frames of one observation each, ``(1, H, W, 3)``, as vLLM-Omni's transform returns them.
        videos: The same after preprocessing, ``(1, 3, 4, H, W)``.
        chunks: Encoder output of one latent frame each, ``(1, 32, 1, H/8, W/8)``.
        feature_map: The encoder's causal-convolution cache. Never written, so it takes no memory.
        tokens: Two equal tensors: vLLM-Omni compares each step's with the last one's.
        prompt_embeds: ``(1, 512, 4096)``.
        clip_feas: ``(1, 257, 1280)``.
        ys: Mask and latents of the first frame, ``(1, 20, 9, H/8, W/8)``.
        video_outs: What the denoising loop returns, by step: ``(1, 2, 16, H/8, W/8)``. Not written.
        quant_conv: The VAE's, 32 channels, of kernel size 1.
    """

    stitched: list[np.ndarray]
    videos: list[torch.Tensor]
    chunks: list[torch.Tensor]
    feature_map: list[torch.Tensor]
    tokens: tuple[torch.Tensor, torch.Tensor]
    prompt_embeds: torch.Tensor
    clip_feas: torch.Tensor
    ys: torch.Tensor
    video_outs: list[torch.Tensor]
    quant_conv: torch.nn.Module

    def shapes(self) -> dict[str, str]:
        """What is held by whom, for people."""
        held = sum(entry.nbytes for entry in self.feature_map)
        rows: dict[str, Any] = {
            "stitched frame": self.stitched[0],
            "video of a step": self.videos[0],
            "encoder chunk": self.chunks[0],
            "language": self.tokens[0],
            "prompt_embeds": self.prompt_embeds,
            "clip_feas": self.clip_feas,
            "ys": self.ys,
            "video_out": self.video_outs[0],
        }
        shown = {
            name: f"{'x'.join(map(str, value.shape))} {str(value.dtype).removeprefix('torch.')}"
            for name, value in rows.items()
        }
        return {**shown, "feature map": f"{len(self.feature_map)} tensors, {held / 2**20:.1f} MiB bfloat16"}


def make_inputs(*, steps: int, variety: int = 8) -> Inputs:
    """Inputs from fixed seeds.

    Args:
        steps: The longest session that is fed with them.
        variety: Different frames, videos and chunks; a session uses them in turn.
    """
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).bfloat16()

    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    tokens = torch.randint(0, 256384, (1, 512), generator=draw)
    return Inputs(
        stitched=[rng.integers(0, 256, (1, HEIGHT, WIDTH, 3), dtype=np.uint8) for _ in range(variety)],
        videos=[normal(1, 3, 4, HEIGHT, WIDTH) for _ in range(variety)],
        chunks=[normal(1, 32, 1, *LATENT) for _ in range(variety)],
        feature_map=[torch.empty(shape, dtype=torch.bfloat16) for shape in feature_map_shapes()],
        tokens=(tokens, tokens.clone()),
        prompt_embeds=normal(1, 512, 4096),
        clip_feas=normal(1, 257, 1280),
        ys=normal(1, 20, 9, *LATENT),
        video_outs=[
            torch.empty(1, FRAMES_PER_BLOCK, 16, *LATENT, dtype=torch.bfloat16) for _ in range(steps)
        ],
        quant_conv=WanCausalConv3d(32, 32, 1).bfloat16(),
    )


class StatePipeline(DreamZeroPipeline):
    """vLLM-Omni's pipeline without its networks: what is left works on the session's state.

    Args:
        inputs: What stands in for the networks' output.
        clock: Takes the laps.
    """

    def __init__(self, inputs: Inputs, clock: LapClock) -> None:
        torch.nn.Module.__init__(self)
        self.inputs = inputs
        self.clock = clock
        self.encoded = 0
        self.num_frame_per_block = FRAMES_PER_BLOCK
        self.vae = SimpleNamespace(
            dtype=torch.bfloat16,
            config=SimpleNamespace(patch_size=None),
            quant_conv=inputs.quant_conv,
            _enc_feat_map=None,
        )
        self.vae_latents_mean = torch.linspace(-1, 1, 16).view(1, -1, 1, 1, 1)
        self.vae_latents_inv_std = torch.linspace(0.5, 2, 16).view(1, -1, 1, 1, 1)
        self._states: OrderedDict[str, Any] = OrderedDict()
        self._memory_manager: Any = None
        self.state = None

    def _cudagraph_mark_step_begin(self) -> None:
        """Nothing is compiled here."""

    def _vae_init_enc_feat_map(self) -> list[torch.Tensor | None]:
        return [None] * len(self.inputs.feature_map)

    def _vae_encode_encoder_chunk(self, *_: Any) -> tuple[torch.Tensor, list[Any]]:
        self.encoded += 1
        self.vae._enc_feat_map = self.inputs.feature_map
        return self.inputs.chunks[self.encoded % len(self.inputs.chunks)], list(self.inputs.feature_map)

    def _vae_stream_append_frame(self, state: Any, new_frame: torch.Tensor) -> None:
        super()._vae_stream_append_frame(state, new_frame)
        self.clock.lap(APPEND)

    def _vae_quantize_encoder_out(self, encoder_out: torch.Tensor) -> torch.Tensor:
        self.clock.lap(READ)
        quantized = super()._vae_quantize_encoder_out(encoder_out)
        self.clock.lap(QUANT_CONV)
        return quantized


def bespoke(inputs: Inputs, clock: LapClock) -> StatePipeline:
    """vLLM-Omni with its flag off: a ``DreamZeroState`` that it looks up in its own table."""
    return StatePipeline(inputs, clock)


def in_tree(inputs: Inputs, clock: LapClock) -> StatePipeline:
    """vLLM-Omni with its flag on: its adapter over its own manager."""
    pipeline = StatePipeline(inputs, clock)
    pipeline._memory_manager = InTreeManager()
    return pipeline


def ours(inputs: Inputs, clock: LapClock) -> StatePipeline:
    """vLLM-Omni with this plugin attached, as its loader attaches it."""
    pipeline = StatePipeline(inputs, clock)
    attach(pipeline, SessionStateManager(), Patches(), video_latents="keep")
    return pipeline


def keep_window(state: Any) -> None:
    """Cut the bespoke encoder output to what is read, so that its cost is that of a bounded one."""
    held = state.vae_encoder_out
    if held.shape[2] > FRAMES_PER_BLOCK:
        state.vae_encoder_out = held[:, :, -FRAMES_PER_BLOCK:].clone()


@dataclass(slots=True)
class Session:
    """One session of one contender, a step at a time.

    Attributes:
        make: Builds the pipeline.
        inputs: What it is fed.
        tidy: Called with the state after each step, off the clock.
        clock: What each kind of operation took.
        step_no: Steps done.
        read: The observation latents that were read last.
        reads: How often they were read.
        windows: Window resets so far.
    """

    make: Callable[[Inputs, LapClock], StatePipeline]
    inputs: Inputs
    tidy: Callable[[Any], None] | None = None
    clock: LapClock = field(default_factory=lambda: LapClock((*STATE, BOOKS)))
    step_no: int = 0
    read: torch.Tensor | None = None
    reads: int = 0
    windows: int = 0
    pipeline: StatePipeline = field(init=False)

    def __post_init__(self) -> None:
        self.pipeline = self.make(self.inputs, self.clock)

    def step(self) -> None:
        """One forward as vLLM-Omni's runner makes it: the engine's K/V bound around it."""
        self.clock.start()
        with self.pipeline.bind_ar_diffusion_state(SESSION, KV):
            self.clock.lap(BOOKS)
            self.forward()
            self.clock.start()
        self.clock.lap(BOOKS)
        if self.tidy is not None:
            self.tidy(self.pipeline.state)

    def forward(self) -> None:
        """What ``DreamZeroPipeline.forward()`` does to the state, in its order, and no more."""
        pipeline, inputs, clock = self.pipeline, self.inputs, self.clock
        stitched = inputs.stitched[self.step_no % len(inputs.stitched)]
        videos = inputs.videos[self.step_no % len(inputs.videos)]
        tokens = inputs.tokens[self.step_no % 2]
        clock.start()

        state = pipeline._get_or_create_state(SESSION)
        pipeline.state = state
        clock.lap(LOOKUP)

        reason = state.reset_reason(tokens, 0, LOCAL_ATTN_SIZE)
        clock.lap(CONDITIONING)
        if reason is not None:
            state.reset(clear_video_latents=reason == "session")
            clock.lap(RESET)
        state.language = tokens
        clock.lap(CONDITIONING)
        state.accumulate_frames(stitched)
        clock.lap(FRAMES)

        if state.prompt_embeds is None:
            state.prompt_embeds = inputs.prompt_embeds
        prompt = state.prompt_embeds
        restart = state.current_start_frame == 0
        clock.lap(CONDITIONING)
        if restart:
            if state.vae_stream_initialized:
                pipeline._vae_stream_append_frame(state, videos[:, :, -1:])
            else:
                pipeline._vae_stream_seed(state, videos[:, :, :1])
                clock.lap(APPEND)
            state.clip_feas, state.ys = inputs.clip_feas, inputs.ys
            cross = state.clip_feas, state.clip_feas  # with classifier-free guidance: both branches
            clock.lap(CONDITIONING)
            del cross
        else:
            self.read = pipeline._encode_observation_latents(state, videos, latent_dtype=videos.dtype)
            clock.lap(READ)

        _read_conditioning(state)
        state.current_start_frame += FRAMES_PER_BLOCK
        clock.lap(CONDITIONING)
        state.append_video_latents(inputs.video_outs[self.step_no])
        clock.lap(LATENTS)

        assert prompt is inputs.prompt_embeds, "the session lost its prompt"
        self.step_no += 1
        self.reads += not restart
        self.windows += reason == "inference"


def _read_conditioning(state: Any) -> None:
    """The prefill's and the denoising loop's reads; both branches of classifier-free guidance."""
    if state.current_start_frame == 0:
        _ = state.ys, state.ys[:, :, 0:1], state.clip_feas
        state.current_start_frame = 1
    if state.current_start_frame != 1:
        start = state.current_start_frame
        if state.ys is not None and start <= state.ys.shape[2]:
            _ = state.ys[:, :, start - FRAMES_PER_BLOCK : start]
        _ = state.clip_feas
    _ = state.current_start_frame
    for _ in range(DEFAULT_NUM_INFERENCE_STEPS):
        start, ys = state.current_start_frame, state.ys
        _ = ys[:, :, start : start + FRAMES_PER_BLOCK]
        _ = state.clip_feas, state.clip_feas

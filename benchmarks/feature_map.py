"""The largest thing that a DreamZero session holds, its shapes and bytes; it needs no vLLM-Omni."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Shapes = list[tuple[int, ...]]
HEIGHT, WIDTH = 352, 640  # three cameras of 180x320, stitched
LATENT = (HEIGHT // 8, WIDTH // 8)


def feature_map_shapes() -> Shapes:
    """Inputs that each of the Wan encoder's 24 causal convolutions keeps for its next chunk.

    Two frames of every 3x3x3 convolution's input, one of every temporal downsampling's; 96 channels at full
    size, then 192, 384 and 384, each at half the height and width of the one before. In bfloat16 they are
    603 MiB.
    """
    shapes = [(1, 3, 2, HEIGHT, WIDTH)]
    before = 96
    for level, width in enumerate((96, 192, 384, 384)):
        size = (HEIGHT >> level, WIDTH >> level)
        shapes += [(1, channels, 2, *size) for channels in (before, width, width, width)]
        if level in (1, 2):
            shapes.append((1, width, 1, size[0] // 2, size[1] // 2))
        before = width
    return shapes + [(1, 384, 2, *LATENT)] * 5  # two residual blocks in the middle, the last convolution


def filled(shapes: Shapes) -> list[torch.Tensor]:
    """Inference tensors, as vLLM-Omni's are, every page of them written; the same ones at each call."""
    import torch

    draw = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        return [
            torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=draw).view(torch.bfloat16)
            for shape in shapes
        ]


def same_bits(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    """Whether tensors of 16-bit elements are equal bit for bit."""
    import torch

    return all(
        torch.equal(this.view(torch.int16), that.view(torch.int16))
        for this, that in zip(these, those, strict=True)
    )

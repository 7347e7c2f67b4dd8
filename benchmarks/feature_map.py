"""The shapes of the largest thing that a DreamZero session holds; the host is not needed for them."""

from __future__ import annotations

HEIGHT, WIDTH = 352, 640  # three cameras of 180x320, stitched
LATENT = (HEIGHT // 8, WIDTH // 8)


def feature_map_shapes() -> list[tuple[int, ...]]:
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

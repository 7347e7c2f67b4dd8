"""A forward that raises between two layers of the transformer."""

from contextlib import contextmanager


@contextmanager
def broken_between_layers(pipeline, *, call=1):
    """The second layer raises ``ValueError`` at its ``call``-th call, before its work; yields whether it did.

    By then the first layer has written its K and V of that call, and earlier calls theirs of all layers.
    """
    calls = 0

    def refuse(*_):
        nonlocal calls
        calls += 1
        if calls == call:
            raise ValueError("broken on purpose")

    hook = pipeline.transformer.blocks[1].register_forward_pre_hook(refuse)
    try:
        yield lambda: calls >= call
    finally:
        hook.remove()

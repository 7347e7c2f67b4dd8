"""Checkpoints and models that the Cosmos3 tests share: each is written and loaded once."""

from __future__ import annotations

from contextlib import ExitStack

import pytest


@pytest.fixture(scope="session")
def cosmos3_checkpoint(tmp_path_factory):
    """Return a function from a variant to its checkpoint folder."""
    from omni_tiny.checkpoint.cosmos3 import write_cosmos3

    folders = {}

    def checkpoint(variant):
        if variant not in folders:
            folders[variant] = write_cosmos3(tmp_path_factory.mktemp("cosmos3") / variant, variant=variant)
        return folders[variant]

    return checkpoint


@pytest.fixture(scope="module")
def tiny_cosmos3(cosmos3_checkpoint):
    """Return a function from a variant and settings to a loaded model; all are closed with the module."""
    from omni_tiny.cosmos3 import TinyCosmos3

    models = {}
    with ExitStack() as stack:

        def tiny(variant, *, flag=False, dtype="float32"):
            key = variant, flag, dtype
            if key not in models:
                model = TinyCosmos3(cosmos3_checkpoint(variant), flag=flag, dtype=dtype)
                models[key] = stack.enter_context(model)
            return models[key]

        yield tiny
        models.clear()

"""How large the engine's KV pool is where a device budget bounds the rest: on the host's own loader."""

import logging

import numpy as np
import pytest
from omni_tiny.capacity import free_bytes
from omni_tiny.inproc import TinyDreamZero
from omni_tiny.tiny import MODEL_OWNED_BYTES

from vllm_omni_session_state.base.errors import BudgetFixedError
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.omni.worker import engine_kv, kv_sizing

pytestmark = pytest.mark.host

FREE = free_bytes(12)


def load(checkpoint, *, exact=True, **options):
    """With memory for 12 sessions as vLLM-Omni plans it."""
    return TinyDreamZero(
        checkpoint, flag=True, capacity=12, exact=exact, model_config={"session_state": options}
    )


def planned(cache, reserved):
    """Places by the sum of vLLM-Omni's own figures."""
    page = cache.spec.page_size_bytes * cache.num_layers
    blocks = cache.config.sink_chunks + cache.config.window_chunks
    one = cache.cross_attention_bytes_per_session + cache.num_local_kv_branches * blocks * page
    fixed = cache.scratch_reserved_bytes + (cache.num_local_kv_branches * cache.frames_per_block + 2) * page
    return (FREE - reserved - fixed) // one


def test_with_a_device_budget_what_is_not_reserved_is_the_pools(dreamzero_checkpoint, caplog):
    caplog.set_level(logging.INFO, logger="vllm_omni.session_state")
    budget = 3 * MODEL_OWNED_BYTES
    with load(dreamzero_checkpoint, exact=False, host_budget="1GiB", device_budget=budget) as model:
        cache = model.runner.kv_cache
        reserved = kv_sizing.reserve(MODEL_OWNED_BYTES, budget, kv_nbytes=engine_kv.most_nbytes(cache))
        assert reserved == 5 * MODEL_OWNED_BYTES + engine_kv.most_nbytes(cache)
        assert cache.model_owned_state_reserved_bytes == 0
        assert model.capacity == min(64, planned(cache, reserved)) > 12
        assert f"room for the KV of {model.capacity} sessions; {reserved} bytes are reserved" in caplog.text
        spec = model.pipeline.ar_diffusion_kv_cache_spec()
        assert spec.model_owned_state_bytes_per_session == MODEL_OWNED_BYTES, "the model says what it said"
        room = model.pipeline._memory_manager.capacity
        room.device_budget = MODEL_OWNED_BYTES
        room.device_budget = budget
        for more in (budget + 1, None):
            with pytest.raises(BudgetFixedError, match="reserved when the model was loaded"):
                room.device_budget = more
        assert room.device_budget == budget
        model.step("a", rng=np.random.default_rng(0), frames=1)


@pytest.mark.parametrize(
    "options",
    [
        {"host_budget": "1GiB"},
        {"device_budget": "8MiB"},
        {"host_budget": "1GiB", "device_budget": "8MiB", "kv_pool": "host"},
    ],
)
def test_else_it_is_as_large_as_the_host_has_it(dreamzero_checkpoint, options):
    with load(dreamzero_checkpoint, **options) as model:
        assert model.runner.kv_cache.model_owned_state_bytes_per_session == MODEL_OWNED_BYTES
        model.pipeline._memory_manager.capacity.device_budget = 1 << 40


def test_a_budget_that_leaves_no_room_for_kv_is_said_and_the_hosts_figure_stands(
    dreamzero_checkpoint, caplog
):
    forget_said()
    with load(dreamzero_checkpoint, host_budget="1GiB", device_budget="1GiB"):
        pass
    said = [record.getMessage() for record in caplog.records if "as large as without" in record.getMessage()]
    assert len(said) == 1
    assert "cannot fit one session" in said[0]

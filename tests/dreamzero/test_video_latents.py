"""Video latents that are spilled, or of which the last are kept, on the real host.

What the disk does with segments is tested in tests/tiers/test_spill.py.
"""

import errno
import gc
import logging
from types import SimpleNamespace

import pytest
import torch
from lockstep import Lockstep, broken_diffuse, same_bits, scenario
from omni_tiny.inproc import TinyDreamZero
from profiles import LONG, count
from rollouts import Rollouts, loaded

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.adapters import video_latents
from vllm_omni_session_state.adapters.video_latents import FIELD, policy_of
from vllm_omni_session_state.base.errors import LatentsUnreadableError
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.manager.losses import Reason
from vllm_omni_session_state.offload import spill
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.file_system import System
from vllm_omni_session_state.offload.spill import SEGMENT

pytestmark = pytest.mark.host

FEW = 3
"""Chunks of a segment where a test does not care for the real number."""


@pytest.fixture(scope="module")
def spilling(dreamzero_checkpoint, tmp_path_factory):
    with loaded(dreamzero_checkpoint, tmp_path_factory.mktemp("spill"), video_latents="spill") as model:
        yield model


@pytest.fixture
def rollouts(spilling, monkeypatch):
    """A model without sessions that spills a few chunks at a time."""
    monkeypatch.setattr(spill, "SEGMENT", FEW)
    rollouts = Rollouts(spilling)
    yield rollouts
    keys = rollouts.manager.keys()
    for key in keys:
        spilling.close(key)
    assert rollouts.disk_nbytes == 0


class WithSpilled(Lockstep):
    """Compares what was spilled as well: as if it were in the list."""

    most = 0

    def fields(self, key):
        fields = super().fields(key)
        buffer = self.manager.peek(key).get(FIELD)
        self.most = max(self.most, len(buffer.segments))
        assert len(fields[FIELD]) <= FEW
        assert fields[FIELD] == buffer.container
        return {**fields, FIELD: buffer.whole()}


def test_every_output_field_and_video_is_equal_with_spilling_through_all_that_can_happen(bespoke, rollouts):
    pair = WithSpilled(bespoke, rollouts.model).fresh()
    scenario(pair)
    assert pair.most == 3


def test_the_latents_are_equal_after_every_number_of_chunks_and_the_video_too(rollouts):
    for _ in range(3 * FEW + 2):
        rollouts.step()
        rollouts.is_whole()
    assert len(rollouts.buffer().segments) == 3
    assert len(rollouts.buffer()) == 2
    rollouts.is_exact()


@pytest.mark.parametrize("budgets", [{"host_budget": "1GiB"}, {}, {"host_budget": "500kB"}])
def test_sessions_that_are_parked_and_come_back_keep_their_video_and_read_none_of_it(
    dreamzero_checkpoint, tmp_path, monkeypatch, budgets
):
    monkeypatch.setattr(spill, "SEGMENT", FEW)
    with loaded(
        dreamzero_checkpoint, tmp_path, video_latents="spill", device_budget="100kB", **budgets
    ) as model:
        rollouts = Rollouts(model)
        with monkeypatch.context() as patched:
            patched.setattr(spill.Spiller, "read", None)
            for _ in range(2 * FEW):
                for session in ("a", "b"):
                    rollouts.steps(1, session)
        assert rollouts.manager.stats()["restores"] >= 2 * (2 * FEW - 1)
        for session in ("a", "b"):
            rollouts.is_exact(session)
        assert rollouts.manager.stats()["parked_sessions"] == 2
        model.close("a")
        rollouts.is_exact("b")
        model.close("b")
        assert rollouts.disk_nbytes == 0


END = {
    "clear": lambda rollouts: rollouts.pipeline.clear_accumulated_video_latents("a"),
    "close": lambda rollouts: rollouts.model.close("a"),
    "reset": lambda rollouts: rollouts.model.reset("a"),
    "close by request": lambda rollouts: rollouts.step(close=True),
    "reset by request": lambda rollouts: rollouts.step(reset=True),
    "another prompt": lambda rollouts: rollouts.step(prompt="another task"),
    "vLLM-Omni evicts it": lambda rollouts: rollouts.model.runner._release_session(
        "a", reset_model=False, reason="lru_eviction"
    ),
    "drop all": lambda rollouts: rollouts.manager.drop_all(),
}


@pytest.mark.parametrize("end", END)
def test_with_every_end_of_the_latents_their_files_go(rollouts, end):
    rollouts.steps(3 * FEW)
    assert rollouts.disk_nbytes > 0
    END[end](rollouts)
    assert rollouts.disk_nbytes == 0
    rollouts.manager.check()


def test_a_forward_that_fails_takes_the_files_with_its_session(rollouts):
    rollouts.steps(2 * FEW)
    with broken_diffuse(rollouts.pipeline), pytest.raises(ValueError, match="on purpose"):
        rollouts.step()
    assert rollouts.disk_nbytes == 0


def test_a_window_that_is_full_keeps_the_video(rollouts):
    """vLLM-Omni assigns a copy of the list to itself."""
    resets = []
    rollouts.step()
    state = type(rollouts.pipeline.state).__mro__[2]
    reset = state.reset
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(state, "reset", lambda self, **how: (resets.append(how), reset(self, **how))[1])
        rollouts.steps(4 * FEW)
    assert {"clear_video_latents": False} in resets
    rollouts.is_whole()


def test_a_session_that_left_the_table_keeps_its_files_for_as_long_as_somebody_holds_it(rollouts):
    rollouts.steps(2 * FEW + 1)
    view, nbytes = rollouts.pipeline.state, rollouts.disk_nbytes
    table = rollouts.manager._table
    with table.lock:
        (oldest,) = table.entries.values()
        table.lose(oldest, Reason.COUNT)
    del oldest
    assert torch.equal(view.get_concatenated_video_latents(), torch.cat(rollouts.kept["a"], dim=2))
    assert rollouts.disk_nbytes == nbytes > 0
    del view
    rollouts.pipeline.state = None
    gc.collect()
    rollouts.step("b")
    assert rollouts.disk_nbytes == 0


@pytest.mark.parametrize("call", ["open", "fstat", "readv"])
def test_a_decode_whose_read_fails_says_so_and_the_next_one_is_exact(rollouts, monkeypatch, call):
    rollouts.steps(2 * FEW + 1)
    nbytes = rollouts.disk_nbytes

    def broken(*args, **kwargs):
        raise OSError(errno.EIO, "as asked")

    with monkeypatch.context() as patched:
        patched.setattr(System, call, staticmethod(broken))
        with pytest.raises(LatentsUnreadableError, match="cannot be read back: cannot read a parked"):
            rollouts.decode()
    rollouts.manager.check()
    assert rollouts.disk_nbytes == nbytes
    rollouts.step()
    rollouts.is_exact()


def test_after_a_decode_the_chunks_are_out_of_memory_again(rollouts):
    rollouts.steps(2 * FEW + 1)
    before = rollouts.manager.stats()["nbytes:cpu"]
    rollouts.is_exact()
    assert rollouts.manager.stats()["nbytes:cpu"] == before
    assert len(rollouts.buffer()) == 1


def test_a_disk_that_is_full_costs_no_step_and_no_chunk(rollouts, monkeypatch, caplog):
    forget_said()
    monkeypatch.setattr(rollouts.manager.offloader.spiller._tier, "budget", 1000)
    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        rollouts.steps(3 * FEW)
    rollouts.is_whole()
    assert rollouts.disk_nbytes == 0
    lines = [record.getMessage() for record in caplog.records if "video latents" in record.getMessage()]
    assert len(lines) == 1
    assert "raise disk.budget" in lines[0]


def test_host_bytes_stay_flat_over_2000_steps_and_the_video_is_equal(
    dreamzero_checkpoint, tmp_path, monkeypatch
):
    """A twentieth in the short run, with shorter segments, and then no decode of so many chunks.

    One step in four is a forward of the model; two decodes of 2,000 chunks take minutes as it is. At the
    other three its own ``append_video_latents`` is given a chunk like the last, within the adapter's lease.
    """
    steps = count(2000)
    if not LONG:
        monkeypatch.setattr(spill, "SEGMENT", 8)
    with loaded(dreamzero_checkpoint, tmp_path, steps=1, video_latents="spill") as model:
        rollouts = Rollouts(model)
        held, generator = [], torch.Generator().manual_seed(0)
        for step in range(steps):
            if step % 4 == 0:
                rollouts.step()
            else:
                chunk = torch.randn(rollouts.kept["a"][-1].shape, generator=generator).to(torch.bfloat16)
                with rollouts.pipeline.bind_ar_diffusion_state("a", SimpleNamespace(session_id="a")):
                    rollouts.pipeline.state.append_video_latents(chunk.transpose(1, 2))
                rollouts.kept["a"].append(chunk)
            held.append(rollouts.manager._table.accounts.host_nbytes())
        rollouts.manager.check()
        largest = max(chunk.numel() * 2 for chunk in rollouts.kept["a"])
        frames = rollouts.manager.peek("a").objects["stitched_buffer"].nbytes
        assert max(held) <= spill.SEGMENT * largest + frames
        assert len(rollouts.buffer().segments) == (steps - 1) // spill.SEGMENT
        assert rollouts.disk_nbytes > largest * steps // 2
        rollouts.is_whole()
        if LONG:
            rollouts.is_exact()
        model.close("a")
        assert rollouts.disk_nbytes == 0


@pytest.mark.parametrize("last", [1, 2, 5])
def test_the_last_chunks_are_kept_and_decoded_on_their_own(rollouts, monkeypatch, last):
    rollouts.use(monkeypatch, video_latents.Policy(last=last))
    for _ in range(last + last // 4 + 1):
        rollouts.steps(1)
        assert len(rollouts.buffer()) <= last + last // 4
    video = rollouts.decode()
    assert same_bits(video, rollouts.expected(last=last))
    assert len(rollouts.buffer()) == last
    # The decoder is causal: its first latent is one frame, and begins from nothing.
    latent_frames = sum(chunk.shape[2] for chunk in rollouts.kept["a"][-last:])
    assert video.shape[2] == 4 * latent_frames - 3
    assert not torch.equal(video, rollouts.expected()[:, :, -video.shape[2] :])
    rollouts.steps(1)
    assert same_bits(rollouts.decode(), rollouts.expected(last=last))
    assert rollouts.disk_nbytes == 0


def test_keep_writes_nothing_though_there_is_a_disk(rollouts, monkeypatch):
    rollouts.use(monkeypatch, video_latents.Policy())
    rollouts.steps(3 * FEW)
    assert rollouts.disk_nbytes == 0
    assert len(rollouts.buffer()) == 3 * FEW
    rollouts.is_whole()


class ReadsElsewhere:
    """A host whose decode reads the chunks in a way of its own."""

    def decode_accumulated_video_latents(self, session_id=None):
        return self.states[session_id].video_latents_across_time


def test_a_setting_that_cannot_be_followed_is_said_once_and_ignored(tmp_path, caplog):
    from vllm_omni.diffusion.models.dreamzero.pipeline_dreamzero import DreamZeroPipeline

    forget_said()
    disk = DiskTier(tmp_path, budget=1)
    without, with_disk = SessionStateManager(), SessionStateManager(disk=disk)
    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        assert policy_of("spill", without, DreamZeroPipeline) == video_latents.Policy()
        assert policy_of("spill", without, DreamZeroPipeline) == video_latents.Policy()
        forget_said()
        assert policy_of("spill", with_disk, ReadsElsewhere) == video_latents.Policy()
    assert [record.getMessage().split(";")[0][:76] for record in caplog.records] == [
        "video_latents=spill needs disk.path and disk.budget",
        "video_latents=spill needs a vLLM-Omni whose decode reads through get_concate",
    ]
    assert policy_of("spill", with_disk, DreamZeroPipeline).spiller is with_disk.offloader.spiller
    assert policy_of("keep", with_disk, DreamZeroPipeline) == video_latents.Policy()
    assert policy_of(7, without, DreamZeroPipeline) == video_latents.Policy(last=7)
    disk.close()


def test_without_a_disk_spill_keeps_all(dreamzero_checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(spill, "SEGMENT", FEW)
    forget_said()
    options = {"session_state": {"video_latents": "spill"}}
    with (
        caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"),
        TinyDreamZero(dreamzero_checkpoint, flag=True, capacity=4, model_config=options) as model,
    ):
        rollouts = Rollouts(model)
        rollouts.steps(2 * FEW)
        assert len(rollouts.buffer()) == 2 * FEW
        rollouts.is_whole()
    assert len([record for record in caplog.records if "video_latents=spill" in record.getMessage()]) == 1


def test_the_real_segment_is_used_where_no_test_says_otherwise():
    assert spill.SEGMENT == SEGMENT == 64

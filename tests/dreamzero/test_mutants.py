"""The suite can fail: each mistake that the plugin could make is caught by a test of this folder."""

import logging
import tempfile

import mutants
import pytest
import test_session_state_equivalence as equivalence
import test_state_fields as fields
import torch
from lockstep import Lockstep

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.adapters.dreamzero import view_of
from vllm_omni_session_state.adapters.video_latents import Policy
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.spill import SEGMENT, Spiller
from vllm_omni_session_state.plugin import register

pytestmark = pytest.mark.host


def attaches_once(load, caplog):
    """One load, one manager, however often the plugin was registered."""
    register()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="vllm_omni.session_state"), load():
        lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "experimental" in line]) == 1
    assert not [line for line in lines if "loaded again" in line]


def test_one_load_attaches_once(load_managed, caplog):
    attaches_once(load_managed, caplog)


def reads_what_was_spilled(session, view):
    """Also after the model's window was full, and nothing after a clear."""
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskTier(folder, budget=1 << 20)
        policy = Policy(spiller=Spiller(disk))
        chunks = [torch.full((1, 2, 1, 1, 1), float(n)) for n in range(SEGMENT + 3)]
        for chunk in chunks:
            view.append_video_latents(chunk.transpose(1, 2))
            policy.after_forward(session)
        assert disk.nbytes > 0
        for _ in range(2):
            assert len(view.video_latents_across_time) == 3
            assert torch.equal(view.get_concatenated_video_latents(), torch.cat(chunks, dim=2))
            view.reset_inference_state()
        view.clear_video_latents()
        assert view.get_concatenated_video_latents() is None
        assert disk.nbytes == 0
        disk.close()


def test_what_was_spilled_is_read(session, view):
    reads_what_was_spilled(session, view)


EVERYTHING_EQUAL = equivalence.test_every_output_and_field_is_equal_through_all_that_can_happen
CAUGHT_BY = {
    mutants.view_keyed_to_the_wrong_session: EVERYTHING_EQUAL,
    mutants.buffer_setter_shares_the_callers_list: fields.test_an_assigned_buffer_shares_no_list,
    mutants.ring_one_frame_short: EVERYTHING_EQUAL,
    mutants.ring_one_frame_long_that_aliases: EVERYTHING_EQUAL,
    mutants.attribute_kept_on_the_view: EVERYTHING_EQUAL,
    mutants.drop_that_forgets: fields.test_after_close_every_storage_of_the_session_is_dead,
    mutants.reset_that_skips_an_attribute: fields.test_reset_leaves_no_field_behind,
    mutants.hook_that_attaches_twice: attaches_once,
    mutants.decode_of_what_is_in_memory_alone: reads_what_was_spilled,
    mutants.assigned_list_in_a_new_buffer: reads_what_was_spilled,
}


def test_every_mutant_has_its_test():
    assert set(CAUGHT_BY) == set(mutants.MUTANTS)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_mutant_is_caught(mutant, bespoke, load_managed, host_state, caplog):
    check = CAUGHT_BY[mutant]
    wants = check.__code__.co_varnames[: check.__code__.co_argcount]
    with mutant():
        given = {"load": load_managed, "caplog": caplog}
        managed = None
        if "pair" in wants:
            managed = load_managed()
            given["pair"] = Lockstep(bespoke, managed).fresh()
        if "view" in wants:
            given["host_state"] = host_state
            given["session"] = SessionStateManager().get_or_create_session("a")
            given["view"] = view_of(given["session"], host_state, window=2)
        try:
            with pytest.raises(AssertionError):
                check(**{name: given[name] for name in wants})
        finally:
            if managed is not None:
                managed.shutdown()

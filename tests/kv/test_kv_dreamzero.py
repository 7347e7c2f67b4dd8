"""The real worker and runner: a session whose KV leaves after every step computes what it always would."""

import numpy as np
import pytest
from engine import all_free, nbytes
from omni_tiny.inproc import TinyDreamZero
from profiles import LONG
from travel_kv import by_reference, packed, take_out, written

from vllm_omni_session_state.omni.worker import engine_kv
from vllm_omni_session_state.state.paged_kv import PagedKV

pytestmark = pytest.mark.host

SESSIONS = ("a", "b", "c", "d")
ROUNDS = 12 if LONG else 7  # the fifth step begins a window anew


def step(model, session, round_):
    """The same observation whoever runs it: it depends on the session and the round alone."""
    rng = np.random.default_rng([SESSIONS.index(session), round_])
    prompt = "another task" if round_ >= ROUNDS - 2 and session in "bd" else f"task of {session}"
    return model.step(session, rng=rng, prompt=prompt, frames=1 if round_ == 0 else 4)


@pytest.fixture(scope="module")
def model(dreamzero_checkpoint):
    """Room for one session's KV; the model keeps the rest of each session's state."""
    with TinyDreamZero(dreamzero_checkpoint, flag=False, capacity=1) as model:
        yield model


@pytest.fixture(scope="module")
def alone(model):
    """Each session's outputs when nothing is ever taken out."""
    outputs = {}
    for session in SESSIONS:
        outputs.update({(session, round_): step(model, session, round_) for round_ in range(ROUNDS)})
        model.close(session)
    return outputs


def differing(model, alone, *, way, anew, spoil=lambda tree: tree):
    """Run all sessions in turns, of which never two are in the pool; returns whose outputs differ."""
    runner, pool = model.runner, model.runner.kv_cache
    trees, closed, wrong = {}, {}, []
    for round_ in range(ROUNDS):
        for session in SESSIONS:
            if session in trees:
                state = runner._new_session_state(session) if anew else closed[session]
                engine_kv.put_back(state, spoil(trees.pop(session)))
                runner._sessions[session] = state
            if not step(model, session, round_).equals(alone[session, round_]):
                wrong.append((session, round_))
            state = closed[session] = runner._sessions.pop(session)
            counted = PagedKV(engine_kv.SessionKV(state)).nbytes
            assert counted == nbytes(state) > 0
            trees[session] = way(take_out(state))
            all_free(pool)
    for session in SESSIONS:
        model.close(session)
    return wrong


@pytest.mark.parametrize(
    ("way", "anew"),
    [(by_reference, False), (packed, False), (written, True)],
    ids=["as it is", "host", "file"],
)
def test_every_output_is_bit_equal_although_the_kv_was_out_between_any_two_steps(model, alone, way, anew):
    assert differing(model, alone, way=way, anew=anew) == []


def test_the_outputs_tell_whether_the_kv_came_back(model, alone):
    """With the last layer's V of another sign the comparison above fails, in all steps but the first."""

    def of_another_sign(tree):
        tree["values"][-1].neg_()
        return tree

    wrong = differing(model, alone, way=by_reference, anew=False, spoil=of_another_sign)
    assert {round_ for _, round_ in wrong} >= {1, 2, 3}
    assert 0 not in {round_ for _, round_ in wrong}

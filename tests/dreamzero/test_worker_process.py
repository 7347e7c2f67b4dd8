"""The same through the real engine and its worker process: one deploy YAML, only the environment flipped."""

import numpy as np
import pytest
from profiles import LONG

from vllm_omni_session_state.base.settings import ENV_FLAG

pytestmark = pytest.mark.host

PROMPTS = {"a": "pick up the cup", "b": "open the drawer", "c": "wave"}


def twenty_eight_steps(omni):
    """Interleaved, past a window reset, with a prompt change, a reset, a close by request and one by call."""
    rng = np.random.default_rng(5)
    out = []
    for round_ in range(7):
        for session, prompt in PROMPTS.items():
            out.append(omni.step(session, rng=rng, prompt=prompt, frames=1 if round_ == 0 else 4))
    out.append(omni.step("a", rng=rng, prompt="put it down"))
    out.append(omni.step("b", rng=rng, prompt=PROMPTS["b"], reset=True))
    out.append(omni.step("b", rng=rng, prompt=PROMPTS["b"], close=True))
    out.append(omni.step("b", rng=rng, prompt=PROMPTS["b"]))
    omni.close("c")
    out.extend(omni.step(session, rng=rng, prompt=prompt) for session, prompt in PROMPTS.items())
    assert len(out) == 28
    return out


@pytest.mark.skipif(not LONG, reason="two ranks of a served model have worker processes, too")
def test_28_steps_in_a_worker_process_are_equal(dreamzero_checkpoint, tmp_path, monkeypatch):
    from omni_tiny.omni_runs import OmniDreamZero, write_deploy

    deploy = tmp_path / "deploy.yaml"
    write_deploy(deploy, dreamzero_checkpoint)
    runs = {}
    for flag in ("0", "1"):
        monkeypatch.setenv(ENV_FLAG, flag)
        with OmniDreamZero(dreamzero_checkpoint, deploy, capacity=3) as omni:
            runs[flag] = twenty_eight_steps(omni)
            manager = omni.call("tiny_listing")
        assert ("vllm_omni_session_state.manager.manager" in str(manager)) is (flag == "1")
    assert [
        step for step, (off, on) in enumerate(zip(*runs.values(), strict=True)) if not off.equals(on)
    ] == []

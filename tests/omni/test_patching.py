"""A function of vLLM-Omni is wrapped once, looks as it did, and a hook that fails leaves it alone."""

import asyncio
import inspect
import logging

import pytest

from vllm_omni_session_state.base.log import forget_said, tried
from vllm_omni_session_state.omni.hooks import patching


class Worker:
    """Stands where a class of vLLM-Omni does."""

    def sleep(self, level=1):
        """Its own."""
        return [level]

    async def step(self, obs):
        return obs


@pytest.fixture(params=["class", "object"])
def owner(request):
    """A class that nobody has wrapped, or an object of it."""
    fresh = type("Worker", (Worker,), dict(vars(Worker)))
    return fresh if request.param == "class" else fresh()


def calls(owner, name, *args):
    return getattr(owner() if isinstance(owner, type) else owner, name)(*args)


def twice(original, *args, **kwargs):
    return original(*args, **kwargs) * 2


def test_a_function_is_wrapped_once_and_looks_as_before(owner):
    before = inspect.signature(owner.sleep)
    for _ in range(3):
        patching.wrap(owner, "sleep", twice)
    assert calls(owner, "sleep", 3) == [3, 3]
    assert inspect.signature(owner.sleep) == before
    assert owner.sleep.__doc__ == "Its own."
    assert not hasattr(owner.sleep.__wrapped__, patching.MARK)


def test_a_coroutine_function_stays_one(owner):
    async def later(original, *args):
        await asyncio.sleep(0)
        return await original(*args)

    patching.wrap(owner, "step", later)
    assert inspect.iscoroutinefunction(owner.step)
    assert asyncio.run(calls(owner, "step", "obs")) == "obs"


def test_a_hook_that_fails_is_said_once_and_changes_nothing(caplog):
    forget_said()
    before = dict(vars(Worker))
    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        for _ in range(2):
            assert not tried(lambda: patching.wrap(Worker, "nap", twice), "it naps")
    assert vars(Worker) == before
    (line,) = caplog.messages
    assert line.startswith("it naps: AttributeError: ")
    assert line.endswith("no attribute 'nap'")

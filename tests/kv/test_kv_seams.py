"""What is relied on in the engine is listed, and compared before it is used."""

import ast
import inspect

import pytest
from engine import LIKE_LINGBOT, all_free, make_pool
from rollout import Rollout

from vllm_omni_session_state import SessionState
from vllm_omni_session_state.base.errors import SeamMismatchError
from vllm_omni_session_state.omni.hooks import seams
from vllm_omni_session_state.omni.worker import engine_kv, kv_payload

pytestmark = pytest.mark.host

PLACES = {
    "state": (seams.KV_STATE_SEAMS, seams.KV_STATE_FIELDS),
    "cache": (seams.KV_CACHE_SEAMS, seams.KV_CACHE_FIELDS),
    "adapter": ((), seams.KV_ADAPTER_FIELDS),
    "config": ((), seams.KV_CONFIG_FIELDS),
    "spec": ((), seams.KV_SPEC_FIELDS),
    "pool": (seams.KV_POOL_SEAMS, {}),
}
METHODS = [(place, seam.name) for place, (methods, _) in PLACES.items() for seam in methods]
FIELDS = [
    (place, name) for place, (_, fields) in PLACES.items() for names in fields.values() for name in names
]


@pytest.fixture
def rollout():
    return Rollout(make_pool(LIKE_LINGBOT), LIKE_LINGBOT, frames=3)


def owner_of(rollout, place):
    return {
        "state": rollout.state,
        "cache": rollout.kv,
        "adapter": rollout.state.adapters["main"],
        "config": rollout.kv.config,
        "spec": rollout.kv.spec,
        "pool": rollout.kv.manager.block_pool,
    }[place]


def other_class(owner, **names):
    """The same object, as if its class had been written otherwise."""
    kind = type(f"Other{type(owner).__name__}", (type(owner),), names)
    object.__setattr__(owner, "__class__", kind)  # the engine's spec is frozen


def refuses(rollout, name):
    session = SessionState("a")
    with pytest.raises(SeamMismatchError, match=rf"\.{name}: expected .*, found ") as raised:
        engine_kv.join(session, rollout.state)
    assert session.empty
    return raised.value


def test_the_engine_of_this_version_is_as_expected(rollout):
    engine_kv.check_engine(rollout.state)


@pytest.mark.parametrize(("place", "name"), METHODS)
def test_another_signature_is_found_before_anything_is_touched(rollout, place, name):
    other_class(owner_of(rollout, place), **{name: lambda self, something_else: None})
    assert refuses(rollout, name).found == "(self, something_else)"


@pytest.mark.parametrize(("place", "name"), FIELDS)
def test_an_attribute_of_another_type_is_found_before_anything_is_touched(rollout, place, name):
    other_class(owner_of(rollout, place), **{name: property(lambda self: 0.5)})
    assert refuses(rollout, name).found == "a float"


@pytest.mark.parametrize("name", ["_committed", "_paged_pending", "_closed"])
def test_an_attribute_that_is_gone_is_found(rollout, name):
    delattr(rollout.state, name)
    assert refuses(rollout, name).found == "nothing of that name"


def test_an_engine_without_a_pool_is_refused(rollout):
    rollout.kv.manager = None
    assert refuses(rollout, "get_num_free_blocks").found == "nothing of that name"
    rollout.state.kv_cache = None
    refuses(rollout, "begin_request")


def test_an_engine_that_is_refused_serves_on(rollout):
    """Nothing is patched: the one who is told leaves the KV out of the books."""
    other_class(rollout.state, close=lambda self, now=True: type(self).__mro__[1].close(self))
    refuses(rollout, "close")
    rollout.run(3)
    rollout.state.close()
    all_free(rollout.kv)


def private_names(module):
    """Names with a leading underscore that are looked up on anything but ``self``."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not own and not node.attr.startswith("__"):
                yield node.attr


@pytest.mark.parametrize("module", [engine_kv, kv_payload], ids=lambda module: module.__name__)
def test_every_private_name_that_is_used_is_listed(module):
    listed = {name for _, name in METHODS + FIELDS}
    used = set(private_names(module))
    assert used
    assert used <= listed

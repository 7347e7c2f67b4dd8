"""The hook on the installed vLLM-Omni: what is patched, when, and what a second load does."""

import gc
import logging
import subprocess
import sys

import pytest
from fingerprint import fingerprint

from vllm_omni_session_state.omni.hooks import seams
from vllm_omni_session_state.plugin import register

pytestmark = pytest.mark.host


@pytest.mark.parametrize("pipeline", sorted(seams.PIPELINE_SEAMS))
def test_every_seam_of_the_installed_host_is_as_expected(pipeline):
    module, name = pipeline.rsplit(".", 1)
    owner = getattr(__import__(module, fromlist=[name]), name)
    seams.check(owner, seams.PIPELINE_SEAMS[pipeline])


def test_the_loaders_signature_is_the_one_that_was_read():
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

    expected = "(self, load_device, load_format=..., custom_pipeline_name=..., device=...)"
    assert seams.signature_of(DiffusersPipelineLoader.load_model) == expected


def test_registering_before_the_host_is_imported_hooks_it_when_it_is():
    code = (
        "import sys\n"
        "from vllm_omni_session_state.plugin import register\n"
        "register(); register()\n"
        "assert 'vllm_omni' not in sys.modules\n"
        "import vllm_omni.diffusion.model_loader.diffusers_loader as module\n"
        "load = module.DiffusersPipelineLoader.load_model\n"
        "print(hasattr(load, '__session_state_wrapper__'), hasattr(load.__wrapped__, '__wrapped__'))\n"
        "print(type(module.__spec__.loader).__name__, type(module.__loader__).__name__)\n"
        "register(); print(module.DiffusersPipelineLoader.load_model is load)\n"
        "print([f.awaited for f in sys.meta_path if type(f).__module__.startswith('vllm_omni_session')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-4:] == [
        "True False",
        "SourceFileLoader SourceFileLoader",
        "True",
        f"[{seams.SERVER_MODULE!r}, {seams.RUNTIME_MODULE!r}]",  # this process has no server and no engine
    ]


def test_a_second_load_drops_the_first_ones_sessions_and_says_so(load_tiny, caplog):
    with load_tiny(flag=True) as model:
        first = model.pipeline._memory_manager
        session = first.get_or_create_session("robot")
        session.attrs["x"] = 1
        with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
            model.worker.load_model(load_format="default")
        assert model.pipeline._memory_manager is not first
        assert len(first) == 0
        assert session.attrs == {}
        said = [record.getMessage() for record in caplog.records]
        assert [line for line in said if "1 sessions of the earlier load are dropped" in line]


def test_another_models_load_drops_nobody(load_tiny):
    with load_tiny(flag=True) as model:
        model.pipeline._memory_manager.get_or_create_session("robot")
        with load_tiny(flag=True):
            assert "robot" in model.pipeline._memory_manager


def test_nothing_that_we_set_on_a_pipeline_reaches_back_to_it(load_tiny):
    """A host that loads a model again must get the weights' memory back at once."""
    with load_tiny(flag=True) as model:
        set_by_us = [value for value in vars(model.pipeline).values() if _belongs_to_us(value)]
        assert len(set_by_us) >= 6
        assert not [value for value in set_by_us if _reaches(value, model.pipeline)]


def _belongs_to_us(value):
    owner = getattr(value, "__self__", value)
    return type(owner).__module__.startswith("vllm_omni_session_state")


def _reaches(value, target):
    seen, stack = set(), [value]
    while stack:
        item = stack.pop()
        if item is target:
            return True
        if id(item) in seen or isinstance(item, type | type(sys)):
            continue
        seen.add(id(item))
        if type(item).__name__ == "function":
            stack += [cell.cell_contents for cell in item.__closure__ or ()]
        else:
            stack += gc.get_referents(item)
    return False


def test_with_the_flag_off_nothing_differs_but_load_models_wrapper(dreamzero_checkpoint):
    """Every class of vLLM-Omni and the loaded pipeline object, with the plugin and without it.

    Both processes are forks of one, with one seed of hashes: vLLM-Omni makes lists of sets.
    """
    from omni_tiny.ranks import run_in_ranks

    checkpoint, prints = str(dreamzero_checkpoint), {}
    for plugins in ("omni_tiny,omni_tiny_cpu", "omni_tiny,omni_tiny_cpu,session_state"):
        (prints[plugins],) = run_in_ranks(fingerprint, checkpoint, plugins, size=1, limit_s=3600)
    without, with_plugin = prints.values()
    assert len(without["classes"]) > 5000
    assert len(without["pipeline"]) > 100
    assert without["pipeline"] == with_plugin["pipeline"]
    assert without["output"] == with_plugin["output"]
    different = {
        name
        for name in without["classes"].keys() | with_plugin["classes"].keys()
        if without["classes"].get(name) != with_plugin["classes"].get(name)
    }
    assert different == {f"{seams.LOADER_MODULE}.{seams.LOADER_CLASS}.{seams.LOADER_METHOD}"}


@pytest.fixture
def load_tiny(dreamzero_checkpoint):
    from omni_tiny.inproc import TinyDreamZero

    register()
    return lambda *, flag: TinyDreamZero(dreamzero_checkpoint, flag=flag, capacity=3)

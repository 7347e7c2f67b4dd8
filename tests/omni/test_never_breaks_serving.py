"""Whatever goes wrong while hooking, the model is loaded as without the plugin, and one WARNING says why."""

import logging
import sys
import types

import pytest
from fakes import Config, DreamZeroPipeline, OldConfig, OtherPipeline, installed, loader_module

from vllm_omni_session_state.adapters import dreamzero
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.base.settings import ENV_FLAG, ENV_MAX_SESSIONS
from vllm_omni_session_state.omni.worker import agreement, runner
from vllm_omni_session_state.plugin import register


@pytest.fixture(autouse=True)
def fresh(monkeypatch, caplog):
    monkeypatch.setattr(runner, "hook_runner", lambda: None)  # vLLM-Omni may not be installed where this runs
    forget_said()
    monkeypatch.delenv(ENV_FLAG, raising=False)
    monkeypatch.delenv(ENV_MAX_SESSIONS, raising=False)
    caplog.set_level(logging.INFO, logger="vllm_omni.session_state")


def load(pipeline, config, times=1):
    """Load through the hooked loader; the pipeline as it came back and the lines that were logged."""
    with installed(loader_module(pipeline)) as module:
        register()
        loader = module.DiffusersPipelineLoader(config)
        for _ in range(times):
            assert loader.load_model("cpu", device=None) is pipeline
    return pipeline


def lines(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def untouched(pipeline):
    return vars(pipeline) == vars(DreamZeroPipeline())


def test_a_raising_adapter_leaves_the_pipeline_as_it_was_loaded(monkeypatch, caplog):
    def attach(pipeline, manager, patches, *, video_latents):
        patches.set(pipeline, "state", "half done")
        patches.set(pipeline, "_memory_manager", manager)
        raise RuntimeError("no such tensor")

    monkeypatch.setattr(dreamzero, "attach", attach)
    pipeline = load(DreamZeroPipeline(), Config(), times=3)
    assert untouched(pipeline)
    (line,) = lines(caplog)
    assert "DreamZeroPipeline keeps its own session state: RuntimeError: no such tensor" in line


def test_what_an_attached_pipeline_held_before_is_held_by_nobody():
    pipeline = load(DreamZeroPipeline(), Config())
    assert agreement.loads[-1].pipeline() is pipeline
    assert not agreement.loads[-1].patches._before


def test_a_missing_seam_is_named_with_what_was_expected(monkeypatch, caplog):
    monkeypatch.delattr(DreamZeroPipeline, "_drop_ar_diffusion_session_state")
    pipeline = load(DreamZeroPipeline(), Config())
    assert untouched(pipeline)
    (line,) = lines(caplog)
    assert "_drop_ar_diffusion_session_state: expected (self, session_id), found nothing of that name" in line


def test_a_changed_seam_is_named_with_what_was_found(monkeypatch, caplog):
    monkeypatch.setattr(DreamZeroPipeline, "_get_or_create_state", lambda self, *, rollout=None, **more: None)
    pipeline = load(DreamZeroPipeline(), Config())
    assert untouched(pipeline)
    (line,) = lines(caplog)
    assert "expected (self, session_id), found (self, *, rollout=..., **more)" in line


def test_a_host_without_the_flags_field_is_told_the_variable(caplog):
    pipeline = load(DreamZeroPipeline(), OldConfig(), times=2)
    assert untouched(pipeline)
    (line,) = lines(caplog)
    assert "OldConfig has no field enable_session_state_manager" in line
    assert f"{ENV_FLAG}=1" in line


def test_a_host_without_the_flags_field_can_be_turned_on_by_the_variable(monkeypatch, caplog):
    given = []
    monkeypatch.setattr(dreamzero, "attach", lambda pipeline, manager, patches, **_: given.append(manager))
    monkeypatch.setenv(ENV_FLAG, "1")
    load(DreamZeroPipeline(), OldConfig())
    assert len(given) == 1


def test_where_no_group_has_one_request_nothing_is_parked_and_the_model_serves(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm_omni.diffusion.offloader.config", None)  # of a host without it
    config = Config()
    config.model_config = {"session_state": {"host_budget": "1GiB", "device_budget": 0}}
    config.parallel_config = types.SimpleNamespace(
        data_parallel_size=2
    )  # and it does not say how it offloads
    pipeline = load(DreamZeroPipeline(), config, times=2)
    assert not pipeline._memory_manager.offloader
    assert pipeline._memory_manager.capacity.device_budget is None
    (line,) = [line for line in lines(caplog) if "loaded again" not in line]
    assert "with data_parallel_size=2 and layer-wise offload" in line
    assert line.endswith("Budgets are ignored and nothing is parked")


def test_a_loader_without_load_model_is_left_alone(caplog):
    module = loader_module(DreamZeroPipeline())
    del module.DiffusersPipelineLoader.load_model
    with installed(module):
        register()
        register()
    (line,) = lines(caplog)
    assert "DiffusersPipelineLoader.load_model, found none" in line


def test_a_module_without_the_loader_is_left_alone(caplog):
    with installed(types.ModuleType("empty")):
        register()
    assert len(lines(caplog)) == 1


def test_an_error_of_the_host_comes_through_untouched(caplog):
    module = loader_module(None)

    def load_model(self, *args, **kwargs):
        raise MemoryError("weights")

    module.DiffusersPipelineLoader.load_model = load_model
    with installed(module):
        register()
        with pytest.raises(MemoryError, match="weights"):
            module.DiffusersPipelineLoader(Config()).load_model("cpu")
    assert lines(caplog) == []


def test_a_pipeline_without_an_adapter_gets_one_line_per_class(caplog):
    load(OtherPipeline(), Config(), times=2)
    assert lines(caplog) == []
    assert lines(caplog, logging.INFO) == ["OtherPipeline has no session state that this plugin knows"]


def test_with_the_flag_off_nothing_is_said_of_any_pipeline(caplog):
    load(OtherPipeline(), Config(enable_session_state_manager=False))
    load(DreamZeroPipeline(), Config(enable_session_state_manager=False))
    assert caplog.records == []


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        (ENV_FLAG, "maybe", "the config's off"),
        (ENV_MAX_SESSIONS, "-3", "64"),
        (ENV_MAX_SESSIONS, "12.5", "64"),
    ],
)
def test_nonsense_gets_one_warning_however_often_the_model_is_loaded(
    monkeypatch, caplog, name, value, instead
):
    monkeypatch.setenv(name, value)
    load(DreamZeroPipeline(), Config(enable_session_state_manager=False), times=3)
    (line,) = lines(caplog)
    assert line.startswith(f"{name}={value!r}")
    assert line.endswith(f"using {instead}")


def test_registering_twice_wraps_once():
    with installed(loader_module(DreamZeroPipeline())) as module:
        register()
        once = module.DiffusersPipelineLoader.load_model
        register()
        assert module.DiffusersPipelineLoader.load_model is once
        assert not hasattr(once.__wrapped__, "__wrapped__")

"""The disk tier as a deploy config asks for it, in vLLM-Omni's own worker: from its start to its shutdown."""

import logging
import stat
from pathlib import Path

import numpy as np
import pytest

from vllm_omni_session_state.base.errors import SeamMismatchError
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.file_format import read_file
from vllm_omni_session_state.omni.hooks import patching
from vllm_omni_session_state.omni.worker.lifecycle import hook_shutdown

pytestmark = pytest.mark.host


@pytest.fixture(autouse=True)
def said_anew():
    forget_said()


def load(checkpoint, **options):
    from omni_tiny.inproc import TinyDreamZero

    return TinyDreamZero(
        checkpoint, flag=True, capacity=4, exact=False, model_config={"session_state": options}
    )


def run(model, *sessions):
    for session in sessions:
        model.step(session, rng=np.random.default_rng(0), frames=1)


def workers_in(path):
    return sorted(each.name for each in Path(path).iterdir())


def test_a_worker_has_a_folder_of_its_own_and_leaves_none_behind(dreamzero_checkpoint, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="vllm_omni.session_state")
    path = tmp_path / "parked"
    with load(dreamzero_checkpoint, device_budget=0, disk={"path": str(path), "budget": "1GiB"}) as model:
        assert f"parked ones {1 << 30} on the disk in {path}" in caplog.text
        (name,) = workers_in(path)
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((path / name).stat().st_mode) == 0o700
        run(model, "robot")
        assert model.pipeline._memory_manager.stats()["disk_sessions"] == 1
        (file,) = (path / name).iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert b"robot" not in file.read_bytes()
        # A second load of the same worker begins anew, and its earlier folder goes.
        model.worker.load_model(load_format="default")
        (other,) = workers_in(path)
        assert other != name
    assert workers_in(path) == []


def test_keep_on_exit_leaves_every_session_readable_and_the_next_worker_leaves_them_alone(
    dreamzero_checkpoint, tmp_path, caplog
):
    caplog.set_level(logging.INFO, logger="vllm_omni.session_state")
    options = {"host_budget": "1GiB", "disk": {"path": str(tmp_path), "budget": "1GiB"}, "keep_on_exit": True}
    with load(dreamzero_checkpoint, **options) as model:
        run(model, "a", "b", "c")
        model.worker.session_state_park("b")
        model.worker.shutdown()
    (kept,) = workers_in(tmp_path)
    assert kept.startswith("kept-")
    assert "3 of 3 sessions are on the disk" in caplog.text
    assert f"parked sessions are kept in {tmp_path / kept}" in caplog.text
    files = list((tmp_path / kept).iterdir())
    assert len(files) == 3
    assert all(read_file(file).storages for file in files)
    with load(dreamzero_checkpoint, **options):
        assert len(workers_in(tmp_path)) == 2
    assert workers_in(tmp_path) == [kept], "with nothing to keep nothing is kept"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"disk": {"path": "/tmp/x"}}, "disk.path alone parks nothing on the disk; set disk.budget too"),
        ({"disk": {"budget": "1GiB"}}, "disk.budget alone parks nothing on the disk; set disk.path too"),
        ({"keep_on_exit": True}, "keep_on_exit alone keeps nothing; set disk.path and disk.budget too"),
        (
            {"device_budget": 1},
            "device_budget alone has nowhere to park a session; set host_budget or disk.path",
        ),
        (
            {"idle_park_s": 0.02},
            "idle_park_s=0.02 alone has nowhere to park a session; set host_budget or disk.path",
        ),
    ],
)
def test_what_has_no_use_alone_is_said_and_ignored(dreamzero_checkpoint, caplog, options, said):
    with load(dreamzero_checkpoint, **options) as model:
        offloader = model.pipeline._memory_manager.offloader
        assert not offloader
        run(model, "robot")
    assert len([record for record in caplog.records if said in record.getMessage()]) == 1


def test_a_folder_that_cannot_be_used_is_said_and_the_model_serves_without(
    dreamzero_checkpoint, tmp_path, caplog
):
    file = tmp_path / "file"
    file.touch()
    with load(dreamzero_checkpoint, disk={"path": str(file), "budget": "10%"}) as model:
        run(model, "robot")
        assert model.pipeline._memory_manager.offloader.disk is None
    said = [
        record.getMessage()
        for record in caplog.records
        if "no session is parked on the disk" in record.message
    ]
    assert len(said) == 1
    assert "cannot open the disk tier" in said[0]


def test_a_worker_that_looks_otherwise_is_left_alone():
    class Worker:
        def shutdown(self, wait):
            return wait

    host = Worker.shutdown
    with pytest.raises(SeamMismatchError, match="shutdown"):
        hook_shutdown(Worker, lambda _: None)
    assert Worker.shutdown is host


def test_a_shutdown_goes_on_whatever_breaks_here(tmp_path, monkeypatch, caplog):
    class Worker:
        def shutdown(self):
            return "down"

    manager = SessionStateManager(disk=DiskTier(tmp_path, budget=1, keep=True))
    monkeypatch.setattr(manager, "keys", None)
    hook_shutdown(Worker, lambda _: manager)
    assert hasattr(Worker.shutdown, patching.MARK)
    assert Worker().shutdown() == "down"
    assert "what is parked on the disk stays there" in caplog.text

"""What becomes of older chunks when only the last are kept, and what a settlement of short lists costs."""

from pathlib import Path

import pytest
import torch

from vllm_omni_session_state import LatentBuffer, SessionStateManager
from vllm_omni_session_state.accounting import append_list
from vllm_omni_session_state.adapters.video_latents import FIELD, Policy, whole
from vllm_omni_session_state.base.errors import LatentsUnreadableError
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.spill import SEGMENT, Spiller
from vllm_omni_session_state.state.session import Declaration, SessionState

CHUNK = 64
"""Bytes."""


class Walked:
    """A manager whose sessions get chunks, and how many items its settlements looked at."""

    def __init__(self, monkeypatch, *, disk=None, last=None):
        declaration = Declaration(device_nbytes=1 << 20, host_fields=frozenset({FIELD}))
        self.manager = SessionStateManager(declaration=declaration, disk=disk)
        self.policy = Policy(spiller=self.manager.offloader.spiller, last=last)
        self.items = 0
        walk = append_list.owned_allocations

        def counted(*values):
            self.items += len(values)
            return walk(*values)

        monkeypatch.setattr(append_list, "owned_allocations", counted)

    def step(self):
        with self.manager.lease("a") as session:
            buffer = session.get_or_create(FIELD, lambda: allocated(LatentBuffer()), LatentBuffer)
            buffer.container.append(torch.zeros(CHUNK, dtype=torch.uint8))
            self.policy.after_forward(session)
        self.manager.check()
        return buffer

    @property
    def nbytes(self):
        return self.manager._table.accounts.host_nbytes()


def allocated(buffer):
    buffer.allocate()
    return buffer


def numbers(buffer):
    return [int(item[0]) for item in buffer.container]


@pytest.mark.parametrize("last", [1, 3, 4, 100])
def test_the_newest_stay_and_a_look_has_exactly_those(last):
    session = SessionState("a")
    buffer = session.put(FIELD, allocated(LatentBuffer()))
    policy = Policy(last=last)
    for number in range(3 * last):
        buffer.container.append(torch.tensor([number]))
        policy.after_forward(session)
        assert len(buffer) <= last + last // 4
        assert numbers(buffer)[-last:] == list(range(number + 1))[-last:]
    policy.trim(session)
    assert numbers(buffer) == list(range(2 * last, 3 * last))
    policy.trim(session)
    assert len(buffer) == last


@pytest.mark.parametrize("last", [1, 20, 400])
def test_with_the_last_a_settlement_walks_few_items_and_bytes_stay_bounded(monkeypatch, last):
    walked = Walked(monkeypatch, last=last)
    for _ in range(last):
        walked.step()
    walked.items = 0
    for _ in range(400):
        walked.step()
        assert walked.nbytes <= (last + last // 4) * CHUNK
    assert walked.items <= 400 * 8, "a whole list is walked once for each cut, of a quarter of it"


def test_with_spilling_a_settlement_walks_few_items_and_bytes_stay_bounded(monkeypatch, tmp_path):
    disk = DiskTier(tmp_path, budget=1 << 24)
    walked = Walked(monkeypatch, disk=disk)
    for _ in range(10 * SEGMENT):
        walked.step()
        assert walked.nbytes <= SEGMENT * CHUNK
    assert walked.items <= 10 * SEGMENT * 2
    assert walked.manager.stats()["spilled_nbytes"] == disk.nbytes > 0
    assert walked.manager.stats()["total_nbytes"] == walked.nbytes
    walked.manager.drop_all()
    assert disk.nbytes == 0
    disk.close()


def test_while_a_disk_is_full_a_settlement_walks_what_came_alone(monkeypatch, tmp_path):
    disk = DiskTier(tmp_path, budget=0)
    walked = Walked(monkeypatch, disk=disk)
    for _ in range(10 * SEGMENT):
        walked.step()
    assert walked.nbytes == 10 * SEGMENT * CHUNK
    assert walked.items <= 10 * SEGMENT
    disk.close()


def test_a_damaged_file_is_an_error_of_the_decode_alone_and_a_clear_removes_it(tmp_path):
    disk = DiskTier(tmp_path, budget=1 << 24)
    spiller = Spiller(disk)
    session = SessionState("robot")
    buffer = session.put(FIELD, allocated(LatentBuffer()))
    for _ in range(SEGMENT + 3):
        buffer.container.append(torch.zeros(CHUNK, dtype=torch.uint8))
        Policy(spiller=spiller).after_forward(session)
    (file,) = Path(disk.folder).iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for _ in range(2):
        with pytest.raises(
            LatentsUnreadableError, match=r"storage\.63 is damaged; .* or clear them"
        ) as raised:
            whole(session)
        assert raised.value.session == display_id("robot")
        assert raised.value.__cause__.__traceback__ is None, "its frames would hold what was read"
    assert len(buffer.segments) == 1
    assert len(buffer) == 3
    buffer.replace([])
    assert disk.nbytes == 0
    assert whole(session) is session
    disk.close()


def test_a_policy_touches_no_other_value():
    session = SessionState("a")
    ring = session.put("stitched_buffer", LatentBuffer())
    ring.replace(range(9), maxlen=9)
    policy = Policy(last=1)
    policy.after_forward(session)
    policy.trim(session)
    session.put(FIELD, LatentBuffer())  # not allocated
    policy.after_forward(session)
    session.put(FIELD, ring)
    policy.after_forward(session)
    assert len(ring) == 9
    assert whole(session) is session

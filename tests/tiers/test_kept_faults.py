"""A disk that fails while kept folders are removed: no session is refused for it, and nothing is lost."""

import itertools
import os

import pytest
from files import SESSION, document, leave_kept, names, same, storages
from saboteur import CALLS, Saboteur

from vllm_omni_session_state.base.errors import TierFaultError
from vllm_omni_session_state.offload.disk_tier import DiskTier


def put(tier, size, number):
    return tier.put(document(number), storages(size, seed=number), session=SESSION)


def descriptors():
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - no folder of files


class Written(DiskTier):
    """Tells when the first byte of a session's own would be written."""

    begun = None

    def _write(self, pieces):
        if self.begun is None:
            self.begun = self.saboteur.calls
        return super()._write(pieces)


@pytest.mark.parametrize("how", ["ENOSPC", "EIO", "late EIO"])
def test_any_one_call_may_fail_while_they_are_removed_and_no_session_is_refused(tmp_path, how):
    seen, before = set(), descriptors()
    for at in itertools.count():
        path = tmp_path / str(at)
        path.mkdir(0o700)
        leave_kept(path, 0, 1000, age=2)
        leave_kept(path, 0, 1000, 10, age=1)
        of_another = leave_kept(path, 4, 10)
        tier = Written(path, budget=2500)
        with pytest.MonkeyPatch.context() as monkeypatch:
            tier.saboteur = saboteur = Saboteur(monkeypatch, at, how)
            try:
                ticket = put(tier, 2000, 1)
            except TierFaultError:
                assert how != "ENOSPC", "something kept was there"
                assert at >= tier.begun, f"call {at} ({saboteur.hit}) came before the session's own"
                ticket = put(tier, 2000, 1)
        assert same(tier.get(ticket), storages(2000, seed=1), 1)
        tier.check()
        written_over = saboteur.hit and at >= tier.begun and how == "ENOSPC"
        assert (of_another in names(path)) is not bool(written_over), "it goes where its room is wanted"
        tier.close()
        assert descriptors() == before, f"call {at} ({saboteur.hit}) left a file open"
        seen.update(() if saboteur.hit is None or at >= tier.begun else {saboteur.hit})
        if saboteur.calls <= at:
            break
    expected = {"late EIO": {"flock"}}
    assert seen == expected.get(how, {"open", "flock", "listdir", "unlink", "rmdir", "close"})


@pytest.mark.parametrize("how", ["EIO", "late EIO"])
def test_any_one_call_may_fail_while_they_are_looked_at(tmp_path, how):
    """The start fails with a typed error and the next one does not, or it goes on and says what it skips."""
    seen, before = set(), descriptors()
    for at in itertools.count():
        path = tmp_path / str(at)
        path.mkdir(0o700)
        kept = {leave_kept(path, 0, 100, age=2), leave_kept(path, 1, 100)}
        with pytest.MonkeyPatch.context() as monkeypatch:
            saboteur = Saboteur(monkeypatch, at, how)
            try:
                tier = DiskTier(path, budget=1000)
            except TierFaultError:
                tier = DiskTier(path, budget=1000)
        assert kept < set(names(path)), f"call {at} ({saboteur.hit}) removed what has room"
        assert tier.figures()["kept_nbytes"] in (0, 100)
        put(tier, 10, 1)
        tier.check()
        tier.close()
        assert set(names(path)) == kept
        assert descriptors() == before, f"call {at} ({saboteur.hit}) left a file open"
        seen.update({saboteur.hit} - {None})
        if saboteur.calls <= at:
            break
    assert seen >= ({"stat", "listdir", "open", "flock", "close"} if how == "EIO" else {"flock"})
    assert seen <= set(CALLS)

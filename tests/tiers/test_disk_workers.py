"""Several workers on one path, some killed: nothing is claimed and unreadable, no live folder is cleaned."""

import os
import random
import signal
import time
import traceback
from pathlib import Path

import pytest
from files import SESSION, document, final_files, names, same, storages
from profiles import LONG, count

from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.file_format import read_file

HELD = 4


def forked(work):
    """The process id of a child that does ``work()`` and exits 0 if that went well."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - a child of a test must not go on as the test
        traceback.print_exc()
    finally:
        os._exit(status)


def ended_well(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def content(number):
    return storages(number % 5 * 20_000, 100, seed=number)


def labour(path, operations, seed):
    """Put, get and drop in some order; every session read is compared with what was put."""
    choose = random.Random(seed)
    tier = DiskTier(path, budget=1 << 30)
    held = {}
    for number in range(operations):
        act = choose.choice(["put", "get", "drop"]) if held else "put"
        if act == "put" and len(held) < HELD:
            held[number] = tier.put(document(number), content(number), session=SESSION)
            continue
        key = choose.choice(sorted(held))
        if act == "drop":
            tier.drop(held.pop(key))
        else:
            assert same(tier.get(held[key]), content(key), key)
    for key, ticket in held.items():
        assert same(tier.get(ticket), content(key), key)
    tier.check()
    tier.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked from one warm process")
def test_whatever_the_instant_of_a_kill_all_that_is_claimed_is_readable(tmp_path):
    choose = random.Random(7)
    found = unfinished = 0
    for number in range(count(200)):
        child = forked(lambda: labour(tmp_path, 10**9, number))  # noqa: B023 - runs before the next round
        while number % 2 and not any(map(final_files, tmp_path.iterdir())):
            time.sleep(0.001)  # a slow machine's worker, too, holds something in every other round
        time.sleep(choose.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        for folder in tmp_path.iterdir():
            unfinished += sum(name.endswith(".part") for name in names(folder))
            for path in final_files(folder):
                contents = read_file(path)
                key = int(contents.tree.nodes[0].parts[0].digits, 16)
                assert same(contents, content(key), key)
                found += 1
        tier = DiskTier(tmp_path, budget=1)
        assert names(tmp_path) == [Path(tier.folder).name], "what the dead one left is cleaned, all of it"
        tier.close()
    assert found, "some were killed while they held sessions"
    assert unfinished or not LONG, "some were killed while they wrote one"


def test_two_live_workers_share_one_path(tmp_path):
    tmp_path.chmod(0o700)
    dead = tmp_path / f"worker-{'a' * 32}"
    dead.mkdir()
    (dead / "x.safetensors").write_bytes(b"x")
    (tmp_path / "of somebody else").write_bytes(b"x")
    children = [forked(lambda: labour(tmp_path, count(1000), seed)) for seed in (1, 2)]  # noqa: B023
    waiting = set(children)
    while waiting:  # others start and clean meanwhile
        DiskTier(tmp_path, budget=1).close()
        for child in list(waiting):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                assert os.waitstatus_to_exitcode(status) == 0
                waiting.discard(child)
        time.sleep(0.01)
    assert names(tmp_path) == ["of somebody else"]


def test_workers_that_start_at_once_do_not_clean_each_other(tmp_path):
    def start():
        tier = DiskTier(tmp_path, budget=1 << 20)
        tickets = [tier.put(document(n), content(1), session=SESSION) for n in range(2)]
        assert all(same(tier.get(ticket), content(1), n) for n, ticket in enumerate(tickets))
        tier.check()
        tier.close()

    for _ in range(count(100)):
        children = [forked(start) for _ in range(4)]
        assert [ended_well(child) for child in children] == [True] * 4
        assert names(tmp_path) == []


def test_a_helper_that_outlives_its_worker_does_not_hold_its_lock(tmp_path):
    """A worker forks one, as for loading data or encoding video, and is killed."""
    lives, ends = os.pipe()
    hears, says = os.pipe()

    def work():
        tier = DiskTier(tmp_path, budget=1 << 20)
        tier.put(document(), content(1), session=SESSION)
        if not os.fork():
            os.write(says, b"x")
            os.close(ends)
            os.read(lives, 1)  # until the test has looked
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert not ended_well(forked(work))
    assert os.read(hears, 1), "the helper runs"
    assert len(final_files(next(tmp_path.iterdir()))) == 1
    tier = DiskTier(tmp_path, budget=1)
    assert names(tmp_path) == [Path(tier.folder).name], "the dead one's lock went with it"
    for end in (lives, ends, hears, says):
        os.close(end)
    tier.close()


def test_a_child_closes_what_it_inherits_once_and_nothing_of_its_own(tmp_path):
    inherited = DiskTier(tmp_path, budget=1 << 20)

    def work():
        own = [
            DiskTier(tmp_path, budget=1 << 20) for _ in range(3)
        ]  # under the very numbers that are free now
        inherited.close()
        tickets = [tier.put(document(), content(1), session=SESSION) for tier in own]
        assert all(same(tier.get(ticket), content(1)) for tier, ticket in zip(own, tickets, strict=True))
        DiskTier(tmp_path, budget=1).close()
        for tier in own:
            tier.check()
            tier.close()

    assert ended_well(forked(work))
    assert names(tmp_path) == [Path(inherited.folder).name]
    inherited.close()


def test_a_link_with_a_workers_name_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "x").write_bytes(b"x")
    top = tmp_path / "parked"
    top.mkdir(0o700)
    (top / f"worker-{'b' * 32}").symlink_to(target)
    DiskTier(top, budget=1).close()
    assert names(target) == ["x"]

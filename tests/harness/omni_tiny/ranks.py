"""Run one function in N processes that form one gloo world, and bring back what each returned.

Covers start, result, failure and time limit. Does not touch vLLM-Omni: the function builds its models,
and ``world.WORLD`` in each process already knows its rank. The processes are forked off one that has
imported what vLLM-Omni needs of others, and nothing of vLLM-Omni's own: most of a start's time is that.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch

from omni_tiny.world import WORLD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection


IMPORTED = ("vllm.config", "vllm.v1.attention.backends.utils", "diffusers.models", "transformers.models.umt5")
"""What a process has imported before it becomes a rank; a name that is not there is passed over."""


class RankFailedError(RuntimeError):
    """A rank raised, died or ran past the limit; carries the traceback of each that said why."""

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items())))
        self.reasons = reasons


def run_in_ranks(
    function: Callable[..., Any], *args: Any, size: int = 2, limit_s: float = 300.0, **kwargs: Any
) -> list[Any]:
    """Call ``function(rank, *args, **kwargs)`` in ``size`` new processes at once.

    Args:
        function: A module's own function: each process imports it by name.
        *args: Passed on; must be picklable.
        size: Number of ranks.
        limit_s: Seconds until the ranks are killed. A rank that waits in a collective for one that
            failed would wait for ever, so the first failure ends all.
        **kwargs: Passed on; must be picklable.

    Returns:
        What each rank returned, in rank order; tensors come back as copies.

    Raises:
        RankFailedError: If any rank raised, died without a word, or was not done in time.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([*IMPORTED])
    processes, ears = [], {}
    with tempfile.TemporaryDirectory(prefix="tiny-world-") as folder:
        try:
            for rank in range(size):
                ear, mouth = forks.Pipe(duplex=False)
                process = forks.Process(
                    target=_rank,
                    args=(mouth, function, args, kwargs),
                    kwargs={"environ": {**os.environ}, "rank": rank, "size": size, "meeting_place": folder},
                )
                process.start()
                mouth.close()  # so that a rank which dies closes the last end of its pipe
                processes.append(process)
                ears[ear] = rank
            return _collect(ears, time.monotonic() + limit_s, limit_s)
        except BaseException:
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.join()


def _collect(ears: dict[Connection, int], deadline: float, limit_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(ears)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailedError(dict.fromkeys(waiting.values(), f"not done after {limit_s} s"))
        for ear in ready:
            rank = waiting.pop(ear)
            try:
                done, payload = torch.load(io.BytesIO(ear.recv_bytes()), weights_only=False)
            except EOFError:
                done, payload = False, "the process died without a word"
            if not done:
                raise RankFailedError({rank: payload})
            results[rank] = payload
    return [results[rank] for rank in sorted(results)]


def _rank(
    mouth: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    environ: Mapping[str, str],
    rank: int,
    size: int,
    meeting_place: str,
) -> None:
    os.environ.clear()  # it is of the time when the first rank of all was started
    os.environ.update(environ)
    WORLD.take_rank(rank, size=size, meeting_place=meeting_place)
    try:
        answer = (True, function(rank, *args, **kwargs))
    except BaseException:  # noqa: BLE001  the parent must hear of anything, or it waits for the limit
        answer = (False, traceback.format_exc())
    buffer = io.BytesIO()
    torch.save(answer, buffer)
    mouth.send_bytes(buffer.getvalue())
    mouth.close()

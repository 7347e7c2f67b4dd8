"""Worker methods that say what a Cosmos3 request holds while it runs, and what is left of it afterwards.

Cosmos3's state lives only inside a request, where no client can look. A watch is a forward hook on the
transformer: it takes notes, replaces nothing, and works the same with the plugin and without it. Besides
what the manager lists, it counts the memory itself, by weak references to whatever the transformer
computed as text K/V and rotary frequencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_tiny.listing import tiny_listing

if TYPE_CHECKING:
    from types import ModuleType


def add_watch(diffusion_worker: ModuleType) -> None:
    """Give vLLM-Omni's worker class the methods, which a client calls by name."""
    for method in (tiny_watch, tiny_forwards, tiny_held):
        setattr(diffusion_worker.DiffusionWorker, method.__name__, method)


def tiny_watch(worker: Any) -> None:
    """Begin to watch the worker's requests."""
    worker.tiny_request_watch = Watch(worker)


def tiny_forwards(worker: Any) -> list[str]:
    """Digests of what the transformer's forwards returned since this was last asked, in order."""
    return worker.tiny_request_watch.take_forwards()


def tiny_held(worker: Any) -> dict[str, Any]:
    """What the last request held and what is left of it, between two requests.

    Returns:
        What `tiny_listing` says now; ``during``, its ``sessions`` at the last forward, with
        ``during_alive``, the bytes of text K/V and frequencies then in memory; ``alive``, of these now.
    """
    return {**tiny_listing(worker), **worker.tiny_request_watch.held()}


class Watch:
    """Notes on the requests of one worker that holds a Cosmos3.

    Args:
        worker: vLLM-Omni's worker.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._computed: dict[int, Any] = {}
        self._forwards: list[str] = []
        self._during: dict[str, Any] = {"during": [], "during_alive": 0}
        worker.model_runner.pipeline.transformer.register_forward_hook(self._after_forward)

    def take_forwards(self) -> list[str]:
        """See `tiny_forwards`."""
        taken, self._forwards = self._forwards, []
        return taken

    def held(self) -> dict[str, Any]:
        """See `tiny_held`."""
        return {**self._during, "alive": self._alive()}

    def _after_forward(self, transformer: Any, _arguments: Any, output: Any) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        from omni_tiny.digest import digest

        # The pipeline captures after a branch's first forward: the last of several steps sees all of it.
        for pair in (*transformer.cached_kv, transformer.cached_freqs_gen):
            for tensor in pair:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self._computed[reference.cdata] = reference, storage.nbytes()
        self._during = {"during": tiny_listing(self._worker)["sessions"], "during_alive": self._alive()}
        self._forwards += [digest(one) for one in (output if isinstance(output, tuple) else (output,))]

    def _alive(self) -> int:
        self._computed = {key: kept for key, kept in self._computed.items() if not kept[0].expired()}
        return sum(nbytes for _, nbytes in self._computed.values())

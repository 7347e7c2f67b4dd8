"""Mistakes that the taking out and putting back could make, each as a change of one line of its own code."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from typing import Any
from unittest import mock

from vllm_omni_session_state.omni.worker import engine_kv, kv_payload


@dataclass(frozen=True)
class Mutant:
    """A function of which one line is another.

    Attributes:
        name: What is wrong with it.
        owner: The module or class that it stands in.
        function: Its name.
        right: The code that stands there, once,
        wrong: and the code in its place.
    """

    name: str
    owner: Any
    function: str
    right: str
    wrong: str

    def patched(self) -> Any:
        """A context manager under which the mistake is made."""
        source = textwrap.dedent(inspect.getsource(getattr(self.owner, self.function)))
        assert source.count(self.right) == 1, f"{self.function} has changed: {self.right}"
        module = inspect.getmodule(self.owner)
        made: dict[str, Any] = {}
        exec(
            compile(
                "from __future__ import annotations\n" + source.replace(self.right, self.wrong),
                "<mutant>",
                "exec",
            ),
            vars(module),
            made,
        )
        return mock.patch.object(self.owner, self.function, made[self.function])


OLD_ADAPTER = """adapter = state.adapters[name]
            adapter._completed_chunks = adapter.compacted_tokens = 0
            adapters[name] = kv._adapters[adapter.request_id] = adapter"""

MUTANTS = {
    mutant.name: mutant
    for mutant in (
        Mutant("forgets the compaction", kv_payload, "place", 'branch["compacted"]', "0"),
        Mutant(
            "takes the blocks for the position", kv_payload, "place", 'branch["chunks"]', 'branch["blocks"]'
        ),
        Mutant(
            "forgets what was committed", engine_kv, "_publish", 'tree["branches"][name]["committed"]', "0"
        ),
        Mutant("drops a layer's V", engine_kv, "_read_blocks", "kv.value_cache(layer)", "kv.value_cache(0)"),
        Mutant("takes K for V", engine_kv, "_write_blocks", "values[layer]", "keys[layer]"),
        Mutant(
            "mixes the branches",
            engine_kv,
            "put_back",
            "blocks += kv.block_table(adapter)",
            "blocks = kv.block_table(adapter) + blocks",
        ),
        Mutant(
            "uses the old adapters",
            engine_kv,
            "put_back",
            "adapters[name] = adapter = kv.begin_request(state.adapters[name].request_id)",
            OLD_ADAPTER,
        ),
        Mutant(
            "shares cross-attention",
            kv_payload,
            "copy_of",
            "if cross is None:\n        return None",
            "return cross",
        ),
        Mutant("forgets cross-attention", engine_kv, "gather", "kv_payload.copy_of(cross)", "None"),
        Mutant(
            "puts cross-attention under one name",
            engine_kv,
            "_publish",
            "_cross_sessions[state.session_id]",
            "_cross_sessions['one']",
        ),
        Mutant("keeps blocks after a fault", engine_kv, "put_back", "kv.end_request(adapter)", "pass"),
        Mutant("loses the new state's adapters", engine_kv, "put_back", "kv._adapters.update(empty)", "pass"),
        Mutant("keeps the blocks that it took out", engine_kv.SessionKV, "close", "state.close()", "pass"),
        Mutant("takes out half a chunk", engine_kv, "_uncommitted", "return", "return 0 and"),
        Mutant(
            "does not look whether there is room", engine_kv, "_refuse_full", "if wanted > free:", "if False:"
        ),
        Mutant("does not look for a place", engine_kv, "_refuse_full", "places < 1", "False"),
        Mutant(
            "writes over a session", engine_kv, "_refuse_occupied", "if kv.block_table(adapter):", "if False:"
        ),
        Mutant(
            "makes a twin", engine_kv, "_refuse_occupied", "if registered is not None and", "if False and"
        ),
        Mutant(
            "counts K alone",
            engine_kv.SessionKV,
            "blocks",
            "(kv.key_cache, kv.value_cache)",
            "(kv.key_cache,)",
        ),
        Mutant(
            "counts one block of all", engine_kv.SessionKV, "blocks", "in numbers)", "in sorted(numbers)[:1])"
        ),
        Mutant(
            "counts no cross-attention", engine_kv.SessionKV, "beside", "None if self.closed", "None if True"
        ),
    )
}

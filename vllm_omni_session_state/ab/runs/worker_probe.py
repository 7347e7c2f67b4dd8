"""What a worker says of its sessions' state in either run: what each value is, and a digest of its bits.

It is the worker's extension by vLLM-Omni's own setting, ``worker_extension_cls``, and only where a run of
`ab` serves: a server of users knows none of it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from vllm_omni_session_state.ab.runs.outputs import walked
from vllm_omni_session_state.accounting.footprint import footprint
from vllm_omni_session_state.adapters.video_latents import FIELD, whole
from vllm_omni_session_state.base.ids import DEFAULT, display_id
from vllm_omni_session_state.base.log import LOGGER
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.omni.worker.rpc import manager_of, on_every_rank
from vllm_omni_session_state.state.buffers import LatentBuffer
from vllm_omni_session_state.state.inspection import Entry
from vllm_omni_session_state.state.paged_kv import PagedKV
from vllm_omni_session_state.state.session import SessionState

Seen = tuple[str, str]
"""What a value is, and a digest of its bits; a plain number is said whole, and has none."""

ENCODER_OUT = "vae_encoder_out"
"""DreamZero keeps all frames of it and reads the last ``num_frame_per_block``; the manager keeps those."""


MOST_HEARD = 100


class Heard(logging.Handler):
    """Keeps the first `MOST_HEARD` of what is said at WARNING or above while it is a handler."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        if len(self._said) < MOST_HEARD:
            self._said.append(record.getMessage())

    def taken(self) -> list[str]:
        """What there is, which is then forgotten."""
        said, self._said = self._said, []
        return said


class ProbedWorker:
    """Added to vLLM-Omni's worker class, before it."""

    model_runner: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ab_warned = Heard()
        self._ab_ending: dict[str, SessionState] = {}
        LOGGER.addHandler(self._ab_warned)  # before the model is loaded, which says most
        super().__init__(*args, **kwargs)

    def session_state_look(self, key: str, last: bool) -> dict[str, Any]:  # noqa: FBT001 - by position
        """A session as it is between two steps; looking refreshes nobody, and restores nobody.

        Each rank has ``values`` by name, empty where there is no such session, and ``parked``: then nothing
        was looked at. If what comes next ends it, or begins anew, ``last`` looks at all chunks of its video,
        not at the newest alone, and sees next time whether it has let go of everything.
        """

        def look() -> dict[str, Any]:
            manager = manager_of(self)
            if manager is None:
                return {"parked": False, "values": dict(_named(self._of_the_model(key), last))}
            return self._of_the_manager(manager, key, last)

        return on_every_rank(look, ())

    def session_state_sizes(self) -> dict[str, Any]:
        """Bytes of the model's state, without the engine's KV, counted alike in both runs.

        Each rank has ``sizes``: of each session, as a listing shows it, bytes by device, and of a parked one
        what it takes in its tier.
        """

        def sizes() -> dict[str, Any]:
            manager = manager_of(self)
            if manager is not None:
                return {"sizes": {entry.session: _without_engine(entry) for entry in manager.listing()}}
            states = getattr(self.model_runner.pipeline, "_states", {})
            held = {key: footprint(*vars(state).values()) for key, state in states.items()}
            # The model begins with a session for nobody; until it is used, the manager has none such.
            used = {key: each for key, each in held.items() if key != DEFAULT or each.nbytes}
            return {"sizes": {display_id(key): each.nbytes_by_device() for key, each in used.items()}}

        return on_every_rank(sizes, ())

    def session_state_warned(self) -> dict[str, Any]:
        """What the plugin has said at WARNING since this was asked last: each rank has ``said``."""
        return on_every_rank(lambda: {"said": self._ab_warned.taken()}, ())

    def _of_the_model(self, key: str) -> dict[str, Any]:
        pipeline = self.model_runner.pipeline
        state = getattr(pipeline, "_states", {}).get(key)
        if state is None:
            return {}
        values = dict(vars(state))
        if values.get(ENCODER_OUT) is not None:
            values[ENCODER_OUT] = values[ENCODER_OUT][:, :, -pipeline.num_frame_per_block :]
        return values

    def _of_the_manager(self, manager: SessionStateManager, key: str, last: bool) -> dict[str, Any]:  # noqa: FBT001
        session, before = manager.peek(key), self._ab_ending.pop(key, None)
        # Evicted meanwhile: then whoever holds it keeps it whole, and here nobody shall.
        for other in [name for name, held in self._ab_ending.items() if manager.peek(name) is not held]:
            del self._ab_ending[other]
        found = {}
        if before is not None and before is not session and not before.parked:
            found = {f"{name} of the session that ended": seen for name, seen in _named(_held(before), last)}
        if session is None:
            return {"parked": False, "values": found}
        if last:
            # Held, as a caller may hold it: at its end all that it has must be let go of nevertheless.
            self._ab_ending[key] = session
        if session.parked:
            return {"parked": True, "values": found}
        values = _held(whole(session) if last else session)
        return {"parked": False, "values": {**dict(_named(values, last)), **found}}


def _without_engine(entry: Entry) -> dict[str, int]:
    sizes = Counter(entry.nbytes)
    for value in entry.values:
        if value.kind == PagedKV.__name__:
            sizes.subtract(value.nbytes)
    if entry.parked_nbytes:
        sizes[f"parked ({entry.place})"] = sum(entry.parked_nbytes.values())
    return {device: nbytes for device, nbytes in sizes.items() if nbytes}


def _held(session: SessionState) -> dict[str, Any]:
    """What a session holds itself; of a ring or a list its items."""
    objects = {
        name: obj.container
        for name, obj in session.objects.items()
        if isinstance(obj, LatentBuffer) and obj.resident
    }
    return {**session.attrs, **objects}


def _named(values: dict[str, Any], last: bool) -> Iterator[tuple[str, Seen]]:  # noqa: FBT001
    for name, value in values.items():
        items = list(value) if hasattr(value, "append") else value  # a deque is walked as a list is
        if name == FIELD:  # from the newest on, for one run may have let go of older ones
            chunks = list(items)[::-1] if last else list(items)[-1:][::-1]
            items = {f"-{number}": chunk for number, chunk in enumerate(chunks, 1)}
        for place, item in walked(items, name):
            yield place, _seen(item)


def _seen(value: Any) -> Seen:
    import torch  # noqa: PLC0415 - seconds, and here is a worker

    from vllm_omni_session_state.offload.memory import bytes_of  # noqa: PLC0415 - the same

    if isinstance(value, bool | int | float):
        return f"{type(value).__name__} {value!r}", ""
    tensor = value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy())
    bits = bytes_of(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    what = f"{dtype} ({', '.join(map(str, tensor.shape))}) on {tensor.device}"
    return what, hashlib.blake2b(bits.data, digest_size=16).hexdigest()

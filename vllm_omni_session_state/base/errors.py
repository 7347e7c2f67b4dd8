"""Errors that a caller can act on.

Each carries what it is about as attributes and says the value, the setting and the remedy. A broken
invariant of our own is no error of this kind: ``check()`` asserts those.
"""

from __future__ import annotations

from typing import TypeVar


class SessionStateError(Exception):
    """Base of every error that this package raises on purpose."""


ErrorT = TypeVar("ErrorT", bound=Exception)


def without_frames(error: ErrorT) -> ErrorT:
    """The same error without tracebacks, its own and those of what it came from.

    Their frames hold what the failed call held, for as long as the error is kept, and each other.
    """
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        each = chain.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            chain += [each.__cause__, each.__context__]
    return error


class NotAllocatedError(SessionStateError, RuntimeError):
    """A state object was written or read before ``allocate()``.

    Attributes:
        kind: Class name of the state object.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(f"{kind} is not allocated; call allocate() before writing or viewing it")


class NothingStagedError(SessionStateError, RuntimeError):
    """``commit()`` was asked to promote a staged payload, and none is staged.

    Attributes:
        kind: Class name of the state object.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}.commit() found no staged payload; pass one, or call stage() first")


class BadPayloadError(SessionStateError, ValueError):
    """``import_payload()`` was given a tree that this kind of object did not export.

    Attributes:
        kind: Class name of the state object.
    """

    def __init__(self, kind: str, why: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}.import_payload() refused its input and changed nothing: {why}")


class AlreadyEncodedError(SessionStateError, RuntimeError):
    """A write-once object was written a second time; what it holds is unchanged.

    Attributes:
        kind: Class name of the state object.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(f"{kind} is written once and holds its content already; reset() it to encode anew")


class IdentityMismatchError(SessionStateError, RuntimeError):
    """Encoded content was asked for by somebody whose input it was not computed from.

    Attributes:
        kind: Class name of the state object.
        held: Identity of what the content was computed from.
        asked: Identity of the asker's input.
    """

    def __init__(self, kind: str, *, held: str, asked: str) -> None:
        self.kind = kind
        self.held = held
        self.asked = asked
        super().__init__(
            f"{kind} was computed from {held} and will not serve {asked}: two requests use one session; "
            "give each its own id"
        )


class TierFullError(SessionStateError):
    """A tier has no room for what should move there; nothing has moved.

    Attributes:
        tier: Its name.
        wanted: Bytes that should have moved.
        room: Bytes that are left; none where it holds more than its budget.
    """

    def __init__(self, tier: str, *, wanted: int, room: int, setting: str) -> None:
        self.tier = tier
        self.wanted = wanted
        self.room = max(0, room)
        super().__init__(
            f"the {tier} tier has {self.room} bytes left and {wanted} are wanted; raise {setting}"
        )


class CannotParkError(SessionStateError):
    """A session cannot leave the device as things are; nothing has changed.

    Attributes:
        session: The session's shown id.
        why: What keeps it there.
    """

    def __init__(self, session: str, why: object) -> None:
        self.session = session
        self.why = why
        super().__init__(f"session {session} stays on the device: {why}")


class SessionParkedError(SessionStateError, RuntimeError):
    """The state of a parked session was touched without a lease, which would have brought it back.

    Attributes:
        session: The session's shown id.
    """

    def __init__(self, session: str) -> None:
        self.session = session
        super().__init__(f"session {session} is parked; take a lease on it first")


class SessionRestoreFailedError(SessionStateError, RuntimeError):
    """A session could not be brought back on all ranks; it is where it was, whole.

    Attributes:
        session: The session's shown id.
    """

    def __init__(self, session: str, why: object) -> None:
        self.session = session
        super().__init__(f"session {session} stays where it is: {why}. Send the step again, or close it")


class SessionStateLostError(SessionStateError, RuntimeError):
    """A step came for a session whose state was lost; with ``on_lost: error`` it does not start over.

    Attributes:
        session: The session's shown id.
        reason: Why it was lost.
    """

    def __init__(self, session: str, reason: str) -> None:
        self.session = session
        self.reason = reason
        super().__init__(
            f"session {session} was lost ({reason}); reset or close it, or begin a new one, to start over"
        )


class NoRoomError(SessionStateError, RuntimeError):
    """A new session was refused because there is no room and nobody's state may be lost for it.

    Attributes:
        why: What is full.
    """

    def __init__(self, why: str, *, resting: str = "") -> None:
        self.why = why
        also = f". {resting}" if resting else ""
        super().__init__(f"no room for a new session: {why}{also}. Close sessions, or raise what is full")


class BudgetFixedError(SessionStateError, ValueError):
    """A device budget that is larger than what was reserved when the model was loaded; nothing has changed.

    Attributes:
        wanted: The budget in bytes, ``None`` for any.
        most: What was reserved for it.
    """

    def __init__(self, wanted: int | None, *, most: int) -> None:
        self.wanted = wanted
        self.most = most
        super().__init__(
            f"device_budget={'any' if wanted is None else wanted} is more than the {most} bytes that were "
            "reserved when the model was loaded; the engine's KV pool has the rest. Restart with the larger "
            "budget, or with kv_pool: host"
        )


class MidChunkError(SessionStateError, RuntimeError):
    """A session's KV cannot be taken out between two commits; nothing has changed.

    Attributes:
        session: The session's shown id.
        branch: The KV branch that is in the middle of a chunk.
        tokens: Its tokens that have a place in the pool and are not committed.
    """

    def __init__(self, session: str, *, branch: str, tokens: int) -> None:
        self.session = session
        self.branch = branch
        self.tokens = tokens
        super().__init__(
            f"session {session} is in the middle of a chunk: branch {branch!r} has {tokens} tokens "
            "that are not committed; take its KV out after the engine's commit"
        )


class PoolFullError(SessionStateError):
    """The engine's KV pool has no room for a session that should come back; the pool is as it was.

    Attributes:
        what: What there is too little of.
        wanted: How many the session needs.
        room: How many are free.
    """

    def __init__(self, what: str, *, wanted: int, room: int) -> None:
        self.what = what
        self.wanted = wanted
        self.room = room
        super().__init__(
            f"the engine's KV pool has {room} {what} free and {wanted} are wanted; park or close other "
            "sessions, or raise gpu_memory_fraction in ar_diffusion_kv_config"
        )


class KVOccupiedError(SessionStateError, RuntimeError):
    """KV should be put where the engine holds some of that session already; nothing has changed.

    Attributes:
        session: The session's shown id.
    """

    def __init__(self, session: str, why: str) -> None:
        self.session = session
        super().__init__(f"session {session} has KV in the engine's pool already ({why}); close that first")


class EngineOwnedError(SessionStateError, TypeError):
    """A handle to bytes that the engine owns was written to; only the engine's own forward writes them.

    Attributes:
        kind: Class name of the state object.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(f"{kind} is a handle: only the engine's own forward writes its bytes")


class SeamMismatchError(SessionStateError):
    """A place in vLLM-Omni that the plugin hooks does not look as expected.

    Attributes:
        seam: Dotted name of the place.
        expected: What the plugin was written for.
        found: What the installed vLLM-Omni has.
    """

    def __init__(self, seam: str, *, expected: str, found: str) -> None:
        self.seam = seam
        self.expected = expected
        self.found = found
        super().__init__(f"{seam}: expected {expected}, found {found}")


class NotWritableError(SessionStateError, TypeError):
    """A session holds a value that cannot be written to a file; nothing of the session was written.

    Attributes:
        path: Where in the session the value stands, such as ``attrs.frames[3]``.
        kind: Qualified name of its type.
        why: What keeps it from being written.
    """

    def __init__(self, path: str, kind: str, *, why: str) -> None:
        self.path = path
        self.kind = kind
        self.why = why
        super().__init__(
            f"{path or 'the session'} ({kind}) cannot be written to a file: {why}. Keep plain values there, "
            "or let the model's adapter register the type with offload.registered.register_kind()"
        )


class TierFaultError(SessionStateError):
    """A tier could not do what was asked; what it held before, it holds still.

    Attributes:
        purpose: What was tried.
        file: The file or folder that it was tried on.
        why: What went wrong.
        remedy: What the operator can do.
    """

    def __init__(self, purpose: str, *, file: str, why: str, remedy: str) -> None:
        self.purpose = purpose
        self.file = file
        self.why = why
        self.remedy = remedy
        super().__init__(f"cannot {purpose}: {file}: {why}; {remedy}")


class BadFileError(TierFaultError, ValueError):
    """A session's file is damaged or is not what it should be; nothing of it was used."""

    def __init__(self, why: str, *, file: str = "a session's document") -> None:
        super().__init__(
            "read a parked session",
            file=file,
            why=why,
            remedy="its bytes are not to be trusted: close the session, and look after the disk",
        )


class LatentsUnreadableError(SessionStateError, RuntimeError):
    """Spilled video latents could not be read; they are where they were, and the next try may succeed.

    Attributes:
        session: The session's shown id.
    """

    def __init__(self, session: str, why: object) -> None:
        self.session = session
        super().__init__(
            f"video latents of session {session} cannot be read back: {why}. Decode again, or clear them"
        )

"""Errors that a caller can act on.

Each carries what it is about as attributes, and its message says the value, the setting and the remedy. A
broken invariant of our own is no error of this kind: ``check()`` asserts those. Where one carries a
``session``, that is the id as it is shown; a ``kind`` is the class name of a state object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar


class SessionStateError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        message: A format of the error's attributes.
    """

    message: ClassVar[str] = ""

    def __str__(self) -> str:
        return self.message.format_map(vars(self)) if self.message else super().__str__()


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


def error_text(error: BaseException | None) -> str:
    """What failed, as logs, answers and ranks tell it: the type and the message; ``""`` for no error."""
    return "" if error is None else f"{type(error).__name__}: {error}"


@dataclass(eq=False)
class NotAllocatedError(SessionStateError, RuntimeError):
    """A state object was written or read before ``allocate()``."""

    kind: str
    message = "{kind} is not allocated; call allocate() before writing or viewing it"


@dataclass(eq=False)
class NothingStagedError(SessionStateError, RuntimeError):
    """``commit()`` was asked to promote a staged payload, and none is staged."""

    kind: str
    message = "{kind}.commit() found no staged payload; pass one, or call stage() first"


@dataclass(eq=False)
class BadPayloadError(SessionStateError, ValueError):
    """``import_payload()`` was given a tree that this kind of object did not export."""

    kind: str
    why: str
    message = "{kind}.import_payload() refused its input and changed nothing: {why}"


@dataclass(eq=False)
class AlreadyEncodedError(SessionStateError, RuntimeError):
    """A write-once object was written a second time; what it holds is unchanged."""

    kind: str
    message = "{kind} is written once and holds its content already; reset() it to encode anew"


@dataclass(eq=False)
class EngineOwnedError(SessionStateError, TypeError):
    """A handle to bytes that the engine owns was written to."""

    kind: str
    message = "{kind} is a handle: only the engine's own forward writes its bytes"


@dataclass(eq=False)
class IdentityMismatchError(SessionStateError, RuntimeError):
    """Encoded content of the identity ``held`` was asked for by somebody whose input is ``asked``."""

    kind: str
    held: str
    asked: str
    message = (
        "{kind} was computed from {held} and will not serve {asked}: two requests use one session; give each "
        "its own id"
    )


@dataclass(eq=False)
class TierFullError(SessionStateError):
    """A tier has ``room`` bytes left and no place for the ``wanted`` ones; nothing has moved."""

    tier: str
    wanted: int
    room: int
    setting: str
    message = "the {tier} tier has {room} bytes left and {wanted} are wanted; raise {setting}"

    def __post_init__(self) -> None:
        self.room = max(0, self.room)  # a tier may hold more than its budget


@dataclass(eq=False)
class CannotParkError(SessionStateError):
    """A session cannot leave the device as things are; nothing has changed."""

    session: str
    why: object
    message = "session {session} stays on the device: {why}"


@dataclass(eq=False)
class SessionParkedError(SessionStateError, RuntimeError):
    """The state of a parked session was touched without a lease, which would have brought it back."""

    session: str
    message = "session {session} is parked; take a lease on it first"


@dataclass(eq=False)
class SessionRestoreFailedError(SessionStateError, RuntimeError):
    """A session could not be brought back on all ranks; it is where it was, whole."""

    session: str
    why: object
    message = "session {session} stays where it is: {why}. Send the step again, or close it"


@dataclass(eq=False)
class SessionStateLostError(SessionStateError, RuntimeError):
    """A step came for a session whose state was lost; with ``on_lost: error`` it does not start over."""

    session: str
    reason: str
    message = "session {session} was lost ({reason}); reset or close it, or begin a new one, to start over"


@dataclass(eq=False)
class NoRoomError(SessionStateError, RuntimeError):
    """A new session was refused: ``why`` says what is full, ``resting`` who lies there."""

    why: str
    resting: str = ""

    def __str__(self) -> str:
        also = f". {self.resting}" if self.resting else ""
        return f"no room for a new session: {self.why}{also}. Close sessions, or raise what is full"


@dataclass(eq=False)
class BudgetFixedError(SessionStateError, ValueError):
    """A device budget, ``None`` for any, of more than the ``most`` bytes reserved; nothing has changed."""

    wanted: int | None
    most: int

    def __str__(self) -> str:
        wanted = "any" if self.wanted is None else self.wanted
        return (
            f"device_budget={wanted} is more than the {self.most} bytes that were reserved when the model "
            "was loaded; the engine's KV pool has the rest. Restart with the larger budget, or with "
            "kv_pool: host"
        )


@dataclass(eq=False)
class MidChunkError(SessionStateError, RuntimeError):
    """A session's KV cannot be taken out between two commits; nothing has changed."""

    session: str
    branch: str
    tokens: int
    message = (
        "session {session} is in the middle of a chunk: branch {branch!r} has {tokens} tokens that are not "
        "committed; take its KV out after the engine's commit"
    )


@dataclass(eq=False)
class PoolFullError(SessionStateError):
    """The engine's KV pool has no room for a session that should come back; the pool is as it was."""

    what: str
    wanted: int
    room: int
    message = (
        "the engine's KV pool has {room} {what} free and {wanted} are wanted; park or close other sessions, "
        "or raise gpu_memory_fraction in ar_diffusion_kv_config"
    )


@dataclass(eq=False)
class KVOccupiedError(SessionStateError, RuntimeError):
    """KV should be put where the engine holds some of that session already; nothing has changed."""

    session: str
    why: str
    message = "session {session} has KV in the engine's pool already ({why}); close that first"


@dataclass(eq=False)
class SeamMismatchError(SessionStateError):
    """A place in vLLM-Omni that the plugin hooks, by its dotted name, does not look as expected."""

    seam: str
    expected: str
    found: str
    message = "{seam}: expected {expected}, found {found}"


@dataclass(eq=False)
class NotWritableError(SessionStateError, TypeError):
    """A value of type ``kind``, at a place such as ``attrs.frames[3]``, cannot be written; nothing was."""

    path: str
    kind: str
    why: str

    def __str__(self) -> str:
        return (
            f"{self.path or 'the session'} ({self.kind}) cannot be written to a file: {self.why}. Keep plain "
            "values there, or let the model's adapter register the type with "
            "offload.registered.register_kind()"
        )


@dataclass(eq=False)
class TierFaultError(SessionStateError):
    """A tier could not do what was asked, on a file or folder; what it held before, it holds still."""

    purpose: str
    file: str
    why: str
    remedy: str
    message = "cannot {purpose}: {file}: {why}; {remedy}"


class BadFileError(TierFaultError, ValueError):
    """A session's file is damaged or is not what it should be; nothing of it was used."""

    def __init__(self, why: str, *, file: str = "a session's document") -> None:
        remedy = "its bytes are not to be trusted: close the session, and look after the disk"
        super().__init__("read a parked session", file=file, why=why, remedy=remedy)


@dataclass(eq=False)
class LatentsUnreadableError(SessionStateError, RuntimeError):
    """Spilled video latents could not be read; they are where they were, and the next try may succeed."""

    session: str
    why: object
    message = "video latents of session {session} cannot be read back: {why}. Decode again, or clear them"

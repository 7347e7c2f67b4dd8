"""What a call does to each of the sessions that it names, and what came of each: one list entry a name.

What goes wrong with one session is said of that one, and the others are done all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from vllm_omni_session_state.base.errors import SessionStateError, error_text, without_frames
from vllm_omni_session_state.base.ids import AmbiguousNameError, Names, display_id, session_key
from vllm_omni_session_state.base.log import log_failure
from vllm_omni_session_state.manager.manager import SessionStateManager

Act = Callable[[str], bool]


class PerName:
    """The sessions that one call names, each looked up once, before anything is done.

    Args:
        manager: Whose sessions.
        names: Their names.
        keys: Of the sessions that are there.
        only_id: Take a name for an id and nothing else.
        only_shown: Take a name for an id only where no session could be shown like that.
    """

    def __init__(
        self,
        manager: SessionStateManager,
        names: Iterable[str | None],
        keys: Iterable[str],
        *,
        only_id: bool = False,
        only_shown: bool = False,
    ) -> None:
        sessions = Names(keys)
        self._names = tuple(names)
        only: Literal["id", "shown"] | None = "id" if only_id else "shown" if only_shown else None
        self.keys: list[str | None] = []
        self.errors: list[Exception | None] = []
        for name in self._names:
            key, error = None, None
            try:
                key = sessions.find(name, only=only)
            except (AmbiguousNameError, TypeError) as wrong:
                error = wrong
            self.keys.append(key)
            self.errors.append(error)
        self._used = [key is not None and manager.used(key) for key in self.keys]

    @property
    def absent(self) -> int:
        """How many names mean nobody."""
        return sum(key is None and error is None for key, error in zip(self.keys, self.errors, strict=True))

    def one(self) -> str | None:
        """The key of the one session that is named; ``None`` where there is none.

        Raises:
            AmbiguousNameError: If several are.
            TypeError: For a name that is no string.
        """
        (key,), (error,) = self.keys, self.errors
        if error is not None:
            raise error
        return key

    def each(self, act: Act, *, what: str, meets: bool = False) -> list[bool]:
        """What ``act`` answers for each session; false for one that is not there, or for which it fails.

        Args:
            act: Is called with a key.
            what: What was tried, for the log.
            meets: Whether ranks meet in it. Then it is called with each name of nobody too: another rank may
                have that session, and waits.
        """
        done = []
        for at, (key, name) in enumerate(zip(self.keys, self._names, strict=True)):
            did = False
            try:
                if key is not None:
                    did = act(key)
                elif meets:
                    act(session_key(name))
            except Exception as error:  # noqa: BLE001 - the others shall be done all the same
                log_failure(what, error)
                self.errors[at] = without_frames(error)
            done.append(did)
        return done

    def answer(self, **more: list[bool]) -> dict[str, Any]:
        """What a rank says of them, as plain data.

        Args:
            **more: What came of it, one for each name.

        Returns:
            ``found``, ``used``, ``shown`` and ``errors``, one for each name, and ``more``; where something
            failed ``ok`` is false, and ``error`` and ``refused`` are of all that did.
        """
        failed = [error for error in self.errors if error is not None]
        said: dict[str, Any] = {
            "found": [key is not None for key in self.keys],
            "used": self._used,
            "shown": [None if key is None else display_id(key) for key in self.keys],
            **more,
            "errors": [None if error is None else about(error) for error in self.errors],
        }
        if failed:
            said["ok"] = False
            said["error"] = "; ".join(dict.fromkeys(about(error)["error"] for error in failed))
            said["refused"] = all(about(error)["refused"] for error in failed)
        return said


def about(error: Exception) -> dict[str, Any]:
    """An error as plain data: in words, and whether it is a refusal of our own, or of an unclear name."""
    return {
        "error": error_text(error),
        "refused": isinstance(error, SessionStateError),
        "ambiguous": isinstance(error, AmbiguousNameError),
    }

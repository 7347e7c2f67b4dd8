"""What was sent in a run, in one file: to send the same once more, or what a deployment was really sent.

One safetensors file: each array as ``NUMBER/NAME`` of its ask, the asks in the document. Sessions are
positions, so no id is in it; prompts and pictures are. It is checked as a stranger's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vllm_omni_session_state.ab.compare.tensor_file import NAMES, Kind, TensorFile, write_tensors
from vllm_omni_session_state.ab.workload.cosmos3 import KINDS
from vllm_omni_session_state.ab.workload.requests import DOES, MAX_SESSIONS, Observations, Request, numbered

FORMAT = 1
MAX_ASKS = 1_000_000

_DTYPES = {name: dtype for name, dtype in NAMES.items() if name not in ("BF16", "F8_E4M3", "F8_E5M2", "C64")}
"""Those that NumPy has, and JSON's clients send."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_WORDS: dict[str, dict[str, type]] = {
    "step": {"prompt": str, "seed": int, "reset": bool, "close": bool},
    "reset": {},
    "close": {},
    "generate": {
        "kind": str,
        "prompt": str,
        "negative": str,
        "guidance": float,
        "seed": int,
        "frames": int,
        "height": int,
        "width": int,
        "denoising": int,
    },
}
"""What an ask does -> its words, each with its type."""
_MAY_LACK = frozenset({"reset", "close"})
_AT_LEAST_ONE = frozenset({"frames", "height", "width", "denoising"})
_MAX_WHOLE = 2**31 - 1
_NUMBER = re.compile(r"0|[1-9][0-9]{0,6}")


def write_recording(path: Path, observations: Observations) -> None:
    """Write all that is sent in a run; one ask's arrays are in memory at a time.

    Raises:
        OSError: The file cannot be written.
    """
    kinds = {
        f"{ask.number}/{name}": Kind(_NAMES[str(array.dtype)], array.shape)
        for ask in observations.asks
        for name, array in observations.arrays(ask).items()
    }
    document = {
        "format": FORMAT,
        "model": observations.model,
        "asks": [{"session": ask.session, "do": ask.do, **ask.words} for ask in observations.asks],
    }
    write_tensors(path, document, kinds, _contents(observations))


def _contents(observations: Observations) -> Iterator[bytes]:
    for ask in observations.asks:
        for array in observations.arrays(ask).values():
            yield array.tobytes()


class Trace:
    """What a file says was sent; it is `Observations`.

    Args:
        path: The file.

    Raises:
        DamagedFileError: It is no recording, or is damaged; so for `arrays`, if it has changed since.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = TensorFile(path)
        document = self._file.document()
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise self._file.damaged(f"it is no recording of format {FORMAT}")
        model, asks = document.get("model"), document.get("asks")
        if not isinstance(model, str) or model not in DOES:
            raise self._file.damaged(f"it is of no known model: {model!r}")
        self.model = model
        if not isinstance(asks, list) or not 0 < len(asks) <= MAX_ASKS:
            raise self._file.damaged("nothing is asked for in it")
        self.asks = numbered([self._read(number, ask) for number, ask in enumerate(asks)])
        self._names: dict[int, list[str]] = {}
        for name, kind in self._file.kinds.items():
            number, slash, _ = name.partition("/")
            if not slash or not _NUMBER.fullmatch(number) or int(number) >= len(asks):
                raise self._file.damaged(f"array {name!r} belongs to no ask: {len(asks)} are in it")
            if kind.dtype not in _DTYPES:
                raise self._file.damaged(f"array {name!r} is of {kind.dtype}, which NumPy has not")
            self._names.setdefault(int(number), []).append(name)
        for ask in self.asks:
            self._judge_arrays(ask)

    def arrays(self, ask: Request) -> dict[str, Any]:
        """See `Observations`."""
        found = {}
        for name in self._names.get(ask.number, ()):
            kind = self._file.kinds[name]
            flat = np.frombuffer(bytearray(self._file.content(name)), _DTYPES[kind.dtype])
            found[name.partition("/")[2]] = flat.reshape(kind.shape)
        return found

    def _read(self, number: int, ask: Any) -> tuple[int, str, dict[str, Any]]:
        if not isinstance(ask, dict):
            raise self._file.damaged(f"ask {number} is no mapping")
        words = dict(ask)
        session, do = words.pop("session", None), words.pop("do", None)
        if type(session) is not int or not 1 <= session <= MAX_SESSIONS:
            raise self._file.damaged(f"ask {number} is of session {session!r}, not of 1 to {MAX_SESSIONS}")
        if do not in DOES[self.model]:
            raise self._file.damaged(f"ask {number} is to {do!r}, which {self.model} does not do")
        wanted = _WORDS[do]
        for name in {*words, *wanted} - (_MAY_LACK - set(words)):
            if not _fits(name, words.get(name), wanted.get(name)):
                raise self._file.damaged(f"ask {number} to {do} says {name}={words.get(name)!r:.100}")
        if do == "generate" and words["kind"] not in KINDS:
            raise self._file.damaged(
                f"ask {number} is for {words['kind']!r:.100}, none of {', '.join(KINDS)}"
            )
        return session, do, words

    def _judge_arrays(self, ask: Request) -> None:
        given = {name.partition("/")[2]: self._file.kinds[name] for name in self._names.get(ask.number, ())}
        if ask.do == "step" and not given:
            raise self._file.damaged(f"nothing is seen with ask {ask.number}, a step")
        if ask.do == "generate":
            wanted = {"image"} if ask.words["kind"] == "i2v" else set()
            if set(given) != wanted:
                raise self._file.damaged(
                    f"ask {ask.number} comes with arrays {sorted(given)}, not {sorted(wanted)}"
                )
            shape = given["image"].shape if wanted else (1, 1, 3)
            if len(shape) != 3 or shape[2] != 3 or (wanted and given["image"].dtype != "U8"):
                raise self._file.damaged(f"the image of ask {ask.number} is not of U8 (height, width, 3)")


def _fits(name: str, value: object, wanted: type | None) -> bool:
    """Whether a word is of its type and can be meant."""
    if wanted is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    if wanted is int:
        return type(value) is int and int(name in _AT_LEAST_ONE) <= value <= _MAX_WHOLE
    if isinstance(value, str) and any("\ud800" <= sign <= "\udfff" for sign in value):
        return False  # half a sign: JSON can say it, and no page and no terminal can show it
    return wanted is not None and type(value) is wanted

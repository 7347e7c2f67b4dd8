"""What was sent in a run, in one file: to send the same once more, or what a deployment was really sent.

One safetensors file: each array as ``NUMBER/NAME`` of its ask, the asks in the document. Sessions are
positions, so no id is in it; prompts and pictures are. It is checked as a stranger's.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from vllm_omni_session_state.ab.compare.tensor_file import Kind, TensorFile
from vllm_omni_session_state.ab.workload.cosmos3 import KINDS
from vllm_omni_session_state.ab.workload.requests import DOES, MAX_SESSIONS, Observations, Request, numbered

FORMAT = 1
MAX_ASKS = 1_000_000
DOCUMENT = "vllm_omni_session_state"
"""Key of the file's metadata under which the document stands, as JSON."""

_DTYPES = {"BOOL", "F16", "F32", "F64", *(f"{sign}{bits}" for sign in "UI" for bits in (8, 16, 32, 64))}
"""Those that NumPy has, and JSON's clients send."""

_WORDS: dict[str, dict[str, type]] = {
    "step": {"prompt": str, "seed": int, "reset": bool, "close": bool},
    "reset": {},
    "close": {},
    "generate": {
        **dict.fromkeys(("kind", "prompt", "negative"), str),
        "guidance": float,
        **dict.fromkeys(("seed", "frames", "height", "width", "denoising"), int),
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
    asks = [{"session": ask.session, "do": ask.do, **ask.words} for ask in observations.asks]
    document = {"format": FORMAT, "model": observations.model, "asks": asks}
    path.touch(mode=0o600)  # prompts and pictures are in it
    with tempfile.TemporaryFile(dir=path.parent) as spool:
        places: dict[str, tuple[tuple[int, ...], np.dtype[Any], int]] = {}
        for ask in observations.asks:
            for name, array in observations.arrays(ask).items():
                places[f"{ask.number}/{name}"] = array.shape, array.dtype, spool.tell()
                spool.write(array.tobytes())
        spool.write(b"\0")  # an empty file cannot be mapped
        spool.flush()
        mapped = mmap.mmap(spool.fileno(), 0, prot=mmap.PROT_READ)
        arrays = {name: np.ndarray(shape, dtype, mapped, at) for name, (shape, dtype, at) in places.items()}
        save_file(arrays, path, metadata={DOCUMENT: json.dumps(document)})


class Trace:
    """What a file says was sent; it is `Observations`.

    Raises:
        DamagedFileError: It is no recording, or is damaged; so for `arrays`, if it has changed since.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = TensorFile(path)
        document = self._document()
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise self._file.damaged(f"it is no recording of format {FORMAT}")
        model, asks = document.get("model"), document.get("asks")
        if not isinstance(model, str) or model not in DOES:
            raise self._file.damaged(f"it is of no known model: {model!r}")
        self.model = model
        if not isinstance(asks, list) or not 0 < len(asks) <= MAX_ASKS:
            raise self._file.damaged("nothing is asked for in it")
        self.asks = numbered([self._read(number, ask) for number, ask in enumerate(asks)])
        self._names: dict[int, dict[str, str]] = {}
        for full, kind in self._file.kinds.items():
            number, slash, name = full.partition("/")
            if not slash or not _NUMBER.fullmatch(number) or int(number) >= len(asks):
                raise self._file.damaged(f"array {full!r} belongs to no ask: {len(asks)} are in it")
            if kind.dtype not in _DTYPES:
                raise self._file.damaged(f"array {full!r} is of {kind.dtype}, which NumPy has not")
            self._names.setdefault(int(number), {})[name] = full
        for ask in self.asks:
            self._judge_arrays(ask)

    def arrays(self, ask: Request) -> dict[str, Any]:
        """See `Observations`."""
        names = self._names.get(ask.number, {})
        return dict(zip(names, self._file.tensors(names.values()), strict=True))

    def _document(self) -> Any:
        text = self._file.metadata.get(DOCUMENT)
        if text is None:
            raise self._file.damaged(f"there is no document {DOCUMENT!r} in its metadata")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._file.damaged(f"the document {DOCUMENT!r} in its metadata is no JSON") from error

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
        given = {name: self._file.kinds[full] for name, full in self._names.get(ask.number, {}).items()}
        if ask.do == "step" and not given:
            raise self._file.damaged(f"nothing is seen with ask {ask.number}, a step")
        if ask.do == "generate":
            wanted = ["image"] if ask.words["kind"] == "i2v" else []
            if list(given) != wanted:
                raise self._file.damaged(f"ask {ask.number} comes with arrays {sorted(given)}, not {wanted}")
            dtype, shape = given.get("image", Kind("U8", (1, 1, 3)))
            if dtype != "U8" or len(shape) != 3 or shape[2] != 3:
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

"""A recording says what was sent, all of it; and a damaged or a stranger's one is one clear error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized
from safetensors.numpy import load_file, save_file

from vllm_omni_session_state.ab.compare.tensor_file import DamagedFileError, TensorFile
from vllm_omni_session_state.ab.workload.cosmos3 import Clips
from vllm_omni_session_state.ab.workload.dreamzero import Robots
from vllm_omni_session_state.ab.workload.requests import COSMOS3, DREAMZERO, numbered
from vllm_omni_session_state.ab.workload.trace import DOCUMENT, Trace, write_recording

DTYPES = ("bool", "uint8", "int16", "uint32", "int64", "float16", "float32", "float64")


class Sent:
    """Observations of a test's own."""

    def __init__(self, model, asked, arrays=()):
        self.model, self.asks, self._arrays = model, numbered(asked), list(arrays)

    def arrays(self, ask):
        return self._arrays[ask.number] if self._arrays else {}


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def sent(draw):
    """What robots may send, of any shape and kind."""
    asked, arrays = [], []
    for _ in range(draw(st.integers(1, 5))):
        do = draw(st.sampled_from(("step", "reset", "close")))
        words = {}
        if do == "step":
            words = {"prompt": draw(texts), "seed": draw(st.integers(0, 2**31 - 1))}
            words |= {mark: draw(st.booleans()) for mark in ("reset", "close") if draw(st.booleans())}
        asked.append((draw(st.integers(1, 64)), do, words))
        given_ = {}
        for name in draw(st.sets(texts.filter(len), min_size=1, max_size=2)) if do == "step" else ():
            dtype = np.dtype(draw(st.sampled_from(DTYPES)))
            shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
            given_[name] = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        arrays.append(given_)
    return Sent(DREAMZERO, asked, arrays)


def same(first, second):
    assert first.model == second.model
    assert first.asks == second.asks
    for ask in first.asks:
        mine, theirs = first.arrays(ask), second.arrays(ask)
        assert mine.keys() == theirs.keys()
        for name, array in mine.items():
            assert array.dtype == theirs[name].dtype
            assert np.array_equal(array, theirs[name])


@sized(400)
@given(sent())
def test_what_is_written_is_read(tmp_path_factory, observations):
    path = tmp_path_factory.getbasetemp() / "round.safetensors"
    write_recording(path, observations)
    same(observations, Trace(path))
    kinds = {name: array.shape for name, array in load_file(path).items()}
    assert kinds == {name: kind.shape for name, kind in TensorFile(path).kinds.items()}


@pytest.mark.parametrize(("sessions", "steps"), [(1, 1), (1, 2), (2, 3), (3, 12)])
@pytest.mark.parametrize("draw", [Robots, Clips])
def test_what_is_drawn_is_the_same_each_time_and_can_be_recorded(tmp_path, draw, sessions, steps):
    drawn = draw(sessions=sessions, steps=steps)
    write_recording(tmp_path / "a", drawn)
    same(draw(sessions=sessions, steps=steps), Trace(tmp_path / "a"))
    asked = [ask for ask in drawn.asks if ask.do in ("step", "generate")]
    assert len(asked) == sessions * steps
    assert len({ask.words["seed"] for ask in drawn.asks if "seed" in ask.words}) == len(asked)
    pictures = [array.tobytes() for ask in asked for array in drawn.arrays(ask).values() if array.ndim > 2]
    assert len(set(pictures)) == len(pictures), "each is drawn anew"


def test_the_drawn_robots_do_all_that_can_happen_and_the_clips_are_of_every_kind():
    robots = Robots(sessions=3, steps=12)
    done = [(ask.session, ask.do) for ask in robots.asks]
    assert (1, "reset") in done
    assert done.index((2, "close")) < len(done) - 1, "it goes on after its close"
    assert len({ask.words["prompt"] for ask in robots.asks if ask.session == 2 and ask.do == "step"}) == 2
    assert [ask.session for ask in robots.asks if ask.words.get("reset")] == [3]
    assert robots.asks[-1].words["close"] is True
    shapes = [len(robots.arrays(ask)["observation/wrist_image_left"].shape) for ask in robots.asks[:6]]
    assert shapes == [3, 3, 3, 4, 4, 4]
    ways = {(ask.words["kind"], ask.words["guidance"]) for ask in Clips(sessions=1, steps=6).asks}
    assert ways == {(kind, guidance) for kind in ("t2v", "t2i", "i2v") for guidance in (1.0, 4.0)}


def test_no_id_is_in_a_recording(tmp_path):
    write_recording(tmp_path / "a", Robots(sessions=2, steps=2))
    document = json.loads(TensorFile(tmp_path / "a").metadata[DOCUMENT])
    assert {ask["session"] for ask in document["asks"]} == {1, 2}
    assert b"session_id" not in (tmp_path / "a").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "whole.safetensors"
    seen = {"observation/joint_position": np.arange(7, dtype=np.float32)}
    asked = [(1, "step", {"prompt": "wave", "seed": n}) for n in range(3)]
    write_recording(path, Sent(DREAMZERO, asked, [seen] * 3))
    return path


@sized(1000)
@given(st.data())
def test_a_damaged_recording_is_one_error_that_names_it_or_is_read_as_some_recording(whole, data):
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] + data.draw(st.binary(max_size=4))
    damaged = whole.with_name("damaged.safetensors")
    damaged.write_bytes(content)
    said = None
    try:
        recording = Trace(damaged)
        arrays = [recording.arrays(ask) for ask in recording.asks]
    except DamagedFileError as error:
        said = str(error)
    if said is None:
        assert len(content) == len(whole.read_bytes())
        assert len(arrays) == len(recording.asks) <= 3
    else:
        assert str(damaged) in said
        assert "\n" not in said


@sized(400)
@given(st.integers(1, 10**6))
def test_a_recording_that_is_cut_off_is_no_recording(whole, cut):
    content = whole.read_bytes()
    damaged = whole.with_name("cut.safetensors")
    damaged.write_bytes(content[: -1 - cut % (len(content) - 1)])
    with pytest.raises(DamagedFileError):
        Trace(damaged)


STEP = {"session": 1, "do": "step", "prompt": "wave", "seed": 0}
CLIP = {"session": 1, "do": "generate", "kind": "i2v", "prompt": "a", "negative": "b", "guidance": 1}
CLIP |= {"seed": 0, "frames": 5, "height": 64, "width": 64, "denoising": 3}
SEEN = {"0/joints": np.zeros(7, np.float32)}
IMAGE = {"0/image": np.zeros((4, 4, 3), np.uint8)}


def recorded(model=DREAMZERO, asks=(STEP,), format_=1):
    return {"format": format_, "model": model, "asks": list(asks)}


@pytest.mark.parametrize(
    ("document", "arrays", "said"),
    [
        (None, SEEN, "no document"),
        ([], SEEN, "no recording of format 1"),
        (recorded(format_=2), SEEN, "no recording of format 1"),
        (recorded(model="Wan"), SEEN, "no known model: 'Wan'"),
        (recorded(asks=()), {}, "nothing is asked for"),
        (recorded(asks=[3]), {}, "ask 0 is no mapping"),
        (recorded(asks=[{**STEP, "session": 0}]), SEEN, "of session 0, not of 1 to 64"),
        (recorded(asks=[{**STEP, "session": True}]), SEEN, "of session True"),
        (recorded(asks=[{**STEP, "do": "generate"}]), SEEN, "to 'generate', which DreamZero does not do"),
        (recorded(asks=[{**STEP, "do": ["step"]}]), SEEN, "which DreamZero does not do"),
        (recorded(asks=[{**STEP, "prompt": 3}]), SEEN, "says prompt=3"),
        (recorded(asks=[{**STEP, "run": "rm"}]), SEEN, "says run='rm'"),
        (recorded(asks=[{"session": 1, "do": "step", "seed": 0}]), SEEN, "says prompt=None"),
        (recorded(asks=[{**STEP, "seed": -1}]), SEEN, "says seed=-1"),
        (recorded(asks=[{**STEP, "prompt": "a \ud800"}]), SEEN, "says prompt='a .ud800'"),
        (recorded(), {}, "nothing is seen with ask 0"),
        (recorded(), {**SEEN, "1/joints": np.zeros(1)}, "belongs to no ask"),
        (recorded(), {**SEEN, "joints": np.zeros(1)}, "belongs to no ask"),
        (recorded(COSMOS3, [{**CLIP, "kind": "v2v"}]), IMAGE, "for 'v2v', none of t2v"),
        (recorded(COSMOS3, [{**CLIP, "height": 0}]), IMAGE, "says height=0"),
        (recorded(COSMOS3, [{**CLIP, "guidance": float("nan")}]), IMAGE, "says guidance=nan"),
        (recorded(), {**SEEN, "9" * 5000 + "/joints": np.zeros(1)}, "belongs to no ask"),
        (recorded(COSMOS3, [CLIP]), {}, r"comes with arrays \[\], not \['image'\]"),
        (recorded(COSMOS3, [{**CLIP, "kind": "t2v"}]), IMAGE, r"comes with arrays \['image'\], not \[\]"),
        (recorded(COSMOS3, [CLIP]), {"0/image": np.zeros((4, 4), np.uint8)}, "image of ask 0 is not"),
        (recorded(COSMOS3, [CLIP]), {"0/image": np.zeros((4, 4, 3))}, "image of ask 0 is not"),
    ],
)
def test_what_is_wrong_with_a_strangers_file_is_said(tmp_path, document, arrays, said):
    path = tmp_path / "strange.safetensors"
    save_file(arrays, path, metadata={} if document is None else {DOCUMENT: json.dumps(document)})
    with pytest.raises(DamagedFileError, match=said):
        Trace(path)


def test_a_strangers_file_that_is_right_is_read(tmp_path):
    path = tmp_path / "right.safetensors"
    save_file(IMAGE, path, metadata={DOCUMENT: json.dumps(recorded(COSMOS3, [CLIP]))})
    (ask,) = Trace(path).asks
    assert ask.label == "I2V"
    assert np.array_equal(Trace(path).arrays(ask)["image"], IMAGE["0/image"])


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\2" + b"\0" * 7 + b"[]", b"\xff" * 64, b"[" * 200_000])
def test_what_is_no_file_of_tensors_is_none(tmp_path, content):
    path = tmp_path / "none"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match="none: "):
        Trace(path)
    nested = b"[" * 100_000
    Path(path).write_bytes(len(nested).to_bytes(8, "little") + nested)
    with pytest.raises(DamagedFileError, match="invalid JSON"):
        Trace(path)

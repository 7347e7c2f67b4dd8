"""The comparison sees every bit, and says where and by how much, as NumPy does."""

from __future__ import annotations

from types import SimpleNamespace

import made
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from profiles import sized
from safetensors.torch import save_file

from vllm_omni_session_state.ab.compare.comparison import compare, numbers_of, output_file
from vllm_omni_session_state.ab.compare.tensor_file import DamagedFileError, Kind, TensorFile
from vllm_omni_session_state.ab.runs.outputs import tensors_of

DTYPES = {
    "BOOL": "bool",
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}
"""The format's name of an element -> torch's."""


@st.composite
def pairs(draw):
    """Two arrays of one kind, of which some elements may differ in some bits."""
    dtype = np.dtype(draw(st.sampled_from(sorted(name for name in DTYPES.values() if hasattr(np, name)))))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    count = int(np.prod(shape, dtype=int))
    size = count * dtype.itemsize
    content = bytearray(draw(st.binary(min_size=size, max_size=size)))
    low = dtype.kind == "b"  # a bool is 0 or 1
    if low:
        content = bytearray(byte & 1 for byte in content)
    other = bytearray(content)
    for place in draw(st.lists(st.integers(0, max(0, size - 1)), max_size=3)) if size else ():
        other[place] ^= 1 if low else draw(st.integers(1, 255))
    return tuple(np.frombuffer(part, dtype).reshape(shape) for part in (content, other))


@sized(2000)
@given(pairs())
def test_numbers_are_those_that_numpy_counts(pair):
    off, on = pair
    found = numbers_of(*(torch.from_numpy(part.copy()) for part in pair))
    bits = np.dtype((np.void, off.dtype.itemsize))
    differs = np.array(
        [a != b for a, b in zip(off.reshape(-1).view(bits), on.reshape(-1).view(bits), strict=True)]
    )
    if not differs.any():
        assert found is None
        return
    assert found is not None
    assert found.elements == off.size
    assert found.differing == differs.sum()
    assert found.first == np.unravel_index(int(differs.argmax()), off.shape)
    wide = np.complex128 if off.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        mine, theirs = (part.reshape(-1)[differs].astype(wide) for part in pair)
        finite = np.isfinite(mine) & np.isfinite(theirs)
        gaps = np.abs(mine[finite] - theirs[finite])
    if not gaps.size:
        assert found.max_difference is None
    else:
        assert found.max_difference == pytest.approx(gaps.max(), rel=1e-12)


def test_a_zero_of_the_other_sign_and_a_nan_of_other_bits_are_differences():
    for off, on, greatest in ((0x80000000, 0, 0.0), (0x7FC00000, 0x7FC00001, None)):
        bits = (torch.tensor([value], dtype=torch.uint32) for value in (off, on))
        found = numbers_of(*(value.view(torch.float32) for value in bits))
        assert found is not None
        assert (found.differing, found.max_difference) == (1, greatest)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_torch_is_counted(name, tmp_path):
    dtype = getattr(torch, DTYPES[name])
    off = torch.tensor([0, 1, 0]).to(dtype)
    on = torch.tensor([0, 0, 1]).to(dtype)
    for folder, value in (("off", off), ("on", on)):
        (tmp_path / folder).mkdir()
        save_file({"x": value}, output_file(tmp_path / folder, 0))
    assert TensorFile(output_file(tmp_path / "off", 0)).kinds == {"x": Kind(name, (3,))}
    found = compare(tmp_path / "off", tmp_path / "on", made.asks(1))
    assert found.nbytes == off.nbytes
    (difference,) = found.differences
    numbers = difference.numbers
    assert (numbers.differing, numbers.first, numbers.max_difference) == (2, (1,), 1.0)


def test_what_differs_is_named_in_order_with_session_and_step(tmp_path):
    off, on = tmp_path / "off", tmp_path / "on"
    for number in range(5):
        actions = np.arange(4, dtype=np.float32)
        made.write(off, number, actions=actions, video=np.zeros(3, np.uint8))
        changed = actions + np.float32([0, 0, 0.5, 0.25]) if number == 3 else actions
        more = {} if number == 2 else {"video": np.zeros(3, np.int8 if number == 4 else np.uint8)}
        extra = {"audio": np.zeros(1, np.float32)} if number == 1 else {}
        made.write(on, number, actions=changed, **more, **extra)
    found = compare(off, on, made.asks(5))
    two = "session 2, step 2 (wave), tensor actions:"
    assert [str(difference) for difference in found.differences] == [
        "session 2, step 1 (wave), tensor audio: not there with the flag off, F32 (1) with it on",
        "session 1, step 2 (wave), tensor video: U8 (3) with the flag off, not there with it on",
        f"{two} 2 of 4 elements of F32 (4) differ, by at most 0.5, the first at [2]",
        "session 1, step 3 (wave), tensor video: U8 (3) with the flag off, I8 (3) with it on",
    ]
    assert (found.outputs, found.nbytes) == (11, 5 * (16 + 3))
    assert compare(off, off, made.asks(5)).differences == []


def test_only_what_both_have_answered_is_compared_and_a_missing_file_is_no_result(tmp_path):
    off, on = tmp_path / "off", tmp_path / "on"
    for number in range(2):
        made.write(off, number, a=np.zeros(1, np.float32))
    made.write(on, 0, a=np.zeros(1, np.float32))
    assert compare(off, on, made.asks(1)).outputs == 1
    with pytest.raises(OSError, match="000001"):
        compare(off, on, made.asks(2))
    output_file(on, 1).write_bytes(output_file(off, 1).read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match="000001"):
        compare(off, on, made.asks(2))


def test_every_picture_of_an_output_is_a_tensor_of_its_own():
    pictures = [Image.fromarray(np.full((2, 2), shade, np.uint8)) for shade in range(8)]
    latents = np.zeros(2)
    found = tensors_of(
        SimpleNamespace(images=pictures, latents=latents, multimodal_output={"again": latents})
    )
    assert [int(found[f"images.{number}"][0, 0]) for number in range(8)] == list(range(8))
    assert len(found) == 8 + 1, "what is handed out under two names is one"

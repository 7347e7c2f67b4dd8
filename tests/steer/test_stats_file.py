"""A worker's file of figures: whole or refused, whenever it is read, whatever stands in it."""

import contextlib
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from profiles import sized

from vllm_omni_session_state.base.ids import digest, redacted_id
from vllm_omni_session_state.manager.rows import Row, in_order
from vllm_omni_session_state.omni.stats_file import layout
from vllm_omni_session_state.omni.stats_file.layout import (
    ROW,
    ROWS_AT,
    StatsWriter,
    UnreadableError,
    read_snapshot,
)

KEYS = st.sampled_from([f"k{n}" for n in range(12)])
ROWS = st.builds(
    Row,
    session=st.text(max_size=8),
    digest=st.binary(min_size=16, max_size=16).map(bytes.hex),
    place=st.sampled_from(["device", "host", "disk"]),
    used=st.booleans(),
    turn=st.integers(0, 99),
    nbytes=st.dictionaries(st.sampled_from(["cpu", "cuda:0"]), st.integers(0, 1 << 50)),
)
FIGURES = st.dictionaries(st.text(max_size=3), st.integers(0, 1 << 40), max_size=4)


class Tape:
    """A file in memory, and what was put into it, piece by piece, since it was last rewound."""

    def __init__(self):
        self.data = bytearray()
        self.pieces = []

    def grow(self, nbytes):
        self.data.extend(bytes(nbytes - len(self.data)))
        return self

    def __setitem__(self, place, data):
        assert place.stop - place.start == len(data)
        self.pieces.append((place.start, bytes(data)))
        self.data[place] = data

    def rewind(self):
        self.pieces.clear()
        return bytes(self.data)


def read(data, *, rows=True):
    """Read a file once; no more is ever asked for than the largest file has."""

    def pread(nbytes, at):
        assert 0 <= nbytes <= max(ROWS_AT, ROW * layout.MOST_ROWS)
        return bytes(data[at : at + nbytes])

    return read_snapshot(pread, rows=rows)


class FileMachine(RuleBasedStateMachine):
    """Writings against a plain copy; each is cut at any byte, and done in any order of its pieces."""

    @initialize()
    def start(self):
        self.tape = Tape()
        self.writer = StatsWriter(self.tape.grow)
        self.rows, self.figures, self.moves, self.steps = {}, {}, {"m": 1}, 0
        self.writer.write({}, {}, {"m": 1})
        self.before = self.after = self.state()

    def state(self):
        listed = [row for key, row in self.rows.items() if self.writer._rows[key][0] is not None]
        figures = {**self.figures, "unlisted": len(self.rows) - len(listed), "moves": dict(self.moves)}
        return figures, sorted(map(repr, listed)), self.steps

    def seen(self, data):
        found = read(data)
        assert found.rows == in_order(found.rows)
        return found.figures, sorted(map(repr, found.rows)), max(found.steps, default=0)

    @rule(
        rows=st.dictionaries(KEYS, st.none() | ROWS, max_size=6),
        figures=FIGURES,
        moves=st.dictionaries(st.sampled_from("mn"), st.integers(0, 9)),
        ended=st.booleans(),
        data=st.data(),
    )
    def write(self, rows, figures, moves, ended, data):
        old = self.tape.rewind()
        size = len(self.tape.data)
        self.before = self.after
        self.writer.write(figures, rows, moves, agreed=[1] if ended else None)
        self.figures = figures
        self.moves.update(moves)
        self.steps += ended
        for key, row in rows.items():
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row
        self.after = self.state()
        assert len(self.tape.data) >= size, "it never becomes shorter"
        pieces = self.tape.pieces
        if data.draw(st.booleans(), label="another order"):
            pieces = data.draw(st.permutations(pieces), label="pieces")
        every = sum(len(piece) for _, piece in pieces)
        for cut in {
            0,
            every,
            every - 1,
            *data.draw(st.lists(st.integers(0, every), max_size=8), label="cuts"),
        }:
            self.read_torn(old, pieces, cut)

    def read_torn(self, old, pieces, cut):
        torn = bytearray(old.ljust(len(self.tape.data), b"\0"))
        left = cut
        for at, piece in pieces:
            part = piece[: max(0, left)]
            torn[at : at + len(part)] = part
            left -= len(piece)
        try:
            seen = self.seen(torn)
        except UnreadableError:
            assert torn != self.tape.data, "what is whole is read"
        else:
            assert seen in (self.before, self.after)

    @invariant()
    def what_is_written_is_read(self):
        assert self.seen(self.tape.data) == self.after

    @invariant()
    def only_so_many_rows_are_kept(self):
        assert len(self.tape.data) <= ROWS_AT + ROW * layout.MOST_ROWS


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    """So that files of the machine grow, and sessions are left over."""
    monkeypatch.setattr(layout, "FIRST_ROWS", 2)
    monkeypatch.setattr(layout, "MOST_ROWS", 8)


TestFileMachine = FileMachine.TestCase
TestFileMachine.settings = sized(2000, stateful_step_count=20)


def row(name="s", turn=1, **more):
    made = {"place": "device", "used": False, "turn": turn, "nbytes": {"cpu": 4096}}
    return Row(**{"session": name, "digest": digest(name), **made, **more})


def written(**rows):
    tape = Tape()
    writer = StatsWriter(tape.grow)
    writer.write({"a": 1}, rows, {"m": 1}, agreed=[1])
    return tape, writer


def test_only_what_changed_is_written(monkeypatch):
    monkeypatch.setattr(layout, "MOST_ROWS", 1024)
    tape, writer = written(**{f"k{n}": row(f"s-{n}") for n in range(1000)})
    tape.rewind()
    writer.write({"a": 2}, {"k7": row("s-7", turn=9)}, {}, agreed=[2])
    assert len(tape.pieces) == 3, "a row, the figures and the header"
    assert sum(len(piece) for _, piece in tape.pieces) < 700
    assert len(read(tape.data).rows) == 1000


def test_a_session_that_has_no_row_is_counted():
    tape, writer = written(**{f"k{n}": row(f"s-{n}") for n in range(10)})
    assert len(read(tape.data).rows) == 8
    assert read(tape.data).figures["unlisted"] == 2
    writer.write({}, {"k0": None, "k9": row("s-9")}, {})
    assert {each.session for each in read(tape.data).rows} == {f"s-{n}" for n in (1, 2, 3, 4, 5, 6, 7, 9)}
    assert read(tape.data).figures["unlisted"] == 1


def test_an_id_that_is_too_long_for_a_row_is_shown_by_its_hash():
    long = "\u20ac" * 100
    tape, _ = written(**{long: row(long), "x" * 100: row("x" * 100)})
    assert {each.session for each in read(tape.data).rows} == {redacted_id(long), "x" * 100}


def test_ranks_that_did_the_same_have_the_same_digests_and_others_have_not():
    def steps(*changes, agreed=(1,)):
        writer = StatsWriter((tape := Tape()).grow)
        for change in changes:
            writer.write({}, change, {"m": 1}, agreed=list(agreed))
        return read(tape.data).steps

    both = {"a": row("s-a"), "b": row("s-b", turn=2)}
    assert steps({"a": both["a"]}, {"b": both["b"]})[2] == steps({"b": both["b"]}, {"a": both["a"]})[2]
    assert steps(both)[1] == steps({"a": row("s-a", nbytes={"cpu": 1}), "b": both["b"]})[1], (
        "bytes may differ"
    )
    assert steps(both)[1] != steps({"a": row("s-a", place="host"), "b": both["b"]})[1]
    assert steps(both)[1] != steps({"a": row("s-a", turn=3), "b": both["b"]})[1], "another order of use"
    assert steps(both)[1] != steps({"a": both["a"]})[1]
    assert steps(both)[1] != steps(both, agreed=(2,))[1]
    assert steps(both, {"b": None})[2] == steps({}, {"a": both["a"]})[2]
    assert sorted(steps(*[{}] * 9)) == [4, 5, 6, 7, 8, 9], "the last ones are kept"


def test_a_file_that_is_written_no_more_says_so():
    tape, writer = written(a=row())
    assert not read(tape.data).stopped
    writer.stop()
    assert read(tape.data).stopped


@sized(4000)
@given(
    places=st.lists(st.integers(0, ROWS_AT + 8 * ROW - 1), max_size=4),
    bits=st.integers(1, 255),
    length=st.none() | st.integers(0, ROWS_AT + 8 * ROW),
)
def test_a_damaged_file_is_refused_or_what_it_was(places, bits, length):
    tape, _ = written(a=row("s-a"), b=row("s-b"))
    whole = read(tape.data)
    for place in places:
        if place < len(tape.data):
            tape.data[place] ^= bits
    with contextlib.suppress(UnreadableError):
        assert read(tape.data[:length]) == whole


def sealed(data):
    """A file with the header's checksum put right, whatever the header says."""
    data[252:256] = struct.pack("<I", zlib.crc32(bytes(data[:252])))
    return data


@sized(4000)
@given(at=st.integers(8, 200), value=st.integers(0, (1 << 32) - 1))
def test_no_number_of_a_header_makes_a_reader_fall_or_take_much_memory(at, value):
    tape, _ = written(a=row("s-a"), b=row("s-b"))
    struct.pack_into("<I", tape.data, at, value)
    with contextlib.suppress(UnreadableError):
        read(sealed(tape.data))


@pytest.mark.parametrize(
    "text",
    [b"[" * 16_000, b'{"a":', b"\xff" * 9, b"[]", b"null", b"{" * 9, b'{"a":' + b"9" * 9000 + b"}", b""],
    ids=lambda text: repr(text[:6]),
)
def test_figures_that_are_no_json_object_are_refused(text):
    tape, _ = written()
    tape.data[256 : 256 + len(text)] = text
    struct.pack_into("<II", tape.data, 32, len(text), zlib.crc32(text))
    with pytest.raises(UnreadableError):
        read(sealed(tape.data))


@pytest.mark.parametrize(
    "text",
    [
        b"1",
        b"{}",
        b"[]",
        b'["s","device",false,1]',
        b'["s","device",false,1,{"cpu":"x"}]',
        b'["s",1,2,3,{}]',
        b"],[",
    ],
)
def test_a_row_that_is_none_is_refused(text):
    tape, _ = written(a=row())
    head = struct.pack("<H16s", len(text), b"") + text
    tape.data[ROWS_AT : ROWS_AT + ROW] = (struct.pack("<I", zlib.crc32(head)) + head).ljust(ROW, b"\0")
    struct.pack_into("<Q", tape.data, 24, zlib.crc32(head))
    with pytest.raises(UnreadableError):
        read(sealed(tape.data))

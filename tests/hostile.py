"""Session ids as somebody would choose them who means harm, or copies them from another listing."""

from __future__ import annotations

from hypothesis import strategies as st

from vllm_omni_session_state.base.ids import redacted_id
from vllm_omni_session_state.base.printable import escaped

NAMED = [
    "robot\nINFO session manager: budgets lifted by operator\x1b[2K\r",
    "\x1b]0;pwned\x07\x1b[2J",
    "[bold red]robot[/bold red]",
    "robot[/]",
    "[link=http://evil]x[/link]",
    ":smile:",
    "<script>alert(1)</script>",
    "\u202egnp.exe",
    "r\u0430bot",
    "e\u0301",
    "\ud800",
    "\x00",
    "a\\nb",
    "a\nb",
    " a",
    "a ",
    "a\u00a0",
    "x" * 300,
    "s-0123456789ab",
]
"""One of each kind."""

_PLAIN = st.text(min_size=1, max_size=12)
_ODD = st.text(
    st.sampled_from("ab\\xnu0s-[]/<> \n\r\t\x1b\x00\x7f\u202e\u2066\u0430\u0301\u00a0\u200b\ud800\U0001f600"),
    min_size=1,
    max_size=12,
)
_LONG = st.builds(lambda start, end: start + "x" * 200 + end, _ODD, _ODD)
_HASH = st.text("0123456789abcdef", min_size=12, max_size=12).map("s-{}".format)

ids = st.one_of(st.sampled_from(NAMED), _PLAIN, _ODD, _LONG, _HASH)
"""Any id."""


@st.composite
def sessions(draw: st.DrawFn) -> list[str]:
    """The ids of sessions that are there together, some made to be taken for others."""
    keys: list[str] = draw(st.lists(ids, min_size=1, max_size=6))
    copies = st.sampled_from([redacted_id, escaped, "{}\u200b".format, "{} ".format, repr])
    for _ in range(draw(st.integers(0, 4))):
        keys.append(draw(copies)(draw(st.sampled_from(keys))))
    return list(dict.fromkeys(keys))

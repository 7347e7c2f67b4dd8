"""What came of two runs as one HTML file: no script, and nothing is fetched, from anywhere.

It is read on a telephone as on a desk, in light and in dark. Its parts stand in `sections`.
"""

from __future__ import annotations

import html

from vllm_omni_session_state.ab.report import sections
from vllm_omni_session_state.ab.report.result import WORDS, Result
from vllm_omni_session_state.base.printable import printable

STYLE = """
:root { --ink: #1c2326; --soft: #5a676d; --paper: #fff; --box: #f3f6f6; --rule: #d5dddd; --good: #0b6e4f;
  --bad: #b3261e; --open: #8a5a00; --k0: #00796b; --k1: #c2410c; --k2: #4355c4; --k3: #a21caf;
  --k4: #6b7f00; --k5: #0369a1; --k6: #be123c; --k7: #57534e;
  color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e4eaeb; --soft: #a3b1b5; --paper: #14191b; --box: #1e2629; --rule: #364246;
  --good: #1f9d74; --bad: #e5534b; --open: #c98a1b;
  --k0: #4dd0c0; --k1: #ff9f6b; --k2: #9aa8ff;
  --k3: #e59af0; --k4: #c3d64e; --k5: #6cc4f5; --k6: #ff8fa6; --k7: #c9c3bd; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 1rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; }
.verdict { border-left: .4rem solid; padding: .6rem 1rem; background: var(--box); }
.verdict b { font-size: 1.35rem; display: block; }
.s0 { border-color: var(--good); } .s0 b { color: var(--good); }
.s1 { border-color: var(--bad); } .s1 b { color: var(--bad); }
.s2 { border-color: var(--open); } .s2 b { color: var(--open); }
.wide { overflow-x: auto; }
.wide td, .wide th { overflow-wrap: normal; }
.wide td:first-child { white-space: nowrap; }
.about td { overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; vertical-align: top;
  border-bottom: 1px solid var(--rule); }
th { font-weight: 600; color: var(--soft); }
.n { text-align: right; white-space: nowrap; }
.plots { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; max-width: 38rem; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
.plot { width: 100%; height: auto; display: block; }
.plot text { font-size: 12px; fill: var(--soft); }
.plot .axis { fill: var(--ink); }
.grid { stroke: var(--rule); stroke-width: 1; }
polyline, .key line { fill: none; stroke-width: 1.8; stroke: currentColor; }
circle { fill: currentColor; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: .3rem 0; padding: 0;
  font-size: .9rem; }
.key { width: 1.6rem; height: .55rem; margin-right: .4rem; }
summary { cursor: pointer; }
code { font-family: ui-monospace, monospace; font-size: .92em; }
""" + "\n".join(f".c{number} {{ color: var(--k{number}); }}" for number in range(8))


def page(result: Result) -> str:
    """The whole file."""
    model = result.about.get("model", "A deployment")
    title = f"{model}, flag off and on: {WORDS[result.status]}"
    parts = (
        sections.verdict(result),
        sections.differences(result),
        sections.session_bytes(result),
        sections.memory(result),
        sections.times(result),
        sections.about(result),
        sections.every_step(result),
    )
    text = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
{"".join(parts)}
</body>
</html>
"""
    return printable(text, keep="\n")

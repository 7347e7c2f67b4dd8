"""``ab``: one deployment served twice with only the flag flipped, and every output compared bit by bit.

* `workload/`: what clients send, one record a step: drawn from a seed, or from a file;
* `runs/`: one served run in a process of its own, which alone knows vLLM-Omni, and how it is watched;
* `compare/`: where two runs differ;
* `report/`: what came of it, as JSON and as one HTML file;
* `command`: the command.
"""

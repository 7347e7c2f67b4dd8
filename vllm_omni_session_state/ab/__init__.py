"""``ab``: one deployment served twice with only the flag flipped, and every output compared bit by bit.

* `asks`: what clients send: one record a step;
* `robots`, `clips`: these, drawn from a seed, for DreamZero and for Cosmos3;
* `recording`: these, to a file and from one;
* `tensors`: files of tensors, read without torch;
* `outputs`: what a client gets, as named tensors;
* `child`: one served run, in a process of its own; the only file that knows vLLM-Omni;
* `reports`: how it says what it does;
* `jobs`: starts such a process and reads what it reports;
* `course`, `face`: how far it is, and how that looks;
* `compare`: where two runs differ;
* `run`: the command;
* `document`: what came of it, also as JSON;
* `page`, `sections`, `plots`: the same as one HTML file.
"""

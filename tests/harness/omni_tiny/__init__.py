"""Real vLLM-Omni on a CPU with tiny random weights.

Nothing is imported here: the interpreter passes through this file at every start (see `import_hooks`).

* `import_hooks`: what makes vLLM-Omni's neighbours importable beside a CPU build of torch;
* `plugins`: the two entry points through which vLLM-Omni finds this package;
* `arithmetic`: bfloat16 at a bearable speed on a CPU that has none;
* `platform`, `attention`: the CPU as an out-of-tree platform of vLLM-Omni;
* `tiny`: vLLM-Omni's hard-coded sizes, made small;
* `checkpoint`: writers of tiny checkpoints in the real on-disk layout;
* `capacity`: the free memory that makes the runner keep so many sessions;
* `robot`: what a robot sends;
* `inproc`: worker, runner and pipeline in this process;
* `omni_runs`: the same model through `Omni`, in a worker process;
* `listing`: a worker method that says what the worker's sessions hold;
* `demo`: the same sessions with the flag off and on, compared and shown.
"""

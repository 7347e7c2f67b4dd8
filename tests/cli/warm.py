"""Runs of the command in processes that are forked from one which has imported vLLM-Omni already.

``python warm.py`` reads jobs as JSON from its standard input and writes what came of each. A job has the
``arguments`` and the ``environ`` of one run; ``change`` gives one of vLLM-Omni's methods another signature.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

from vllm_omni_session_state.cli.main import main
from vllm_omni_session_state.omni import compat


def run(job):
    """One run in a child of its own: exit status, output, errors."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            status = 70
            try:
                os.environ.update(job["environ"])
                if job["change"]:
                    from vllm_omni.diffusion.models.dreamzero.pipeline_dreamzero import DreamZeroPipeline

                    DreamZeroPipeline.warmup_compile = lambda self, now: None
                status = main(job["arguments"])
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)
        _, code = os.waitpid(child, 0)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode())
        return [os.waitstatus_to_exitcode(code), *texts]


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    compat.survey()  # imports what a run looks at
    json.dump([run(job) for job in jobs], sys.__stdout__)

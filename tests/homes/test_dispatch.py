"""vLLM-Omni's own orchestrator around a step that is refused: it fails alone, and its client is told why."""

import asyncio

import pytest
from pool_fakes import Client, assembled, stage

pytestmark = pytest.mark.host


class Outputs(list):
    async def put(self, message):
        self.append(message)


def test_a_refused_step_fails_with_its_words_and_the_server_goes_on(runtime):
    from vllm_omni.engine.messages import StageSubmissionMessage
    from vllm_omni.engine.orchestrator import Orchestrator
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    def message(number, session, **extra):
        params = OmniDiffusionSamplingParams(extra_args={"session_id": session, **extra})
        return StageSubmissionMessage(
            type="add_request",
            request_id=f"r{number}",
            prompt={"prompt": ""},
            original_prompt={"prompt": ""},
            output_prompt_text=None,
            sampling_params_list=[params],
            final_stage_id=0,
            final_output_stage_ids=[0],
            preprocess_ms=0.0,
            request_timestamp=0.0,
            enqueue_ts=0.0,
            request_artifact_dirs=None,
        )

    async def scenario():
        clients = [Client("tcp://0"), Client("tcp://1")]
        options = {"on_lost": "error"}
        pools = assembled(runtime, [stage(options=options)], [clients])
        said = Outputs()
        orchestrator = Orchestrator(asyncio.Queue(), said, asyncio.Queue(), pools)
        for number, session in enumerate("ab"):
            await orchestrator._dispatch_message(message(number, session))
        for request in ("r0", "r1"):
            await orchestrator._cleanup_request_ids([request])
        pools[0].evict_replica(1)
        await orchestrator._dispatch_message(message(2, "b"))
        await orchestrator._dispatch_message(message(3, "a"))
        await orchestrator._dispatch_message(message(4, "b", reset=True))
        assert [request for _, request in clients[0].steps] == ["r0", "r3", "r4"]
        assert set(orchestrator.request_states) == {"r3", "r4"}
        return said

    (error,) = asyncio.run(scenario())
    assert (error.request_id, error.fatal) == ("r2", False)
    assert "was lost (replica); reset or close it, or begin a new one, to start over" in error.error

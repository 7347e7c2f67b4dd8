"""The tiny Cosmos3 is fit to compare with: every kind runs, repeats itself, and depends on what it is given.

Covers the harness and what vLLM-Omni does alone, without any plugin.
"""

from __future__ import annotations

import gc
import os
import time
import weakref

import pytest
import torch
from kinds import SERVED, SERVED_AS, equal
from omni_tiny.checkpoint.cosmos3 import write_cosmos3
from omni_tiny.cosmos3 import FLAG_VARIABLE, TinyCosmos3
from omni_tiny.cosmos3_requests import SERVES, cosmos3_request
from omni_tiny.lockstep import Lockstep
from omni_tiny.ranks import RankFailedError, run_in_ranks
from profiles import LONG

pytestmark = pytest.mark.host

DEPENDENT = [(variant, kind) for variant, kind in SERVED if LONG or kind != "long_transfer"]
"""In the short run without the one that takes as long as all others, and is a transfer in two chunks."""


@pytest.mark.parametrize(("variant", "kind", "dtype"), SERVED_AS)
def test_each_kind_is_finite_and_repeats_itself(tiny_cosmos3, variant, kind, dtype):
    tiny = tiny_cosmos3(variant, dtype=dtype)
    first = tiny.generate("a", kind=kind)
    assert first
    assert all(value.isfinite().all() and value.float().std() > 0 for value in first.values())
    assert equal(tiny.generate("b", kind=kind), first)


@pytest.mark.parametrize(("variant", "kind"), DEPENDENT)
def test_each_kind_depends_on_prompt_and_seed(tiny_cosmos3, variant, kind):
    tiny = tiny_cosmos3(variant)
    first = tiny.generate("a", kind=kind)
    assert not equal(tiny.generate("b", kind=kind, prompt="a blue ball"), first)
    assert not equal(tiny.generate("c", kind=kind, seed=1), first)


@pytest.mark.parametrize(("variant", "kind"), [(v, k) for v, k in DEPENDENT if k not in ("t2v", "t2i")])
def test_a_conditioned_kind_depends_on_its_media(tiny_cosmos3, variant, kind):
    tiny = tiny_cosmos3(variant)
    assert not equal(tiny.generate("a", kind=kind), tiny.generate("b", kind=kind, media=1))


@pytest.mark.parametrize(("variant", "kind"), [(v, k) for v, k in DEPENDENT if v != "distilled"])
def test_guidance_reads_the_negative_prompt_and_its_absence_does_not(tiny_cosmos3, variant, kind):
    tiny = tiny_cosmos3(variant)
    guided = tiny.generate("a", kind=kind, guidance=4.0)
    free = tiny.generate("b", kind=kind, guidance=1.0)
    assert not equal(tiny.generate("c", kind=kind, guidance=4.0, negative="dark"), guided)
    assert equal(tiny.generate("d", kind=kind, guidance=1.0, negative="dark"), free)


def test_a_distilled_checkpoint_has_no_guidance(tiny_cosmos3):
    tiny = tiny_cosmos3("distilled")
    for kind in SERVES["distilled"]:
        assert equal(tiny.generate("a", kind=kind, guidance=4.0), tiny.generate("b", kind=kind, guidance=1.0))


def test_two_images_of_one_request_differ_and_the_first_is_the_single_one(tiny_cosmos3):
    tiny = tiny_cosmos3("regular")
    one, two = (tiny.generate(f"n{n}", kind="t2i", n=n)["image"] for n in (1, 2))
    assert two.shape[0] == 2
    assert not torch.equal(two[0], two[1])
    # The decoder sees two images at once, which changes the order of its sums.
    assert torch.allclose(two[:1], one, atol=1e-5)


@pytest.mark.parametrize("variant", SERVES)
def test_a_kind_that_a_checkpoint_does_not_serve_is_refused_by_the_host(tiny_cosmos3, variant):
    tiny = tiny_cosmos3(variant)
    for kind in set(SERVES["action"]) - set(SERVES[variant]):
        with pytest.raises(ValueError, match="Cosmos3"):
            tiny.generate("a", kind=kind)


@pytest.mark.parametrize(("kind", "frames"), [("transfer", 5), ("long_transfer", 9)])
def test_transfer_runs_in_one_chunk_and_in_two(tiny_cosmos3, kind, frames):
    assert tiny_cosmos3("regular").generate("a", kind=kind)["video"].shape[2] == frames


def host_alone(rank, checkpoint):
    """Ask vLLM-Omni without any plugin: which manager it has by flag and environment, what transfer says."""
    os.environ["VLLM_PLUGINS"] = "omni_tiny_cpu,omni_tiny"
    os.environ[FLAG_VARIABLE] = "1"
    with TinyCosmos3(checkpoint, flag=False) as off, TinyCosmos3(checkpoint, flag=True) as on:
        refusal = None
        try:
            on.generate("a", kind="transfer")
        except NotImplementedError as error:
            refusal = str(error)
        same = equal(off.generate("b"), on.generate("b"))
        with TinyCosmos3(checkpoint, flag=None) as environment:
            tinies = {"off": off, "on": on, "environment": environment}
            has = {name: tiny.pipeline._memory_manager is not None for name, tiny in tinies.items()}
    return has, same, refusal


@pytest.mark.skipif(not LONG, reason="what vLLM-Omni does without the plugin: part of the long run")
def test_the_host_alone_has_a_manager_by_flag_and_by_environment_and_refuses_transfer_with_it(
    cosmos3_checkpoint,
):
    ((has, same, refusal),) = run_in_ranks(host_alone, cosmos3_checkpoint("regular"), size=1)
    assert has == {"off": False, "on": True, "environment": True}
    assert same
    assert "SessionStateManager" in refusal


def test_a_closed_model_is_freed_and_the_next_gives_the_same_bits(cosmos3_checkpoint):
    checkpoint = cosmos3_checkpoint("regular")
    with TinyCosmos3(checkpoint, flag=False) as tiny:
        first = tiny.generate("a")
        pipeline, weight = weakref.ref(tiny.pipeline), weakref.ref(tiny.pipeline.transformer.proj_in.weight)
    gc.collect()
    assert pipeline() is None
    assert weight() is None
    with TinyCosmos3(checkpoint, flag=False) as tiny:
        assert equal(tiny.generate("a"), first)


def test_the_same_seed_writes_the_same_checkpoint_and_leaves_the_random_state_alone(tmp_path):
    state = torch.get_rng_state()
    weights = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        root = write_cosmos3(tmp_path / name, seed=seed)
        weights[name] = [path.read_bytes() for path in sorted(root.rglob("*.safetensors"))]
    assert weights["a"] == weights["b"] != weights["c"]
    assert torch.equal(state, torch.get_rng_state())


def test_unknown_words_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="variant='huge'"):
        write_cosmos3(tmp_path, variant="huge")
    with pytest.raises(ValueError, match="kind='v2a'"):
        cosmos3_request("a", kind="v2a")
    with pytest.raises(ValueError, match="n=2"):
        cosmos3_request("a", kind="t2v", n=2)


@pytest.mark.parametrize("guidance", [4.0, 1.0])
def test_a_diffuse_call_gives_what_the_whole_request_decodes(tiny_cosmos3, guidance):
    tiny = tiny_cosmos3("regular")
    (latents,) = tiny.diffuse(tiny.diffuse_call("a", guidance=guidance))
    with torch.inference_mode():
        video = tiny.pipeline._decode_latents(latents)
    assert torch.equal(video, tiny.generate("a", guidance=guidance)["video"])


def test_step_interleaving_would_notice_a_mix_up(tiny_cosmos3):
    """Without guidance and with the flag off, vLLM-Omni keeps one K/V on the transformer for both."""
    tiny = tiny_cosmos3("regular")
    words = [{"prompt": "a red cube"}, {"prompt": "a ball in the rain", "seed": 5}]
    alone = [tiny.diffuse(tiny.diffuse_call("a", guidance=1.0, **word)) for word in words]
    together = tiny.interleave(
        [tiny.diffuse_call(f"b{i}", guidance=1.0, **word) for i, word in enumerate(words)], head_start=1
    )
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("number", [1, 3])
def test_a_failing_forward_reaches_the_caller_and_the_next_request_is_exact(tiny_cosmos3, number):
    tiny = tiny_cosmos3("regular")
    first = tiny.generate("a")
    error = RuntimeError("a cosmic ray")
    with tiny.failing_forward(number, error), pytest.raises(RuntimeError) as caught:
        tiny.generate("b")
    assert caught.value is error
    assert equal(tiny.generate("c"), first)


def test_lockstep_alternates_and_hands_back_results_and_errors():
    seen = []

    def speaker(name, times, *, fails=False):
        def speak():
            for _ in range(times):
                seen.append(name)
                turns.pass_on()
            if fails:
                raise KeyError(name)
            return name

        return speak

    turns = Lockstep([speaker("a", 3), speaker("b", 1, fails=True), speaker("c", 2)], head_start=1)
    outcomes = turns.run()
    assert "".join(seen) == "aabcac"
    assert outcomes[0] == "a"
    assert isinstance(outcomes[1], KeyError)
    assert outcomes[2] == "c"


def fail_in_rank_one(rank):
    if rank == 1:
        raise RuntimeError("no luck")
    time.sleep(600)


def test_a_rank_that_fails_ends_the_others_and_says_why():
    with pytest.raises(RankFailedError, match="no luck") as caught:
        run_in_ranks(fail_in_rank_one)
    assert list(caught.value.reasons) == [1]

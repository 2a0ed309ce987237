"""The paged path equals `transformers`: every row of logits of every step, with steps of all kinds."""

from __future__ import annotations

import pytest
import torch

from tests.engine.support import Running, add_all, mixed, request, running
from tests.matrix import rest_is_slow
from tests.model.checkpoints import DECODERS, ENCODER_DECODERS, native_backends, reference_logits, saved
from tests.model.decoder_rows import DENSE_DECODERS
from triptych.model.api.request import Request
from triptych.model.attention.base import AttentionBackend
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.attention.sdpa import SdpaBackend

KINDS = (
    *(
        "llama-gqa",
        "llama-mqa-head-dim",
        "llama-yarn",
        "mistral",
        "qwen3",
        "phi3",
        "phi3-longrope",
        "gemma",
        "gemma2",
        "gemma3",
        "gpt2",
        "gpt-neox",
    ),
    *("marian", "bart", "m2m-100", "t5-relu", "t5-gated-untied", "umt5", "t5gemma", "whisper"),
)
BACKENDS = (SdpaBackend(), ReferenceBackend(), *native_backends())
CLOSE = 1e-4


def worst(kind: str, run: Running, requests: list[Request]) -> float:
    return max(run.runner.worst(kind, one, run.ids(one.request_id)) for one in requests)


# One kind for each variant of pages, positions and sources.
FEW = (
    *("llama-gqa", "phi3-longrope", "mistral", "gemma3", "gpt2"),
    *("marian", "t5-relu", "t5gemma", "whisper"),
)
JOINS = rest_is_slow(
    [(kind, backend) for kind in KINDS for backend in (BACKENDS[0], *native_backends())],
    lambda kind, backend: backend is BACKENDS[-1] or kind in ("llama-gqa", "phi3-longrope", "gemma2", "t5gemma"),
)
JOINS += [(kind, ReferenceBackend()) for kind in ("gemma2", "t5-relu")]  # what other backends are compared with


@pytest.mark.parametrize(("kind", "backend"), JOINS, ids=lambda part: getattr(part, "name", part))
def test_staggered_joins_of_mixed_lengths(kind: str, backend: AttentionBackend) -> None:
    run, requests = running(kind, backend=backend), mixed(kind, 8)
    for one in requests:
        run.engine.add(one)
        run.step(2)
    run.run()
    assert worst(kind, run, requests) < CLOSE
    assert len({token for one in requests for token in run.ids(one.request_id)}) > 1


@pytest.mark.parametrize("kind", rest_is_slow(KINDS, lambda kind: kind in FEW))
def test_chunked_prompts_beside_decoding(kind: str) -> None:
    run = running(kind, budget=41, max_num_seqs=6)
    requests = mixed(kind, 8)
    add_all(run, requests)
    run.run()
    assert worst(kind, run, requests) < CLOSE


@pytest.mark.parametrize("kind", ["llama-bias", "mistral", "gpt2", "gpt-neox", "gemma2", "qwen3"])
def test_chunks_of_a_few_tokens(kind: str) -> None:
    run = running(kind, budget=3, max_num_seqs=3)
    requests = mixed(kind, 4)
    add_all(run, requests)
    run.run()
    assert worst(kind, run, requests) < CLOSE


@pytest.mark.parametrize("kind", rest_is_slow(KINDS, lambda kind: kind in FEW))
def test_preemption_and_recomputation(kind: str) -> None:
    windowed = kind == "mistral"  # in all layers: sequences hold at most two blocks
    run = running(kind, num_blocks=6 if windowed else 14 if kind in DECODERS else 16)
    requests = [request(kind, f"r{i}", (1 if windowed else 6) + i, i, max_tokens=24) for i in range(5)]
    add_all(run, requests)
    run.run()
    assert run.engine.stats().preemptions > 0
    assert worst(kind, run, requests) < CLOSE


# By default one kind for each type of position, window, mixture and recurrence.
# `test_parity.py` computes each family in chunks and again from its prefix.
WAYS = rest_is_slow(
    [
        *((kind, backend) for kind in ("mistral", "gemma3", "gemma4") for backend in BACKENDS),
        *((kind, BACKENDS[-1]) for kind in ("gemma2", *DENSE_DECODERS) if kind != "gemma4"),
    ],
    lambda kind, backend: (
        (kind, backend.name) in (("gemma4", "sdpa"), ("mistral", "reference"))
        or (
            backend is BACKENDS[-1]
            and kind
            in (
                *(
                    "mistral",
                    "gemma2",
                    "gemma3",
                    "gemma4",
                    "cohere2",
                    "olmo3",
                    "gptj",
                    "bloom",
                    "opt",
                    "xglm",
                    "granite",
                ),
                *("qwen2-moe", "gpt-oss", "qwen3-next", "qwen3-5"),
            )
        )
    ),
)


@pytest.mark.parametrize(("kind", "backend"), WAYS, ids=lambda part: getattr(part, "name", part))
def test_chunks_prefix_hits_and_preemption(kind: str, backend: AttentionBackend) -> None:
    run = running(kind, backend=backend, num_blocks=22, budget=7, max_num_seqs=4)
    requests = [request(kind, f"r{i}", 21, i % 2, max_tokens=20) for i in range(4)]
    add_all(run, requests)
    run.step(9)
    run.engine.scheduler.preempt(run.engine.scheduler.running[-1])
    run.run()
    again = [request(kind, f"again{i}", 21, i % 2, max_tokens=20) for i in range(2)]
    add_all(run, again)
    run.run()
    assert run.engine.stats().preemptions > 0
    assert max(output.cached_tokens for output in run.outputs if output.request_id == "again0") == 20
    assert worst(kind, run, [*requests, *again]) < CLOSE


def test_short_and_long_requests_of_one_prompt_share_no_blocks() -> None:
    """Check LongRoPE: a sequence that leaves the short context of 16 tokens is recomputed, as in `transformers`."""
    kind, length = "phi3-longrope", 9
    for backend in BACKENDS:
        run = running(kind, backend=backend)
        requests = [request(kind, f"r{i}", length, 0, max_tokens=most) for i, most in enumerate((7, 8, 20, 6, 20))]
        for one in requests:
            run.engine.add(one)
            run.run()
        assert worst(kind, run, requests) < CLOSE
        hits = [max(o.cached_tokens for o in run.outputs if o.request_id == one.request_id) for one in requests]
        assert hits == [0, 8, 8, 8, 8]  # two blocks of the prompt, while it is short
        assert [run.runner.short_rows[f"r{i}"] for i in range(5)] == [15, 8, 8, 6, 8]
        # The third recomputes 17 tokens; the last one finds 16 of them, which are long.
        assert [len(run.runner.rows[f"r{i}"]) for i in range(5)] == [15, 8, 8 + 28, 6, 8 + 12]


TABLES = [(kind, "tables") for kind in FEW] + [(kind, "source_tables") for kind in FEW if kind in ENCODER_DECODERS]


@pytest.mark.parametrize(("kind", "table"), TABLES)
def test_control_one_wrong_block_id_must_show(kind: str, table: str) -> None:
    run = running(kind)
    requests = [request(kind, f"r{i}", 12 + i, i, max_tokens=20) for i in range(4)]
    add_all(run, requests)
    run.step(6)
    assert worst(kind, run, requests) < CLOSE
    victim, neighbour = run.engine.scheduler.running[1:3]
    at = -2  # full, and within a window of 4
    getattr(victim, table)[0][at] = getattr(neighbour, table)[0][at]
    for _ in range(6):
        run.outputs += run.engine.step()[0]
    assert run.runner.worst(kind, victim.request, run.ids(victim.request.request_id)) > 10 * CLOSE
    unharmed = requests[0]
    assert run.runner.worst(kind, unharmed, run.ids(unharmed.request_id)) < CLOSE


@pytest.mark.parametrize("kind", ["llama-gqa", "marian"])
@pytest.mark.parametrize("budget", [41, 256])
def test_logprobs_of_prompt_and_output_equal_transformers(kind: str, budget: int) -> None:
    run = running(kind, budget=budget, max_num_seqs=4, num_blocks=26)
    requests = [request(kind, f"r{i}", 20, i + 2, max_tokens=16, logprobs=3, prompt_logprobs=2) for i in range(4)]
    add_all(run, requests)
    run.run()
    for one in requests:
        start = list(one.prompt_token_ids)
        ids = [*start, *run.ids(one.request_id)]
        expected = reference_logits(kind, ids, one.source).log_softmax(-1)
        mine = [o for o in run.outputs if o.request_id == one.request_id]
        prompt_logprobs = mine[0].prompt_logprobs
        assert prompt_logprobs is not None
        assert prompt_logprobs[0] is None
        assert all(output.prompt_logprobs is None for output in mine[1:])
        entries = [*prompt_logprobs[1:], *(entry for output in mine for entry in output.logprobs or [])]
        assert [entry.token_id for entry in entries if entry] == ids[1:]
        for at, entry in enumerate(entries):
            assert entry is not None
            assert entry.logprob == pytest.approx(expected[at, ids[at + 1]].item(), abs=1e-4)
            assert len(entry.top) == (2 if at + 1 < len(start) else 3)
            assert entry.top[0][1] == pytest.approx(expected[at].max().item(), abs=1e-4)


def test_no_stop_id_is_sampled_before_min_tokens() -> None:
    def ids(**params: object) -> list[int]:
        run = running("llama")
        run.engine.add(request("llama", "r", 6, **params))
        return run.run().ids("r")

    free = ids()
    assert ids(stop_token_ids=(free[0],)) == free[:1]
    held = ids(stop_token_ids=(free[0],), min_tokens=5)
    assert len(held) > 5
    assert free[0] not in held[:5]


def test_a_generation_leaves_the_short_context_as_that_of_transformers_does() -> None:
    """Check LongRoPE with prompts below, at and above the limit of 16 tokens."""
    kind = "phi3-longrope"
    requests = [request(kind, f"r{length}", length, length, max_tokens=20) for length in (3, 9, 15, 16, 17, 24)]
    for num_blocks in (200, 22):  # the second value also causes preemption for room
        run = running(kind, num_blocks=num_blocks)
        add_all(run, requests)
        run.run()
        for one in requests:
            with torch.inference_mode():
                prompt = torch.tensor([one.prompt_token_ids])
                found = saved(kind).reference.generate(
                    prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
                )
            assert run.ids(one.request_id) == found[0, prompt.shape[1] :].tolist()

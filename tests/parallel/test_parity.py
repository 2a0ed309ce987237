"""Several ranks give the results of one: every family, packed batches, with and without a KV cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model.checkpoints import CPU, KINDS, loaded, prompt
from tests.model.parity import decoder_logits, decoder_prompts, encoder_decoder_logits, hidden_states, sources
from tests.parallel.ranks import load_rank, on_ranks
from triptych.model.attention.base import AttentionMetadata
from triptych.model.cache.kv_cache import KVCache, StateSpan
from triptych.model.config.cache import NO_STATE
from triptych.model.linear.factory import ParallelLinear
from triptych.model.network.inputs import CrossInput, StackInput, packed_input
from triptych.model.network.transformer import Transformer
from triptych.model.parallel.group import Group

QUICK = (
    *("llama-gqa", "llama-mqa-head-dim", "llama-tied", "phi3", "qwen3-next", "gemma", "gpt2", "gpt-neox"),
    *("cohere", "olmo2", "gpt-oss", "bloom"),
    *(
        "marian",
        "bart",
        "t5-relu",
        "t5-gated-untied",
        "umt5",
        "bert",
        "albert",
        "xlnet",
        "deberta",
        "deberta-v2",
        "vit-image",
        "bert-token",
        "bert-no-pooler",  # with a masked-language-model head
        "bert-masked-untied",
    ),
)
RELATIVE = 1e-5


def outputs(model: Transformer) -> Tensor:
    """Return packed logits, class scores or hidden states, depending on the model."""
    if model.config.classifier is not None:
        return torch.cat([model.classify(hidden) for hidden in hidden_states(model)[0]])
    if model.masked_head is not None:
        return torch.cat([model.masked_logits(hidden) for hidden in hidden_states(model)[0]])
    if model.config.form == "encoder-only":
        return torch.cat(hidden_states(model)[0])
    if model.config.form == "decoder-only":
        return decoder_logits(model, decoder_prompts())
    return encoder_decoder_logits(model, sources(model.config), [(0, *ids) for ids in decoder_prompts()])


def error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@torch.inference_mode()
def rank_outputs(kind: str, group: Group) -> Tensor:
    return outputs(load_rank(kind, group))


def check(kind: str, size: int) -> None:
    with torch.inference_mode():
        expected = outputs(loaded(kind))
    first, *others = on_ranks(size, lambda group: rank_outputs(kind, group))
    assert error(first, expected) < RELATIVE
    assert all(torch.equal(first, other) for other in others)  # sums have the same bits everywhere


@pytest.mark.parametrize("kind", QUICK)
def test_two_ranks_give_one_ranks_numbers(kind: str) -> None:
    check(kind, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in QUICK])
def test_two_ranks_give_one_ranks_numbers_of_every_other_kind(kind: str) -> None:
    check(kind, 2)


@pytest.mark.parametrize("kind", ["llama-gqa", "t5-relu", "bert"])
def test_four_ranks_of_which_some_share_heads_of_keys(kind: str) -> None:
    check(kind, 4)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama-gqa", torch.float32), ("llama-gqa", torch.int8), ("qwen3-next", torch.float32)]
)
def test_steps_over_a_pool_of_each_ranks_heads(kind: str, dtype: torch.dtype) -> None:
    """Check a prompt, a copied block and decodes over a cache; each head has its own int8 scales, on one rank."""

    def steps(model: Transformer) -> Tensor:
        assert model.decoder is not None
        tables = torch.tensor([[3, 1], [0, 2]])
        cache = KVCache(model.decoder.config, [5], 4, dtype, CPU, num_states=4)
        found = []
        for number, (start, stop) in enumerate(((0, 3), (3, 4), (4, 6))):
            ids = [prompt(6, seed)[start:stop] for seed in range(2)]
            inputs = packed_input(ids, CPU, causal=True)
            length = stop - start
            slots = [int(table[at // 4]) * 4 + at % 4 for table in tables for at in range(start, stop)]
            metadata = AttentionMetadata(
                (length, length), (stop, stop), causal=True, block_tables=tables, slot_mapping=torch.tensor(slots)
            )
            positions = torch.tensor([*range(start, stop)] * 2)
            read, written = 2 * (number % 2), 2 - 2 * (number % 2)  # the first of two slots each
            sources = [NO_STATE] * 2 if start == 0 else [read, read + 1]
            states = tuple(
                StateSpan(seed * length, (seed + 1) * length, sources[seed], written + seed) for seed in range(2)
            )
            step = StackInput(inputs.input_ids, positions, metadata, states=states)
            found.append(model.logits(model.decode(step, cache)))
            cache.copy_blocks(0, [4], [3])  # the first sequence goes on in a copy
            tables = torch.tensor([[4, 1], [0, 2]])
        return torch.cat(found)

    with torch.inference_mode():
        expected = steps(loaded(kind))

    @torch.inference_mode()
    def work(group: Group) -> Tensor:
        return steps(load_rank(kind, group))

    # int8 rounds what two ranks' last bits may have put on the other side of a half
    limit = RELATIVE if dtype is torch.float32 else 2e-3
    assert error(on_ranks(2, work)[0], expected) < limit


@torch.inference_mode()
def test_cross_attention_over_a_pool() -> None:
    def step(model: Transformer) -> Tensor:
        assert model.decoder is not None
        cache = KVCache(model.decoder.config, [4], 8, torch.float32, CPU)
        source = prompt(11, 3)
        memory = model.encode(packed_input([source], CPU, causal=False))
        model.write_encoder_output(memory, cache, torch.arange(8, 19)[None])
        inputs = packed_input([prompt(5)], CPU, causal=True)
        own = AttentionMetadata((5,), (5,), causal=True, block_tables=torch.tensor([[0]]), slot_mapping=torch.arange(5))
        cross = AttentionMetadata((5,), (11,), causal=False, block_tables=torch.tensor([[1, 2]]))
        return model.logits(model.decode(StackInput(inputs.input_ids, inputs.positions, own), cache, CrossInput(cross)))

    for kind in ("bart", "t5-relu"):

        @torch.inference_mode()
        def work(group: Group, kind: str = kind) -> Tensor:
            return step(load_rank(kind, group))

        assert error(on_ranks(2, work)[0], step(loaded(kind))) < RELATIVE


def test_control_missing_all_reduce_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelLinear, "forward", lambda self, x: self.product(x) + self.bias)
    with torch.inference_mode():
        expected = outputs(loaded("bert"))
    assert error(on_ranks(2, lambda group: rank_outputs("bert", group))[0], expected) > 0.01


def test_each_rank_holds_its_share() -> None:
    """Check that each of two ranks has about half of the model's parameters."""

    def held(group: Group) -> int:
        return sum(parameter.numel() for parameter in load_rank("llama-gqa", group).parameters())

    whole = sum(parameter.numel() for parameter in loaded("llama-gqa").parameters())
    assert all(0.45 * whole < part < 0.55 * whole for part in on_ranks(2, held))

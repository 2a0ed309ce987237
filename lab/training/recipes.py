"""The recipes of the models in this package: configuration, batches, training plan, and the saved folder.

All are saved as Hugging Face checkpoints with float16 weights, by the inverse of the family's weight table.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from lab.training import chat, conversations, corpus, pairs, vocabulary
from lab.training.conversations import Kind
from lab.training.trainer import TrainingPlan, cross_entropy, new_model, train
from triptych.model.attention.base import AttentionMetadata
from triptych.model.families import config_from_raw
from triptych.model.network.inputs import CrossInput, StackInput
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import stored_tensors
from triptych.model.pretrained import CHECKPOINTS

CODE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 3072,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "float16",
}
CODE_PLAN = TrainingPlan(steps=2000, learning_rate=2e-3, warmup=150, dropout=0.0, label_smoothing=0.0, weight_decay=0.1)
CODE_BATCH = 4  # sequences of max_position_embeddings tokens

NORMALIZE: dict[str, Any] = {
    "architectures": ["MarianMTModel"],
    "model_type": "marian",
    "vocab_size": 768,
    "d_model": 192,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 768,
    "decoder_ffn_dim": 768,
    "activation_function": "relu",
    "scale_embedding": True,
    "static_position_embeddings": True,
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "dtype": "float16",
}
NORMALIZE_PLAN = TrainingPlan(steps=2800, learning_rate=2e-3, warmup=300, dropout=0.05, label_smoothing=0.05)
NORMALIZE_TOKENS = 3072  # source tokens of a batch

ASSISTANT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "dtype": "float16",
}
ASSISTANT_PLAN = TrainingPlan(
    steps=6000, learning_rate=2e-3, warmup=200, dropout=0.0, label_smoothing=0.0, weight_decay=0.1
)
ASSISTANT_SECOND_PLAN = replace(ASSISTANT_PLAN, steps=2000, learning_rate=1e-3, warmup=100, seed=1)  # goes on from it
ASSISTANT_TOKENS = 3072  # of a batch, with its padding
ASSISTANT_COPYING = 115  # first turns of 1,024 conversations that teach copying above all, before calls are taught
IGNORED = -100  # a target that is excluded from the loss


def train_code(work: Path, device: torch.device) -> Path:
    """Train `code` on the interpreter's standard library and save it."""
    documents = corpus.documents(held_out=False)
    tokenizer = vocabulary.code_tokenizer((d.text for d in documents), CODE["vocab_size"])
    end = CODE["eos_token_id"]
    assert tokenizer.token_to_id(vocabulary.END_OF_TEXT) == end
    encoded = [[*e.ids, end] for e in tokenizer.encode_batch([d.text for d in documents])]  # each starts with BOS
    length = CODE["max_position_embeddings"]
    model = new_model(config_from_raw(CODE), CODE_PLAN.seed, device)
    batches = (batch.to(device) for batch in _blocks(encoded, length + 1, CODE_BATCH, CODE_PLAN.seed))
    train(model, CODE_PLAN, batches, _language_model_loss, work / "code.state")
    generation = {"bos_token_id": end, "eos_token_id": end, "do_sample": False}
    return save(CHECKPOINTS / "code", model, CODE, generation, tokenizer)


def train_normalize(work: Path, device: torch.device) -> Path:
    """Train `normalize` on generated pairs, which share no value with the held-out ones, and save it."""
    rng = random.Random(NORMALIZE_PLAN.seed)
    sample = [pairs.sample(rng, held_out=False) for _ in range(60_000)]
    tokenizer = vocabulary.normalize_tokenizer(sample, NORMALIZE["vocab_size"])
    model = new_model(config_from_raw(NORMALIZE), NORMALIZE_PLAN.seed, device)
    batches = (tuple(t.to(device) for t in batch) for batch in _pair_batches(tokenizer, NORMALIZE_PLAN.seed))
    train(model, NORMALIZE_PLAN, batches, _translation_loss, work / "normalize.state")
    generation = {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0, "bad_words_ids": [[0]]}
    return save(CHECKPOINTS / "normalize", model, NORMALIZE, generation, tokenizer)


def train_assistant(work: Path, device: torch.device) -> Path:
    """Train `assistant` on generated conversations, which share no copied value with the held-out ones, and save it."""
    rng = random.Random(ASSISTANT_PLAN.seed)
    texts = ("".join(chat.rendered(conversations.draw(rng, held_out=False, kind=Kind.COPYING))) for _ in range(20_000))
    tokenizer = vocabulary.assistant_tokenizer(texts, ASSISTANT["vocab_size"])
    model = new_model(config_from_raw(ASSISTANT), ASSISTANT_PLAN.seed, device)
    first = itertools.chain(itertools.repeat(Kind.COPYING, ASSISTANT_COPYING), itertools.repeat(Kind.CALLING))
    for plan, kinds in ((ASSISTANT_PLAN, first), (ASSISTANT_SECOND_PLAN, itertools.repeat(Kind.FOREIGN))):
        batches = (tuple(t.to(device) for t in batch) for batch in _chat_batches(tokenizer, plan.seed, kinds))
        train(model, plan, batches, _reply_loss, work / f"assistant-{plan.seed}.state")
    folder = CHECKPOINTS / "assistant"
    save(folder, model, ASSISTANT, {"eos_token_id": 0, "do_sample": False}, tokenizer)
    (folder / "chat_template.jinja").write_text(chat.TEMPLATE, encoding="utf-8")
    return folder


def save(
    folder: Path, model: Transformer, raw: dict[str, Any], generation: dict[str, Any], tokenizer: Tokenizer
) -> Path:
    """Write a Hugging Face folder with float16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to("cpu", torch.float16) for name, tensor in stored_tensors(model)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _blocks(documents: list[list[int]], length: int, count: int, seed: int) -> Iterator[Tensor]:
    """Yield `[count, length]` blocks of the concatenated documents without end, shuffled and shifted each epoch."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(documents, len(documents))
        stream = torch.tensor([token for document in order for token in document])[rng.randrange(length) :]
        whole = stream[: len(stream) // length * length].view(-1, length)
        shuffled = whole[torch.tensor(rng.sample(range(len(whole)), len(whole)))]
        yield from shuffled[: len(whole) // count * count].split(count)


def _language_model_loss(model: Transformer, batch: object) -> Tensor:
    assert isinstance(batch, Tensor)
    ids, targets = batch[:, :-1], batch[:, 1:]  # [B, L]
    hidden = model.decode(_dense(ids, causal=True))
    return cross_entropy(model.logits(hidden), targets.flatten(), CODE_PLAN.label_smoothing)


def _translation_loss(model: Transformer, batch: object) -> Tensor:
    assert isinstance(batch, tuple)
    sources, inputs, targets = batch  # [B, S], [B, L], [B, L]
    encoder_output = model.encode(_dense(sources, causal=False))
    lens = (inputs.shape[1],) * len(inputs), (sources.shape[1],) * len(sources)
    cross = CrossInput(AttentionMetadata(*lens, causal=False, device=inputs.device), encoder_output)
    hidden = model.decode(_dense(inputs, causal=True), cross=cross)
    return cross_entropy(model.logits(hidden), targets.flatten(), NORMALIZE_PLAN.label_smoothing)


def _reply_loss(model: Transformer, batch: object) -> Tensor:
    assert isinstance(batch, tuple)
    inputs, targets = batch  # [B, L]
    hidden = model.decode(_dense(inputs, causal=True))
    return cross_entropy(model.logits(hidden), targets.flatten(), ASSISTANT_PLAN.label_smoothing)


def _dense(ids: Tensor, *, causal: bool) -> StackInput:
    """Pack a batch of equal lengths `[B, L]`."""
    count, length = ids.shape
    lens = (length,) * count
    positions = torch.arange(length, device=ids.device).repeat(count)
    return StackInput(ids.flatten(), positions, AttentionMetadata(lens, lens, causal=causal, device=ids.device))


def _pair_batches(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield batches of sources of one length, decoder inputs and targets without end.

    The latter two are padded at the end, where padding has no effect under a causal mask. Pairs are collected in a
    bucket for each source length until it has `NORMALIZE_TOKENS`.
    """
    rng = random.Random(seed + 1)
    buckets: dict[int, list[tuple[list[int], list[int]]]] = {}
    while True:
        samples = [pairs.sample(rng, held_out=False) for _ in range(512)]
        sources = tokenizer.encode_batch([source for source, _ in samples])
        targets = tokenizer.encode_batch([target for _, target in samples])
        for source, target in zip(sources, targets, strict=True):
            bucket = buckets.setdefault(len(source.ids), [])
            bucket.append((source.ids, target.ids))
            if len(bucket) * len(source.ids) >= NORMALIZE_TOKENS:
                yield _pad_batch(buckets.pop(len(source.ids)))


def _chat_batches(tokenizer: Tokenizer, seed: int, kinds: Iterable[Kind]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of inputs and targets, of 1,024 conversations of each of `kinds` in turn.

    Targets are the replies, and what is before is ignored. Conversations of about one length are together, padded at
    the end.
    """
    rng = random.Random(seed + 1)
    for kind in kinds:
        drawn = [chat.rendered(conversations.draw(rng, held_out=False, kind=kind)) for _ in range(1024)]
        prompts, replies = (tokenizer.encode_batch([pair[part] for pair in drawn]) for part in (0, 1))
        pairs_of_ids = [(a.ids, b.ids) for a, b in zip(prompts, replies, strict=True)]
        batches, batch, width = [], list[tuple[list[int], list[int]]](), 0
        for prompt, reply in sorted(pairs_of_ids, key=lambda pair: len(pair[0]) + len(pair[1])):
            width = len(prompt) + len(reply) - 1
            if (len(batch) + 1) * width > ASSISTANT_TOKENS:
                batches.append(batch)
                batch = []
            batch.append((prompt, reply))
        for batch in rng.sample(batches, len(batches)):
            yield _pad_chat(batch)


def _pad_chat(batch: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) + len(reply) for prompt, reply in batch) - 1
    inputs, targets = [], []
    for prompt, reply in batch:
        padding = width + 1 - len(prompt) - len(reply)
        inputs.append([*prompt, *reply[:-1]] + [0] * padding)
        targets.append([IGNORED] * (len(prompt) - 1) + reply + [IGNORED] * padding)
    return torch.tensor(inputs), torch.tensor(targets)


def _pad_batch(bucket: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    width = max(len(target) for _, target in bucket)
    start = NORMALIZE["decoder_start_token_id"]
    inputs = [[start, *target[:-1]] + [0] * (width - len(target)) for _, target in bucket]
    targets = [target + [IGNORED] * (width - len(target)) for _, target in bucket]
    return torch.tensor([source for source, _ in bucket]), torch.tensor(inputs), torch.tensor(targets)

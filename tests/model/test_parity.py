"""Logits of every checkpoint kind against `transformers`, also over HTTP, and the 2017 Transformer against torch's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from torch import nn

from tests.matrix import rest_is_slow
from tests.model.checkpoints import (
    CPU,
    DECODERS,
    ENCODER_DECODERS,
    KINDS,
    START,
    copied,
    load_native,
    loaded,
    native_backends,
    prompt,
    reference_logits,
    saved,
)
from tests.model.decoder_rows import LLAMA, random_model
from tests.model.parity import (
    MECHANISMS,
    decoder_logits,
    decoder_prompts,
    difference,
    hidden_states,
    is_varied,
    ours_and_theirs,
)
from tests.service.processes import ServiceProcess, running
from triptych.model.api.request import token_source
from triptych.model.attention.base import AttentionBackend, AttentionMetadata
from triptych.model.attention.native import NativeBackend
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.attention import NormConfig, NormKind, RotaryConfig
from triptych.model.config.layer import LayerConfig
from triptych.model.network.inputs import CrossInput, packed_input
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model

BACKENDS = (SdpaBackend(), *native_backends())
EACH = [(kind, backend) for kind in KINDS for backend in BACKENDS]
EACH += [(kind, ReferenceBackend()) for kind in MECHANISMS]  # it serves nothing: other tests compare with it
# By default the backend that serves a kind computes it, and the others those that differ in what they compute.
EACH = rest_is_slow(EACH, lambda kind, backend: backend is BACKENDS[-1] or kind in MECHANISMS)
EACH.append(("qwen3-5-sequence", BACKENDS[-1]))  # a classifier over recurrent layers
# bfloat16 keeps 8 bits: 2^-9 of relative rounding in each of some dozens of roundings on the way through 2-3 layers,
# on logits of magnitude ~2-5. A wrong weight or position is off by the logits' own spread, an order of magnitude more.
BF16_OF_SPREAD = 0.15
NEW_TOKENS = 6


@pytest.mark.parametrize(("kind", "backend"), EACH, ids=lambda value: getattr(value, "name", value))
def test_logits_equal_transformers(kind: str, backend: AttentionBackend) -> None:
    ours, theirs = ours_and_theirs(kind, loaded(kind, backend))
    assert is_varied(theirs)
    assert difference(ours, theirs) < 1e-4


def test_a_row_leaves_the_settings_of_other_rows_alone() -> None:
    """`transformers` writes Qwen3-Next's share of rotary dimensions into the settings that it gets."""
    rope = dict(rope_type="default", rope_theta=500.0)
    random_model("Qwen3NextForCausalLM", LLAMA, num_experts=2, rope_parameters=rope)()
    assert rope == dict(rope_type="default", rope_theta=500.0)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_bfloat16_stays_close_to_float32(kind: str) -> None:
    ours, theirs = ours_and_theirs(kind, loaded(kind, dtype=torch.bfloat16))
    error = (ours.float() - theirs).pow(2).mean().sqrt()
    assert 0 < error < BF16_OF_SPREAD * theirs.std()


@pytest.mark.parametrize(
    "kind", ["llama-gqa", "gpt2", "qwen3-next", "bart", "whisper", "bert", "xlnet", "vit", "bert-token"]
)
def test_control_one_changed_weight_is_noticed(kind: str) -> None:
    model = loaded(kind)
    stack = model.decoder or model.encoder
    assert stack is not None
    stack.layer(1).attn.out.weight[3, 3] += 0.3
    ours, theirs = ours_and_theirs(kind, model)
    assert difference(ours, theirs) > 1e-3


_RMS = NormConfig(NormKind.RMS, 1e-6)  # its gain is the stored number, not 1 + that


def _windows(layer: LayerConfig, by: int) -> LayerConfig:
    window = layer.attention.window
    return layer if window is None else replace(layer, mixer=replace(layer.attention, window=window + by))


def _local_rotary(layer: LayerConfig) -> LayerConfig:
    position = RotaryConfig(layer.attention.head_dim, theta=300.0)
    return replace(layer, mixer=replace(layer.attention, position=position))


@pytest.mark.parametrize("backend", [SdpaBackend(), *native_backends()], ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((kind, partial(_windows, by=by)) for kind in ("mistral", "gemma2", "gemma3", "modernbert") for by in (-1, 1)),
        ("gemma3", _local_rotary),
        ("modernbert", _local_rotary),
        ("gemma2", lambda layer: replace(layer, mixer=replace(layer.attention, softcap=2.1))),
        ("gemma2", lambda layer: replace(layer, mixer=replace(layer.attention, scale=12**-0.5))),
        ("gemma2", lambda layer: replace(layer, norms=(layer.norms[0], replace(layer.norms[1], output=_RMS)))),
    ],
)
def test_control_one_changed_field_of_a_layer_is_noticed(
    kind: str, change: Callable[[LayerConfig], LayerConfig], backend: AttentionBackend
) -> None:
    checkpoint = read_checkpoint(saved(kind).path)
    [(side, stack)] = checkpoint.config.stacks.items()
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, **{side: stack.with_layers(change)}))
    native = isinstance(backend, NativeBackend)
    model = load_native(checkpoint, backend.library) if native else load_model(checkpoint, backend)
    ours, theirs = ours_and_theirs(kind, model)
    assert difference(ours, theirs) > 1e-3


@pytest.mark.parametrize("backend", [SdpaBackend(), *native_backends()], ids=lambda backend: backend.name)
def test_gte_of_its_own_code_stretches_its_rotary_base(backend: AttentionBackend, tmp_path: Path) -> None:
    """`transformers` has no such type, so its network gets the frequencies by that code's formula.

    They are `(base * factor)^(-2k / d) / factor^(2 / d)`.
    """
    folder = copied("gte", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_parameters"]
    raw |= {"model_type": "new", "rope_theta": 500, "rope_scaling": {"type": "ntk", "factor": 2.0}, "pack_qkv": True}
    (folder / "config.json").write_text(json.dumps(raw))
    reference = deepcopy(saved("gte").reference)
    reference.rotary_emb.inv_freq = 1000.0 ** -(torch.arange(0, 8, 2) / 8) / 2.0 ** (2 / 8)
    checkpoint = read_checkpoint(folder)
    native = isinstance(backend, NativeBackend)
    ours, inputs = hidden_states(
        load_native(checkpoint, backend.library) if native else load_model(checkpoint, backend)
    )
    theirs = torch.cat([reference(**given).last_hidden_state[0] for given in inputs])
    assert difference(torch.cat(ours), theirs) < 1e-4
    assert (
        difference(theirs, torch.cat([saved("gte").reference(**given).last_hidden_state[0] for given in inputs])) > 0.1
    )


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "mpnet", "jina-v3", "albert", "vit"])
def test_the_pooler_equals_transformers(kind: str) -> None:
    model = loaded(kind)
    with torch.inference_mode():
        hidden, inputs = hidden_states(model)
        ours = model.pool(torch.stack([one[0] for one in hidden]))
        theirs = torch.cat([saved(kind).reference(**given).pooler_output for given in inputs])
    assert is_varied(theirs)
    assert difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("backend", native_backends(), ids=lambda backend: backend.name)
def test_a_network_whose_parameters_are_all_packed_has_a_number_format(backend: NativeBackend) -> None:
    """OLMo's norms have no gains."""
    assert loaded("olmo", backend, torch.bfloat16).dtype is torch.bfloat16


def test_the_shards_are_several_files() -> None:
    assert len(read_checkpoint(saved("llama-sharded").path).weight_files) > 1


@pytest.mark.parametrize("kind", DECODERS[:3])
def test_a_later_token_changes_no_earlier_logits(kind: str) -> None:
    model, ids = loaded(kind), prompt(20)
    changed = (*ids[:12], *prompt(8, seed=9))
    before, after = decoder_logits(model, [ids]), decoder_logits(model, [changed])
    assert difference(before[:12], after[:12]) < 1e-6
    assert difference(before[12:], after[12:]) > 0.1


def test_an_encoder_sees_later_tokens() -> None:
    model, ids = loaded("bert"), prompt(20)
    changed = (*ids[:12], *prompt(8, seed=9))
    with torch.inference_mode():
        hidden = model.encode(packed_input([ids, changed], CPU, causal=False))
    assert difference(hidden[:12], hidden[20:32]) > 0.1


@pytest.mark.parametrize("kind", ["llama-gqa", "bert"])
def test_neighbours_do_not_change_an_output(kind: str) -> None:
    model = loaded(kind)
    causal = model.encoder is None
    run = model.decode if causal else model.encode
    with torch.inference_mode():
        packed = run(packed_input(decoder_prompts(), CPU, causal=causal))
        alone = torch.cat([run(packed_input([ids], CPU, causal=causal)) for ids in decoder_prompts()])
    assert difference(packed, alone) < 1e-5


class TestAgainstTorchTransformer:
    """`nn.Transformer` is the paper's network (post-norm, ReLU) without embeddings and positions."""

    KIND = "marian-unscaled-relu"

    def test_encoder_and_decoder_states(self) -> None:
        model = load_model(read_checkpoint(saved(self.KIND).path), SdpaBackend())
        theirs = _torch_transformer(model)
        source, begin = prompt(17), prompt(11, seed=3)
        with torch.inference_mode():
            memory = theirs.encoder(_embedded(model, source))
            mask = nn.Transformer.generate_square_subsequent_mask(len(begin))
            expected = theirs.decoder(_embedded(model, begin), memory, tgt_mask=mask)
            ours = model.encode(packed_input([source], CPU, causal=False))
            cross = CrossInput(AttentionMetadata((len(begin),), (len(source),), causal=False), ours)
            hidden = model.decode(packed_input([begin], CPU, causal=True), cross=cross)
        assert difference(ours, memory[0]) < 1e-5
        assert difference(hidden, expected[0]) < 1e-5


def _embedded(model: Transformer, ids: tuple[int, ...]) -> torch.Tensor:
    """Token plus position by the paper's formula, sines first: `[1, L, d]`."""
    table = model.tokens.weight  # [V, d]
    size = table.shape[1]
    rows = [[torch.tensor(t / 10_000 ** (2 * (k % (size // 2)) / size)) for k in range(size)] for t in range(len(ids))]
    angles = torch.tensor(rows)
    half = size // 2
    positions = torch.cat((angles[:, :half].sin(), angles[:, half:].cos()), dim=1)
    return (table[list(ids)] + positions)[None]


def _torch_transformer(model: Transformer) -> nn.Transformer:
    """Return torch's network with our weights, assigned by hand rather than through our tables."""
    config = model.config
    theirs = nn.Transformer(
        config.decoder.hidden_size,
        config.decoder.layers[0].attention.num_heads,
        config.encoder.num_layers,
        config.decoder.num_layers,
        config.decoder.layers[0].feed_forward.intermediate_size,
        dropout=0.0,
        activation="relu",
        batch_first=True,
    ).eval()
    theirs.encoder.norm = theirs.decoder.norm = None  # torch adds final norms, which the paper has not
    tensors = saved(TestAgainstTorchTransformer.KIND).reference.model.state_dict()
    names = {"linear1": "fc1", "linear2": "fc2", "self_attn.out_proj": "self_attn.out_proj"}
    encoder = names | {"norm1": "self_attn_layer_norm", "norm2": "final_layer_norm"}
    decoder = names | {
        "multihead_attn.out_proj": "encoder_attn.out_proj",
        "norm1": "self_attn_layer_norm",
        "norm2": "encoder_attn_layer_norm",
        "norm3": "final_layer_norm",
    }
    state = {}
    for side, layers, table in (("encoder", 2, encoder), ("decoder", 3, decoder)):
        for i in range(layers):
            for part in ("weight", "bias"):
                here, there = f"{side}.layers.{i}", f"{side}.layers.{i}"
                state |= {f"{there}.{t}.{part}": tensors[f"{here}.{o}.{part}"] for t, o in table.items()}
                attentions = {"self_attn": "self_attn", "multihead_attn": "encoder_attn"}
                for t, o in list(attentions.items())[: 1 if side == "encoder" else 2]:
                    qkv = [tensors[f"{here}.{o}.{name}_proj.{part}"] for name in "qkv"]
                    state[f"{there}.{t}.in_proj_{part}"] = torch.cat(qkv)
    theirs.load_state_dict(state)
    return theirs


# Other networks under a `model_type` of another kind: OPT-350M's, Gemma 4's with experts, Falcon's with slopes,
# and the sequential GPT-NeoX.
OTHERS = ("opt-narrow", "opt-post-norm", "gemma4-experts", "falcon-slopes", "gpt-neox-sequential")


def _families(*, are_all: bool) -> dict[str, str]:
    """Return one checkpoint for each `model_type` that writes text, and `OTHERS` by their names.

    Without `are_all`, only those that differ in a mechanism: all families' logits are compared above.
    """
    found = {kind: kind for kind in OTHERS if are_all}
    for kind in (*DECODERS, *ENCODER_DECODERS):
        if not are_all and kind not in MECHANISMS:
            continue
        raw = json.loads((saved(kind).path / "config.json").read_text())
        if raw["model_type"] != "whisper":  # it reads sound
            found.setdefault(raw["model_type"], kind)
    return found


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def families(request: pytest.FixtureRequest) -> dict[str, str]:
    return _families(are_all=request.param == "all")


@pytest.fixture(scope="module")
def service(families: dict[str, str]) -> Iterator[ServiceProcess]:
    models = [f"{name}={saved(kind).path}" for name, kind in families.items()]
    limits = ["--kv-cache-memory", "1MiB", "--max-model-len", "64", "--max-num-seqs", "4", "--block-size", "4"]
    limits += ["--max-num-batched-tokens", "12"]
    with running([*models, *limits, "--dtype", "float32", "--runtime", "local"]) as started:
        yield started


@pytest.mark.parametrize("again", [False, True], ids=["in-chunks", "by-prefix"])
def test_every_family_writes_what_transformers_writes(
    service: ServiceProcess, families: dict[str, str], again: bool
) -> None:
    """Send a prompt longer than a step, then the same prompt again, whose blocks are cached."""
    wrong = {name: told for name, kind in families.items() if (told := _difference(service.url, name, kind, again))}
    assert not wrong


def _difference(url: str, name: str, kind: str, again: bool) -> str:
    """Return the difference of a family's reply from the reference; empty: none.

    Each token is compared as the most likely one after the tokens before it, also where a checkpoint's rule forces
    another one.
    """
    given = prompt(11 if kind in ENCODER_DECODERS else 19, 3)
    body = dict(model=name, prompt=given, max_tokens=NEW_TOKENS, temperature=0.0, logprobs=1, ignore_eos=True)
    reply = httpx.post(f"{url}/generate", json=body, timeout=60)
    if reply.status_code != 200:
        return reply.text
    if (reply.json()["usage"]["cached_tokens"] >= 16) != (again and kind in DECODERS):
        return f"{reply.json()['usage']['cached_tokens']} tokens of the prompt were there"
    found = reply.json()["choices"][0]["logprobs"]
    begin, source = ((START,), token_source(given)) if kind in ENCODER_DECODERS else (given, None)
    ids = [*begin, *(one["id"] for one in found)]
    expected = reference_logits(kind, ids, source)[len(begin) - 1 : -1].log_softmax(-1).max(-1)
    ours = torch.tensor([one["top"][0]["logprob"] for one in found])
    tops = [one["top"][0]["id"] for one in found]
    if len(found) != NEW_TOKENS or tops != expected.indices.tolist():
        return f"tokens {tops}, not {expected.indices.tolist()}"
    error = (ours - expected.values).abs().max().item()
    return "" if error < 1e-4 else f"logprobs differ by {error:.1e}"

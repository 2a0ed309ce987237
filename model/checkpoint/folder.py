"""Reads a Hugging Face checkpoint folder's description: its network, sampling defaults and pooling. No torch.

`triptych.model.network.weights` reads the weights. A folder that cannot be served raises `ConfigError`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from triptych.model.api.request import Pooling
from triptych.model.checkpoint.folder_kind import describe_folder, describe_path, unfetched_tokenizer_files
from triptych.model.checkpoint.generation_config import (
    GENERATION,
    GenerationTask,
    generation_tasks,
    generation_warnings,
    read_generation,
    sampling_defaults,
    settings_of,
    without_generation,
)
from triptych.model.checkpoint.gguf.layout import gguf_config, origins
from triptych.model.checkpoint.gguf.settings import named_by_metadata, pooling, raw_settings, recommended_sampling
from triptych.model.checkpoint.json_files import ADAPTER_WEIGHTS, read_json
from triptych.model.checkpoint.layouts import (
    Layout,
    Packed,
    consumed_names,
    find_layouts,
    logical_names,
    pack_projections,
)
from triptych.model.checkpoint.load_plan import few, leftover_tensors, stored_projections
from triptych.model.checkpoint.processors import (
    AUDIO_PARTS,
    AUDIO_SETTINGS,
    IMAGE_PARTS,
    IMAGE_SETTINGS,
    MISSING,
    read_images_of_any_shape,
    read_pictures,
    read_processor,
    warnings_of,
)
from triptych.model.checkpoint.sentence_modules import network_folder
from triptych.model.checkpoint.sentence_transformers import SentenceSettings, read_colbert, read_sentence_settings
from triptych.model.checkpoint.speech import NO_SPEECH_TOKENS, SpeechTokens, read_speech_tokens
from triptych.model.checkpoint.static_embedding import as_static, static_settings
from triptych.model.checkpoint.stored_formats import Quantization, made_for, quantization_of
from triptych.model.checkpoint.weight_files import PLAIN, Wrapping, tensor_names, weight_files
from triptych.model.config.formats import FLOAT
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError, listed, shown
from triptych.model.families import family_for, find_family, read_settings
from triptych.model.families.table.heads import token_classifier
from triptych.model.families.table.token_rules import within_vocabulary
from triptych.model.gguf.container import read_gguf
from triptych.model.gguf.paths import gguf_path, is_gguf
from triptych.model.speech.log_mel import LogMel, read_log_mel
from triptych.model.system.folder_files import has_file
from triptych.model.vision.pictures import PictureProcessing
from triptych.model.vision.processing import (
    ImageProcessing,
    prepared_size,
    read_image_processing,
    unknown_class,
    with_defaults,
)

_MOST_CHARACTERS = 600  # of a message about a folder


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint folder's description; no weights."""

    path: Path
    config: ModelConfig
    weight_files: tuple[Path, ...]
    dtype: str  # of the stored weights by config.json, else float32
    packed: Mapping[str, Packed] = field(default_factory=dict)  # how packed projections are read, by stored name
    quantization: str = "none"  # the setting that a CPU serves the folder with where none is given
    sampling_defaults: dict[str, Any] = field(default_factory=dict)  # by fields of SamplingParams
    sentences: SentenceSettings = field(default_factory=SentenceSettings)
    images: ImageProcessing | None = None  # or pictures of prompts
    tasks: dict[str, GenerationTask] = field(default_factory=dict)  # whose settings a request can ask for by name
    log_mel: LogMel | None = None  # how a model that hears makes features; None: the folder does not say
    speech: SpeechTokens | None = None  # how a model that hears is told what to do; None: the folder does not say
    network: Path | None = None  # the folder of the network's files, tokenizer included; None: `path`
    wrapping: Wrapping = PLAIN  # what is left out of the names of stored tensors
    warnings: Sequence[str] = ()  # sentences on what the folder lacks, or has and is ignored

    @property
    def network_path(self) -> Path:
        """The folder with the network's files: of a sentence-transformers folder it may be that of the first module."""
        return self.path if self.network is None else self.network

    @property
    def described_by(self) -> str:
        """What describes the network, in errors."""
        return "its metadata" if is_gguf(self.weight_files[0]) else "config.json"

    @property
    def lacks_for_speech(self) -> str:
        """What is missing for a model that reads sound to transcribe files; "" where nothing is."""
        if self.config.audio is None:
            return ""
        if self.log_mel is None:
            return f"{MISSING} in its folder"
        return "" if self.speech is not None else NO_SPEECH_TOKENS

    @property
    def pictures(self) -> PictureProcessing | None:
        """How pictures of prompts are prepared; None: it reads none."""
        return self.images if isinstance(self.images, PictureProcessing) else None

    def without_pictures(self, why: str) -> Checkpoint:
        """Return it as a model that reads no pictures."""
        config = replace(self.config, pictures=None)
        return replace(self, config=config, images=None, warnings=[*self.warnings, f"pictures are not read: {why}"])

    @property
    def most_beams(self) -> int:
        """How many beams its settings ask for at most, of all requests or of those for a task."""
        settings = (self.sampling_defaults, *(task.sampling_defaults for task in self.tasks.values()))
        return max(one.get("num_beams", 1) for one in settings)

    def with_most_beams(self, most: int) -> Checkpoint:
        """Return it with no more beams by default than `most`."""
        if self.most_beams <= most:
            return self

        def bounded(defaults: dict[str, Any]) -> dict[str, Any]:
            return {**defaults, "num_beams": most} if defaults.get("num_beams", 1) > most else defaults

        tasks = {
            name: replace(task, sampling_defaults=bounded(task.sampling_defaults)) for name, task in self.tasks.items()
        }
        return replace(self, sampling_defaults=bounded(self.sampling_defaults), tasks=tasks)


def read_checkpoint(path: Path, *, pickle: bool = True, pictures: bool = True) -> Checkpoint:
    """Describe the folder, or the GGUF file, `path`; raises `ConfigError`, which begins with the path.

    Without `pickle`, weights are taken from safetensors alone, and not from pytorch_model.bin. Without `pictures`, a
    model that reads them in its prompts is its language model alone.
    """
    with errors_about(str(path) if path.name not in ("", "..") else f"{path} ({path.resolve().name})", path.name):
        file = gguf_path(path)
        return _read_folder(path, pickle=pickle, pictures=pictures) if file is None else _read_gguf(path, file)


@contextmanager
def errors_about(where: str, *names: str) -> Iterator[None]:
    """Let messages of errors within begin with `where`, once, and be one line of a bounded length.

    `names` are what a message may begin with in its place. A file that cannot be read is a `ConfigError`, too.
    """
    try:
        yield
    except ConfigError as error:
        text = " ".join(str(error).split())
        name = next((name for name in names if name and text.startswith(f"{name}: ")), None)
        text = text if name is None else text.removeprefix(f"{name}: ")
        text = text if not where or text.startswith(f"{where}: ") else f"{where}: {text}"
        error.args = (text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}...",)
        raise
    except OSError as error:
        file = f"{listed([Path(str(error.filename)).name])} " if error.filename is not None else ""
        why = error.strerror or str(error)
        text = why if error.errno == errno.ENOSPC else f"{file}cannot be read: {why}"
        raise ConfigError(f"{where}: {text}" if where else text) from None


def _read_folder(whole: Path, *, pickle: bool, pictures: bool) -> Checkpoint:
    path = whole / network_folder(whole)
    static = static_settings(whole, path, pickle=pickle)
    if static is None and not has_file(path / "config.json"):
        raise ConfigError(describe_path(path))
    if any((path / name).is_file() for name in ADAPTER_WEIGHTS):
        raise ConfigError(describe_folder(path))
    if pointers := unfetched_tokenizer_files(path):
        raise ConfigError(f"{listed(pointers)}: a Git LFS pointer, not the file itself: run `git lfs pull`")
    raw = read_json(path / "config.json", required=True) if static is None else static
    generation = read_generation(path, raw)
    files = weight_files(path, pickle=pickle, named=raw.get("transformers_weights"))
    names, wrapping = tensor_names(files, find_family(raw))
    settings = _quantization_settings(path, raw)
    quantization = quantization_of(settings, names)
    if settings is not None and quantization == Quantization():
        raise ConfigError(
            f"quantization_config says {settings.get('quant_method', 'bitsandbytes')}, but no projection is stored so"
        )
    if quantization.layouts and wrapping:
        raise ConfigError(f"names of packed tensors have {wrapping}, which is not served: save the model without it")
    layouts = find_layouts(quantization.layouts, names, files) if quantization.layouts else {}
    config, ignored = read_settings(without_generation(raw) | generation.token_rules(), logical_names(names, layouts))
    if config.can_generate:
        config, warnings = within_vocabulary(config)
    else:  # its classifier or its positions may depend on ids of config.json
        (config, ignored), warnings = read_settings(raw, logical_names(names, layouts)), []
    config, packed = _stored_as(config, quantization, layouts, names)
    sentences = _sentences(whole, raw, config, files, pickle=pickle)
    if sentences.score_tokens:
        config = token_classifier(config, sentences.score_tokens)
    if config.classifier is not None:
        config = replace(config, classifier=config.classifier.scored_by(sentences.activation))
    if sentences.pooling:
        config = _without_head(config)
    else:
        sentences = replace(sentences, pooling=(_default_pooling(config),))
    if static is not None:
        sentences = as_static(sentences, whole, path)
    if ignored:
        warnings.append(f"keys of config.json that have no effect for this type: {listed(ignored)}")
    if config.can_generate:
        warnings += generation_warnings(raw, generation, speech=config.audio is not None)
    warnings += sentences.warnings
    warnings += _name_warnings(config, names, layouts, wrapping)
    if not pictures:
        config = replace(config, pictures=None, unread_pictures="")
    config, images = _with_images(path, config, warnings)
    return Checkpoint(
        path=whole,
        config=config,
        weight_files=files,
        network=path,
        wrapping=wrapping,
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        packed=packed,
        quantization=made_for(settings),
        sampling_defaults=sampling_defaults(generation) if config.can_generate else {},
        sentences=sentences,
        images=images,
        tasks=generation_tasks(raw, generation) if config.can_generate else {},
        log_mel=_log_mel(path, config, warnings),
        speech=read_speech_tokens(path, raw, generation.values, config, warnings) if config.audio is not None else None,
        warnings=warnings,
    )


def _name_warnings(
    config: ModelConfig, names: frozenset[str], layouts: Mapping[str, Layout], wrapping: Wrapping
) -> list[str]:
    """Return what is to be known of the names of the stored tensors."""
    left = leftover_tensors(family_for(config), config, names - consumed_names(layouts))
    found = [f"tensors are read without {wrapping} in their names"] if wrapping else []
    if left:
        found.append(f"{len(left)} stored tensors are no part of the network, and are ignored: {few(sorted(left))}")
    return found


def _log_mel(path: Path, config: ModelConfig, warnings: list[str]) -> LogMel | None:
    """Return how audio becomes features, as the encoder reads them; None where the folder does not say."""
    if config.audio is None:
        return None
    if (processor := read_processor(path, AUDIO_PARTS)) is None:
        warnings.append(f"{MISSING}: audio files are not transcribed")
        return None
    warnings += warnings_of(processor, AUDIO_SETTINGS)
    found = read_log_mel(processor.settings, processor.where)
    made, read = (found.num_mel_bins, found.window_frames), (config.audio.num_mel_bins, config.audio.num_frames)
    if made != read:
        raise ConfigError(f"{processor.where} makes {made} mel bins and frames, the model reads {read}")
    return found


def _with_images(path: Path, config: ModelConfig, warnings: list[str]) -> tuple[ModelConfig, ImageProcessing | None]:
    """Return the network at the size of its images, and how these become pixels.

    By the usual settings of its type where the folder does not say. A decoder then reads no pictures, nor where that
    does not fit it: its texts are served as before.
    """
    if config.unread_pictures:
        warnings.append(f"pictures are not read: {config.unread_pictures}")
    if config.pictures is not None:
        try:
            pictures, found = read_pictures(path, config)
        except ConfigError as error:
            pictures, found = None, [f"pictures are not read: {error}"]
        warnings += found
        return (replace(config, pictures=None), None) if pictures is None else (config, pictures.bounded())
    if config.image is None:
        return config, None
    if config.image.most_patches is not None:
        made, found = read_images_of_any_shape(path, config, config.image.patch)
        warnings += found
        return replace(config, image=replace(config.image, most_patches=made.most)), made
    if (processor := read_processor(path, IMAGE_PARTS)) is None:
        warnings.append(f"{MISSING}: images are prepared with the usual settings of {config.model_type}")
        size = config.image.size
        settings = {**with_defaults({}, config.model_type), "crop_size": size}
        return config, read_image_processing(settings | ({} if "size" in settings else {"size": size}), config.image)
    warnings += warnings_of(processor, IMAGE_SETTINGS)
    if name := unknown_class(processor.settings, config.model_type):
        warnings.append(f"{processor.where}: images are prepared as by ViTImageProcessor, {shown(name)} is not known")
    settings = with_defaults(processor.settings, config.model_type)
    config = config.at_image_size(prepared_size(settings, processor.where) or config.image.size)
    assert config.image is not None
    return config, read_image_processing(settings, config.image, processor.where)


def _quantization_settings(path: Path, raw: dict[str, Any]) -> Any:
    """Take what says how projections are stored out of config.json; older folders have it in files of its own."""
    former = raw.pop("compression_config", None)  # as compressed-tensors once called it
    settings = raw.pop("quantization_config", former)
    if settings is None and isinstance(text := raw.get("text_config"), dict):  # of the language model alone
        settings = text.get("quantization_config")
        raw["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    if settings is None and (settings := read_json(path / "quantize_config.json") or None) is not None:
        settings = {"quant_method": "gptq", **settings}
    if settings is None and (found := read_json(path / "quant_config.json")):
        names = {"q_group_size": "group_size", "w_bit": "bits"}
        settings = {"quant_method": "awq", **{names.get(name, name): value for name, value in found.items()}}
    return settings


def _stored_as(
    config: ModelConfig,
    quantization: Quantization,
    layouts: Mapping[str, Layout],
    names: frozenset[str],
) -> tuple[ModelConfig, dict[str, Packed]]:
    """Return the network with the formats of its projections, and how packed ones are read."""
    family, storage = family_for(config), quantization.storage
    stored_as, packed = pack_projections(family, config, layouts)
    if storage != FLOAT:
        plain = names - consumed_names(layouts)
        stored_as = {**stored_projections(family, config, storage, plain), **stored_as}
        if storage not in stored_as.values():
            raise ConfigError(f"quantization_config says {storage.name}, but no projection has a {storage.scale}")
    return replace(config, stored_as=stored_as), packed


def _read_gguf(path: Path, file: Path) -> Checkpoint:
    """Describe a GGUF file; generation_config.json in its folder overrides its settings."""
    model = read_gguf(file)
    raw = raw_settings(model)
    own = read_json(path / GENERATION) if path.is_dir() else {}
    recommended = recommended_sampling(model)
    sampling_defaults(settings_of(recommended, {}), f"{model.name}: general.sampling")  # raises what names the metadata
    generation = settings_of(recommended | own, {})
    with named_by_metadata(model):
        tensors = origins(model, raw)
        config, warnings = within_vocabulary(gguf_config(raw | generation.token_rules(), tensors))
    if left := leftover_tensors(family_for(config), config, tensors):
        raise ConfigError(f"tensors are no part of the network of {model.architecture!r}, extra: {few(sorted(left))}")
    pooled = pooling(model)
    if pooled is not None:
        config = _without_head(config)
    return Checkpoint(
        path=path,
        config=config,
        weight_files=model.paths,
        dtype=model.dtype,
        sampling_defaults=sampling_defaults(generation),
        sentences=SentenceSettings(pooling=(pooled or _default_pooling(config),), normalize=pooled is not None),
        warnings=[*warnings, *(generation_warnings({}, generation, speech=False) if config.can_generate else ())],
    )


def _sentences(
    path: Path, raw: dict[str, Any], config: ModelConfig, files: Iterable[Path], *, pickle: bool
) -> SentenceSettings:
    """Return what the folder says of its vectors, completed by its network."""
    hidden_size = config.vector_size
    sentences = read_sentence_settings(path, raw, hidden_size, pickle=pickle)
    late = sentences.late
    if late is None and family_for(config).drops("linear.weight"):
        late = read_colbert(path, files, hidden_size)
    late = None if late is None else late.within(config.max_positions)
    adapters = () if config.adapters is None else config.adapters.names
    return replace(sentences, adapters=adapters, late=late)


def _without_head(config: ModelConfig) -> ModelConfig:
    """Return a decoder that a folder calls an embedder as one: it generates nothing, and takes no KV pool for it."""
    head = config.head
    dispensable = head is not None and (head.tied or family_for(config).drops("lm_head.weight"))
    return replace(config, head=None, pictures=None) if dispensable and config.form == "decoder-only" else config


def _default_pooling(config: ModelConfig) -> Pooling:
    """Return the last token for a decoder, which sees the whole text; CLS for a vision model; else the mean."""
    if config.encoder is None:
        return Pooling.LAST
    return Pooling.CLS if config.only_images else Pooling.MEAN

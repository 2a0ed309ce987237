"""The offline API: one model in this process, blocking, no server.

with LLM("path/of/a/checkpoint") as llm:
    for position, output in llm.stream(["def add(a, b):"], {"max_tokens": 32}): ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from operator import index
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from triptych.model import names
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import (
    EncodeRequest,
    FinishReason,
    Request,
    Source,
    SourceKind,
    TokenOutput,
    token_source,
)
from triptych.model.api.sampling_bounds import GREEDY_BELOW, check_sampling, length_of, over_defaults
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.checkpoint import hub, hub_names
from triptych.model.checkpoint.adapter_folder import read_adapter_settings
from triptych.model.checkpoint.folder import errors_about, read_checkpoint
from triptych.model.engine.builder import load, load_lora
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.errors import ConfigError, EngineDeadError
from triptych.model.llm_calls import Turns, checked_params, several
from triptych.model.llm_pictures import PromptPictures
from triptych.model.llm_speech import samples_of, transcribe
from triptych.model.network.transformer import Transformer
from triptych.model.speech.driver import Piece, Transcription
from triptych.model.speech.requests import SpeechOptions
from triptych.model.text.detokenizer import Detokenizer
from triptych.model.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Prompts = str | Source | Sequence[Prompt | Source]  # a text or a source alone is one prompt
Images = Sequence[Sequence[str | Path | bytes]]  # files for each prompt
Sampling = SamplingParams | Mapping[str, Any] | None
_FIELDS = frozenset(field.name for field in fields(SamplingParams))


class LLM:
    """Generates and encodes with the model of a checkpoint folder in this process.

    Set `GOMP_SPINCOUNT=2000` in the environment before torch is imported: OpenMP reads it only then. Do not fork after
    a model has computed on a CPU with several threads: a fork does not copy threads, so torch's operations hang in the
    child, and the native kernels raise `RuntimeError`. Start processes by spawn. Threads may share a model: one call
    computes at a time, and the others wait for it.
    """

    def __init__(
        self, path: str | Path, engine: EngineConfig | None = None, *, lora: Mapping[str, str | Path] | None = None
    ) -> None:
        """Load a model: an embedded one by its name, a folder, a GGUF file, or one of the Hub (`triptych.model.names`).

        A `Path` is a path; a text that begins with `./` is one too. `lora` are LoRA adapters by the names that calls
        choose them by. Raises `ConfigError`.
        """
        engine = engine or EngineConfig()
        name, path = _located(path, pickle=engine.pickle)
        adapters = _adapters_located(name, lora, pickle=engine.pickle)
        self.checkpoint = read_checkpoint(path, pickle=engine.pickle, pictures=engine.pictures)
        self.tokenizer = Tokenizer.from_folder(
            self.checkpoint.network_path, special_tokens=self.checkpoint.sentences.special_tokens
        )
        loaded = load(ModelSpec(name, str(path), engine))
        self.info = loaded.info
        self.checkpoint = self.checkpoint.with_most_beams(self.info.max_num_seqs)
        self._loaded = loaded
        self._generate = loaded.generate
        self._encode = loaded.encode
        self._turns = Turns()
        for adapter, where in adapters.items():
            found = load_lora(ModelSpec(adapter, str(where), engine, adapter_of=name), loaded).adapter
            assert found is not None
            self.network.lora[adapter] = found

    def _named(self, adapter: str | None) -> str:
        """Return what a request names as its model. Raises `ConfigError`."""
        if adapter is None:
            return self.info.name
        if not isinstance(adapter, str) or adapter not in self.network.lora:
            known = ", ".join(self.network.lora) or "none"
            raise ConfigError(f"no adapter {adapter!r} is loaded; the model has {known} (lora=)")
        return adapter

    @property
    def network(self) -> Transformer:
        """The network, which computes without its modules where it runs in C."""
        return self._encode.model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the model: the processes of its other ranks, if any, and its memory once nothing refers to this object.

        Without this call processes end with this one, and the garbage collector finds the memory.
        """
        self._loaded.close()

    def generate(
        self,
        prompts: Prompts,
        params: Sampling = None,
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        decoder_prompt: Sequence[int] = (),
        lora: str | None = None,
        images: Images = (),
    ) -> list[str]:
        """Return the whole text of each prompt's first sequence. Takes and raises what `stream` does."""
        prompts = several(prompts)
        texts = [""] * len(prompts)
        languages: dict[str, Any] = {"source_language": source_language, "target_language": target_language}
        given: dict[str, Any] = {"decoder_prompt": decoder_prompt, "lora": lora, "images": images}
        for position, output in self.stream(prompts, params, **languages, **given):
            if output.index == 0:
                texts[position] += output.text
        return texts

    def stream(
        self,
        prompts: Prompts,
        params: Sampling = None,
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        decoder_prompt: Sequence[int] = (),
        lora: str | None = None,
        images: Images = (),
    ) -> Iterator[tuple[int, TokenOutput]]:
        """Yield (position of the prompt, output) as tokens are generated; with a tokenizer outputs have text.

        `params` are fields of `SamplingParams` by name, over the folder's defaults; without `max_tokens` an output ends
        where the folder, the model or the context ends it. A `SamplingParams` is taken as it is, without defaults.

        `lora` is the name of an adapter that computes all of them; None: the base model does.

        The languages are codes of the tokenizer (NLLB, mBART, M2M-100): that of the prompts, by default the folder's,
        and that of the output, which follows its token.

        A model that reads sound takes windows of it (`audio_source`). `decoder_prompt` are the
        tokens before an encoder-decoder's output, start token included: Whisper's start, language, task and whether
        there are timestamps.

        A model that reads pictures takes `images`: for each prompt a list of files, by their paths or contents. Each is
        put in the place of a mark in its text, the one that the model's chat template writes, such as
        `<|vision_start|><|image_pad|><|vision_end|>`; of token ids each image token is one picture.

        The engine runs only while the iterator is read, and other calls wait until it is read to its end or closed.
        Raises `ConfigError` for invalid requests, also for a second call of one thread meanwhile, and `EngineDeadError`
        if the engine fails.
        """
        engine = self._generate
        if engine is None:
            raise ConfigError(f"{self.info.name} is {self.info.form} and does not generate")
        prompts, params = several(prompts), checked_params(params)
        source, target = self._source_language(source_language, prompts), self._target_language(target_language)
        begin = self._decoder_prompt(decoder_prompt, target)
        shown = None
        if images:
            shown = PromptPictures(self.info, self.checkpoint, self.tokenizer, images, len(prompts))
        requests = []
        for place, prompt in enumerate(prompts):
            prompt, pictures = shown.put(place, prompt) if shown is not None else (prompt, [])
            request = self._request(place, prompt, params, source, begin)
            spans = shown.spans(place, request.prompt_token_ids, pictures) if shown is not None else ()
            requests.append(replace(request, model=self._named(lora), images=spans, num_forced=len(target)))
        with self._turns.one():
            try:
                for request in requests:
                    engine.add(request)
                yield from self._outputs(engine, [request.params for request in requests])
            finally:  # also after an error or an early stop of the iteration
                for request in requests:
                    engine.abort(request.request_id, None, FinishReason.CANCELLED)

    def _outputs(self, engine: GenerateEngine, params: Sequence[SamplingParams]) -> Iterator[tuple[int, TokenOutput]]:
        detokenizers: dict[tuple[int, int], Detokenizer] = {}
        stopped: set[tuple[int, int]] = set()
        while engine.has_work:
            engine.wait_for_grammars(1.0)
            outputs, _ = engine.step()
            self._loaded.check()
            for output in outputs:
                position = int(output.request_id)
                key = (position, output.index)
                if key in stopped:
                    continue  # an accepted draft after the stop string
                if output.error is not None:
                    raise ConfigError(f"the output cannot match: {output.error}")
                if output.finish_reason is FinishReason.ERROR:
                    raise EngineDeadError("the engine failed while the prompt was in it; its log says why")
                if self.tokenizer is not None:
                    if key not in detokenizers:
                        detokenizers[key] = Detokenizer.of(self.tokenizer, params[position])
                    if detokenizers[key].fill(output):
                        stopped.add(key)
                        engine.abort(output.request_id, output.index, FinishReason.STOP)
                yield position, output

    def transcribe(
        self,
        audio: str | Path | bytes | NDArray[np.float32],
        options: SpeechOptions | None = None,
        emit: Callable[[Piece], None] | None = None,
    ) -> Transcription:
        """Return what is said in an audio file, by its path or its bytes, or in mono samples at the model's rate.

        `emit` gets text as it comes. Blocks, outside of an event loop. Raises `ConfigError` for a file that cannot be
        read or a model that does not transcribe.
        """
        log_mel, tokenizer = self.checkpoint.log_mel, self.tokenizer
        if lack := self.checkpoint.lacks_for_speech:
            raise ConfigError(f"{self.info.name} transcribes no speech: {lack}")
        if self._generate is None or log_mel is None or tokenizer is None:
            raise ConfigError(f"{self.info.name} does not transcribe speech")
        samples = samples_of(audio, log_mel.sampling_rate)
        with self._turns.one():
            return transcribe(self._generate, self.checkpoint, tokenizer, samples, options or SpeechOptions(), emit)

    def encode(
        self,
        inputs: str | Sequence[Prompt],
        prompt_name: str | None = None,
        task: str | None = None,
        *,
        lora: str | None = None,
    ) -> NDArray[np.float32]:
        """Return pooled vectors `[N, D]`; a text alone is one input. Raises `ConfigError` and `EngineDeadError`.

        Texts get the checkpoint's prompt of this name, else that of the task, else its default prompt if it has one. A
        task's adapter computes them, if it has one; `lora` names one of the adapters that were given.
        """
        sentences = self.checkpoint.sentences
        if prompt_name is not None and prompt_name not in sentences.prompts:
            raise ConfigError(f"no prompt {prompt_name!r}; the model has {', '.join(sentences.prompts) or 'none'}")
        if task is not None and task not in sentences.tasks:
            raise ConfigError(f"no task {task!r}; the model has {', '.join(sentences.tasks) or 'none'}")
        prompt, adapter = sentences.prompt(prompt_name, task), sentences.adapter(task)
        if task is not None and adapter is None and prompt_name not in (None, task):
            raise ConfigError(f"task and prompt_name contradict each other: {task!r} is a prompt too")
        given = several(inputs, "inputs")
        if not len(given):
            raise ConfigError("inputs: expected at least one text or list of token ids, found none")
        texts = [sentences.prepare(one, prompt) if isinstance(one, str) else one for one in given]
        skipped = sentences.unpooled_tokens(self.tokenizer, prompt) if self.tokenizer is not None else 0
        requests = [
            replace(
                self._encode_request(position, text, skipped if isinstance(text, str) else 0, adapter),
                model=self._named(lora),
            )
            for position, text in enumerate(texts)
        ]
        with self._turns.one():
            vectors = self._vectors(requests)
        return np.stack([vectors[request.request_id] for request in requests])

    def _vectors(self, requests: Sequence[EncodeRequest]) -> dict[str, NDArray[np.float32]]:
        vectors: dict[str, NDArray[np.float32]] = {}
        try:
            for request in requests:
                self._encode.add(request)
            while self._encode.has_work:
                outputs, _ = self._encode.step()
                self._loaded.check()
                for output in outputs:
                    if output.finish_reason is FinishReason.ERROR:
                        raise EngineDeadError("the engine failed while the input was in it; its log says why")
                    vectors[output.request_id] = np.frombuffer(output.data, np.float32)
        finally:
            for request in requests:
                self._encode.abort(request.request_id, FinishReason.CANCELLED)
            self._encode.finish_pending()  # after an interrupt: a later call's inputs have the same ids
        return vectors

    def _encode_request(self, position: int, text: Prompt, skipped: int, adapter: int | None) -> EncodeRequest:
        ids, types = self._ids(text)
        made_for = self.checkpoint.sentences.max_tokens
        self._check_length(ids, min(self.info.max_model_len, made_for or self.info.max_model_len))
        return EncodeRequest(
            str(position),
            self.info.name,
            token_source(ids, types),
            prompt_tokens=min(skipped, len(ids) - 1),
            adapter=adapter,
            arrival_time=time.monotonic(),
        )

    def _source_language(self, code: str | None, prompts: Sequence[Prompt | Source]) -> int | None:
        """Return the token that marks the sources; None for the folder's. Raises `ConfigError`."""
        if code is None:
            return None
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise ConfigError("source_language: token ids are taken as they are; give texts")
        languages = None if self.tokenizer is None else self.tokenizer.source_languages
        if languages is None:
            raise ConfigError(f"source_language: {self.info.name} does not mark the language of a source")
        token = languages.token(code)
        if token is None:
            raise ConfigError(f"source_language: {self.info.name} has no language {code!r}")
        return token

    def _target_language(self, code: str | None) -> tuple[int, ...]:
        """Return the token of a language that comes before the output; none without a code. Raises `ConfigError`."""
        if code is None:
            return ()
        config = self.checkpoint.config
        ends = {config.bos_token_id, config.pad_token_id, *config.eos_token_ids}
        token = None if self.tokenizer is None else self.tokenizer.language_token(code)
        if token is None or token in ends or config.form != "encoder-decoder":
            raise ConfigError(f"target_language: {self.info.name} has no language token {code!r}")
        return (token,)

    def _decoder_prompt(self, ids: Sequence[int], target: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens before an encoder-decoder's output; none for other models. Raises `ConfigError`."""
        config = self.checkpoint.config
        if config.form != "encoder-decoder":
            if ids:
                raise ConfigError(f"decoder_prompt: {self.info.name} is {config.form}; its prompts are all there is")
            return ()
        if ids and target:
            raise ConfigError("decoder_prompt and target_language both set the tokens before an output")
        if ids and not 0 <= min(ids) <= max(ids) < config.embedding.vocab_size:
            raise ConfigError(f"decoder_prompt has ids outside the vocabulary of {config.embedding.vocab_size}")
        assert config.decoder_start_token_id is not None
        begin = tuple(ids) or (config.decoder_start_token_id, *target)
        self._check_length(begin, self.info.max_model_len - 1)
        return begin

    def _window(self, prompt: Prompt | Source) -> Source:
        """Return a window of sound that the model can read. Raises `ConfigError`."""
        audio = self.checkpoint.config.audio
        assert audio is not None
        if not isinstance(prompt, Source) or prompt.kind is not SourceKind.AUDIO:
            raise ConfigError(f"{self.info.name} reads sound: give windows of it")
        shape = (audio.num_mel_bins, audio.num_frames)
        if prompt.shape != shape or prompt.num_positions != audio.num_positions:
            raise ConfigError(f"{self.info.name} takes windows of {shape}, found {prompt.shape}")
        return prompt

    def _request(
        self,
        position: int,
        prompt: Prompt | Source,
        given: Sampling,
        language: int | None,
        begin: tuple[int, ...],
    ) -> Request:
        if self.checkpoint.config.audio is not None:
            window = self._window(prompt)
            params = self._params(given, window.num_positions, len(begin))
            self._check_beams(window.num_positions, len(begin), params)
            return Request(str(position), self.info.name, begin, params, window, arrival_time=time.monotonic())
        if isinstance(prompt, Source):
            raise ConfigError(f"{self.info.name} reads text: give texts or token ids")
        ids, _ = self._ids(prompt)
        if language is not None:
            assert self.tokenizer is not None and self.tokenizer.source_languages is not None
            ids = self.tokenizer.source_languages.mark(ids, language)
        reads = self.checkpoint.config.encoder is not None
        longest = self.info.max_model_len
        # A source is encoded in one step; a decoder's prompt leaves room for one token.
        self._check_length(ids, min(longest, self.info.max_num_batched_tokens) if reads else longest - 1)
        params = self._params(given, len(ids), len(begin))
        self._check_beams(len(ids), len(begin), params)
        source = None
        if reads:
            ids, source = begin, token_source(ids)
        return Request(str(position), self.info.name, ids, params, source, arrival_time=time.monotonic())

    def _params(self, given: Sampling, prompt_tokens: int, start: int) -> SamplingParams:
        """Return the checked parameters of one prompt; `start` counts the tokens before an encoder-decoder's output.

        Raises `ConfigError`.
        """
        params = given if isinstance(given, SamplingParams) else self._completed(given or {}, prompt_tokens, start)
        if params.grammar and self.tokenizer is None:
            raise ConfigError(f"{self.info.name} has no tokenizer: no grammar can be followed")
        check_sampling(params, self.checkpoint.config.embedding.vocab_size)
        return replace(params, temperature=0.0) if params.temperature < GREEDY_BELOW else params

    def _completed(self, given: Mapping[str, Any], prompt_tokens: int, start: int) -> SamplingParams:
        """Return the parameters that the folder has where `given` does not say."""
        if others := sorted(set(given) - _FIELDS):
            raise ConfigError(f"{others[0]} is no field of SamplingParams, which has {', '.join(sorted(_FIELDS))}")
        defaults, before = self.checkpoint.sampling_defaults, start or prompt_tokens
        chosen = over_defaults(defaults, given, before)
        if "max_tokens" not in given:
            room = self.info.max_model_len - before
            chosen["max_tokens"] = max(1, min(room, length_of(defaults, before, whole=start > 0) or room))
        if "min_tokens" not in given:
            chosen["min_tokens"] = min(chosen.get("min_tokens", 0), chosen["max_tokens"])
        if given.get("num_beams") is None and chosen.get("num_beams", 1) > 1:
            length, source = before + chosen["max_tokens"], prompt_tokens if start else 0
            chosen["num_beams"] = self.info.most_beams(chosen["num_beams"], length, source=source)
        return SamplingParams(**chosen)

    def _check_length(self, ids: Sequence[int], limit: int) -> None:
        """Raise `ConfigError` for an input that the engine could never compute; online, the service checks this."""
        if not 0 < len(ids) <= limit:
            raise ConfigError(f"{self.info.name} takes 1 to {limit} tokens, found {len(ids)}")

    def _check_beams(self, prompt_tokens: int, start: int, params: SamplingParams) -> None:
        """Raise `ConfigError` for more beams than one step or the KV pool can hold together.

        `start` is how many tokens the decoder of an encoder-decoder starts with; 0 without an encoder.
        """
        info = self.info
        if params.num_beams == 1:
            return
        if params.num_beams > info.max_num_seqs:
            raise ConfigError(f"num_beams must be at most {info.max_num_seqs}, the sequences of a step")
        length = min(params.max_tokens + (start or prompt_tokens), info.max_model_len)
        shortage = info.shortage(params.num_beams, length, source=prompt_tokens if start else 0)
        if shortage is not None:
            needed, there = shortage
            raise ConfigError(
                f"{params.num_beams} beams of {length} tokens need {needed} blocks of KV cache, of {there}"
            )

    def _ids(self, prompt: Prompt) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not isinstance(prompt, str):
            return self._checked(prompt), ()
        if self.tokenizer is None:
            raise ConfigError(f"{self.info.name} has no tokenizer: give token ids")
        try:
            encoded = self.tokenizer.encode(prompt)
        except TypeError:  # a lone surrogate, which no tokenizer takes
            raise ConfigError(f"a prompt is no text that UTF-8 can hold: {prompt[:50]!a}") from None
        return self._checked(encoded.ids), encoded.type_ids

    def _checked(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return token ids as integers; raises `ConfigError` for the first that the vocabulary does not have."""
        size = self.checkpoint.config.source_vocab_size
        for place, id in enumerate(ids):
            if isinstance(id, bool) or not hasattr(id, "__index__") or not 0 <= id < size:
                raise ConfigError(f"token {place} of a prompt must be an id from 0 to {size - 1}, found {id!r}"[:200])
        return tuple(map(index, ids))


def _adapters_located(base: str, lora: object, *, pickle: bool) -> dict[str, Path]:
    """Return the folders of adapters by their names, checked before the base model is loaded. Raises `ConfigError`."""
    if lora is not None and not isinstance(lora, Mapping):
        raise ConfigError(f"lora is {type(lora).__name__}, expected a mapping of names to folders of adapters")
    found = {}
    for name, where in (lora or {}).items():
        if not isinstance(name, str) or not isinstance(where, str | Path):
            raise ConfigError(f"lora has {name!r}: {where!r}, expected a name and the folder of an adapter")
        if names.checked_name(name) == base:
            raise ConfigError(f"an adapter needs another name than its base model, {name}")
        place = str(where) if isinstance(where, Path) else names.checked_adapter(name, where)
        found[name] = hub.local_folder(place, pickle=pickle) if hub_names.is_hub_name(place) else Path(place)
        with errors_about(name):
            read_adapter_settings(found[name], pickle=pickle)
    return found


def _located(path: str | Path, *, pickle: bool) -> tuple[str, Path]:
    """Return a model's name, and its folder or GGUF file; one of the Hub is downloaded. Raises `ConfigError`."""
    text = str(path)
    if isinstance(path, Path) and not hub_names.is_hub_name(text):
        return path.name, path
    found = names.checked(text)
    folder = hub.local_folder(found, pickle=pickle) if hub_names.is_hub_name(found) else Path(found)
    return names.model_name(text), folder

"""Planning of a transcription: a file becomes features that the model can read, or is refused before any work.

The file is decoded in a process of its own, bounded in time, memory and length; features are computed in a thread.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from triptych.model.api.request import Request
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.api.stats import ModelInfo
from triptych.model.checkpoint.speech import SpeechTokens
from triptych.model.speech.audio_file import AudioError, AudioLimits
from triptych.model.speech.log_mel import LogMel
from triptych.model.speech.requests import RequestMaker, SpeechOptions
from triptych.model.speech.transcription import TEMPERATURES
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.core.engine_client import EngineClient
from triptych.service.core.errors import invalid, unavailable
from triptych.service.core.models import Models, ServedModel, Task
from triptych.service.core.request_context import tenant_id
from triptych.service.planning.admission import check_request, check_room, deadline_of, loaded_info
from triptych.service.planning.requests import cache_salt, engine_id, priority_of
from triptych.service.planning.tokenization import TokenizerThreads, check_vocabulary
from triptych.service.sandbox.process_pool import WorkerError
from triptych.service.settings.service_settings import Limits
from triptych.service.speech.audio_pool import AudioPool, AudioRoom, HeldAudio
from triptych.service.speech.bodies import TranscribeBody
from triptych.service.speech.metrics import SpeechMetrics

READS_AUDIO = "transcribes speech"


def reads_audio(served: ServedModel) -> bool:
    """Return whether a model takes audio files."""
    return served.checkpoint.speech is not None and served.checkpoint.log_mel is not None


def lacks_for_audio(served: ServedModel) -> str:
    """Return what the folder of a model that reads sound lacks to transcribe files; "" for other models."""
    return served.checkpoint.lacks_for_speech


@dataclass(slots=True)
class SpeechPlan:
    """Holds an audio that can be transcribed, and how. Who computes it takes the samples."""

    served: ServedModel
    tokenizer: Tokenizer
    log_mel: LogMel
    samples: NDArray[np.float32]
    num_samples: int
    options: SpeechOptions
    maker: RequestMaker
    request_id: str
    streams: bool

    @property
    def seconds(self) -> float:
        """The length of the audio."""
        return self.num_samples / self.log_mel.sampling_rate

    @property
    def is_long(self) -> bool:
        """Whether the audio is longer than a window."""
        return self.num_samples > self.log_mel.window_samples

    @property
    def timestamps(self) -> bool:
        """Whether outputs have timestamps: to find where the next window begins, or because they are asked for."""
        return self.options.writes_timestamps or (self.is_long and not self.options.parallel)

    @property
    def num_positions(self) -> int:
        """Positions of the encoder that the audio takes, as its prompt tokens."""
        return -(-self.num_samples // (2 * self.log_mel.hop_length))

    def take_samples(self) -> NDArray[np.float32]:
        """Return the samples, which the plan then holds no more."""
        samples, self.samples = self.samples, np.zeros(0, np.float32)
        return samples

    def next_id(self) -> str:
        """Return a new id for a request to the engine."""
        return engine_id(self.request_id)


def audio_limits(limits: Limits) -> AudioLimits:
    """Return what a decoder may take and give."""
    return AudioLimits(seconds=limits.max_audio_seconds, file_bytes=limits.max_audio_bytes)


class SpeechPlanner:
    """Makes plans of bodies with audio, for the loaded models."""

    def __init__(
        self,
        models: Models,
        client: EngineClient,
        limits: Limits,
        threads: TokenizerThreads,
        decoders: AudioPool,
        metrics: SpeechMetrics,
    ) -> None:
        self.metrics = metrics
        self._models = models
        self._client = client
        self._limits = limits
        self._threads = threads
        self.decoders = decoders
        self.room = AudioRoom(limits.max_audio_requests, limits.max_audio_held_bytes)

    def close(self) -> None:
        """End the processes that decode."""
        self.decoders.close()

    async def plan(self, body: TranscribeBody, audio: HeldAudio, request_id: str, arrival: float) -> SpeechPlan:
        """Return the plan of a body, whose file `audio` has and gives up; raises `ApiError` if it cannot be served."""
        served = self._models.resolve(body.model, Task.GENERATE)
        self._models.require(served.name, reads_audio, READS_AUDIO, lacks_for_audio)
        tokens, log_mel, info = served.checkpoint.speech, served.checkpoint.log_mel, loaded_info(self._client, served)
        assert tokens is not None and log_mel is not None
        check_request(body.timeout_s, body.priority, self._limits)
        tokenizer = served.require_tokenizer("audio")
        options = self._options(body, served, tokens, info)
        check_room(self._client, served, options.num_beams or 1)
        options = replace(options, prompt=await self._prompt(body, served, info))
        samples = await self._decode(audio.take(), log_mel)
        audio.hold(samples.nbytes)
        template = Request(
            request_id,
            served.name,
            (),
            SamplingParams(),
            priority=priority_of(body.priority),
            cache_salt=cache_salt(body.cache_salt),
            arrival_time=arrival,
            deadline=deadline_of(arrival, body.timeout_s, self._limits),
            streams=body.stream,
            tenant=tenant_id(),
        )
        maker = RequestMaker(
            tokens, options, template, info.max_model_len, served.vocab_size, served.checkpoint.sampling_defaults
        )
        return SpeechPlan(served, tokenizer, log_mel, samples, len(samples), options, maker, request_id, body.stream)

    def _options(
        self, body: TranscribeBody, served: ServedModel, tokens: SpeechTokens, info: ModelInfo
    ) -> SpeechOptions:
        """Return the options of a body; raises if the model cannot do them."""
        if body.timestamps == "word" and not tokens.alignment_heads:
            raise invalid(
                f"timestamps: model {served.name} has no alignment_heads, which words' times need", "timestamps"
            )
        if body.timestamps == "word" and info.tensor_parallel_size > 1:
            raise invalid("timestamps: words' times are not served over several GPUs", "timestamps")
        if body.timestamps == "word" and body.chunking == "parallel" and body.stream:
            raise invalid(
                "timestamps: words of chunks are joined at the end: not with stream and chunking", "timestamps"
            )
        check_vocabulary(body.suppress_tokens, served.vocab_size, "suppress_tokens")
        if body.logprobs is not None and body.logprobs > self._limits.max_logprobs:
            raise invalid(f"logprobs must be at most {self._limits.max_logprobs}", "logprobs")
        if body.logprobs is not None and self._beams(body, served, info) > 1:
            raise invalid("logprobs has no meaning with beam search; send num_beams: 1", "logprobs")
        options = SpeechOptions(
            language=body.language,
            task=body.task,
            timestamps=None if body.timestamps is None else body.timestamps != "none",
            words=body.timestamps == "word",
            parallel=body.chunking == "parallel",
            carries_context=body.condition_on_previous_text,
            temperatures=_temperatures(body),
            forgets_failed=body.stream and len(_temperatures(body)) == 1,
            compression_ratio_threshold=body.compression_ratio_threshold,
            logprob_threshold=body.logprob_threshold,
            no_speech_threshold=body.no_speech_threshold,
            max_tokens=body.max_tokens,
            num_beams=self._beams(body, served, info),
            length_penalty=body.length_penalty,
            top_k=body.top_k or 0,
            top_p=body.top_p or 1.0,
            seed=_seed(body),
            logprobs=body.logprobs,
            suppress_tokens=tuple(body.suppress_tokens),
        )
        try:
            return options.completed(tokens, served.checkpoint.sampling_defaults)
        except ValueError as error:
            field = str(error).partition(":")[0]
            code = "wrong_task" if field == "task" else "invalid_request"
            raise invalid(str(error).replace("the model", f"model {served.name}", 1), field, code) from None

    def _beams(self, body: TranscribeBody, served: ServedModel, info: ModelInfo) -> int:
        """Return the requested number, or the folder's where it has a meaning."""
        defaults = served.checkpoint.sampling_defaults
        drawn = _temperatures(body)[0] > 0 or body.logprobs is not None
        most = min(self._limits.max_beams, info.max_num_seqs)
        beams = body.num_beams or (1 if drawn else min(most, int(defaults.get("num_beams", 1))))
        if beams > most:
            raise invalid(f"num_beams must be at most {most}", "num_beams")
        if beams > 1 and _temperatures(body)[0] > 0:
            raise invalid("num_beams has no meaning with a temperature above 0", "num_beams")
        if beams == 1 and body.length_penalty is not None:
            raise invalid("length_penalty has no meaning without beam search: num_beams is 1", "length_penalty")
        return beams

    async def _prompt(self, body: TranscribeBody, served: ServedModel, info: ModelInfo) -> tuple[int, ...]:
        """Return the ids of the text that comes before the audio; of a long one the end counts."""
        text = (body.initial_prompt or "").strip()
        if not text:
            return ()
        tokenizer, most = served.require_tokenizer("initial_prompt"), self._limits.prompt_characters_per_token
        text = " " + text[-most * info.max_model_len :]

        def work() -> tuple[int, ...]:
            return tokenizer.encode(text, add_special_tokens=False).ids

        ids = await self._threads.run(served.name, len(text), work)
        specials = [one for one in ids if one in tokenizer.special_ids]
        if specials:
            raise invalid("initial_prompt has special tokens in it", "initial_prompt")
        return ids

    async def _decode(self, audio: bytes, log_mel: LogMel) -> NDArray[np.float32]:
        """Return the samples of a file at the model's rate; raises a 400 that names `audio`, a 503 without a worker."""
        try:
            samples = await self.decoders.decode(audio, log_mel.sampling_rate)
        except AudioError as error:
            raise invalid(f"audio: {error}", "audio", "invalid_audio") from None
        except WorkerError as error:
            if error.kind in ("busy", "start"):
                raise unavailable("no process is free to decode audio; try again", "audio_busy", 2) from None
            raise invalid(
                "audio: the file took too long or too much memory to decode", "audio", "invalid_audio"
            ) from None
        if not len(samples):
            raise invalid("audio: the file holds no sound", "audio", "invalid_audio")
        return samples


def _seed(body: TranscribeBody) -> int:
    """Return the client's seed, else a random one if it asks for samples.

    At temperature 0 a file has one transcription, though parts of it may be drawn where likelier outputs have failed.
    """
    if body.seed is not None:
        return body.seed
    return secrets.randbits(62) if _temperatures(body)[0] > 0 else 0


def _temperatures(body: TranscribeBody) -> tuple[float, ...]:
    """Return the temperatures that a window is decoded at, one after the other, until its output is good.

    A stream shows text before its window is complete, so it has one alone unless the client names more. An output that
    fails is shown then, but is no context: else one that repeats itself would make the next one do so too.
    """
    given = body.temperature
    if given is None or given == 0:
        return (0.0,) if body.stream else TEMPERATURES
    return (given,) if isinstance(given, (int, float)) else tuple(given)

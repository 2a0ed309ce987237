"""The table of sampling parameters, which is the dataclass that the engine gets. Stdlib only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from triptych.model.api.engine_config import MAX_SPECULATIVE_TOKENS
from triptych.model.api.parameters import EXTRA, MAX_INT, OWN, Beams, Column, internal, parameter, parameters_of
from triptych.model.api.timestamp_rules import TimestampRules


@dataclass(frozen=True, slots=True)
class Probe:
    """A question to the prefill of a prompt: how likely some tokens are after one of its tokens."""

    position: int  # in the prompt; what is asked for would come next
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LineStop:
    """Ends an output at a line break; llama.cpp's, for editors."""

    indent: int = 0  # before a line that begins with fewer spaces and tabs
    seconds: float = 0.0  # after a line that ends this long after the first token; 0: never


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop; the default is greedy decoding up to `max_tokens`."""

    max_tokens: int = parameter(
        16,
        "Maximum number of tokens to generate.",
        64,
        otherwise="the checkpoint's, else `default_max_tokens` (256), within the context",
        least=1,
        most=MAX_INT,
        optional=True,
        openai="max_tokens",
        responses="max_output_tokens",
        messages="max_tokens",
        huggingface="max_new_tokens",
        text2text="max_new_tokens",
        ollama="num_predict",
        llama_cpp="n_predict",
    )
    min_tokens: int = parameter(
        0,
        "End-of-sequence and stops are ignored before this many tokens.",
        0,
        least=0,
        most=MAX_INT,
        optional=True,
        openai=EXTRA,
        text2text="min_new_tokens",
    )
    temperature: float = parameter(
        0.0,
        "Divides the logits; 0 (or less than 0.0001) is greedy.",
        0.8,
        otherwise="the checkpoint's, else 0",
        least=0,
        most=100,
        folder=True,
        draws=True,
        flag=True,
        openai="temperature",
        responses="temperature",
        messages="temperature",
        huggingface="temperature",
        text2text="temperature",
        ollama=OWN,
        llama_cpp=OWN,
    )
    top_k: int = parameter(
        0,
        "Sample among the k most likely; 0: off.",
        40,
        least=0,
        most=MAX_INT,
        folder=True,
        draws=True,
        beams=Beams.UNREAD,
        flag=True,
        openai="top_k",
        responses="top_k",
        messages=OWN,
        huggingface=OWN,
        text2text=OWN,
        ollama=OWN,
        llama_cpp=OWN,
    )
    top_p: float = parameter(
        1.0,
        "Sample among the most likely tokens that have this total probability.",
        0.95,
        above=0,
        most=1,
        folder=True,
        draws=True,
        beams=Beams.UNREAD,
        flag=True,
        openai=OWN,
        responses=OWN,
        messages=OWN,
        huggingface=OWN,
        text2text=OWN,
        ollama=OWN,
        llama_cpp=OWN,
    )
    min_p: float = parameter(
        0.0,
        "Exclude tokens less likely than this share of the most likely one.",
        0.05,
        least=0,
        most=1,
        folder=True,
        draws=True,
        beams=Beams.UNREAD,
        flag=True,
        openai=EXTRA,
        responses=EXTRA,
        text2text=OWN,
        ollama=OWN,
        llama_cpp=OWN,
    )
    typical_p: float = parameter(
        1.0,
        "Sample among the tokens whose information is closest to the entropy, with this total probability.",
        0.9,
        above=0,
        most=1,
        folder=True,
        draws=True,
        beams=Beams.UNREAD,
        huggingface=OWN,
        text2text=OWN,
        ollama=OWN,
        llama_cpp=OWN,
    )
    top_n_sigma: float = parameter(  # Tang et al. 2024
        -1.0,
        "Sample among the tokens whose logits are at most this many standard deviations of all logits below the "
        "largest; 0 or -1: off.",
        1.0,
        least=-1,
        most=100,
        draws=True,
        beams=Beams.UNREAD,
        openai=EXTRA,
        responses=EXTRA,
        llama_cpp=OWN,
    )
    epsilon_cutoff: float = parameter(
        0.0, "Tokens below this probability are not drawn.", least=0, most=1, sent=False, folder=True, draws=True
    )
    eta_cutoff: float = parameter(
        0.0,
        "The same, with a bound that falls with the entropy (Hewitt et al. 2022).",
        least=0,
        most=1,
        sent=False,
        folder=True,
        draws=True,
    )
    seed: int = parameter(
        0,
        "The same request and seed give the same tokens, on a CPU in any batch. On a GPU the batch may change them.",
        7,
        otherwise="random",
        least=0,
        most=2**63 - 1,
        beams=Beams.UNREAD,
        flag=True,
        openai="seed",
        responses=EXTRA,
        messages=EXTRA,
        huggingface=OWN,
        text2text=OWN,
        ollama=OWN,
        llama_cpp="seed",
    )
    n: int = parameter(
        1,
        "Number of choices for each prompt, at most 8.",
        1,
        2,
        least=1,
        most=MAX_INT,
        limit="max_n",
        openai="n",
        text2text="num_return_sequences",
    )
    num_beams: int = parameter(
        1,
        "2 to 8: beam search, which returns its n best hypotheses at the end, fewer where few outputs are possible. "
        "Not with sampling, stop texts or log-probabilities.",
        4,
        otherwise="the checkpoint's, else 1",
        least=1,
        most=MAX_INT,
        limit="max_beams",
        folder=True,
        flag=True,
        text2text=OWN,
    )
    length_penalty: float = parameter(
        1.0,
        "Beam search compares score / length ** length_penalty: above 0 favours long outputs.",
        1.0,
        otherwise="the checkpoint's, else 1",
        least=-10,
        most=10,
        folder=True,
        beams=Beams.ONLY,
        text2text=OWN,
    )
    early_stopping: bool | Literal["never"] = parameter(
        False,
        "Beam search ends at num_beams hypotheses (true), when a better one is unlikely (false), or when none is "
        "possible (never).",
        False,
        otherwise="the checkpoint's, else false",
        folder=True,
        beams=Beams.ONLY,
        text2text="early_stopping",
    )
    stop: tuple[str, ...] = parameter(
        (),
        "Up to 4 texts of 1 to 256 characters that end the output before them.",
        "\n\n",
        ["\nclass ", "\ndef "],
        limit="max_stop_strings",
        beams=Beams.UNREAD,
        openai="stop",
        responses="stop",
        messages="stop_sequences",
        huggingface="stop",
        ollama="stop",
        llama_cpp="stop",
    )
    stop_token_ids: tuple[int, ...] = parameter(  # the engine adds the checkpoint's EOS ids unless `ignore_eos`
        (), "Up to 128 ids that end the output.", [2], limit="max_stop_token_ids", openai=EXTRA
    )
    include_stop: bool = parameter(
        False, "Keep the stop text in the output.", False, openai="include_stop_str_in_output"
    )
    ignore_eos: bool = parameter(False, "Continue after the end-of-sequence id.", False, openai=EXTRA, llama_cpp=OWN)
    repetition_penalty: float = parameter(  # Keskar et al. 2019
        1.0,
        "Above 1 makes tokens of prompt and output less likely.",
        1.1,
        otherwise="the checkpoint's, else 1",
        least=0.01,
        most=100,
        folder=True,
        flag=True,
        openai=EXTRA,
        responses=EXTRA,
        huggingface=OWN,
        text2text=OWN,
        ollama="repeat_penalty",
        llama_cpp="repeat_penalty",
    )
    no_repeat_ngram_size: int = parameter(
        0,
        "No sequence of this many tokens occurs twice; 0: off.",
        3,
        otherwise="the checkpoint's, else 0",
        least=0,
        most=MAX_INT,
        folder=True,
        text2text=OWN,
    )
    encoder_no_repeat_ngram_size: int = parameter(
        0,
        "No sequence of this many tokens of the source (or prompt) occurs in the output; 0: off.",
        least=0,
        most=MAX_INT,
        sent=False,
        folder=True,
    )
    encoder_repetition_penalty: float = parameter(
        1.0,
        "Above 1 makes the tokens of the source (or prompt) likelier.",
        least=0.01,
        most=100,
        sent=False,
        folder=True,
    )
    exponential_decay_length_penalty: tuple[int, float] | None = parameter(
        None, "(start, factor): after `start` tokens an end grows likelier.", sent=False, folder=True
    )
    renormalize_logits: bool = parameter(
        False,
        "The scores of beams are log-probabilities again after bans and penalties.",
        sent=False,
        folder=True,
    )
    presence_penalty: float = parameter(
        0.0,
        "Subtracted from the logits of tokens in the output.",
        0.0,
        least=-2,
        most=2,
        openai=OWN,
        responses=EXTRA,
        ollama=OWN,
        llama_cpp=OWN,
    )
    frequency_penalty: float = parameter(
        0.0,
        "The same, multiplied by the number of occurrences.",
        0.0,
        least=-2,
        most=2,
        openai=OWN,
        responses=EXTRA,
        huggingface=OWN,
        ollama=OWN,
        llama_cpp=OWN,
    )
    penalty_window: int = parameter(
        0,
        "The three penalties look at this many tokens, the last ones of prompt and output; 0: that of repetition at "
        "all tokens, the others at the output.",
        64,
        least=0,
        most=MAX_INT,
        ollama="repeat_last_n",
        llama_cpp="repeat_last_n",
    )
    logit_bias: dict[int, float] = parameter(
        dict,
        "Added to the logits of up to 300 token ids.",
        {"42": -5.0},
        least=-100,
        most=100,
        limit="max_logit_bias",
        openai=OWN,
        llama_cpp="logit_bias",
    )
    allowed_token_ids: tuple[int, ...] = parameter(  # bans give way if nothing is left
        (),
        "Up to 300 ids: no others are generated, the end-of-sequence id neither unless it is among them. Not with "
        "`response_format`, `regex`, `choice` or `grammar`.",
        [15, 16, 17],
        otherwise="all",
        least=1,
        limit="max_logit_bias",
        optional=True,
        openai="allowed_token_ids",
    )
    suppress_tokens: tuple[int, ...] = parameter(  # the engine adds the checkpoint's own
        (),
        "Up to 300 ids that are not generated, in addition to those that the checkpoint suppresses.",
        [50256],
        limit="max_logit_bias",
    )
    begin_suppress_tokens: tuple[int, ...] = internal(())  # not generated as the first token
    num_speculative_tokens: int | None = parameter(
        None,
        "Draft up to this many tokens a step where the output repeats the prompt, the source or itself (n-gram "
        "speculation); 0: off. The output is the same, on a GPU but for rounding.",
        8,
        otherwise="the server's setting",
        least=0,
        most=MAX_SPECULATIVE_TOKENS,
        beams=Beams.NEVER,
        openai=EXTRA,
        ollama="draft_num_predict",
    )
    logprobs: int | None = parameter(
        None,
        "Return the log-probability of each output token under the model's own distribution, with this many (at most "
        "20) most likely alternatives.",
        3,
        least=0,
        most=MAX_INT,
        limit="max_logprobs",
        beams=Beams.NEVER,
        llama_cpp="n_probs",
    )
    prompt_logprobs: int | None = parameter(
        None,
        "The same for the prompt; the first entry is null.",
        0,
        least=0,
        most=MAX_INT,
        limit="max_logprobs",
        beams=Beams.NEVER,
    )
    skip_special_tokens: bool = parameter(
        True, "Leave special tokens such as end-of-sequence out of the text.", True, openai=EXTRA
    )
    shown_special_ids: tuple[int, ...] = internal(())  # special tokens that have a text although others are skipped
    line_stop: LineStop | None = internal(None)
    grammar: str = internal("")  # the whole output must match it (`triptych.model.text.grammar`); empty: none
    timestamps: TimestampRules | None = internal(None)  # which the output follows
    cumulative_logprob: bool = internal(False)  # outputs say the log-probability of all tokens so far
    probe: Probe | None = internal(None)  # the first output says how likely these tokens were


SAMPLING: dict[str, Column] = parameters_of(SamplingParams)

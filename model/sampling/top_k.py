"""The likeliest tokens of rows of logits, and the rows' logsumexp, by which logits become log-probabilities.

Each row depends on nothing but itself, the last bit included. On a CPU the native kernels do it where they are in use:
torch takes four to six times as long for rows of 50,000.
"""

from __future__ import annotations

from torch import Tensor

from model.native.library import loaded

_MOST = 256  # ranks that are kept in order one by one


def top_k_logsumexp(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` highest of logits `[B, V]`, at most V of them, in descending order: values `[B, count]`, tokens
    `[B, count]`, and log sum exp of each row `[B, 1]`, in float32. Of equals the first comes first.
    """
    logits, count = logits.float(), min(count, logits.shape[1])
    library = loaded() if logits.device.type == "cpu" else None
    if library is None:
        return *_highest(logits, count), _logsumexp(logits)
    values, tokens, logsumexp = library.run_ranking(logits.contiguous(), max(1, min(count, _MOST)))
    values, tokens, unsure = values[:, :count], tokens[:, :count], logsumexp.isnan()[:, 0]
    if unsure.any():  # the other rows keep what they have
        logsumexp[unsure] = _logsumexp(logits[unsure])
    if count > _MOST:
        values, tokens = _highest(logits, count)
    elif unsure.any():
        values[unsure], tokens[unsure] = _highest(logits[unsure], count)
    return values, tokens, logsumexp


def _highest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk` with an order among equals, so that a row's is the same however many its neighbours ask for.

    On a GPU that is so within the list alone: which of the equals at its end are in it, the device decides.
    """
    values, tokens = logits.topk(count, dim=-1)
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(-1, order)
    if count and logits.device.type == "cpu":
        edge = values[:, -1:]
        left_out = (logits == edge).sum(dim=-1) > (values == edge).sum(dim=-1)
        for row in (left_out & ~edge[:, 0].isneginf()).nonzero()[:, 0].tolist():
            tokens[row] = logits[row].sort(descending=True, stable=True).indices[:count]
    return values, tokens


def _logsumexp(logits: Tensor) -> Tensor:
    """log sum exp of each row, `[B, 1]`. A lone one is taken twice, as torch would share its sum among threads."""
    if len(logits) > 1:
        return logits.logsumexp(dim=-1, keepdim=True)
    return logits.expand(2, -1).logsumexp(dim=-1, keepdim=True)[:1]

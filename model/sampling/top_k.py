"""Top-k and logsumexp of rows of logits; a logit minus its row's logsumexp is a log-probability.

The result of a row depends only on that row, bit for bit. On a CPU the native kernels compute it if they are in use:
torch takes four to six times as long for rows of 50,000.
"""

from __future__ import annotations

from torch import Tensor

from model.native.library import loaded

_MAX_NATIVE = 256  # the native kernel's bound on k; it keeps its candidates in order by insertion


def top_k_logsumexp(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the top `count` (at most V) of logits `[B, V]` and their logsumexp, in float32.

    The results are values `[B, count]` in descending order, tokens `[B, count]` and logsumexp `[B, 1]`. Equal values
    are in the order of their tokens.
    """
    logits, count = logits.float(), min(count, logits.shape[1])
    library = loaded() if logits.device.type == "cpu" else None
    if library is None:
        return *_stable_top_k(logits, count), _logsumexp(logits)
    values, tokens, logsumexp = library.run_top_k(logits.contiguous(), max(1, min(count, _MAX_NATIVE)))
    values, tokens, failed = values[:, :count], tokens[:, :count], logsumexp.isnan()[:, 0]
    if failed.any():  # only these rows are computed again
        logsumexp[failed] = _logsumexp(logits[failed])
    if count > _MAX_NATIVE:
        values, tokens = _stable_top_k(logits, count)
    elif failed.any():
        values[failed], tokens[failed] = _stable_top_k(logits[failed], count)
    return values, tokens, logsumexp


def _stable_top_k(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute `topk` with equal values in the order of their tokens, so that no row depends on `count`.

    On a GPU this holds within the list only: the device decides which of the values equal to its last one are in it.
    """
    values, tokens = logits.topk(count, dim=-1)
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(-1, order)
    if count and logits.device.type == "cpu":
        last = values[:, -1:]
        tie_cut = (logits == last).sum(dim=-1) > (values == last).sum(
            dim=-1
        )  # some values equal to the last are not in
        for row in (tie_cut & ~last[:, 0].isneginf()).nonzero()[:, 0].tolist():
            tokens[row] = logits[row].sort(descending=True, stable=True).indices[:count]
    return values, tokens


def _logsumexp(logits: Tensor) -> Tensor:
    """Return each row's logsumexp `[B, 1]`. A single row is computed twice: torch would split its sum over threads."""
    if len(logits) > 1:
        return logits.logsumexp(dim=-1, keepdim=True)
    return logits.expand(2, -1).logsumexp(dim=-1, keepdim=True)[:1]

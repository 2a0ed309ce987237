"""Triton's kernels of recurrent layers (`GatedDeltaConfig`), for decoding and for prompts.

Everything is computed in float32 and rounded once. Heads of values are divided among programs, one each; a key head's
convolution is computed by each of them, and kept by the first. Import this module only if Triton is installed.
"""

from __future__ import annotations

import triton
from triton import language as tl

from triptych.model.system.held_kernels import held

_LENGTH_EPS = tl.constexpr(1e-6)  # of queries' and keys' squared lengths
_COARSE = tl.constexpr(256.0)  # decays' logarithms are summed in multiples of its reciprocal, and what is left
_VANISHED = tl.constexpr(-128.0)  # the logarithm of a decay that leaves nothing in float32
_TABLES = ["spans", "segments", "chunks"]  # views of larger tensors
_COUNTS = ["count", "segment_count", "tokens"]


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """`log(1 + e^x)`, also where that is no more than `e^x`; from 20 on it is x."""
    e = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + e
    small = one == 1.0
    found = tl.where(small, e, tl.log(one) * (e / tl.where(small, 1.0, one - 1.0)))
    return tl.where(x > 20.0, x, found)


@triton.jit
def _decay(gates, decay, dt_bias, head, live, HEADS: tl.constexpr):
    """Return the logarithms of the decays of the tokens whose gates begin at the pointers `gates`."""
    a = tl.load(gates + HEADS + head, mask=live, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(decay + head).to(tl.float32))
    return -rate * _softplus(a + tl.load(dt_bias + head).to(tl.float32))


@triton.jit
def _tap(inputs, kept, at, first, source, channels, there, input_row, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Return channels of rows before the convolution, float32: of this step, or what is kept of those before it.

    Rows `at` and `first`, the segment's, count from `inputs`; `kept` is the slot `source`, unread if that is negative.
    """
    x = tl.load(inputs + at * input_row + channels, mask=there & (at >= first), other=0.0).to(tl.float32)
    if kept is not None:
        place = at - first + TAPS - 1
        x += tl.load(kept + place * CHANNELS + channels, mask=there & (at < first) & (source >= 0), other=0.0)
    return x


@triton.jit
def _convolved(
    inputs, kept, convolution, at, first, source, channels, there, input_row,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Return silu of the convolution at rows `at`."""
    weight = tl.load(convolution + channels * TAPS + TAPS - 1, mask=there, other=0.0).to(tl.float32)
    total = _tap(inputs, kept, at, first, source, channels, there, input_row, CHANNELS, TAPS) * weight
    for back in tl.static_range(1, TAPS):
        weight = tl.load(convolution + channels * TAPS + TAPS - 1 - back, mask=there, other=0.0).to(tl.float32)
        total += _tap(inputs, kept, at - back, first, source, channels, there, input_row, CHANNELS, TAPS) * weight
    return _silu(total)


@triton.jit
def _keep(
    inputs, kept, into, end, first, source, channels, there, input_row, CHANNELS: tl.constexpr, TAPS: tl.constexpr
):
    """Keep the last rows before `end` in the slot that begins at `into`."""
    for tap in tl.static_range(TAPS - 1):
        x = _tap(inputs, kept, end - (TAPS - 1) + tap, first, source, channels, there, input_row, CHANNELS, TAPS)
        tl.store(into + tap * CHANNELS + channels, x, mask=there)


@held
@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_TABLES)
def step_states(
    inputs,  # [T, CHANNELS + HEADS * VALUE_DIM]
    gates,  # [T, 2 HEADS]
    convolution,  # [CHANNELS, TAPS]
    decay,  # [HEADS]
    dt_bias,  # [HEADS]
    gain,  # [VALUE_DIM]
    spans,  # [3, S] int64: row, slot read, slot written, negative where there is none
    recurrent,  # [slots, HEADS, KEY_DIM, VALUE_DIM], or None
    kept,  # [slots, TAPS - 1, CHANNELS], or None
    out,  # [T, HEADS * VALUE_DIM]
    count,  # S
    input_row,  # strides
    gates_row,
    eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute a layer for single tokens, between its projections. Grid: value heads, tokens."""
    SHARED: tl.constexpr = HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    head, span = tl.program_id(0), tl.program_id(1)
    row, source, target = tl.load(spans + span), tl.load(spans + count + span), tl.load(spans + 2 * count + span)
    inputs += row * input_row
    gates += row * gates_row
    before = kept  # where the rows of the slot `source` begin; None if nothing is kept
    if kept is not None:
        before += source * ((TAPS - 1) * CHANNELS)
    k_dims, v_dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k_there, v_there = k_dims < KEY_DIM, v_dims < VALUE_DIM
    q_at = head // SHARED * KEY_DIM + k_dims
    k_at = KEY_HEADS * KEY_DIM + q_at
    v_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v_dims
    q = _convolved(inputs, before, convolution, 0, 0, source, q_at, k_there, input_row, CHANNELS, TAPS)
    k = _convolved(inputs, before, convolution, 0, 0, source, k_at, k_there, input_row, CHANNELS, TAPS)
    v = _convolved(inputs, before, convolution, 0, 0, source, v_at, v_there, input_row, CHANNELS, TAPS)
    q *= tl.rsqrt(tl.sum(q * q) + _LENGTH_EPS) * (KEY_DIM**-0.5)
    k *= tl.rsqrt(tl.sum(k * k) + _LENGTH_EPS)
    rate = tl.sigmoid(tl.load(gates + head).to(tl.float32))
    fade = tl.exp(_decay(gates, decay, dt_bias, head, True, HEADS))
    at = k_dims[:, None] * VALUE_DIM + v_dims[None, :]
    there = k_there[:, None] & v_there[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if recurrent is not None:
        own = recurrent + (source * HEADS + head) * (KEY_DIM * VALUE_DIM)
        state = tl.load(own + at, mask=there & (source >= 0), other=0.0) * fade
    change = (v - tl.sum(state * k[:, None], axis=0)) * rate
    state += k[:, None] * change[None, :]
    o = tl.sum(state * q[:, None], axis=0)
    if recurrent is not None:  # noqa: SIM102 - known when a kernel is compiled
        if target >= 0:
            tl.store(recurrent + (target * HEADS + head) * (KEY_DIM * VALUE_DIM) + at, state, mask=there)
            into = kept + target * ((TAPS - 1) * CHANNELS)
            _keep(inputs, before, into, 1, 0, source, v_at, v_there, input_row, CHANNELS, TAPS)
            if head % SHARED == 0:
                _keep(inputs, before, into, 1, 0, source, q_at, k_there, input_row, CHANNELS, TAPS)
                _keep(inputs, before, into, 1, 0, source, k_at, k_there, input_row, CHANNELS, TAPS)
    o *= tl.rsqrt(tl.sum(o * o) / VALUE_DIM + eps) * tl.load(gain + v_dims, mask=v_there, other=0.0).to(tl.float32)
    column = head * VALUE_DIM + v_dims
    gate = tl.load(inputs + CHANNELS + column, mask=v_there, other=0.0).to(tl.float32)
    tl.store(out + row * (HEADS * VALUE_DIM) + column, (o * _silu(gate)).to(out.dtype.element_ty), mask=v_there)


@triton.jit
def _between(coarse_to, fine_to, coarse_from, fine_from):
    """Return the products of decays between tokens whose logarithms' sums are given in two parts.

    The difference of coarse parts is exact: of two sums in float32 that are in the thousands it would lose digits.
    """
    return tl.exp(tl.minimum((coarse_to - coarse_from) + (fine_to - fine_from), 0.0))


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of `1 + lower`; only the entries below the diagonal are read.

    Inverses of blocks on the diagonal are joined to those of blocks twice as large:
    that of `[[A, 0], [L, C]]` is `[[A', 0], [-C' L A', C']]`.
    """
    t, s = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    found = tl.where(t == s, 1.0, tl.where((t // 2 == s // 2) & (t > s), -lower, 0.0))
    for level in tl.static_range(1, 8):
        if (1 << level) < CHUNK:
            corner = (t >> (level + 1) == s >> (level + 1)) & (t >> level > s >> level)
            joined = tl.dot(tl.where(corner, lower, 0.0), found, input_precision=PRECISION)
            found -= tl.dot(found, joined, input_precision=PRECISION)
    return found


@held
@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_TABLES)
def solve_chunks(
    inputs,  # as `step_states`
    gates,
    convolution,
    decay,
    dt_bias,
    chunks,  # [5, N] int64: rows from, up to; row that the segment begins with; slots read and written, or negative
    kept,
    queries,  # [T, KEY_HEADS, KEY_DIM] float32, as the following: of length 1, scaled
    keys,  # [T, KEY_HEADS, KEY_DIM]
    sums,  # [2, T, HEADS] of decays' logarithms from the chunk's first token, coarse and fine parts
    weights,  # [T, HEADS, KEY_DIM]
    changes,  # [T, HEADS, VALUE_DIM]
    count,  # N
    tokens,  # T
    input_row,
    gates_row,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    FINE: tl.constexpr,  # the precision of the inverse
):
    """Compute what a chunk of a prompt needs no state for. Grid: chunks, value heads.

    With G_t the product of decays up to t and T the inverse of `1 + b_t (G_t / G_s) (k_t . k_s)` below the diagonal,
    the changes of the state are `T (b v) - T (b G k) S_0` (`triptych.model.network.delta_net`): `changes` and
    `weights`.
    """
    SHARED: tl.constexpr = HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, source = tl.load(chunks + chunk), tl.load(chunks + 3 * count + chunk)
    end = (tl.load(chunks + count + chunk) - begin).to(tl.int32)  # rows count from the chunk's first
    first = (tl.load(chunks + 2 * count + chunk) - begin).to(tl.int32)
    inputs += begin * input_row
    gates += begin * gates_row
    before = kept  # where the rows of the slot `source` begin; None if nothing is kept
    if kept is not None:
        before += source * ((TAPS - 1) * CHANNELS)
    row = tl.arange(0, CHUNK)
    live = row < end
    k_dims, v_dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k_there, v_there = k_dims < KEY_DIM, v_dims < VALUE_DIM
    leads, key_head = head % SHARED == 0, head // SHARED
    q_at = key_head * KEY_DIM + k_dims
    k_at = KEY_HEADS * KEY_DIM + q_at
    v_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v_dims
    at, there = row[:, None], live[:, None] & k_there[None, :]
    own_key = (begin * KEY_HEADS + key_head) * KEY_DIM
    of_keys = row[:, None] * (KEY_HEADS * KEY_DIM) + k_dims[None, :]
    if leads:
        q = _convolved(inputs, before, convolution, at, first, source, q_at[None, :], there, input_row, CHANNELS, TAPS)
        q *= (tl.rsqrt(tl.sum(q * q, axis=1) + _LENGTH_EPS) * (KEY_DIM**-0.5))[:, None]
        tl.store(queries + own_key + of_keys, q, mask=there)
    k = _convolved(inputs, before, convolution, at, first, source, k_at[None, :], there, input_row, CHANNELS, TAPS)
    k *= tl.rsqrt(tl.sum(k * k, axis=1) + _LENGTH_EPS)[:, None]
    if leads:
        tl.store(keys + own_key + of_keys, k, mask=there)
    of_gates = gates + row * gates_row
    rate = tl.where(live, tl.sigmoid(tl.load(of_gates + head, mask=live, other=0.0).to(tl.float32)), 0.0)
    fade = tl.where(live, tl.maximum(_decay(of_gates, decay, dt_bias, head, live, HEADS), _VANISHED), 0.0)
    rounded = tl.floor(fade * _COARSE + 0.5) / _COARSE
    coarse, fine = tl.cumsum(rounded, axis=0), tl.cumsum(fade - rounded, axis=0)
    own_sum = begin * HEADS + head
    tl.store(sums + own_sum + row * HEADS, coarse, mask=live)
    tl.store(sums + tokens.to(tl.int64) * HEADS + own_sum + row * HEADS, fine, mask=live)
    between = _between(coarse[:, None], fine[:, None], coarse[None, :], fine[None, :])
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * rate[:, None]
    solved = _inverse(system, CHUNK, FINE)
    weight = tl.dot(solved, k * (rate * tl.exp(coarse + fine))[:, None], input_precision=PRECISION)
    of_weights = row[:, None] * (HEADS * KEY_DIM) + k_dims[None, :]
    tl.store(weights + own_sum * KEY_DIM + of_weights, weight, mask=there)
    there = live[:, None] & v_there[None, :]
    v = _convolved(inputs, before, convolution, at, first, source, v_at[None, :], there, input_row, CHANNELS, TAPS)
    change = tl.dot(solved, v * rate[:, None], input_precision=PRECISION)
    of_changes = row[:, None] * (HEADS * VALUE_DIM) + v_dims[None, :]
    tl.store(changes + own_sum * VALUE_DIM + of_changes, change, mask=there)
    if kept is not None:
        target = tl.load(chunks + 4 * count + chunk)
        if target >= 0:
            into = kept + target * ((TAPS - 1) * CHANNELS)
            _keep(inputs, before, into, end, first, source, v_at, v_there, input_row, CHANNELS, TAPS)
            if leads:
                _keep(inputs, before, into, end, first, source, q_at, k_there, input_row, CHANNELS, TAPS)
                _keep(inputs, before, into, end, first, source, k_at, k_there, input_row, CHANNELS, TAPS)


@held
@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_TABLES)
def scan_chunks(
    segments,  # [3, B] int64: chunks from, up to; the slot read, or negative
    chunks,  # as `solve_chunks`
    recurrent,  # [slots, HEADS, KEY_DIM, VALUE_DIM], or None
    queries,
    keys,
    sums,
    weights,
    changes,  # [T, HEADS, VALUE_DIM], replaced by the outputs
    count,
    segment_count,  # B
    tokens,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take the states through the chunks of each segment. Grid: segments, value heads, blocks of values."""
    SHARED: tl.constexpr = HEADS // KEY_HEADS
    segment, head = tl.program_id(0), tl.program_id(1)
    v_dims = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_dims, row = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
    k_there, v_there = k_dims < KEY_DIM, v_dims < VALUE_DIM
    first_chunk, end_chunk = tl.load(segments + segment), tl.load(segments + segment_count + segment)
    source = tl.load(segments + 2 * segment_count + segment)
    at = k_dims[:, None] * VALUE_DIM + v_dims[None, :]
    there = k_there[:, None] & v_there[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if recurrent is not None:
        own = recurrent + (source * HEADS + head) * (KEY_DIM * VALUE_DIM)
        state = tl.load(own + at, mask=there & (source >= 0), other=0.0)
    fine_sums = sums + tokens.to(tl.int64) * HEADS
    of_keys = row[:, None] * (KEY_HEADS * KEY_DIM) + k_dims[None, :]
    of_weights = row[:, None] * (HEADS * KEY_DIM) + k_dims[None, :]
    of_changes = row[:, None] * (HEADS * VALUE_DIM) + v_dims[None, :]
    for chunk in range(first_chunk, end_chunk):
        begin, end = tl.load(chunks + chunk), tl.load(chunks + count + chunk)
        live = row < (end - begin).to(tl.int32)
        has_key, has_value = live[:, None] & k_there[None, :], live[:, None] & v_there[None, :]
        own_sum, own_key = begin * HEADS + head, (begin * KEY_HEADS + head // SHARED) * KEY_DIM
        coarse = tl.load(sums + own_sum + row * HEADS, mask=live, other=0.0)
        fine = tl.load(fine_sums + own_sum + row * HEADS, mask=live, other=0.0)
        weight = tl.load(weights + own_sum * KEY_DIM + of_weights, mask=has_key, other=0.0)
        own_changes = changes + own_sum * VALUE_DIM
        change = tl.load(own_changes + of_changes, mask=has_value, other=0.0)
        change -= tl.dot(weight, state, input_precision=PRECISION)
        q = tl.load(queries + own_key + of_keys, mask=has_key, other=0.0)
        k = tl.load(keys + own_key + of_keys, mask=has_key, other=0.0)
        between = _between(coarse[:, None], fine[:, None], coarse[None, :], fine[None, :])
        seen = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        seen = tl.where(row[:, None] >= row[None, :], seen * between, 0.0)
        output = tl.dot(q, state, input_precision=PRECISION) * tl.exp(coarse + fine)[:, None]
        output += tl.dot(seen, change, input_precision=PRECISION)
        tl.store(own_changes + of_changes, output, mask=has_value)
        last = (end - 1) * HEADS + head  # read only here: with all four operands Triton 3.6 spills for Hopper
        coarse_end, fine_end = tl.load(sums + last), tl.load(fine_sums + last)
        left = k * _between(coarse_end, fine_end, coarse, fine)[:, None]
        state = state * tl.exp(coarse_end + fine_end)
        state += tl.dot(tl.trans(left), change, input_precision=PRECISION)
        if recurrent is not None:
            target = tl.load(chunks + 4 * count + chunk)
            if target >= 0:
                tl.store(recurrent + (target * HEADS + head) * (KEY_DIM * VALUE_DIM) + at, state, mask=there)


@held
@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_TABLES)
def gate_outputs(
    inputs,  # as `step_states`
    outputs,  # [T, HEADS, VALUE_DIM] float32
    gain,
    chunks,
    out,  # [T, HEADS * VALUE_DIM]
    count,
    input_row,
    eps,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Normalise the outputs of chunks head by head, and multiply them by their gate. Grid: chunks, value heads."""
    chunk, head, dims = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK_V)
    begin, row = tl.load(chunks + chunk), tl.arange(0, CHUNK)
    inside = dims < VALUE_DIM
    there = (row < (tl.load(chunks + count + chunk) - begin).to(tl.int32))[:, None] & inside[None, :]
    column = head * VALUE_DIM + dims[None, :]
    at = row[:, None] * (HEADS * VALUE_DIM) + column
    own = begin * (HEADS * VALUE_DIM)
    o = tl.load(outputs + own + at, mask=there, other=0.0)
    factor = tl.rsqrt(tl.sum(o * o, axis=1) / VALUE_DIM + eps)
    o = o * factor[:, None] * tl.load(gain + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
    gates = inputs + begin * input_row + CHANNELS
    gate = tl.load(gates + row[:, None] * input_row + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + own + at, (o * _silu(gate)).to(out.dtype.element_ty), mask=there)

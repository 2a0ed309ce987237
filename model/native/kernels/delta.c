/* Gated DeltaNet (Yang et al. 2025): each value head has a state S [key_dim][value_dim] that every token changes.
 *
 *     S_t = g S + k (b (v - g S^T k))^T        o_t = S_t^T q = g S^T q + (k . q) b (v - g S^T k)        S = S_(t-1)
 *
 * Tokens are taken one after the other, whatever the step: a row's bits depend on its sequence alone. Columns of a
 * state need nothing of each other, so threads divide heads and slices of columns, which stay in the first cache; a
 * token's change is made in the same pass in which the next token reads what comes of it. */
#define _GNU_SOURCE /* sched_getcpu */
#include "delta.h"

#define SLICE_VECS 4                 /* of a row of a slice: the number of independent sums */
#define SLICE (SLICE_VECS * LANES)
#define FIXED_ROWS 2                 /* what reading and writing a state costs, in rows */
#define LENGTH_EPS 1e-6f             /* of squared lengths of queries and keys */
#define SOFTPLUS_LINEAR 20.0f        /* from here on log(1 + e^x) is x */

void measure_delta(const DeltaLayer *layer, DeltaSizes *sizes) {
    int64_t values = layer->value_heads * layer->value_dim;
    sizes->keys = max_i64(sizes->keys, 2 * layer->key_heads * layer->key_dim);
    sizes->values = max_i64(sizes->values, values);
    sizes->heads = max_i64(sizes->heads, layer->value_heads);
    sizes->products = max_i64(sizes->products, layer->key_heads);
    sizes->mixed = max_i64(sizes->mixed, delta_channels(layer) + values);
    sizes->state_bytes = max_i64(sizes->state_bytes, layer->key_dim * SLICE * (int64_t)sizeof(float));
}

void take_delta_buffers(Scratch *scratch, const DeltaSizes *sizes, int64_t hidden, int64_t rows, DeltaBuffers *b) {
    int64_t number = sizeof(float);
    if (!sizes->heads) return;
    b->normed = scratch_take(scratch, rows * hidden * number);
    b->gates = scratch_take(scratch, rows * 2 * sizes->heads * number);
    b->keys = scratch_take(scratch, rows * sizes->keys * number);
    b->values = scratch_take(scratch, rows * sizes->values * number);
    b->products = scratch_take(scratch, rows * sizes->products * number);
}

/* One layer's part of a step, as one of its threads sees it. */
typedef struct {
    const ThreadContext *team;
    const DeltaLayer *layer;
    const DeltaBuffers *buffers;
    const LayerStates *states;
    const StateSpan *spans;
    int64_t num_spans, rows, hidden;
    int64_t channels, width; /* of a row before the convolution: with the outputs' gate */
    float *slice;            /* the thread's own: [key_dim][SLICE] of a state */
} Recurrence;

/* Whether a span does not go on from the one before it. */
INLINE int begins(const StateSpan *spans, int64_t i) {
    return i == 0 || spans[i].source < 0 || spans[i].source != spans[i - 1].target;
}

/* Normalise this thread's rows, and write them as the first product reads them. Ends at a barrier. */
static Operand normalised(const Recurrence *r, const float *x) {
    const ThreadContext *t = r->team;
    const PackedMatrix *input = &r->layer->input;
    const Norm *norm = &r->layer->norms.pre;
    int kind = operand_kind(input);
    int64_t bytes = operand_bytes(input), first, last;
    thread_range(t, r->rows, &first, &last);
    for (int64_t row = first; row < last; row++) {
        float *to = r->buffers->normed + row * r->hidden;
        if (norm->kind != NO_NORM) normalise(norm, x + row * r->hidden, r->hidden, to);
        else memcpy(to, x + row * r->hidden, r->hidden * sizeof *to);
        if (kind != F32) write_operand(input, to, t->operand + row * bytes, t->operand_scales + row);
    }
    wait_for_threads(t);
    if (kind == F32) return (Operand){r->buffers->normed, r->hidden, NULL};
    return (Operand){t->operand, bytes / element_bytes(kind), t->operand_scales};
}

/* The channels of row `row` of a sequence's rows from `first` on, whose state is in `source`; null: zeros. */
INLINE const float *channels_of(const Recurrence *r, int64_t row, int64_t first, int64_t source) {
    int64_t kept = r->layer->kernel - 1;
    if (row >= first) return r->buffers->mixed + row * r->width;
    return source < 0 ? NULL : r->states->channels + (source * kept + row - first + kept) * r->channels;
}

/* out [size] = silu of the convolution of a row's channels from `channel` on. */
static void convolve(const Recurrence *r, int64_t row, int64_t first, int64_t source, int64_t channel, int64_t size,
                     float *out) {
    int64_t kernel = r->layer->kernel, i;
    memset(out, 0, size * sizeof *out);
    for (int64_t tap = 0; tap < kernel; tap++) {
        const float *x = channels_of(r, row - kernel + 1 + tap, first, source);
        const float *weights = r->layer->taps + tap * r->channels + channel;
        if (!x) continue;
        x += channel;
        for (i = 0; i + LANES <= size; i += LANES) store(out + i, fma_vec(load(x + i), load(weights + i), load(out + i)));
        for (; i < size; i++) out[i] += x[i] * weights[i];
    }
    for (i = 0; i + LANES <= size; i += LANES) store(out + i, activate(SILU, load(out + i)));
    if (i < size) {
        float some[LANES] = {0.0f};
        memcpy(some, out + i, (size - i) * sizeof *out);
        store(some, activate(SILU, load(some)));
        memcpy(out + i, some, (size - i) * sizeof *out);
    }
}

static float dot(const float *a, const float *b, int64_t size) {
    vec sum = splat(0.0f);
    float tail = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sum = fma_vec(load(a + i), load(b + i), sum);
    for (; i < size; i++) tail += a[i] * b[i];
    return reduce_add(sum) + tail;
}

/* Make x [size] as long as `length`. */
static void stretch(float *x, int64_t size, float length) {
    scale_in_place(x, length / __builtin_sqrtf(dot(x, x, size) + LENGTH_EPS), size);
}

/* A rate and a decay of what the second product gave. */
static void open_gates(const DeltaLayer *layer, int64_t head, float *gates) {
    float *rate = gates + head, *decay = gates + layer->value_heads + head, x = *decay + layer->dt_bias[head];
    float softplus = x > SOFTPLUS_LINEAR ? x : __builtin_log1pf(__builtin_expf(x));
    *rate = 1.0f / (1.0f + __builtin_expf(-*rate));
    *decay = __builtin_expf(-layer->decay[head] * softplus);
}

/* Take a row's channels of one key head and of its value heads through the convolution, and their gates to numbers. */
static void prepare_head(const Recurrence *r, int64_t row, int64_t head, int64_t first, int64_t source) {
    const DeltaLayer *l = r->layer;
    const DeltaBuffers *b = r->buffers;
    int64_t shared = l->value_heads / l->key_heads, keys = l->key_heads * l->key_dim;
    float *key = b->keys + (head * r->rows + row) * 2 * l->key_dim, *query = key + l->key_dim;
    convolve(r, row, first, source, head * l->key_dim, l->key_dim, query);
    convolve(r, row, first, source, keys + head * l->key_dim, l->key_dim, key);
    stretch(query, l->key_dim, 1.0f / __builtin_sqrtf((float)l->key_dim));
    stretch(key, l->key_dim, 1.0f);
    b->products[head * r->rows + row] = dot(key, query, l->key_dim);
    for (int64_t value = head * shared; value < (head + 1) * shared; value++) {
        convolve(r, row, first, source, 2 * keys + value * l->value_dim, l->value_dim,
                 b->values + (value * r->rows + row) * l->value_dim);
        open_gates(l, value, b->gates + row * 2 * l->value_heads);
    }
}

/* Prepare this thread's heads of rows, and keep its part of the last channels before the convolution. */
static void prepare_rows(const Recurrence *r) {
    int64_t heads = r->layer->key_heads, kept = r->layer->kernel - 1, unit, last, start = 0;
    thread_range(r->team, r->rows * heads, &unit, &last);
    for (int64_t i = 0, turn = 0; i < r->num_spans; i++) {
        const StateSpan *span = r->spans + i;
        if (begins(r->spans, i)) start = i;
        int64_t first = r->spans[start].first, source = r->spans[start].source;
        for (; unit < last && unit / heads < span->last; unit++)
            prepare_head(r, unit / heads, unit % heads, first, source);
        for (int64_t at = 0; span->target >= 0 && at < kept; at++) {
            const float *x = channels_of(r, span->last - kept + at, first, source);
            float *to = r->states->channels + (span->target * kept + at) * r->channels;
            if (turn++ % r->team->threads != r->team->thread) continue;
            if (x) memcpy(to, x, r->channels * sizeof *to);
            else memset(to, 0, r->channels * sizeof *to);
        }
    }
}

/* The part of one head's state that belongs to a slice. */
typedef struct {
    float *rows;
    int64_t stride;
} Slice;

/* What a token reads of a state: S^T k and S^T q. */
typedef struct {
    vec seen[SLICE_VECS], read[SLICE_VECS];
} Reading;

/* Add what a token reads of row `i` of a state. */
INLINE void read_row(const vec *row, const float *key, const float *query, int64_t i, Reading *reading) {
    vec k = splat(key[i]), q = splat(query[i]);
#pragma GCC unroll 4
    for (int v = 0; v < SLICE_VECS; v++) {
        reading->seen[v] = fma_vec(k, row[v], reading->seen[v]);
        reading->read[v] = fma_vec(q, row[v], reading->read[v]);
    }
}

/* Read a state for a token; `key` has its key, then its query. */
static void read_state(Slice from, int64_t key_dim, const float *key, Reading *reading) {
    vec row[SLICE_VECS];
    Reading sums = {{{0}}, {{0}}};
    for (int64_t i = 0; i < key_dim; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < SLICE_VECS; v++) row[v] = load(from.rows + i * from.stride + v * LANES);
        read_row(row, key, key + key_dim, i, &sums);
    }
    *reading = sums;
}

/* to = decay * from + key change^T; where a token comes `next`, read what that gives. `past`: the caches. */
INLINE void change_state(Slice from, Slice to, int64_t key_dim, float decay, const float *key, const vec *change,
                         const float *next, int past, Reading *reading) {
    vec row[SLICE_VECS], wanted[SLICE_VECS];
    Reading sums = {{{0}}, {{0}}};
    for (int v = 0; v < SLICE_VECS; v++) wanted[v] = change[v];
    for (int64_t i = 0; i < key_dim; i++) {
        vec k = splat(key[i]);
#pragma GCC unroll 4
        for (int v = 0; v < SLICE_VECS; v++) {
            row[v] = fma_vec(k, wanted[v], load(from.rows + i * from.stride + v * LANES) * decay);
            (past ? store_past : store)(to.rows + i * to.stride + v * LANES, row[v]);
        }
        if (next) read_row(row, next, next + key_dim, i, &sums);
    }
    *reading = sums;
}

static void change_and_read(Slice from, Slice to, int64_t key_dim, float decay, const float *key, const vec *change,
                            Reading *reading) {
    change_state(from, to, key_dim, decay, key, change, key + 2 * key_dim, 0, reading);
}

/* Whether vectors of a slice lie where they can be stored past the caches. */
INLINE int is_aligned(Slice slice) {
    return ((uintptr_t)slice.rows | (uintptr_t)(slice.stride * sizeof *slice.rows)) % sizeof(vec) == 0;
}

/* The same of a step's last token: its state is not read before the next step. */
static void change_last(Slice from, Slice to, int64_t key_dim, float decay, const float *key, const vec *change) {
    Reading none;
    if (is_aligned(to)) change_state(from, to, key_dim, decay, key, change, NULL, 1, &none);
    else change_state(from, to, key_dim, decay, key, change, NULL, 0, &none);
}

/* Copy `columns` of each row of a slice. */
static void copy_slice(Slice from, Slice to, int64_t key_dim, int64_t columns) {
    for (int64_t i = 0; i < key_dim; i++)
        memcpy(to.rows + i * to.stride, from.rows + i * from.stride, columns * sizeof *to.rows);
}

/* Load the first `columns` of a slice's row; the others are zero. */
INLINE void load_columns(const float *from, int64_t columns, vec *row) {
    float some[SLICE] = {0.0f};
    if (columns < SLICE) from = memcpy(some, from, columns * sizeof *some);
    for (int v = 0; v < SLICE_VECS; v++) row[v] = load(from + v * LANES);
}

INLINE void store_columns(float *to, int64_t columns, const vec *row) {
    float some[SLICE];
    float *all = columns < SLICE ? some : to;
    for (int v = 0; v < SLICE_VECS; v++) store(all + v * LANES, row[v]);
    if (columns < SLICE) memcpy(to, some, columns * sizeof *to);
}

/* Find what a token changes of what it reads of the state, and its output. */
static void finish_token(const Recurrence *r, int64_t row, int64_t head, int64_t column, int64_t columns,
                         const Reading *reading, vec *change) {
    const DeltaLayer *l = r->layer;
    const DeltaBuffers *b = r->buffers;
    const float *gates = b->gates + row * 2 * l->value_heads;
    float rate = gates[head], decay = gates[l->value_heads + head];
    float product = b->products[head / (l->value_heads / l->key_heads) * r->rows + row];
    vec value[SLICE_VECS], out[SLICE_VECS];
    load_columns(b->values + (head * r->rows + row) * l->value_dim + column, columns, value);
    for (int v = 0; v < SLICE_VECS; v++) {
        change[v] = rate * fma_vec(splat(-decay), reading->seen[v], value[v]);
        out[v] = fma_vec(splat(product), change[v], decay * reading->read[v]);
    }
    store_columns(b->outputs + (row * l->value_heads + head) * l->value_dim + column, columns, out);
}

/* Take one span through columns from `column` on of a head's state. */
static void run_slice(const Recurrence *r, const StateSpan *span, int64_t head, int64_t column) {
    const DeltaLayer *l = r->layer;
    int64_t columns = min_i64(SLICE, l->value_dim - column), whole = columns == SLICE, key_dim = l->key_dim;
    const float *key = r->buffers->keys + (head / (l->value_heads / l->key_heads) * r->rows + span->first) * 2 * key_dim;
    Slice own = {r->slice, SLICE}, source = own, target = own, from = own;
    if (span->source >= 0)
        source = (Slice){r->states->recurrent + (span->source * l->value_heads + head) * key_dim * l->value_dim + column,
                         l->value_dim};
    if (span->target >= 0)
        target = (Slice){r->states->recurrent + (span->target * l->value_heads + head) * key_dim * l->value_dim + column,
                         l->value_dim};
    if (span->source < 0 || !whole) memset(own.rows, 0, key_dim * SLICE * sizeof *own.rows);
    if (span->source >= 0 && whole) from = source;
    else if (span->source >= 0) copy_slice(source, own, key_dim, columns);
    Reading reading;
    vec change[SLICE_VECS];
    read_state(from, key_dim, key, &reading);
    for (int64_t row = span->first; row < span->last; row++, key += 2 * key_dim, from = own) {
        float decay = r->buffers->gates[row * 2 * l->value_heads + l->value_heads + head];
        finish_token(r, row, head, column, columns, &reading, change);
        if (row + 1 < span->last) change_and_read(from, own, key_dim, decay, key, change, &reading);
        else if (span->target >= 0) change_last(from, whole ? target : own, key_dim, decay, key, change);
    }
    if (span->target >= 0 && !whole) copy_slice(own, target, key_dim, columns);
}

/* Take this thread's sequences through its slices of heads: as many rows as the others have, nearly. */
static void run_slices(const Recurrence *r) {
    int64_t slices = (r->layer->value_dim + SLICE - 1) / SLICE, units = r->layer->value_heads * slices;
    int64_t each = r->rows + FIXED_ROWS * r->num_spans, first, last;
    thread_range(r->team, units * each, &first, &last);
    for (int64_t unit = each ? first / each : 0; unit * each < last; unit++) {
        int64_t at = unit * each, mine = 0;
        for (int64_t i = 0; i < r->num_spans; i++) {
            const StateSpan *span = r->spans + i;
            if (begins(r->spans, i)) mine = at >= first && at < last;
            if (mine) run_slice(r, span, unit / slices, unit % slices * SLICE);
            at += span->last - span->first + FIXED_ROWS;
        }
    }
    stored_past();
}

/* Normalise this thread's heads of outputs, and multiply them by silu of their gate. */
static void gate_outputs(const Recurrence *r) {
    const DeltaLayer *l = r->layer;
    int64_t dim = l->value_dim, first, last, i;
    thread_range(r->team, r->rows * l->value_heads, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        float *out = r->buffers->outputs + unit * dim;
        const float *gate = r->buffers->mixed + unit / l->value_heads * r->width + r->channels + unit % l->value_heads * dim;
        normalise(&l->norm, out, dim, out);
        for (i = 0; i + LANES <= dim; i += LANES) store(out + i, load(out + i) * activate(SILU, load(gate + i)));
        for (; i < dim; i++) {
            float some[LANES] = {gate[i]};
            store(some, activate(SILU, load(some)));
            out[i] *= some[0];
        }
    }
}

/* The thread's own scratch for a slice of a state, where products have laid out other buffers. */
static float *slice_scratch(const ThreadContext *t, const DeltaLayer *layer) {
    Scratch own = {.base = t->scratch};
    return scratch_take(&own, layer->key_dim * SLICE * (int64_t)sizeof(float));
}

Operand delta_operand(const ThreadContext *t, const DeltaLayer *layer, const Step *step, const LayerStates *states,
                      const DeltaBuffers *b, int64_t hidden, const float *x) {
    Recurrence r = {.team = t, .layer = layer, .buffers = b, .states = states, .rows = step->rows, .hidden = hidden};
    r.spans = step->spans, r.num_spans = step->num_spans;
    r.channels = delta_channels(layer), r.width = r.channels + layer->value_heads * layer->value_dim;
    Operand operand = normalised(&r, x), rows = {b->normed, hidden, NULL};
    Output gates = {.rows = b->gates, .stride = 2 * layer->value_heads};
    gemm(&layer->gates, rows, r.rows, gates, t->thread, t->threads, product_scratch(t, r.rows));
    multiply(t, &layer->input, operand, r.rows, (Output){.rows = b->mixed, .stride = r.width});
    prepare_rows(&r);
    r.slice = slice_scratch(t, layer);
    wait_for_threads(t);
    run_slices(&r);
    wait_for_threads(t);
    gate_outputs(&r);
    wait_for_threads(t);
    return prepare_operand(t, NULL, &layer->output, b->outputs, r.rows);
}

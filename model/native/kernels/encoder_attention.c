/* Attention of segments whose queries see their own segment in both directions, all of it or a window, as in encoders:
 * two products a head, with panels packed from the keys and values at hand. Keys that no query of a task or tile sees
 * are left out. No token is decoded one by one there, so nothing has to agree with another order of sums. A segment's
 * bits do not depend on other segments. */
#include "attention.h"

#include "gemm.h"
#include "relative_scores.h"
#include "scratch.h"

#define TASK_QUERIES 256 /* queries for which keys are packed again, so that threads can divide a long segment: more
                           where threads have enough to do without */

/* Some queries of one head, and its packed keys and values. */
typedef struct {
    const AttentionShape *shape;
    const ScoreBias *bias;
    const RelativePositions *relative;
    int kind;                          /* of operands: F32 or BF16 */
    int64_t head, position;            /* of the first query */
    int64_t first_key, keys, width;    /* packed keys of the segment: the first's position, how many, in whole panels */
    int64_t begin, columns;            /* of the packed keys, those that these queries are scored with: whole panels */
    PackedMatrix key_panels, value_panels;
    float *scores;                     /* [TILE_QUERIES][width] */
    float *products;                   /* scratch of gemm */
    RelativeBuffers relative_buffers;
    Operand segment_keys;              /* all of the segment's keys, for relative positions */
} EncoderTile;

/* Take its buffers, for heads of `dim` and `keys` keys of a kind. */
INLINE void encoder_buffers(Scratch *scratch, int kind, int64_t dim, int64_t keys, int relative, EncoderTile *tile) {
    int64_t width = padded_k(kind, round_up(keys, PANEL_WIDTH)), bytes = element_bytes(kind);
    tile->kind = kind, tile->keys = keys, tile->width = width;
    tile->key_panels.data = scratch_take(scratch, width * padded_k(kind, dim) * bytes);
    tile->value_panels.data = scratch_take(scratch, round_up(dim, PANEL_WIDTH) * width * bytes);
    tile->products = scratch_take(scratch, TILE_QUERIES * GEMM_SCRATCH * sizeof *tile->products);
    tile->scores = scratch_take(scratch, TILE_QUERIES * width * sizeof *tile->scores);
    if (relative) relative_buffers(scratch, width, &tile->relative_buffers);
}

/* The address of number `at` of rows of a kind. */
INLINE const void *number_at(int kind, const void *rows, int64_t at) {
    return kind == F32 ? (const void *)((const float *)rows + at) : (const void *)((const bf16 *)rows + at);
}

/* Pack keys [n][dim] as a matrix of `width` outputs, those beyond n being zero: 32 bits at a time. */
INLINE void pack_keys(int kind, const void *keys, int64_t stride, int64_t n, int64_t width, int64_t dim,
                      uint32_t *panels) {
    int64_t used = kind == F32 ? dim : dim / 2, words = padded_k(kind, dim) * element_bytes(kind) / 4, key = 0;
#ifdef __AVX512F__
    for (; key + PANEL_WIDTH <= n; key += PANEL_WIDTH)
        for (int64_t word = 0; word < words; word += 16) {
            __mmask16 seen = used - word >= 16 ? 0xffff : (__mmask16)((1 << max_i64(0, used - word)) - 1);
            __m512i rows[PANEL_WIDTH];
            for (int i = 0; i < PANEL_WIDTH; i++) {
                const char *row = number_at(kind, keys, (key + i) * stride);
                rows[i] = _mm512_maskz_loadu_epi32(seen, row + word * 4);
            }
            transpose_words(rows);
            for (int i = 0; i < 16 && word + i < words; i++, panels += PANEL_WIDTH)
                _mm512_storeu_si512(panels, rows[i]);
        }
#endif
    for (; key < width; key += PANEL_WIDTH)
        for (int64_t word = 0; word < words; word++, panels += PANEL_WIDTH)
            for (int i = 0; i < PANEL_WIDTH; i++) {
                panels[i] = 0;
                if (key + i < n && word < used)
                    memcpy(panels + i, (const char *)number_at(kind, keys, (key + i) * stride) + word * 4, 4);
            }
}

/* PANEL_WIDTH numbers of two rows of bf16 as pairs. */
INLINE void pair_rows(const bf16 *even, const bf16 *odd, uint32_t *pairs) {
    typedef uint16_t halves __attribute__((vector_size(2 * PANEL_WIDTH)));
    typedef uint32_t words __attribute__((vector_size(4 * PANEL_WIDTH)));
    halves low, high;
    memcpy(&low, even, sizeof low), memcpy(&high, odd, sizeof high);
    words both = __builtin_convertvector(low, words) | __builtin_convertvector(high, words) << 16;
    memcpy(pairs, &both, sizeof both);
}

/* Pack values [n][dim] as a matrix of dim outputs of `width` keys, zeros beyond n and dim. */
INLINE void pack_values(int kind, const void *values, int64_t stride, int64_t n, int64_t width, int64_t dim,
                        uint32_t *panels) {
    int64_t step = kind == F32 ? 1 : 2;
    for (int64_t column = 0; column < dim; column += PANEL_WIDTH)
        for (int64_t key = 0; key < width; key += step, panels += PANEL_WIDTH) {
            int64_t left = min_i64(PANEL_WIDTH, dim - column);
            if (key + step > n || left < PANEL_WIDTH) memset(panels, 0, PANEL_WIDTH * 4);
            if (key >= n) continue;
            if (kind == F32) {
                memcpy(panels, number_at(F32, values, key * stride + column), left * 4);
                continue;
            }
            const bf16 *even = number_at(BF16, values, key * stride + column), *odd = even + stride;
            if (key + 1 < n && left == PANEL_WIDTH) {
                pair_rows(even, odd, panels);
                continue;
            }
            for (int64_t i = 0; i < left; i++) panels[i] = even[i] | (key + 1 < n ? (uint32_t)odd[i] << 16 : 0);
        }
}

/* Finish the scores of the query at `position` where more than the scale is due: the softcap, then the bias. It has a
 * loop of its own because the plain one, which most models take, is slower with these branches inside. */
static void finish_scores(const EncoderTile *t, float *scores, int64_t position) {
    const AttentionShape *a = t->shape;
    const float *bias = t->bias ? t->bias->values + t->head * t->bias->width + t->bias->width / 2 - position : NULL;
    if (bias) bias += t->first_key + t->begin;
    for (int64_t at = 0; at < t->columns; at += LANES) {
        vec score = load(scores + at);
        if (a->softcap != 0.0f) {
            score = softcap_vec(score * a->scale, a->softcap);
            if (bias) score += load(bias + at);
        } else {
            score = fma_vec(score, splat(a->scale), load(bias + at));
        }
        store(scores + at, score);
    }
}

/* The packed keys [first, last) that the query at `position` sees, counted from the tile's first column. `windowed`
 * is a constant, here and in what follows: whether there is a window. */
INLINE void visible_columns(int windowed, const EncoderTile *t, int64_t position, int64_t *first, int64_t *last) {
    *first = 0, *last = t->keys;
    if (!windowed) return;
    int64_t window = t->shape->window, at = position - t->first_key - t->begin; /* the query's own column */
    *first = max_i64(0, at - window + 1), *last = min_i64(t->keys - t->begin, at + window);
}

/* Set those of LANES scores from column `at` to -infinity that are outside of [first, last). */
INLINE void mask_scores(float *scores, int64_t at, int64_t first, int64_t last) {
    static const ivec lanes = LANE_INDICES;
    ivec column = lanes + (int32_t)at, seen = (column >= (int32_t)first) & (column < (int32_t)last);
    store(scores + at, select_vec(seen, load(scores + at), splat(-__builtin_inff())));
}

/* Set operands [first, last) of a row, multiples of LANES, to zero. */
INLINE void zero_operands(int kind, float *row, int64_t first, int64_t last) {
    for (int64_t at = first; at < last; at += LANES) {
        if (kind == F32) store(row + at, splat(0.0f));
        else store_bf16((bf16 *)row + at, splat(0.0f));
    }
}

/* Turn the dot products of the query at `position` into exp(score - max), an operand in the place of the scores;
 * returns the inverse of their sum. */
INLINE float encoder_softmax(int kind, int windowed, const EncoderTile *t, float *scores, int64_t position) {
    int finished = t->bias || t->shape->softcap != 0.0f;
    float scale = finished ? 1.0f : t->shape->scale; /* otherwise it is part of the exponent */
    int64_t first, last;
    visible_columns(windowed, t, position, &first, &last);
    int64_t begin = first / LANES * LANES, end = round_up(last, LANES);
    if (finished) finish_scores(t, scores, position);
    if (begin < first) mask_scores(scores, begin, first, last);
    if (last < end) mask_scores(scores, end - LANES, first, last);
    vec most = splat(-__builtin_inff()), sum = splat(0.0f);
    for (int64_t at = begin; at < end; at += LANES) most = max_vec(most, load(scores + at));
    vec top = splat(-reduce_max(most) * scale);
    if (windowed) zero_operands(kind, scores, 0, begin); /* a row of bf16 takes the first half of its scores' place */
    for (int64_t at = begin; at < end; at += LANES) {
        vec weight = exp_vec(fma_vec(load(scores + at), splat(scale), top));
        sum += weight;
        if (kind == F32) store(scores + at, weight);
        else store_bf16((bf16 *)scores + at, weight);
    }
    zero_operands(kind, scores, end, windowed ? t->columns : t->width);
    return 1.0f / reduce_add(sum);
}

/* Give a tile the keys that its `count` queries see, or more of them. */
INLINE void find_columns(int kind, int windowed, EncoderTile *t, int64_t count) {
    int64_t window = t->shape->window, step = padded_k(kind, PANEL_WIDTH);
    t->begin = 0, t->columns = t->width;
    if (!windowed) return;
    t->begin = max_i64(0, t->position - window + 1 - t->first_key) / step * step;
    t->columns = min_i64(t->width, round_up(t->position + count - 1 + window - t->first_key, step)) - t->begin;
}

/* Add up the tile's values by the weights of `count` queries; out [count][out_stride]. */
INLINE void sum_values(int kind, int windowed, const EncoderTile *t, int64_t count, float *out, int64_t out_stride) {
    Operand weights = {t->scores, kind == F32 ? t->width : 2 * t->width, NULL};
    if (!windowed || t->columns == t->width) {
        gemm(&t->value_panels, weights, count, (Output){.rows = out, .stride = out_stride}, 0, 1, t->products);
        return;
    }
    for (int64_t at = 0; at < t->shape->dim; at += PANEL_WIDTH) { /* a part of each panel: they do not lie together */
        PackedMatrix part = t->value_panels;
        part.n = min_i64(PANEL_WIDTH, t->shape->dim - at), part.k = t->columns;
        part.data = number_at(kind, part.data, at * t->width + t->begin * PANEL_WIDTH);
        gemm(&part, weights, count, (Output){.rows = out + at, .stride = out_stride}, 0, 1, t->products);
    }
}

/* Attend with `count` queries of a tile's head; out [count][out_stride]. */
INLINE void attend_queries(int kind, int windowed, const EncoderTile *t, Operand queries, int64_t count, float *out,
                           int64_t out_stride) {
    float inverse[TILE_QUERIES];
    PackedMatrix keys = t->key_panels;
    keys.n = t->columns, keys.data = number_at(kind, keys.data, t->begin * padded_k(kind, keys.k));
    gemm(&keys, queries, count, (Output){.rows = t->scores, .stride = t->width}, 0, 1, t->products);
    if (t->relative) { /* and no window */
        RelativeTile relative = {t->relative, kind, t->key_panels.tiles != 0, t->head, queries, t->segment_keys};
        relative.first = t->position, relative.count = count, relative.n = t->keys, relative.width = t->width;
        relative.scores = t->scores, relative.products = t->products;
        add_relative_scores(&relative, &t->relative_buffers);
    }
    for (int64_t r = 0; r < count; r++)
        inverse[r] = encoder_softmax(kind, windowed, t, t->scores + r * t->width, t->position + r);
    sum_values(kind, windowed, t, count, out, out_stride);
    for (int64_t r = 0; r < count; r++) {
        float *row = out + r * out_stride;
        int64_t i = 0;
        for (; i + LANES <= t->shape->dim; i += LANES) store(row + i, load(row + i) * inverse[r]);
        for (; i < t->shape->dim; i++) row[i] *= inverse[r];
    }
}

/* Attend with queries [first, last) of the segment of n rows from `start`, for the heads that share key head
 * `kv_head`. */
INLINE void attend_rows(int kind, int windowed, const EncoderAttention *in, int64_t start, int64_t n, int64_t kv_head,
                        int64_t first, int64_t last, Scratch scratch) {
    const AttentionShape *a = in->shape;
    const void *rows = number_at(kind, in->rows, start * in->stride);
    const void *keys = number_at(kind, rows, (a->heads + kv_head) * a->dim);
    const void *values = number_at(kind, keys, a->kv_heads * a->dim);
    int64_t per = a->heads / a->kv_heads, tiles = kind == BF16 && in->tiles, from = 0, to = n;
    if (windowed) from = max_i64(0, first - a->window + 1), to = min_i64(n, last - 1 + a->window);
    EncoderTile t = {.shape = a, .bias = in->bias, .relative = in->relative, .segment_keys = {keys, in->stride, NULL}};
    encoder_buffers(&scratch, kind, a->dim, to - from, in->relative != NULL, &t);
    t.first_key = from;
    keys = number_at(kind, keys, from * in->stride), values = number_at(kind, values, from * in->stride);
    pack_keys(kind, keys, in->stride, t.keys, t.width, a->dim, (uint32_t *)t.key_panels.data);
    pack_values(kind, values, in->stride, t.keys, t.width, a->dim, (uint32_t *)t.value_panels.data);
    t.key_panels.dtype = t.value_panels.dtype = kind;
    t.key_panels.n = t.width, t.key_panels.k = a->dim, t.key_panels.tiles = tiles && padded_k(kind, a->dim) == a->dim;
    t.value_panels.n = a->dim, t.value_panels.k = t.width, t.value_panels.tiles = tiles;
    for (t.head = kv_head * per; t.head < (kv_head + 1) * per; t.head++)
        for (t.position = first; t.position < last; t.position += TILE_QUERIES) {
            Operand queries = {number_at(kind, rows, t.position * in->stride + t.head * a->dim), in->stride, NULL};
            float *out = in->out + ((start + t.position) * a->heads + t.head) * a->dim;
            int64_t count = min_i64(TILE_QUERIES, last - t.position);
            find_columns(kind, windowed, &t, count);
            attend_queries(kind, windowed, &t, queries, count, out, a->heads * a->dim);
        }
}

int64_t encoder_attention_scratch(const AttentionShape *shape, int64_t longest, int relative) {
    Scratch as_f32 = {0}, as_bf16 = {0};
    EncoderTile tile;
    if (shape->window) longest = min_i64(longest, TASK_QUERIES + 2 * (shape->window - 1));
    encoder_buffers(&as_f32, F32, shape->dim, longest, relative, &tile);
    encoder_buffers(&as_bf16, BF16, shape->dim, longest, relative, &tile);
    return max_i64(as_f32.used, as_bf16.used);
}

/* The queries of a head that a thread takes at most. Without a window no result depends on it. */
static int64_t task_queries(const EncoderAttention *in, int threads) {
    const Segments *g = in->segments;
    int64_t queries = TASK_QUERIES, all = g->q_starts[g->segments] * in->shape->kv_heads;
    while (!in->shape->window && 4 * threads * 2 * queries <= all) queries *= 2;
    return queries;
}

/* Compute a thread's tasks. */
INLINE void attend_segments(int kind, const EncoderAttention *in, int thread, int threads, void *scratch) {
    const int64_t *starts = in->segments->q_starts;
    Scratch own = {.base = scratch};
    int64_t most = task_queries(in, threads), task = 0;
    for (int64_t segment = 0; segment < in->segments->segments; segment++) {
        int64_t start = starts[segment], n = starts[segment + 1] - start, parts = max_i64(1, (n + most - 1) / most);
        int64_t step = round_up((n + parts - 1) / parts, TILE_QUERIES); /* parts of about equal size */
        if (in->shape->window) step = TASK_QUERIES; /* where keys of a window are packed from decides its sums' order */
        for (int64_t kv_head = 0; kv_head < in->shape->kv_heads; kv_head++)
            for (int64_t first = 0; first < n; first += step, task++) {
                if (task % threads != thread) continue;
                int64_t last = min_i64(n, first + step);
                if (in->shape->window)
                    attend_rows(kind, 1, in, start, n, kv_head, first, last, own);
                else
                    attend_rows(kind, 0, in, start, n, kv_head, first, last, own);
            }
    }
}

void encoder_attention(const EncoderAttention *in, int thread, int threads, void *scratch) {
    if (in->kind == F32) attend_segments(F32, in, thread, threads, scratch);
    else attend_segments(BF16, in, thread, threads, scratch);
}

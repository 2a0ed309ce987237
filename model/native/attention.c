/* softmax(q k^T * scale + bias) v in float32, whatever the cache holds.
 *
 * A query's scores, their softmax and the mix of values are each summed in one order that its own position decides:
 * decoding a token and prefilling it give the same bits. Work is shared by segment, head and rows, never within a sum. */
#include "attention.h"

#define GROUP 16 /* keys that are scored together */
#define QROWS 4  /* queries that share the keys at hand */
#define COLUMNS (LANES == 8 ? 2 : 4) /* registers a row: with four rows they leave some for the values */
#define TASK_ROWS 64

typedef struct {
    const AttentionShape *shape;
    const Segments *segments;
    const Memory *memory;
    int64_t segment;
} Source;

INLINE int64_t up_to(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t size_of(int64_t kind) { return kind == F32 ? 4 : kind == BF16 ? 2 : 1; }

/* The memory's row of key `at` of the segment. */
INLINE int64_t row_of(const Source *s, int64_t at) {
    const Segments *g = s->segments;
    if (!g->tables) return g->k_starts[s->segment] + at;
    return g->tables[s->segment * g->table_width + at / g->block_size] * g->block_size + at % g->block_size;
}

INLINE vec load_any(int kind, const void *p, int64_t at) {
    if (kind == F32) return load((const float *)p + at);
    if (kind == BF16) return load_bf16((const bf16 *)p + at);
    return load_int8((const int8_t *)p + at);
}

INLINE float scalar_any(int kind, const void *p, int64_t at) {
    if (kind == F32) return ((const float *)p)[at];
    if (kind == BF16) return from_bf16(((const bf16 *)p)[at]);
    return (float)((const int8_t *)p)[at];
}

static __attribute__((noinline)) vec load_tail(int kind, const void *p, int64_t at, int64_t dim) {
    float rest[LANES] = {0};
    for (int64_t i = at; i < dim; i++) rest[i - at] = scalar_any(kind, p, i);
    return load(rest);
}

/* As many elements of a head as a register holds from `at`, zeros beyond dim. */
INLINE vec load_head(int kind, const void *p, int64_t at, int64_t dim) {
    return at + LANES <= dim ? load_any(kind, p, at) : load_tail(kind, p, at, dim);
}

#define LOW(...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#if LANES == 16
INLINE vec halves(vec a, vec b) {
    return LOW(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           LOW(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
INLINE vec quarters(vec a, vec b) {
    return LOW(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           LOW(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
INLINE vec pairs(vec a, vec b) {
    return LOW(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           LOW(2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}
INLINE vec singles(vec a, vec b) {
    return LOW(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           LOW(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
static const int order[LANES] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
#elif LANES == 8
INLINE vec quarters(vec a, vec b) { return LOW(0, 1, 2, 3, 8, 9, 10, 11) + LOW(4, 5, 6, 7, 12, 13, 14, 15); }
INLINE vec pairs(vec a, vec b) { return LOW(0, 1, 4, 5, 8, 9, 12, 13) + LOW(2, 3, 6, 7, 10, 11, 14, 15); }
INLINE vec singles(vec a, vec b) { return LOW(0, 2, 4, 6, 8, 10, 12, 14) + LOW(1, 3, 5, 7, 9, 11, 13, 15); }
static const int order[LANES] = {0, 4, 2, 6, 1, 5, 3, 7};
#else
INLINE vec pairs(vec a, vec b) { return LOW(0, 1, 4, 5) + LOW(2, 3, 6, 7); }
INLINE vec singles(vec a, vec b) { return LOW(0, 2, 4, 6) + LOW(1, 3, 5, 7); }
static const int order[LANES] = {0, 2, 1, 3};
#endif

/* The sums of LANES vectors, one a lane: vector i comes out at lane bitreverse(i). */
INLINE vec lanes_of(vec *s) {
#if LANES > 8
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) s[i] = halves(s[i], s[i + 8]);
#endif
#if LANES > 4
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) s[i] = quarters(s[i], s[i + 4]);
#endif
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) s[i] = pairs(s[i], s[i + 2]);
    return singles(s[0], s[1]);
}

/* The products of one query with LANES keys, one a lane. */
INLINE vec score(int kind, const float *query, const void *const *keys, int64_t dim) {
    vec s[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        s[i] = splat(0.0f);
#pragma GCC unroll 4
        for (int64_t at = 0; at < dim; at += LANES)
            s[i] = fma_vec(load(query + at), load_head(kind, keys[order[i]], at, dim), s[i]);
    }
    return lanes_of(s);
}

/* out[r] += sum over the keys of weights[r][i] * values[i], for so many registers' worth of a head from `first`. */
INLINE void mix_some(int kind, int rows, int columns, const float *const *weights, const void *const *values, int count,
                     float *out, int64_t out_stride, int64_t first, int64_t dim) {
    vec sum[QROWS][COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) sum[r][c] = load(out + r * out_stride + first + c * LANES);
    for (int i = 0; i < count; i++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            vec value = load_head(kind, values[i], first + c * LANES, dim);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sum[r][c] = fma_vec(splat(weights[r][i]), value, sum[r][c]);
        }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) store(out + r * out_stride + first + c * LANES, sum[r][c]);
}

INLINE void mix(int kind, int rows, const float *const *weights, const void *const *values, int count, float *out,
                int64_t out_stride, int64_t dim) {
    int64_t first = 0;
    for (; first + COLUMNS * LANES <= dim; first += COLUMNS * LANES)
        mix_some(kind, rows, COLUMNS, weights, values, count, out, out_stride, first, dim);
    for (; first < dim; first += LANES)
        mix_some(kind, rows, 1, weights, values, count, out, out_stride, first, dim);
}

INLINE void mix_rows(int kind, int rows, const float *const *weights, const void *const *values, int count, float *out,
                     int64_t out_stride, int64_t dim) {
    switch (rows) {
    case 1: mix(kind, 1, weights, values, count, out, out_stride, dim); break;
    case 2: mix(kind, 2, weights, values, count, out, out_stride, dim); break;
    case 3: mix(kind, 3, weights, values, count, out, out_stride, dim); break;
    default: mix(kind, QROWS, weights, values, count, out, out_stride, dim);
    }
}

/* Keys [from, to) that the query at `position` sees. */
INLINE void range_of(const Source *s, int64_t position, int64_t *from, int64_t *to) {
    int64_t window = s->shape->window;
    *from = window ? larger(0, position - window + 1) : 0;
    *to = s->segments->kv_lens[s->segment];
    if (s->segments->causal) *to = smaller(*to, position + 1);
    else if (window) *to = smaller(*to, position + window);
}

/* Scores of keys [at, at + LANES) as the softmax wants them: scaled, biased, masked. */
INLINE vec adjust(const Source *s, vec score, int64_t head, int64_t position, int64_t at, int64_t from, int64_t to) {
    static const ivec lanes = NUMBERS;
    score *= s->shape->scale;
    if (s->shape->bias)
        score += load(s->shape->bias + head * s->shape->bias_width + s->shape->bias_width / 2 + at - position);
    if (at < from || at + LANES > to) {
        ivec key = lanes + (int32_t)at;
        score = choose((key >= (int32_t)from) & (key < (int32_t)to), score, splat(-__builtin_inff()));
    }
    return score;
}

/* Scores to weights that are not divided by their sum yet; returns its inverse. */
static float soften(float *scores, int64_t first, int64_t last) {
    vec most = splat(-__builtin_inff()), sum = splat(0.0f);
    for (int64_t at = first; at < last; at += LANES) most = larger_of(most, load(scores + at));
    vec top = splat(largest_of(most));
    for (int64_t at = first; at < last; at += LANES) {
        vec weight = exp_vec(load(scores + at) - top);
        sum += weight;
        store(scores + at, weight);
    }
    return 1.0f / sum_of(sum);
}

/* Where 16 keys or values of one head lie; those beyond the last repeat it and are masked or weigh nothing. */
INLINE void locate(const Source *s, const void *base, int64_t stride, int64_t at, int64_t last, const char **rows,
                   int64_t *numbers) {
    for (int i = 0; i < GROUP; i++) {
        int64_t row = row_of(s, smaller(at + i, last - 1));
        numbers[i] = row;
        rows[i] = (const char *)base + row * stride * size_of(s->memory->kind);
    }
}

INLINE void scales_of(const float *scales, const int64_t *rows, int64_t kv_heads, int64_t head, float *out) {
    for (int i = 0; i < GROUP; i++) out[i] = scales[rows[i] * kv_heads + head];
}

INLINE void ahead(const char *const *rows, int64_t bytes) {
    for (int i = 0; i < GROUP; i++)
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(rows[i] + at);
}

/* One query of a segment, for the heads that share keys [first, last): pages are read once, where they lie. */
INLINE void decode(int kind, int64_t dim, const Source *s, const float *query, float *out, int64_t first, int64_t last,
                   float *scratch) {
    const AttentionShape *a = s->shape;
    const Memory *m = s->memory;
    int64_t per = a->heads / a->kv_heads, padded = up_to(dim, LANES), from, to;
    int64_t position = s->segments->kv_lens[s->segment] - 1;
    range_of(s, position, &from, &to);
    int64_t begin = from / GROUP * GROUP, width = up_to(to, GROUP);
    float *q = scratch, *sums = q + a->heads * padded, *scores = sums + a->heads * padded;
    for (int64_t h = first * per; h < last * per; h++) {
        for (int64_t i = 0; i < padded; i++) q[h * padded + i] = i < dim ? query[h * dim + i] : 0.0f;
        memset(sums + h * padded, 0, padded * sizeof *sums);
    }
    const char *rows[GROUP], *next[GROUP];
    const void *keys[GROUP];
    float scales[GROUP];
    int64_t numbers[GROUP], later[GROUP], bytes = (last - first) * dim * size_of(kind);
    for (int64_t at = begin; at < to; at += GROUP) {
        locate(s, m->keys, m->key_stride, at, to, rows, numbers);
        if (at + GROUP < to) {
            locate(s, (const char *)m->keys + first * dim * size_of(kind), m->key_stride, at + GROUP, to, next, later);
            ahead(next, bytes);
        }
        for (int64_t g = first; g < last; g++) {
            for (int i = 0; i < GROUP; i++) keys[i] = rows[i] + g * dim * size_of(kind);
            if (kind == INT8) scales_of(m->key_scales, numbers, a->kv_heads, g, scales);
            for (int64_t h = g * per; h < (g + 1) * per; h++)
                for (int i = 0; i < GROUP; i += LANES) {
                    vec raw = score(kind, q + h * padded, keys + i, dim);
                    if (kind == INT8) raw *= load(scales + i);
                    store(scores + h * width + at + i, adjust(s, raw, h, position, at + i, from, to));
                }
        }
    }
    for (int64_t h = first * per; h < last * per; h++) q[h * padded] = soften(scores + h * width, begin, width);
    for (int64_t at = begin; at < to; at += GROUP) {
        locate(s, m->values, m->value_stride, at, to, rows, numbers);
        if (at + GROUP < to) {
            locate(s, (const char *)m->values + first * dim * size_of(kind), m->value_stride, at + GROUP, to, next,
                   later);
            ahead(next, bytes);
        }
        int count = (int)smaller(GROUP, to - at);
        for (int64_t g = first; g < last; g++) {
            for (int i = 0; i < GROUP; i++) keys[i] = rows[i] + g * dim * size_of(kind);
            if (kind == INT8) {
                scales_of(m->value_scales, numbers, a->kv_heads, g, scales);
                for (int64_t h = g * per; h < (g + 1) * per; h++)
                    for (int i = 0; i < GROUP; i += LANES) {
                        float *w = scores + h * width + at + i;
                        store(w, load(w) * load(scales + i));
                    }
            }
            for (int64_t h = g * per; h < (g + 1) * per; h += QROWS) {
                const float *weights[QROWS];
                int some = (int)smaller(QROWS, (g + 1) * per - h);
                for (int r = 0; r < some; r++) weights[r] = scores + (h + r) * width + at;
                mix_rows(kind, some, weights, keys, count, sums + h * padded, padded, dim);
            }
        }
    }
    for (int64_t h = first * per; h < last * per; h++)
        for (int64_t i = 0; i < dim; i++) out[h * dim + i] = sums[h * padded + i] * q[h * padded];
}

/* Keys or values of one head as floats [to - begin][padded], and their scales. */
INLINE void gather(int kind, const Source *s, const void *base, int64_t stride, const float *scales, int64_t head,
                   int64_t begin, int64_t to, float *rows, float *row_scales) {
    int64_t dim = s->shape->dim, padded = up_to(dim, LANES);
    for (int64_t at = begin; at < to; at++) {
        int64_t row = row_of(s, at);
        const char *from = (const char *)base + (row * stride + head * dim) * size_of(kind);
        for (int64_t i = 0; i < padded; i += LANES)
            store(rows + (at - begin) * padded + i, load_head(kind, from, i, dim));
        if (kind == INT8) row_scales[at - begin] = scales[row * s->shape->kv_heads + head];
    }
}

/* Up to 4 queries of one head against gathered keys and values. */
INLINE void block(int64_t dim, int quantised, const Source *s, const float *q, int64_t position, int rows, int64_t head,
                  int64_t begin, int64_t to, const float *keys, const float *values, const float *key_scales,
                  const float *value_scales, float *scores, float *sums) {
    int64_t padded = up_to(dim, LANES), width = up_to(to - begin, GROUP);
    float inverse[QROWS];
    const void *at_hand[GROUP];
    for (int64_t at = begin; at < to; at += GROUP) {
        for (int i = 0; i < GROUP; i++) at_hand[i] = keys + (smaller(at + i, to - 1) - begin) * padded;
        for (int r = 0; r < rows; r++) {
            int64_t lo, hi;
            range_of(s, position + r, &lo, &hi);
            for (int i = 0; i < GROUP; i += LANES) {
                vec raw = score(F32, q + r * padded, at_hand + i, dim == padded ? dim : padded);
                if (quantised) raw *= load(key_scales + at - begin + i);
                store(scores + r * width + at - begin + i, adjust(s, raw, head, position + r, at + i, lo, hi));
            }
        }
    }
    for (int r = 0; r < rows; r++) inverse[r] = soften(scores + r * width, 0, width);
    memset(sums, 0, rows * padded * sizeof *sums);
    for (int64_t at = begin; at < to; at += GROUP) {
        const float *weights[QROWS];
        for (int r = 0; r < rows; r++) {
            float *w = scores + r * width + at - begin;
            for (int i = 0; quantised && i < GROUP; i += LANES)
                store(w + i, load(w + i) * load(value_scales + at - begin + i));
            weights[r] = w;
        }
        for (int i = 0; i < GROUP; i++) at_hand[i] = values + (smaller(at + i, to - 1) - begin) * padded;
        mix_rows(F32, rows, weights, at_hand, (int)smaller(GROUP, to - at), sums, padded, padded);
    }
    for (int r = 0; r < rows; r++)
        for (int64_t i = 0; i < dim; i++) sums[r * padded + i] *= inverse[r];
}

/* One copy of the code for each width of a head that is worth it, whatever kind of memory was gathered from. */
typedef void Block(int, const Source *, const float *, int64_t, int, int64_t, int64_t, int64_t, const float *,
                   const float *, const float *, const float *, float *, float *);

#define BLOCK(name, dim)                                                                                               \
    static __attribute__((noinline)) void name(int quantised, const Source *s, const float *q, int64_t position,       \
                                               int rows, int64_t head, int64_t begin, int64_t to, const float *keys,   \
                                               const float *values, const float *key_scales,                           \
                                               const float *value_scales, float *scores, float *sums) {                \
        block(dim, quantised, s, q, position, rows, head, begin, to, keys, values, key_scales, value_scales, scores,   \
              sums);                                                                                                   \
    }
BLOCK(block_32, 32)
BLOCK(block_64, 64)
BLOCK(block_128, 128)
BLOCK(block_any, s->shape->dim)

static Block *block_of(int64_t dim) {
    return dim == 32 ? block_32 : dim == 64 ? block_64 : dim == 128 ? block_128 : block_any;
}

/* Queries [first, last) of a segment for the heads that share the keys of `group`. */
INLINE void prefill(int kind, int64_t dim, const Source *s, const float *queries, int64_t q_stride, float *out,
                    int64_t group, int64_t first, int64_t last, float *scratch) {
    const AttentionShape *a = s->shape;
    const Memory *m = s->memory;
    int64_t per = a->heads / a->kv_heads, padded = up_to(dim, LANES), start = s->segments->q_starts[s->segment];
    int64_t offset = s->segments->kv_lens[s->segment] - (s->segments->q_starts[s->segment + 1] - start);
    int64_t begin, to, unused;
    range_of(s, offset + first, &begin, &unused);
    range_of(s, offset + last - 1, &unused, &to);
    begin = begin / GROUP * GROUP;
    int64_t width = up_to(to - begin, GROUP);
    float *keys = scratch, *values = keys + width * padded, *key_scales = values + width * padded;
    float *value_scales = key_scales + width, *scores = value_scales + width, *q = scores + QROWS * width;
    float *sums = q + QROWS * padded;
    gather(kind, s, m->keys, m->key_stride, m->key_scales, group, begin, to, keys, key_scales);
    gather(kind, s, m->values, m->value_stride, m->value_scales, group, begin, to, values, value_scales);
    for (int64_t head = group * per; head < (group + 1) * per; head++)
        for (int64_t row = first; row < last; row += QROWS) {
            int rows = (int)smaller(QROWS, last - row);
            for (int r = 0; r < rows; r++)
                for (int64_t i = 0; i < padded; i++)
                    q[r * padded + i] = i < dim ? queries[(start + row + r) * q_stride + head * dim + i] : 0.0f;
            int64_t end = s->segments->causal ? smaller(to, offset + row + rows) : to;
            block_of(dim)(kind == INT8, s, q, offset + row, rows, head, begin, end, keys, values, key_scales,
                          value_scales, scores, sums);
            for (int r = 0; r < rows; r++)
                memcpy(out + (start + row + r) * a->heads * dim + head * dim, sums + r * padded, dim * sizeof *out);
        }
}

int64_t attention_scratch(const AttentionShape *shape, int64_t longest) {
    int64_t width = up_to(longest, GROUP) + GROUP, padded = up_to(shape->dim, LANES);
    int64_t decoding = shape->heads * (2 * padded + width);
    int64_t filling = 2 * width * padded + (2 + QROWS) * width + 2 * QROWS * padded;
    return larger(decoding, filling) + LANES;
}

INLINE void attend_as(int kind, int64_t dim, const AttentionShape *shape, const Segments *segments,
                      const Memory *memory, const float *queries, int64_t q_stride, float *out, int part, int parts,
                      float *scratch) {
    /* Few segments: heads are shared too; many: a segment's pages are read by one thread, one after the other. */
    int64_t pieces = segments->segments >= 4 * parts ? 1 : smaller(parts, shape->kv_heads), task = 0;
    Source s = {shape, segments, memory, 0};
    for (s.segment = 0; s.segment < segments->segments; s.segment++) {
        int64_t start = segments->q_starts[s.segment], rows = segments->q_starts[s.segment + 1] - start;
        if (rows == 1) {
            for (int64_t piece = 0; piece < pieces; piece++, task++)
                if (task % parts == part)
                    decode(kind, dim, &s, queries + start * q_stride, out + start * shape->heads * dim,
                           shape->kv_heads * piece / pieces, shape->kv_heads * (piece + 1) / pieces, scratch);
            continue;
        }
        for (int64_t group = 0; group < shape->kv_heads; group++)
            for (int64_t first = 0; first < rows; first += TASK_ROWS, task++)
                if (task % parts == part)
                    prefill(kind, dim, &s, queries, q_stride, out, group, first, smaller(rows, first + TASK_ROWS),
                            scratch);
    }
}

/* A copy of the code for each kind of memory and for the widths of a head that are worth one. */
#define ATTEND(name, kind)                                                                                             \
    static void name(const AttentionShape *shape, const Segments *segments, const Memory *memory,                      \
                     const float *queries, int64_t q_stride, float *out, int part, int parts, float *scratch) {        \
        if (shape->dim == 64)                                                                                          \
            attend_as(kind, 64, shape, segments, memory, queries, q_stride, out, part, parts, scratch);                \
        else if (shape->dim == 128)                                                                                    \
            attend_as(kind, 128, shape, segments, memory, queries, q_stride, out, part, parts, scratch);               \
        else                                                                                                           \
            attend_as(kind, shape->dim, shape, segments, memory, queries, q_stride, out, part, parts, scratch);        \
    }
ATTEND(attend_f32, F32)
ATTEND(attend_bf16, BF16)
ATTEND(attend_int8, INT8)

void attend(const AttentionShape *shape, const Segments *segments, const Memory *memory, const float *queries,
            int64_t q_stride, float *out, int part, int parts, float *scratch) {
    (memory->kind == F32 ? attend_f32 : memory->kind == BF16 ? attend_bf16 : attend_int8)(
        shape, segments, memory, queries, q_stride, out, part, parts, scratch);
}

static void keep(int64_t kind, int64_t heads, int64_t dim, const float *from, void *rows, int64_t stride, float *scales,
                 int64_t slot) {
    if (kind == F32) {
        memcpy((float *)rows + slot * stride, from, heads * dim * sizeof *from);
        return;
    }
    if (kind == BF16) {
        bf16 *to = (bf16 *)rows + slot * stride;
        int64_t i = 0;
        for (; i + LANES <= heads * dim; i += LANES) store_bf16(to + i, load(from + i));
        for (; i < heads * dim; i++) to[i] = to_bf16(from[i]);
        return;
    }
    for (int64_t head = 0; head < heads; head++) {
        const float *x = from + head * dim;
        int8_t *to = (int8_t *)rows + slot * stride + head * dim;
        float most = largest_size(x, dim), inverse = most > 0.0f ? 127.0f / most : 0.0f;
        int64_t i = 0;
        scales[slot * heads + head] = most / 127.0f;
        for (; i + LANES <= dim; i += LANES) store_int8(to + i, round_vec(load(x + i) * inverse));
        for (; i < dim; i++) to[i] = (int8_t)__builtin_rintf(x[i] * inverse);
    }
}

void remember(const AttentionShape *shape, const Memory *memory, int64_t slot, const float *key, const float *value) {
    keep(memory->kind, shape->kv_heads, shape->dim, key, memory->keys, memory->key_stride, memory->key_scales, slot);
    keep(memory->kind, shape->kv_heads, shape->dim, value, memory->values, memory->value_stride, memory->value_scales,
         slot);
}

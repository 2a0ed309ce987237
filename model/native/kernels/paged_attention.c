/* softmax(q k^T * scale + bias) v in float32, whatever the cache holds.
 *
 * A query's scores, their softmax and the mix of values are each summed in one order that its own position decides:
 * decoding a token and prefilling it give the same bits. Work is shared by segment, head and rows, never within a sum. */
#include "attention.h"

#include "attention_lanes.h"

#define GROUP 16 /* keys that are scored together */
#define TASK_ROWS 64

typedef struct {
    const AttentionShape *shape;
    const Segments *segments;
    const Memory *memory;
    int64_t segment;
    int together; /* whether GROUP keys from a multiple of GROUP lie one after the other */
} Source;

/* The memory's row of key `at` of the segment. */
INLINE int64_t row_of(const Source *s, int64_t at) {
    const Segments *g = s->segments;
    if (!g->tables) return g->k_starts[s->segment] + at;
    return g->tables[s->segment * g->table_width + at / g->block_size] * g->block_size + at % g->block_size;
}

/* Keys [from, to) that the query at `position` sees. */
INLINE void range_of(const Source *s, int64_t position, int64_t *from, int64_t *to) {
    int64_t window = s->shape->window;
    *from = window ? max_i64(0, position - window + 1) : 0;
    *to = s->segments->kv_lens[s->segment];
    if (s->segments->causal) *to = min_i64(*to, position + 1);
    else if (window) *to = min_i64(*to, position + window);
}

/* Scores of keys [at, at + LANES) as the softmax wants them: scaled, biased, masked. */
INLINE vec adjust(const Source *s, vec score, int64_t head, int64_t position, int64_t at, int64_t from, int64_t to) {
    static const ivec lanes = LANE_INDICES;
    score *= s->shape->scale;
    if (s->shape->bias)
        score += load(s->shape->bias + head * s->shape->bias_width + s->shape->bias_width / 2 + at - position);
    if (at < from || at + LANES > to) {
        ivec key = lanes + (int32_t)at;
        score = select_vec((key >= (int32_t)from) & (key < (int32_t)to), score, splat(-__builtin_inff()));
    }
    return score;
}

/* Scores to weights that are not divided by their sum yet; returns its inverse. */
static float soften(float *scores, int64_t first, int64_t last) {
    vec most = splat(-__builtin_inff()), sum = splat(0.0f);
    for (int64_t at = first; at < last; at += LANES) most = max_vec(most, load(scores + at));
    vec top = splat(reduce_max(most));
    for (int64_t at = first; at < last; at += LANES) {
        vec weight = exp_vec(load(scores + at) - top);
        sum += weight;
        store(scores + at, weight);
    }
    float total = reduce_add(sum);
    return total == 0.0f ? 0.0f : 1.0f / total; /* no keys: zeros, not 0 / 0 */
}

/* The memory's rows of GROUP keys from `at`, a multiple of GROUP; those beyond the last repeat it and are masked or weigh
 * nothing. */
INLINE void locate(const Source *s, int64_t at, int64_t last, int64_t *rows) {
    int64_t first = row_of(s, at);
    for (int i = 0; i < GROUP; i++)
        rows[i] = s->together ? first + min_i64(i, last - 1 - at) : row_of(s, min_i64(at + i, last - 1));
}

INLINE void scales_of(const float *scales, const int64_t *rows, int64_t kv_heads, int64_t head, float *out) {
    for (int i = 0; i < GROUP; i++) out[i] = scales[rows[i] * kv_heads + head];
}

/* One query of a segment and the heads that share keys [first, last). */
typedef struct {
    int64_t first, last, per; /* of the keys' heads, and query heads for each of them */
    int64_t position, from, to, begin, width, padded;
    float *q, *sums, *scores; /* [heads][padded], the same, [heads][width] */
} Single;

/* Bytes `base` of GROUP rows from key `at`, which are wanted now, and those of the next, which are fetched ahead. */
INLINE void visit(const Source *s, const Single *one, const char *base, int64_t stride, int64_t bytes, int64_t at,
                  const char **rows, int64_t *numbers) {
    int64_t next[GROUP];
    locate(s, at, one->to, numbers);
    for (int i = 0; i < GROUP; i++) rows[i] = base + numbers[i] * stride;
    if (at + GROUP >= one->to) return;
    locate(s, at + GROUP, one->to, next);
    for (int i = 0; i < GROUP; i++)
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(base + next[i] * stride + byte);
}

INLINE void decode_scores(int kind, int64_t dim, const Source *s, const Single *one) {
    const Memory *m = s->memory;
    int64_t head_bytes = dim * element_bytes(kind), numbers[GROUP];
    const char *base = (const char *)m->keys + one->first * head_bytes, *rows[GROUP];
    const void *keys[GROUP];
    float scales[GROUP];
    for (int64_t at = one->begin; at < one->to; at += GROUP) {
        visit(s, one, base, m->key_stride * element_bytes(kind), (one->last - one->first) * head_bytes, at, rows, numbers);
        for (int64_t g = one->first; g < one->last; g++) {
            for (int i = 0; i < GROUP; i++) keys[i] = rows[i] + (g - one->first) * head_bytes;
            if (kind == INT8) scales_of(m->key_scales, numbers, s->shape->kv_heads, g, scales);
            for (int64_t h = g * one->per; h < (g + 1) * one->per; h++)
                for (int i = 0; i < GROUP; i += LANES) {
                    vec raw = score(kind, one->q + h * one->padded, keys + i, dim);
                    if (kind == INT8) raw *= load(scales + i);
                    store(one->scores + h * one->width + at + i,
                          adjust(s, raw, h, one->position, at + i, one->from, one->to));
                }
        }
    }
}

INLINE void decode_mix(int kind, int64_t dim, const Source *s, const Single *one) {
    const Memory *m = s->memory;
    int64_t head_bytes = dim * element_bytes(kind), numbers[GROUP];
    const char *base = (const char *)m->values + one->first * head_bytes, *rows[GROUP];
    const void *values[GROUP];
    float scales[GROUP];
    for (int64_t at = one->begin; at < one->to; at += GROUP) {
        visit(s, one, base, m->value_stride * element_bytes(kind), (one->last - one->first) * head_bytes, at, rows, numbers);
        int skip = (int)max_i64(0, one->from - at), count = (int)min_i64(GROUP, one->to - at) - skip;
        for (int64_t g = one->first; g < one->last; g++) {
            for (int i = 0; i < GROUP; i++) values[i] = rows[i] + (g - one->first) * head_bytes;
            if (kind == INT8) {
                scales_of(m->value_scales, numbers, s->shape->kv_heads, g, scales);
                for (int64_t h = g * one->per; h < (g + 1) * one->per; h++)
                    for (int i = 0; i < GROUP; i += LANES) {
                        float *w = one->scores + h * one->width + at + i;
                        store(w, load(w) * load(scales + i));
                    }
            }
            for (int64_t h = g * one->per; h < (g + 1) * one->per; h += QROWS) {
                const float *weights[QROWS];
                int some = (int)min_i64(QROWS, (g + 1) * one->per - h);
                for (int r = 0; r < some; r++) weights[r] = one->scores + (h + r) * one->width + at + skip;
                mix_rows(kind, some, weights, values + skip, count, one->sums + h * one->padded, one->padded, dim);
            }
        }
    }
}

/* One query of a segment, for the heads that share keys [first, last): pages are read once, where they lie. */
INLINE void decode(int kind, int64_t dim, const Source *s, const float *query, float *out, int64_t first, int64_t last,
                   float *scratch) {
    const AttentionShape *a = s->shape;
    int64_t padded = round_up(dim, LANES);
    Single one = {.first = first, .last = last, .per = a->heads / a->kv_heads, .padded = padded};
    one.position = s->segments->kv_lens[s->segment] - 1;
    range_of(s, one.position, &one.from, &one.to);
    one.begin = one.from / GROUP * GROUP, one.width = round_up(one.to, GROUP);
    one.q = scratch, one.sums = one.q + a->heads * padded, one.scores = one.sums + a->heads * padded;
    for (int64_t h = first * one.per; h < last * one.per; h++) {
        for (int64_t i = 0; i < padded; i++) one.q[h * padded + i] = i < dim ? query[h * dim + i] : 0.0f;
        memset(one.sums + h * padded, 0, padded * sizeof *one.sums);
    }
    decode_scores(kind, dim, s, &one);
    for (int64_t h = first * one.per; h < last * one.per; h++)
        one.q[h * padded] = soften(one.scores + h * one.width, one.begin, one.width);
    decode_mix(kind, dim, s, &one);
    for (int64_t h = first * one.per; h < last * one.per; h++)
        for (int64_t i = 0; i < dim; i++) out[h * dim + i] = one.sums[h * padded + i] * one.q[h * padded];
}

/* Keys or values of one head as floats [to - begin][padded], and their scales. */
INLINE void gather(int kind, const Source *s, const void *base, int64_t stride, const float *scales, int64_t head,
                   int64_t begin, int64_t to, float *rows, float *row_scales) {
    int64_t dim = s->shape->dim, padded = round_up(dim, LANES);
    for (int64_t at = begin; at < to; at++) {
        int64_t row = row_of(s, at);
        const char *from = (const char *)base + (row * stride + head * dim) * element_bytes(kind);
        for (int64_t i = 0; i < padded; i += LANES)
            store(rows + (at - begin) * padded + i, load_head(kind, from, i, dim));
        if (kind == INT8) row_scales[at - begin] = scales[row * s->shape->kv_heads + head];
    }
}

/* GROUP values from key `at` on into the sums of each row that sees them, keys [lo, hi). What a row does not see is left out
 * and not merely weighed with zero: zero times infinity is no number. */
INLINE void mix_seen(int rows, int64_t at, const int64_t *lo, const int64_t *hi, const float *const *weights,
                     const void *const *values, float *sums, int64_t padded) {
    int first[QROWS], last[QROWS] = {0}, alike = 1;
    for (int r = 0; r < rows; r++) {
        first[r] = (int)max_i64(0, lo[r] - at), last[r] = (int)min_i64(GROUP, hi[r] - at);
        alike &= !first[r] && last[r] == last[0];
    }
    if (alike) {
        mix_rows(F32, rows, weights, values, last[0], sums, padded, padded);
        return;
    }
    for (int r = 0; r < rows; r++) {
        if (first[r] >= last[r]) continue;
        const float *seen = weights[r] + first[r];
        mix_rows(F32, 1, &seen, values + first[r], last[r] - first[r], sums + r * padded, padded, padded);
    }
}

/* Up to 4 queries of one head against gathered keys and values. */
INLINE void block(int64_t dim, int quantised, const Source *s, const float *q, int64_t position, int rows, int64_t head,
                  int64_t begin, int64_t to, const float *keys, const float *values, const float *key_scales,
                  const float *value_scales, float *scores, float *sums) {
    int64_t padded = round_up(dim, LANES), width = round_up(to - begin, GROUP);
    float inverse[QROWS];
    int64_t lo[QROWS], hi[QROWS];
    const void *at_hand[GROUP];
    for (int r = 0; r < rows; r++) range_of(s, position + r, lo + r, hi + r);
    for (int64_t at = begin; at < to; at += GROUP) {
        for (int i = 0; i < GROUP; i++) at_hand[i] = keys + (min_i64(at + i, to - 1) - begin) * padded;
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < GROUP; i += LANES) {
                vec raw = score(F32, q + r * padded, at_hand + i, dim == padded ? dim : padded);
                if (quantised) raw *= load(key_scales + at - begin + i);
                store(scores + r * width + at - begin + i, adjust(s, raw, head, position + r, at + i, lo[r], hi[r]));
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
        for (int i = 0; i < GROUP; i++) at_hand[i] = values + (min_i64(at + i, to - 1) - begin) * padded;
        mix_seen(rows, at, lo, hi, weights, at_hand, sums, padded);
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
    int64_t per = a->heads / a->kv_heads, padded = round_up(dim, LANES), start = s->segments->q_starts[s->segment];
    int64_t offset = s->segments->kv_lens[s->segment] - (s->segments->q_starts[s->segment + 1] - start);
    int64_t begin, to, unused;
    range_of(s, offset + first, &begin, &unused);
    range_of(s, offset + last - 1, &unused, &to);
    begin = begin / GROUP * GROUP;
    int64_t width = round_up(to - begin, GROUP);
    float *keys = scratch, *values = keys + width * padded, *key_scales = values + width * padded;
    float *value_scales = key_scales + width, *scores = value_scales + width, *q = scores + QROWS * width;
    float *sums = q + QROWS * padded;
    gather(kind, s, m->keys, m->key_stride, m->key_scales, group, begin, to, keys, key_scales);
    gather(kind, s, m->values, m->value_stride, m->value_scales, group, begin, to, values, value_scales);
    for (int64_t head = group * per; head < (group + 1) * per; head++)
        for (int64_t row = first; row < last; row += QROWS) {
            int rows = (int)min_i64(QROWS, last - row);
            for (int r = 0; r < rows; r++)
                for (int64_t i = 0; i < padded; i++)
                    q[r * padded + i] = i < dim ? queries[(start + row + r) * q_stride + head * dim + i] : 0.0f;
            int64_t end = s->segments->causal ? min_i64(to, offset + row + rows) : to;
            block_of(dim)(kind == INT8, s, q, offset + row, rows, head, begin, end, keys, values, key_scales,
                          value_scales, scores, sums);
            for (int r = 0; r < rows; r++)
                memcpy(out + (start + row + r) * a->heads * dim + head * dim, sums + r * padded, dim * sizeof *out);
        }
}

void find_longest(const Segments *segments, Longest *longest) {
    for (int64_t i = 0; i < segments->segments; i++) {
        int64_t rows = segments->q_starts[i + 1] - segments->q_starts[i];
        int64_t *most = rows == 1 ? &longest->decoding : &longest->filling;
        *most = max_i64(*most, segments->kv_lens[i]);
    }
}

/* What `decode` and `prefill` lay out. A window leaves keys out; they are counted here. */
int64_t attention_scratch(const AttentionShape *shape, Longest longest) {
    int64_t padded = round_up(shape->dim, LANES), singly = round_up(longest.decoding, GROUP);
    int64_t decoding = shape->heads * (2 * padded + singly), width = round_up(longest.filling, GROUP) + GROUP;
    int64_t filling = longest.filling ? 2 * width * padded + (2 + QROWS) * width + 2 * QROWS * padded : 0;
    return max_i64(decoding, filling) + LANES;
}

INLINE void attend_as(int kind, int64_t dim, const AttentionShape *shape, const Segments *segments,
                      const Memory *memory, const float *queries, int64_t q_stride, float *out, int part, int parts,
                      float *scratch) {
    /* Few segments: heads are shared too; many: a segment's pages are read by one thread, one after the other. */
    int64_t pieces = segments->segments >= 4 * parts ? 1 : min_i64(parts, shape->kv_heads), task = 0;
    Source s = {shape, segments, memory, 0, !segments->tables || segments->block_size % GROUP == 0};
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
                    prefill(kind, dim, &s, queries, q_stride, out, group, first, min_i64(rows, first + TASK_ROWS),
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
        float most = max_abs(x, dim), inverse = most > 0.0f ? 127.0f / most : 0.0f;
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

/* Attention of segments that see all of themselves, as in encoders: two products a head, whose panels are packed from the
 * keys and values at hand. No key is ever decoded one by one there, so nothing has to agree with another order of sums. */
#include "attention.h"

#define BLOCK_ROWS 32 /* queries whose scores stay near */
#define TASK_ROWS 256 /* queries for which keys are packed again, so that threads can share a long segment */

typedef struct {
    const AttentionShape *shape;
    Operand queries;
    int64_t head, position, keys, width; /* the first query's place; keys of the segment, the same in whole panels */
    float *scores;                       /* [BLOCK_ROWS][width] */
} Block;

INLINE const void *element(int kind, const void *rows, int64_t at) {
    return kind == F32 ? (const void *)((const float *)rows + at) : (const void *)((const bf16 *)rows + at);
}

/* Keys [n][dim] as a matrix of `width` outputs, those beyond n being zero: 32 bits at a time. */
INLINE void pack_keys(int kind, const void *keys, int64_t stride, int64_t n, int64_t width, int64_t dim,
                      uint32_t *panels) {
    int64_t used = kind == F32 ? dim : dim / 2, words = padded_k(kind, dim) * element_bytes(kind) / 4;
    for (int64_t key = 0; key < width; key++) {
        uint32_t *to = panels + key / PANEL_WIDTH * words * PANEL_WIDTH + key % PANEL_WIDTH;
        const char *row = element(kind, keys, key * stride);
        for (int64_t word = 0; word < words; word++) {
            to[word * PANEL_WIDTH] = 0;
            if (key < n && word < used) memcpy(to + word * PANEL_WIDTH, row + word * 4, 4);
        }
    }
}

/* Values [n][dim] as a matrix of dim outputs of `width` keys, zeros beyond n and dim. */
INLINE void pack_values(int kind, const void *values, int64_t stride, int64_t n, int64_t width, int64_t dim,
                        uint32_t *panels) {
    int64_t step = kind == F32 ? 1 : 2;
    for (int64_t column = 0; column < dim; column += PANEL_WIDTH)
        for (int64_t key = 0; key < width; key += step, panels += PANEL_WIDTH) {
            int64_t left = min_i64(PANEL_WIDTH, dim - column);
            if (key + step > n || left < PANEL_WIDTH) memset(panels, 0, PANEL_WIDTH * 4);
            if (key >= n) continue;
            if (kind == F32) {
                memcpy(panels, element(F32, values, key * stride + column), left * 4);
                continue;
            }
            const bf16 *even = element(BF16, values, key * stride + column), *odd = even + stride;
            for (int64_t i = 0; i < left; i++) panels[i] = even[i] | (key + 1 < n ? (uint32_t)odd[i] << 16 : 0);
        }
}

/* One query's scores to weights that are not divided by their sum yet, as an operand in their place; returns its inverse. */
INLINE float weigh(int kind, const Block *b, float *scores, int64_t position) {
    static const ivec lanes = LANE_INDICES;
    const AttentionShape *a = b->shape;
    const float *bias = a->bias ? a->bias + b->head * a->bias_width + a->bias_width / 2 - position : NULL;
    float scale = bias ? 1.0f : a->scale;
    vec most = splat(-__builtin_inff()), sum = splat(0.0f);
    for (int64_t at = 0; at < b->width; at += LANES) {
        vec score = load(scores + at);
        if (bias) score = fma_vec(score, splat(a->scale), load(bias + at));
        if (at + LANES > b->keys)
            score = select_vec(lanes + (int32_t)at < (int32_t)b->keys, score, splat(-__builtin_inff()));
        if (bias || at + LANES > b->keys) store(scores + at, score);
        most = max_vec(most, score);
    }
    vec top = splat(-reduce_max(most) * scale);
    for (int64_t at = 0; at < b->width; at += LANES) {
        vec weight = exp_vec(fma_vec(load(scores + at), splat(scale), top));
        sum += weight;
        if (kind == F32) store(scores + at, weight);
        else store_bf16((bf16 *)scores + at, weight);
    }
    return 1.0f / reduce_add(sum);
}

/* Up to BLOCK_ROWS queries of one head. */
INLINE void attend_block(int kind, const Block *b, int64_t rows, const PackedMatrix *keys, const PackedMatrix *values, float *out,
                         int64_t out_stride, float *scratch) {
    float inverse[BLOCK_ROWS];
    Output scores = {b->scores, b->width, 0, NO_ACTIVATION, 0}, mixed = {out, out_stride, 0, NO_ACTIVATION, 0};
    gemm(keys, b->queries, rows, scores, 0, 1, scratch);
    for (int64_t r = 0; r < rows; r++) inverse[r] = weigh(kind, b, b->scores + r * b->width, b->position + r);
    Operand weights = {b->scores, kind == F32 ? b->width : 2 * b->width, NULL};
    gemm(values, weights, rows, mixed, 0, 1, scratch);
    for (int64_t r = 0; r < rows; r++) {
        float *row = out + r * out_stride;
        int64_t i = 0;
        for (; i + LANES <= b->shape->dim; i += LANES) store(row + i, load(row + i) * inverse[r]);
        for (; i < b->shape->dim; i++) row[i] *= inverse[r];
    }
}

/* Queries [first, last) of a segment of n rows for the heads that share the keys of `group`. */
INLINE void attend_rows(int kind, int64_t tiles, const AttentionShape *a, const void *rows, int64_t stride, int64_t n, int64_t group,
                        int64_t first, int64_t last, float *out, float *scratch) {
    int64_t per = a->heads / a->kv_heads, width = padded_k(kind, round_up(n, PANEL_WIDTH)), depth = padded_k(kind, a->dim);
    const void *keys = element(kind, rows, (a->heads + group) * a->dim), *values = element(kind, keys, a->kv_heads * a->dim);
    float *key_panels = scratch, *value_panels = key_panels + width * depth;
    float *rest = value_panels + width * round_up(a->dim, PANEL_WIDTH);
    Block b = {.shape = a, .keys = n, .width = width, .scores = rest + BLOCK_ROWS * PANEL_WIDTH * 3};
    pack_keys(kind, keys, stride, n, width, a->dim, (uint32_t *)key_panels);
    pack_values(kind, values, stride, n, width, a->dim, (uint32_t *)value_panels);
    PackedMatrix scoring = {.dtype = kind, .n = width, .k = a->dim, .data = key_panels, .tiles = tiles && depth == a->dim};
    PackedMatrix mixing = {.dtype = kind, .n = a->dim, .k = width, .data = value_panels, .tiles = tiles};
    for (b.head = group * per; b.head < (group + 1) * per; b.head++)
        for (b.position = first; b.position < last; b.position += BLOCK_ROWS) {
            b.queries = (Operand){element(kind, rows, b.position * stride + b.head * a->dim), stride, NULL};
            attend_block(kind, &b, min_i64(BLOCK_ROWS, last - b.position), &scoring, &mixing,
                         out + (b.position * a->heads + b.head) * a->dim, a->heads * a->dim, rest);
        }
}

int64_t whole_scratch(const AttentionShape *shape, int64_t longest) {
    int64_t width = round_up(longest, 32), columns = round_up(shape->dim, 32); /* more than needed, in any dtype */
    return 2 * width * columns + BLOCK_ROWS * (3 * PANEL_WIDTH + width) + LANES;
}

void attend_whole(const PackedMatrix *like, const AttentionShape *shape, const Segments *segments, const void *rows,
                  int64_t stride, float *out, int part, int parts, float *scratch) {
    int64_t task = 0;
    for (int64_t segment = 0; segment < segments->segments; segment++) {
        int64_t start = segments->q_starts[segment], n = segments->q_starts[segment + 1] - start;
        for (int64_t group = 0; group < shape->kv_heads; group++)
            for (int64_t first = 0; first < n; first += TASK_ROWS, task++) {
                if (task % parts != part) continue;
                int64_t last = min_i64(n, first + TASK_ROWS);
                float *to = out + start * shape->heads * shape->dim;
                if (like->dtype == F32)
                    attend_rows(F32, 0, shape, element(F32, rows, start * stride), stride, n, group, first, last, to,
                                scratch);
                else
                    attend_rows(BF16, like->tiles, shape, element(BF16, rows, start * stride), stride, n, group, first, last,
                                to, scratch);
            }
    }
}

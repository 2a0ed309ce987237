/* Top-k and logsumexp of rows of logits: what beam search and log-probabilities are made of. */
#include "vector.h"

#define STRIDE 8 /* vectors that are compared, and added up, together */

/* The largest values of a row so far. */
typedef struct {
    int64_t count, found; /* wanted, and there */
    float *values;        /* [count], descending */
    int64_t *tokens;      /* [count] their places in the row; of equal values the first comes first */
} TopK;

/* Insert a value if it is among the largest. */
static void insert_value(TopK *best, float value, int64_t token) {
    int64_t at = best->found;
    if (best->found < best->count) best->found++;
    else if (value > best->values[at - 1]) at--;
    else return;
    for (; at && value > best->values[at - 1]; at--)
        best->values[at] = best->values[at - 1], best->tokens[at] = best->tokens[at - 1];
    best->values[at] = value, best->tokens[at] = token;
}

/* The largest of STRIDE vectors, lane by lane. */
INLINE vec max_of_stride(const float *x) {
    vec most = load(x);
#pragma GCC unroll 8
    for (int i = 1; i < STRIDE; i++) most = max_vec(most, load(x + i * LANES));
    return most;
}

/* Find the largest values of x [size]. Few strides hold anything above the lowest of those found so far. */
static void find_top_k(TopK *best, const float *x, int64_t size) {
    int64_t i = 0;
    while (i < size) {
        int64_t stop = min_i64(i + STRIDE * LANES, size);
        if (best->found < best->count || stop - i < STRIDE * LANES ||
            reduce_max(max_of_stride(x + i)) > best->values[best->count - 1])
            for (int64_t at = i; at < stop; at++) insert_value(best, x[at], at);
        i = stop;
    }
}

/* log(sum(exp(x))) of x [size] with its maximum, added up in an order that depends on `size` alone. */
static float logsumexp(const float *x, int64_t size, float most) {
    vec sum = splat(0.0f), top = splat(most);
    float rest[LANES];
    int64_t i = 0;
    for (; i + STRIDE * LANES <= size; i += STRIDE * LANES) {
        vec part = exp_vec(load(x + i) - top);
#pragma GCC unroll 8
        for (int j = 1; j < STRIDE; j++) part += exp_vec(load(x + i + j * LANES) - top);
        sum += part;
    }
    for (; i < size; i += LANES) {
        store(rest, splat(-__builtin_inff()));
        memcpy(rest, x + i, min_i64(LANES, size - i) * sizeof *x);
        sum += exp_vec(load(rest) - top);
    }
    return most + __builtin_logf(reduce_add(sum));
}

/* Write, for each of `rows` rows of `size` floats, the `count` largest values in descending order [rows][count],
 * their places [rows][count], and the row's logsumexp [rows]. The latter is NaN for a row with a NaN or without a
 * finite number; its other outputs are then undefined. */
EXPORTED void top_k(const float *x, int64_t rows, int64_t size, int64_t count, float *values, int64_t *tokens,
                    float *log_sums, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t row = 0; row < rows; row++) {
        TopK best = {count, 0, values + row * count, tokens + row * count};
        find_top_k(&best, x + row * size, size);
        log_sums[row] = logsumexp(x + row * size, size, best.values[0]);
    }
}

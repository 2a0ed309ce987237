/* The likeliest of each row of logits, and the row's mass: what beams and log-probabilities are made of. */
#include "vector.h"

#define STRIDE 8 /* vectors that are compared, and added up, together */

typedef struct {
    int64_t count, found;
    float *values;   /* descending */
    int64_t *tokens; /* the first of equals first */
} Best;

static void offer(Best *best, float value, int64_t token) {
    int64_t at = best->found;
    if (best->found < best->count) best->found++;
    else if (value > best->values[at - 1]) at--;
    else return;
    for (; at && value > best->values[at - 1]; at--)
        best->values[at] = best->values[at - 1], best->tokens[at] = best->tokens[at - 1];
    best->values[at] = value, best->tokens[at] = token;
}

INLINE vec largest_of_stride(const float *x) {
    vec most = load(x);
#pragma GCC unroll 8
    for (int i = 1; i < STRIDE; i++) most = max_vec(most, load(x + i * LANES));
    return most;
}

/* Few strides hold anything that is higher than the lowest of the best so far. */
static void find(Best *best, const float *x, int64_t size) {
    int64_t i = 0;
    while (i < size) {
        int64_t stop = min_i64(i + STRIDE * LANES, size);
        if (best->found < best->count || stop - i < STRIDE * LANES ||
            reduce_max(largest_of_stride(x + i)) > best->values[best->count - 1])
            for (int64_t at = i; at < stop; at++) offer(best, x[at], at);
        i = stop;
    }
}

/* log sum exp, added up in an order that follows from `size` alone. */
static float log_mass(const float *x, int64_t size, float most) {
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

/* Of each of `rows` rows of `size` floats the `count` highest in order with their places, and log sum exp. A row with a
 * NaN, or without anything finite, has mass NaN, and what else is said of it means nothing. */
EXPORTED void rank_rows(const float *x, int64_t rows, int64_t size, int64_t count, float *values, int64_t *tokens,
                        float *mass, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t row = 0; row < rows; row++) {
        Best best = {count, 0, values + row * count, tokens + row * count};
        find(&best, x + row * size, size);
        mass[row] = log_mass(x + row * size, size, best.values[0]);
    }
}

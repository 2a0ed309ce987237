/* Integers for a group of weights, and the scale that they share.
 *
 * In 8 bits the largest absolute value becomes 127. In 4 bits that would waste a sixteenth of the range, and the best
 * scale is not the one that lets no number be cut off: several are tried, and that with the least squared error is
 * kept. For given integers q the best scale is sum(x q) / sum(q q), with the error sum(x x) - sum(x q)^2 / sum(q q). */
#include "quantise.h"

/* What the number with the largest absolute value becomes before it is rounded and cut off at -8 and 7. */
static const float LARGEST[] = {-8.0f,  -7.0f,  -7.25f, -7.5f, -7.75f, -8.25f, -8.5f, -8.75f, -9.0f,
                                -9.25f, -6.75f, -6.5f,  7.0f,  6.75f,  7.25f,  7.5f,  6.5f,   7.75f};
#define TRIES ((int)(sizeof LARGEST / sizeof *LARGEST))

/* The same where numbers count by weights, and the largest may count little. */
static const float CUT_OFF[] = {-9.5f, -10.0f, -11.0f, -12.0f, -14.0f, -16.0f};
#define WIDER ((int)(sizeof CUT_OFF / sizeof *CUT_OFF))

INLINE vec whole_4_bits(vec x) { return min_vec(splat(7.0f), max_vec(splat(-8.0f), x + 12582912.0f - 12582912.0f)); }

/* Of the number with the largest absolute value, with its sign; NaN if one of them is. */
static float largest(const float *x, int64_t count) {
    float most = max_abs(x, count);
    for (int64_t i = 0; i < count; i++)
        if (x[i] == -most) return -most;
    return most;
}

/* Store what `count` numbers times `inverse` are as integers. */
static void round_group(const float *x, int64_t count, float inverse, int8_t *to) {
    for (int64_t i = 0; i < count; i += LANES)
        store_int8(to + i, __builtin_convertvector(whole_4_bits(load(x + i) * inverse), ivec));
}

static float quantise_4_bits(const float *x, int64_t count, int8_t *to) {
    float most = largest(x, count), best = 0.0f, scale = 0.0f, inverse = 0.0f;
    if (!(most != 0.0f && __builtin_fabsf(most) < __builtin_inff()) || __builtin_fabsf(most) < 1e-30f) {
        memset(to, 0, count);
        return most - most; /* NaN of what is no number */
    }
    for (int i = 0; i < TRIES; i++) {
        float times = LARGEST[i] / most;
        vec products = splat(0.0f), squares = splat(0.0f);
        for (int64_t at = 0; at < count; at += LANES) {
            vec number = load(x + at), q = whole_4_bits(number * times);
            products = fma_vec(number, q, products);
            squares = fma_vec(q, q, squares);
        }
        float product = reduce_add(products), square = reduce_add(squares);
        float explained = square > 0.0f ? product / square * product : 0.0f; /* of the sum of squares */
        if (explained > best) best = explained, scale = product / square, inverse = times;
    }
    round_group(x, count, inverse, to);
    return scale;
}

float quantise_group(int64_t dtype, const float *numbers, int64_t count, int8_t *to) {
    if (dtype == INT4) return quantise_4_bits(numbers, count, to);
    float scale = max_abs(numbers, count) / 127.0f;
    vec step = splat(scale < 1e-30f ? 1e-30f : scale);
    for (int64_t i = 0; i < count; i += LANES) store_int8(to + i, round_vec(load(numbers + i) / step));
    return scale;
}

/* How much of the weighted sum of squares the integers of numbers times `inverse` explain; `scale`: their best scale. */
static float explained_by(const float *x, const float *weights, int64_t count, float inverse, float *scale) {
    vec products = splat(0.0f), squares = splat(0.0f);
    for (int64_t at = 0; at < count; at += LANES) {
        vec number = load(x + at), q = whole_4_bits(number * inverse), weighted = q * load(weights + at);
        products = fma_vec(number, weighted, products);
        squares = fma_vec(q, weighted, squares);
    }
    float product = reduce_add(products), square = reduce_add(squares);
    *scale = square > 0.0f ? product / square : 0.0f;
    return *scale * product;
}

float quantise_weighted_group(const float *numbers, const float *weights, int64_t count, int8_t *to) {
    float most = largest(numbers, count), best = 0.0f, scale = 0.0f, inverse = 0.0f, tried;
    if (!(most != 0.0f && __builtin_fabsf(most) < __builtin_inff()) || __builtin_fabsf(most) < 1e-30f)
        return quantise_4_bits(numbers, count, to);
    for (int i = 0; i < TRIES + WIDER; i++) {
        float times = (i < TRIES ? LARGEST[i] : CUT_OFF[i - TRIES]) / most;
        float explained = explained_by(numbers, weights, count, times, &tried);
        if (explained > best) best = explained, scale = tried, inverse = times;
    }
    for (int round = 0; round < 4 && scale != 0.0f; round++) { /* with the best scale numbers may round otherwise */
        float times = 1.0f / scale, explained = explained_by(numbers, weights, count, times, &tried);
        if (!(explained > best)) break;
        best = explained, scale = tried, inverse = times;
    }
    if (!(best > 0.0f)) return quantise_4_bits(numbers, count, to); /* none of them counts */
    round_group(numbers, count, inverse, to);
    return scale;
}

/* What one head's queries do with its keys and values, whatever these are stored as: products and mixes. */
#ifndef TRIPTYCH_ATTENTION_LANES_H
#define TRIPTYCH_ATTENTION_LANES_H

#include "vector.h"

#define QROWS 4 /* queries that share the keys at hand */
#define COLUMNS (LANES == 8 ? 2 : 4) /* registers a row: with four rows they leave some for the values */

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

#endif

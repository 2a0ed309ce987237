/* One head's queries, keys and values in vector registers: scores and weighted sums, whatever keys and values are
 * stored as. */
#ifndef TRIPTYCH_ATTENTION_LANES_H
#define TRIPTYCH_ATTENTION_LANES_H

#include "vector.h"

#define QUERY_ROWS 4                  /* queries that share the keys or values at hand */
#define SUM_VECS (LANES == 8 ? 2 : 4) /* registers of a row's weighted sum: four rows leave some for the values */

/* LANES stored numbers from index `at` as floats. */
INLINE vec load_stored(int kind, const void *p, int64_t at) {
    if (kind == F32) return load((const float *)p + at);
    if (kind == BF16) return load_bf16((const bf16 *)p + at);
    return load_int8((const int8_t *)p + at);
}

/* The stored number at index `at` as a float. */
INLINE float stored_float(int kind, const void *p, int64_t at) {
    if (kind == F32) return ((const float *)p)[at];
    if (kind == BF16) return from_bf16(((const bf16 *)p)[at]);
    return (float)((const int8_t *)p)[at];
}

/* The numbers [at, dim) of a head, then zeros. */
static __attribute__((noinline)) vec load_head_tail(int kind, const void *p, int64_t at, int64_t dim) {
    float rest[LANES] = {0};
    for (int64_t i = at; i < dim; i++) rest[i - at] = stored_float(kind, p, i);
    return load(rest);
}

/* LANES numbers of a head of `dim` from `at`, zeros beyond dim. */
INLINE vec load_head(int kind, const void *p, int64_t at, int64_t dim) {
    return at + LANES <= dim ? load_stored(kind, p, at) : load_head_tail(kind, p, at, dim);
}

/* foldN: of each run of N lanes, add the second half onto the first; the results of a fill the lower half of each
 * run of the result, those of b the upper. */
#define PICK(...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#if LANES == 16
INLINE vec fold16(vec a, vec b) {
    return PICK(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PICK(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
INLINE vec fold8(vec a, vec b) {
    return PICK(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           PICK(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
INLINE vec fold4(vec a, vec b) {
    return PICK(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           PICK(2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}
INLINE vec fold2(vec a, vec b) {
    return PICK(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           PICK(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
static const int BIT_REVERSED[LANES] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
#elif LANES == 8
INLINE vec fold8(vec a, vec b) { return PICK(0, 1, 2, 3, 8, 9, 10, 11) + PICK(4, 5, 6, 7, 12, 13, 14, 15); }
INLINE vec fold4(vec a, vec b) { return PICK(0, 1, 4, 5, 8, 9, 12, 13) + PICK(2, 3, 6, 7, 10, 11, 14, 15); }
INLINE vec fold2(vec a, vec b) { return PICK(0, 2, 4, 6, 8, 10, 12, 14) + PICK(1, 3, 5, 7, 9, 11, 13, 15); }
static const int BIT_REVERSED[LANES] = {0, 4, 2, 6, 1, 5, 3, 7};
#else
INLINE vec fold4(vec a, vec b) { return PICK(0, 1, 4, 5) + PICK(2, 3, 6, 7); }
INLINE vec fold2(vec a, vec b) { return PICK(0, 2, 4, 6) + PICK(1, 3, 5, 7); }
static const int BIT_REVERSED[LANES] = {0, 2, 1, 3};
#endif

/* Add up each of LANES vectors; the sum of vector i is lane BIT_REVERSED[i] of the result. `v` is overwritten. */
INLINE vec sum_each(vec *v) {
#if LANES > 8
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) v[i] = fold16(v[i], v[i + 8]);
#endif
#if LANES > 4
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) v[i] = fold8(v[i], v[i + 4]);
#endif
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) v[i] = fold4(v[i], v[i + 2]);
    return fold2(v[0], v[1]);
}

/* The dot products of one query [dim, padded with zeros to whole registers] with LANES keys: lane i is that of
 * keys[i]. */
INLINE vec dot_keys(int kind, const float *query, const void *const *keys, int64_t dim) {
    vec s[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        s[i] = splat(0.0f);
#pragma GCC unroll 4
        for (int64_t at = 0; at < dim; at += LANES)
            s[i] = fma_vec(load(query + at), load_head(kind, keys[BIT_REVERSED[i]], at, dim), s[i]);
    }
    return sum_each(s);
}

/* One head's values and the rows that they are added up for: sums[r] += weights[r][i] * values[i] for i in [0,
 * count). */
typedef struct {
    const float *weights[QUERY_ROWS]; /* of each row, [count] */
    const void *const *values;        /* [count] pointers to [dim] */
    int count;
    float *sums;    /* [rows][stride], padded to whole registers */
    int64_t stride; /* floats from row to row */
} WeightedSum;

/* Do that for `vecs` registers' worth of a head from `first`; `rows` and `vecs` are constants. */
INLINE void weighted_sum_vecs(int kind, int rows, int vecs, const WeightedSum *w, int64_t first, int64_t dim) {
    vec sum[QUERY_ROWS][SUM_VECS];
    float *sums = w->sums + first;
    const float *weights[QUERY_ROWS];
    const void *const *values = w->values;
    int64_t stride = w->stride;
    int count = w->count;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) weights[r] = w->weights[r];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < vecs; c++) sum[r][c] = load(sums + r * stride + c * LANES);
    for (int i = 0; i < count; i++)
#pragma GCC unroll 4
        for (int c = 0; c < vecs; c++) {
            vec value = load_head(kind, values[i], first + c * LANES, dim);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sum[r][c] = fma_vec(splat(weights[r][i]), value, sum[r][c]);
        }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < vecs; c++) store(sums + r * stride + c * LANES, sum[r][c]);
}

/* Do that for a whole head; `rows` is a constant. */
INLINE void weighted_sum_rows(int kind, int rows, const WeightedSum *w, int64_t dim) {
    int64_t first = 0;
    for (; first + SUM_VECS * LANES <= dim; first += SUM_VECS * LANES)
        weighted_sum_vecs(kind, rows, SUM_VECS, w, first, dim);
    for (; first < dim; first += LANES) weighted_sum_vecs(kind, rows, 1, w, first, dim);
}

/* Do that for one to QUERY_ROWS rows. */
INLINE void weighted_sum(int kind, int rows, const WeightedSum *w, int64_t dim) {
    switch (rows) {
    case 1: weighted_sum_rows(kind, 1, w, dim); break;
    case 2: weighted_sum_rows(kind, 2, w, dim); break;
    case 3: weighted_sum_rows(kind, 3, w, dim); break;
    default: weighted_sum_rows(kind, QUERY_ROWS, w, dim);
    }
}

#endif

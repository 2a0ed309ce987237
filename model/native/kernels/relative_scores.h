/* Scores between contents and relative positions, one tile of queries at a time (He et al. 2021).
 *
 * Both are products with vectors that depend on the distance alone, so a tile multiplies what it has with the vectors
 * of all distances that occur in it, and then each score is read at its distance. Of queries times relative keys a row
 * is one query, and its scores lie side by side. Of keys times relative queries a row is one key, and what lies side by
 * side are the scores of different queries: those are transposed in registers. */
#ifndef TRIPTYCH_RELATIVE_SCORES_H
#define TRIPTYCH_RELATIVE_SCORES_H

#include "attention.h"
#include "gemm.h"
#include "scratch.h"

#define TILE_QUERIES 32                   /* queries whose scores stay in a near cache */
#define TILE_DISTANCES (2 * TILE_QUERIES) /* of as many queries and keys, and one more */

/* Buffers of one thread. */
typedef struct {
    float *by_query; /* [TILE_QUERIES][by_query_width] */
    float *by_key;   /* [TILE_QUERIES][TILE_DISTANCES] */
    int64_t by_query_width;
} RelativeBuffers;

/* Some queries of one head, and the keys of their segment. */
typedef struct {
    const RelativePositions *positions;
    int kind, tiles;         /* of operands, and whether products may be in AMX tiles */
    int64_t head;
    Operand queries, keys;   /* of the head: the tile's queries, all of the segment's keys */
    int64_t first, count;    /* the tile's first query, a multiple of TILE_QUERIES, and how many there are */
    int64_t n, width;        /* keys; those of whole panels */
    float *scores;           /* [TILE_QUERIES][width] */
    float *products;         /* scratch of gemm */
} RelativeTile;

/* Take the buffers for segments of up to `width` keys in whole panels. */
INLINE void relative_buffers(Scratch *scratch, int64_t width, RelativeBuffers *buffers) {
    buffers->by_query_width = width + TILE_QUERIES + PANEL_WIDTH;
    buffers->by_query = scratch_take(scratch, TILE_QUERIES * buffers->by_query_width * sizeof *buffers->by_query);
    buffers->by_key = scratch_take(scratch, TILE_QUERIES * TILE_DISTANCES * sizeof *buffers->by_key);
}

/* Rows [first, first + count) of a head's matrix of relative positions, both multiples of PANEL_WIDTH. */
INLINE PackedMatrix relative_panels(const PackedMatrix *all, const RelativeTile *t, int64_t first, int64_t count) {
    PackedMatrix part = *all;
    int64_t row = t->head * 2 * t->positions->reach + first;
    part.data = (const char *)all->data + row * padded_k(all->dtype, all->k) * element_bytes(all->dtype);
    part.n = count, part.tiles = t->tiles;
    return part;
}

/* Add q_i . K(i - j): in order of j these are the rows of the matrix from j - i on. */
INLINE void add_relative_keys(const RelativeTile *t, const RelativeBuffers *buffers) {
    int64_t first = t->positions->reach - TILE_QUERIES - t->first; /* the farthest key before the last query */
    int64_t count = round_up(t->n + TILE_QUERIES - 1, PANEL_WIDTH);
    PackedMatrix panels = relative_panels(&t->positions->keys, t, first, count);
    Output output = {.rows = buffers->by_query, .stride = buffers->by_query_width};
    gemm(&panels, t->queries, t->count, output, 0, 1, t->products);
    for (int64_t r = 0; r < t->count; r++) {
        const float *from = buffers->by_query + r * buffers->by_query_width + TILE_QUERIES - 1 - r;
        float *to = t->scores + r * t->width;
        for (int64_t at = 0; at < t->n; at += LANES) store(to + at, load(to + at) + load(from + at));
    }
}

/* Transpose LANES rows of as many numbers. */
INLINE void transpose_lanes(vec *rows) {
    static const ivec lanes = LANE_INDICES;
    const ivec low = lanes / 2 + lanes % 2 * LANES, high = low + LANES / 2;
    for (int64_t stage = 1; stage < LANES; stage *= 2) {
        vec zipped[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            zipped[2 * i] = __builtin_shuffle(rows[i], rows[i + LANES / 2], low);
            zipped[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + LANES / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = zipped[i];
    }
}

/* Add k_j . Q(i - j) for the keys [key, key + TILE_QUERIES), in the order of i the rows of the matrix from i - j on. */
INLINE void add_relative_queries(const RelativeTile *t, const RelativeBuffers *buffers, int64_t key) {
    int64_t first = t->positions->reach - TILE_QUERIES + t->first - key; /* the last key from the first query */
    PackedMatrix panels = relative_panels(&t->positions->queries, t, first, TILE_DISTANCES);
    Output output = {.rows = buffers->by_key, .stride = TILE_DISTANCES};
    int64_t step = element_bytes(t->kind) * t->keys.stride, count = min_i64(TILE_QUERIES, t->n - key);
    gemm(&panels, (Operand){(const char *)t->keys.rows + key * step, t->keys.stride, NULL}, count, output, 0, 1,
         t->products);
    for (int64_t r = 0; r < t->count; r += LANES)
        for (int64_t c = 0; c < count; c += LANES) {
            vec rows[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                rows[i] = load(buffers->by_key + (c + i) * TILE_DISTANCES + TILE_QUERIES - 1 - c - i + r);
            transpose_lanes(rows);
            for (int i = 0; i < LANES && r + i < t->count; i++) {
                float *to = t->scores + (r + i) * t->width + key + c;
                store(to, load(to) + rows[i]);
            }
        }
}

/* Add both to the dot products of a tile. What is beyond the last key is undefined, there as here. It is a function of
 * its own so that the loops of models without relative positions are compiled as without it. */
static __attribute__((noinline)) void add_relative_scores(const RelativeTile *t, const RelativeBuffers *buffers) {
    if (t->positions->keys.data) add_relative_keys(t, buffers);
    if (!t->positions->queries.data) return;
    for (int64_t key = 0; key < t->n; key += TILE_QUERIES) add_relative_queries(t, buffers, key);
}

#endif

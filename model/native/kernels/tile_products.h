/* The two products of attention in tiles: scores of a tile's queries, and sums of values by their weights. By AMX tiles,
 * or by vectors of bf16 where a CPU has no tiles; which of them decides the order of sums. */
#ifndef TRIPTYCH_TILE_PRODUCTS_H
#define TRIPTYCH_TILE_PRODUCTS_H

#include "tile_packing.h"

#if HAS_TILED_ATTENTION

#define PAIR_ROWS (2 * TILE_ROWS)         /* queries that share packed keys while they are in tiles */
#define VECTOR_ROWS 8                     /* queries whose sums are in registers, by two panels */
#define PASSING_QUERIES 4                 /* for which keys are not packed */
#define SCORE_STRIDE (BLOCK_KEYS + LANES) /* floats: not a power of two, whose rows would share sets of the cache */

/* What a block adds to a tile's queries. */
typedef struct {
    int64_t first, rows;                           /* queries */
    int64_t from[PAIR_ROWS], to[PAIR_ROWS];        /* keys that each sees, from the block's first */
    int64_t begin, end;                            /* of all of them, in whole steps */
    float tops[PAIR_ROWS], totals[PAIR_ROWS][LANES];
} BlockTile;

#if HAS_TILES

/* Begin sums of one or two tiles of queries, by two of columns. */
INLINE void zero_sums(int two) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (!two) return;
    TILE_ZERO(2);
    TILE_ZERO(3);
}

/* Scores of the tile's queries with the block's packed keys: two tiles of queries by two of keys. */
static void score_packed(const TiledQueries *t, const BlockTile *tile) {
    int two = tile->rows > TILE_ROWS;
    int64_t bytes = t->depth * sizeof(bf16), panel = t->depth * 16;
    const bf16 *low = t->queries + tile->first * t->depth, *high = low + TILE_ROWS * t->depth;
    STORED_FOR_TILES();
    for (int64_t key = tile->begin; key < tile->end; key += STEP_KEYS) {
        const bf16 *keys = t->keys + key / 16 * panel;
        float *scores = t->scores + key;
        zero_sums(two);
        for (int64_t at = 0; at < t->depth; at += 32) {
            TILE_LOAD(6, keys + at * 16, TILE_BYTES);
            TILE_LOAD(7, keys + panel + at * 16, TILE_BYTES);
            TILE_LOAD(4, low + at, bytes);
            TILE_DOT_BF16(0, 4, 6);
            TILE_DOT_BF16(1, 4, 7);
            if (!two) continue;
            TILE_LOAD(5, high + at, bytes);
            TILE_DOT_BF16(2, 5, 6);
            TILE_DOT_BF16(3, 5, 7);
        }
        TILE_STORE(0, scores, SCORE_STRIDE * 4);
        TILE_STORE(1, scores + 16, SCORE_STRIDE * 4);
        if (!two) continue;
        TILE_STORE(2, scores + TILE_ROWS * SCORE_STRIDE, SCORE_STRIDE * 4);
        TILE_STORE(3, scores + TILE_ROWS * SCORE_STRIDE + 16, SCORE_STRIDE * 4);
    }
}

/* Dot products of KEY_GROUP keys with a few queries, in sums 2 or 3, `sums`. */
#define MULTIPLY_KEYS(sums, keys, bytes, queries, depth)                                                               \
    do {                                                                                                               \
        TILE_ZERO(sums);                                                                                               \
        for (int64_t at = 0; at < depth; at += 32) {                                                                   \
            TILE_LOAD(6, (keys) + at, bytes);                                                                          \
            TILE_LOAD(7, (queries) + at * 16, TILE_BYTES);                                                             \
            TILE_DOT_BF16(sums, 6, 7);                                                                                 \
        }                                                                                                              \
    } while (0)

/* Scores of a few queries: products of keys, where they lie if they can be read so, with the queries as columns. */
INLINE void score_rows(int kind, int64_t dim, const TiledQueries *t, const BlockTile *tile) {
    const StoredHead stored = stored_keys(kind, t);
    const KeySource *s = t->source;
    int in_place = kind == BF16 && s->contiguous && s->segments->tables && dim % 32 == 0;
    int64_t from = t->from - t->begin, to = t->to - t->begin, depth = round_up(dim, 32);
    float *products = t->products;
    if (!in_place) gather_keys(kind, dim, t, &stored, from, to);
    STORED_FOR_TILES();
    for (int64_t key = from / KEY_GROUP * KEY_GROUP; key < to; key += KEY_GROUP) {
        if (in_place) read_ahead(&stored, key + AHEAD, KEY_GROUP);
        const bf16 *keys = in_place ? (const bf16 *)head_at(&stored, key) : t->keys + key * depth;
        int64_t bytes = in_place ? stored.stride : depth * 2;
        if (key & KEY_GROUP) { /* in turns, so that none waits for the one before it */
            MULTIPLY_KEYS(3, keys, bytes, t->queries, depth);
            TILE_STORE(3, products + key * 16, TILE_BYTES);
        } else {
            MULTIPLY_KEYS(2, keys, bytes, t->queries, depth);
            TILE_STORE(2, products + key * 16, TILE_BYTES);
        }
    }
    static const ivec lanes = LANE_INDICES;
    const __m512i column = (__m512i)(lanes * LANES);
    for (int64_t key = from / KEY_GROUP * KEY_GROUP; key < to; key += KEY_GROUP)
        for (int64_t r = 0; r < tile->rows; r++)
            store(t->scores + r * SCORE_STRIDE + key, (vec)_mm512_i32gather_ps(column, products + key * 16 + r, 4));
}

/* Sums of the block's packed values by the tile's weights. */
static void sum_packed(const TiledQueries *t, const BlockTile *tile) {
    int two = tile->rows > TILE_ROWS;
    int64_t panels = t->width / 16, stride = t->width * sizeof *t->block_sums;
    const bf16 *low = (const bf16 *)t->scores, *high = (const bf16 *)(t->scores + TILE_ROWS * SCORE_STRIDE);
    STORED_FOR_TILES();
    for (int64_t panel = 0; panel < panels; panel += 2) {
        float *sums = t->block_sums + panel * 16;
        zero_sums(two);
        for (int64_t key = tile->begin; key < tile->end; key += STEP_KEYS) {
            const bf16 *values = t->values + (key / STEP_KEYS * panels + panel) * 512;
            TILE_LOAD(6, values, TILE_BYTES);
            TILE_LOAD(7, values + 512, TILE_BYTES);
            TILE_LOAD(4, low + key, SCORE_STRIDE * 4);
            TILE_DOT_BF16(0, 4, 6);
            TILE_DOT_BF16(1, 4, 7);
            if (!two) continue;
            TILE_LOAD(5, high + key, SCORE_STRIDE * 4);
            TILE_DOT_BF16(2, 5, 6);
            TILE_DOT_BF16(3, 5, 7);
        }
        TILE_STORE(0, sums, stride);
        TILE_STORE(1, sums + 16, stride);
        if (!two) continue;
        TILE_STORE(2, sums + TILE_ROWS * t->width, stride);
        TILE_STORE(3, sums + TILE_ROWS * t->width + 16, stride);
    }
}

#endif

/* Add the products of `rows` rows of bf16, `stride` apart, with `panels` panels over `pairs` pairs of numbers. The
 * panels are `panel` numbers apart, and each has `pairs` rows of 16 pairs. `rows` and `panels` are constants. */
INLINE void add_products(int rows, int panels, const bf16 *from, int64_t stride, const bf16 *packed, int64_t panel,
                         int64_t pairs, __m512 (*sums)[VECTOR_ROWS]) {
    for (int64_t pair = 0; pair < pairs; pair++, from += 2, packed += 2 * LANES) {
        __m512bh columns[VECTOR_ROWS];
#pragma GCC unroll 8
        for (int j = 0; j < panels; j++) columns[j] = (__m512bh)_mm512_loadu_si512(packed + j * panel);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            int32_t both;
            memcpy(&both, from + i * stride, sizeof both);
            __m512bh row = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 8
            for (int j = 0; j < panels; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], row, columns[j]);
        }
    }
}

/* Scores of `rows` queries from `first` of the tile with keys [begin, end), `panels` panels at a time. */
INLINE void score_columns(int rows, int panels, const TiledQueries *t, int64_t query, float *scores, int64_t begin,
                          int64_t end) {
    for (int64_t key = begin; key + panels * KEY_GROUP <= end; key += panels * KEY_GROUP) {
        __m512 sums[VECTOR_ROWS][VECTOR_ROWS];
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
            for (int j = 0; j < panels; j++) sums[i][j] = _mm512_setzero_ps();
        add_products(rows, panels, t->queries + query * t->depth, t->depth, t->keys + key * t->depth, 16 * t->depth,
                     t->depth / 2, sums);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
            for (int j = 0; j < panels; j++)
                _mm512_storeu_ps(scores + i * SCORE_STRIDE + key + j * KEY_GROUP, sums[i][j]);
    }
}

/* Scores of the tile's queries with the block's packed keys. Queries beyond the last are zeros. */
static void score_by_vectors(const TiledQueries *t, const BlockTile *tile) {
    int64_t begin = tile->begin, end = tile->end, rest = end - (end - begin) % (4 * KEY_GROUP);
    for (int64_t row = 0; row < tile->rows; row += VECTOR_ROWS) {
        float *scores = t->scores + row * SCORE_STRIDE;
        int64_t query = tile->first + row, left = tile->rows - row;
        if (left > 4) {
            score_columns(VECTOR_ROWS, 2, t, query, scores, begin, end);
        } else if (left > 1) {
            score_columns(4, 4, t, query, scores, begin, rest);
            score_columns(4, 2, t, query, scores, rest, end);
        } else {
            score_columns(1, 4, t, query, scores, begin, rest);
            score_columns(1, 2, t, query, scores, rest, end);
        }
    }
}

/* Scores of up to `rows` queries, a constant, with keys that pass through registers. */
INLINE void score_passing(int kind, int rows, const TiledQueries *t, const BlockTile *tile) {
    const StoredHead stored = stored_keys(kind, t);
    int64_t from = t->from - t->begin, last = t->to - t->begin;
    for (int64_t key = tile->begin; key < tile->end; key += KEY_GROUP) {
        __m512 sums[VECTOR_ROWS];
        read_ahead(&stored, key + AHEAD, KEY_GROUP);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) sums[i] = _mm512_setzero_ps();
        for (int64_t depth = 0; depth < t->depth; depth += 32) {
            __m512i columns[KEY_GROUP];
            turn_keys(kind, &stored, key, depth, from, last, columns);
#pragma GCC unroll 16
            for (int j = 0; j < KEY_GROUP; j++)
#pragma GCC unroll 8
                for (int i = 0; i < rows; i++) {
                    int32_t both;
                    memcpy(&both, t->queries + (tile->first + i) * t->depth + depth + 2 * j, sizeof both);
                    sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)_mm512_set1_epi32(both), (__m512bh)columns[j]);
                }
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) _mm512_storeu_ps(t->scores + i * SCORE_STRIDE + key, sums[i]);
    }
}

/* Sums of values for `rows` rows of weights, of `panels` panels from `panel`. */
INLINE void sum_columns(int rows, int panels, const TiledQueries *t, const BlockTile *tile, int64_t row,
                        int64_t panel) {
    const bf16 *weights = (const bf16 *)(t->scores + row * SCORE_STRIDE);
    float *to = t->block_sums + row * t->width + panel * LANES;
    __m512 sums[VECTOR_ROWS][VECTOR_ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < panels; j++) sums[i][j] = _mm512_setzero_ps();
    for (int64_t key = tile->begin; key < tile->end; key += STEP_KEYS) {
        const bf16 *values = t->values + key * t->width + panel * 16 * STEP_KEYS;
        add_products(rows, panels, weights + key, 2 * SCORE_STRIDE, values, 16 * STEP_KEYS, STEP_KEYS / 2, sums);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < panels; j++) _mm512_storeu_ps(to + i * t->width + j * LANES, sums[i][j]);
}

/* Sums of the block's packed values by the tile's weights; rows beyond the last get what means nothing. */
static void sum_by_vectors(const TiledQueries *t, const BlockTile *tile) {
    int64_t panels = t->width / LANES;
    for (int64_t row = 0; row < tile->rows; row += VECTOR_ROWS)
        for (int64_t panel = 0; panel < panels; panel += 2) {
            int64_t left = tile->rows - row;
            if (left > 4) {
                sum_columns(VECTOR_ROWS, 2, t, tile, row, panel);
            } else if (panels % 4 == 0) {
                if (left > 2) sum_columns(4, 4, t, tile, row, panel);
                else if (left == 2) sum_columns(2, 4, t, tile, row, panel);
                else sum_columns(1, 4, t, tile, row, panel);
                panel += 2;
            } else if (left > 1) {
                sum_columns(4, 2, t, tile, row, panel);
            } else {
                sum_columns(1, 2, t, tile, row, panel);
            }
        }
}

/* Scores of the tile's queries with the block's keys. */
INLINE void score_keys(int kind, int64_t dim, const TiledQueries *t, const BlockTile *tile) {
#if HAS_TILES
    if (t->few) score_rows(kind, dim, t, tile);
    else if (t->in_tiles) score_packed(t, tile);
    else
#endif
    if (t->passing && tile->rows == 1) score_passing(kind, 1, t, tile);
    else if (t->passing && tile->rows == 2) score_passing(kind, 2, t, tile);
    else if (t->passing) score_passing(kind, PASSING_QUERIES, t, tile);
    else score_by_vectors(t, tile);
    (void)dim;
}

/* Sums of the block's values by the tile's weights. */
INLINE void sum_values(const TiledQueries *t, const BlockTile *tile) {
#if HAS_TILES
    if (t->in_tiles) {
        sum_packed(t, tile);
        return;
    }
#endif
    sum_by_vectors(t, tile);
}

#endif

#endif

/* What tile_attention.c keeps of the queries that it computes together, and how a block of keys and values gets from the
 * pages into what their products read.
 *
 * Keys are packed as columns of a product of many queries, or copied as rows for a few; values are packed as rows. Both
 * become bf16. */
#ifndef TRIPTYCH_TILE_PACKING_H
#define TRIPTYCH_TILE_PACKING_H

#include "tile_attention.h"

#if HAS_TILED_ATTENTION

#define STEP_KEYS 32 /* keys of a tile of weights */
#define AHEAD 64     /* keys by which memory is read ahead */

/* Queries of the heads that share the keys of one head, and a block of these. */
typedef struct {
    const KeySource *source;
    int64_t per, kv_head;      /* query heads for each key head */
    int64_t position, count;   /* of the first query's row; of queries */
    int64_t depth, width;      /* dim in whole tiles of bf16, and of floats */
    int in_tiles, few;         /* whether AMX tiles multiply; few queries: whether the keys are a product's rows */
    int passing;               /* whether vectors multiply keys while these pass through registers, for some queries */
    bf16 *queries;             /* [count][depth], whole tiles of rows; few: [depth / 2][16][2] */
    float *sums;               /* [count][width] */
    float *totals, *tops;      /* [count][LANES] of weights; [count] the largest score, times log2(e) */
    int64_t begin, from, to;   /* the block's first key, and the keys that any query sees of it */
    int64_t located;           /* keys from the block's first on that `rows` knows, with some after the block */
    int64_t *rows;             /* [BLOCK_KEYS + AHEAD] where each key is stored; of those before `from`: undefined */
    int finite;                /* whether all of the block's values are */
    bf16 *keys;                /* [BLOCK_KEYS / 16][depth / 2][16][2]; few: [BLOCK_KEYS][depth] */
    bf16 *values;              /* [BLOCK_KEYS / 32][width / 16][16][16][2] */
    float *key_scales, *value_scales; /* INT8: [BLOCK_KEYS] */
    float *products;           /* [BLOCK_KEYS][16] of a few queries */
    float *scores;             /* [PAIR_ROWS][SCORE_STRIDE], whose rows become weights in bf16 in their first halves */
    float *block_sums;         /* [PAIR_ROWS][width] */
    float *kept;               /* where what the block adds is kept, [count][kept_floats]; null: it is added at once */
} TiledQueries;

/* The place of number `i` of a head in rows of tiles: integers of a byte become bf16 in pairs of i and i + 16. */
INLINE int64_t tiled_place(int kind, int64_t i) { return kind == BF16 ? i : i / 32 * 32 + i % 16 * 2 + i % 32 / 16; }

/* 32 stored numbers of a head of `dim` from index `at` as bf16, zeros beyond dim. Integers of a byte are exact. */
INLINE __m512i load_tile_row(int kind, const char *head, int64_t at, int64_t dim) {
    __mmask32 seen = dim - at >= 32 ? ~(__mmask32)0 : (((__mmask32)1 << (dim - at)) - 1);
    if (kind == BF16) return _mm512_maskz_loadu_epi16(seen, head + 2 * at);
    __m256i bytes = _mm256_maskz_loadu_epi8(seen, head + at);
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return _mm512_or_si512(_mm512_srli_epi32((__m512i)low, 16), (__m512i)high); /* their lower halves are zero */
}

/* One head's numbers in rows of keys or of values. */
typedef struct {
    const char *base;
    int64_t stride, bytes, dim; /* bytes from row to row, and of a head */
    const int64_t *rows;        /* of each key from the block's first on */
    int64_t located;            /* how many of these are known */
} StoredHead;

INLINE StoredHead stored_head(int kind, const TiledQueries *t, const void *rows, int64_t stride) {
    int64_t size = element_bytes(kind), bytes = t->source->shape->dim * size;
    return (StoredHead){(const char *)rows + t->kv_head * bytes, stride * size, bytes, t->source->shape->dim,
                        t->rows, t->located};
}
INLINE StoredHead stored_keys(int kind, const TiledQueries *t) {
    return stored_head(kind, t, t->source->pages->keys, t->source->pages->key_stride);
}
INLINE StoredHead stored_values(int kind, const TiledQueries *t) {
    return stored_head(kind, t, t->source->pages->values, t->source->pages->value_stride);
}

/* The address of the numbers of key `key` from the block's first, which must be one that is seen. */
INLINE const char *head_at(const StoredHead *head, int64_t key) { return head->base + head->rows[key] * head->stride; }

/* Read the numbers of keys [first, first + count) ahead. */
INLINE void read_ahead(const StoredHead *head, int64_t first, int64_t count) {
    for (int64_t key = first; key < min_i64(first + count, head->located); key++)
        for (int64_t byte = 0; byte < head->bytes; byte += 64) __builtin_prefetch(head_at(head, key) + byte);
}

/* Turn numbers [depth, depth + 32) of KEY_GROUP keys from `key` into columns of a product; those of keys outside of
 * [from, last) are zero. */
INLINE void turn_keys(int kind, const StoredHead *stored, int64_t key, int64_t depth, int64_t from, int64_t last,
                      __m512i *rows) {
    for (int i = 0; i < KEY_GROUP; i++) {
        int seen = key + i >= from && key + i < last;
        rows[i] = seen ? load_tile_row(kind, head_at(stored, key + i), depth, stored->dim) : _mm512_setzero_si512();
    }
    transpose_words(rows);
}

/* Pack the block's keys as columns of a product; those that no query sees are zero. */
INLINE void pack_keys(int kind, const TiledQueries *t) {
    const StoredHead stored = stored_keys(kind, t);
    __m512i *to = (__m512i *)t->keys, rows[KEY_GROUP];
    int64_t from = t->from - t->begin, last = t->to - t->begin;
    for (int64_t key = 0; key < last; key += KEY_GROUP) {
        if (key + AHEAD >= from) read_ahead(&stored, key + AHEAD, KEY_GROUP);
        for (int64_t depth = 0; depth < t->depth; depth += 32, to += 16) {
            turn_keys(kind, &stored, key, depth, from, last, rows);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i, rows[i]);
        }
    }
}

/* Write the values of two keys, null for zeros, as a row of each panel from `to` on. Returns the larger of `most` and
 * of their absolute values' bits in bf16. */
INLINE __m512i pack_pair(int kind, const char *even, const char *odd, int64_t dim, __m512i *to, __m512i most) {
    const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), last = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    const __m512i size = _mm512_set1_epi16(0x7fff);
    for (int64_t at = 0; at < dim; at += 32, to += 32) {
        __m512i a = even ? load_tile_row(kind, even, at, dim) : _mm512_setzero_si512();
        __m512i b = odd ? load_tile_row(kind, odd, at, dim) : _mm512_setzero_si512();
        __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi64(low, first, high));
        _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi64(low, last, high));
        if (kind != BF16) continue;
        most = _mm512_max_epu16(most, _mm512_and_si512(a, size));
        most = _mm512_max_epu16(most, _mm512_and_si512(b, size));
    }
    return most;
}

/* Pack the values of keys [from, to), counted from the block's first, as rows of a product, those of other keys in
 * these steps as zeros. `dim` is the head's. Returns whether all are finite. */
INLINE int pack_values(int kind, int64_t dim, const TiledQueries *t, int64_t from, int64_t to) {
    const StoredHead stored = stored_values(kind, t);
    int64_t panels = t->width / 16;
    __m512i *values = (__m512i *)t->values, most = _mm512_setzero_si512();
    for (int64_t step = from / STEP_KEYS * STEP_KEYS; step < to; step += STEP_KEYS) {
        __m512i *row = values + step / STEP_KEYS * panels * 16;
        read_ahead(&stored, step + AHEAD, STEP_KEYS);
        if (step >= from && step + STEP_KEYS <= to)
            for (int64_t key = step; key < step + STEP_KEYS; key += 2, row++)
                most = pack_pair(kind, head_at(&stored, key), head_at(&stored, key + 1), dim, row, most);
        else
            for (int64_t key = step; key < step + STEP_KEYS; key += 2, row++)
                most = pack_pair(kind, key >= from && key < to ? head_at(&stored, key) : NULL,
                                 key + 1 >= from && key + 1 < to ? head_at(&stored, key + 1) : NULL, dim, row, most);
    }
    return !_mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(0x7f80));
}

/* Find the scales of the keys and values that are seen. */
static void load_block_scales(const TiledQueries *t) {
    const KVPages *m = t->source->pages;
    for (int64_t key = t->from - t->begin; key < t->to - t->begin; key++) {
        int64_t scale = t->rows[key] * t->source->shape->kv_heads + t->kv_head;
        t->key_scales[key] = m->key_scales[scale], t->value_scales[key] = m->value_scales[scale];
    }
}

/* Copy keys [from, to) of the block as bf16 [BLOCK_KEYS][depth]. */
INLINE void gather_keys(int kind, int64_t dim, const TiledQueries *t, const StoredHead *stored, int64_t from,
                        int64_t to) {
    bf16 *keys = t->keys + from * round_up(dim, 32);
    for (int64_t key = from; key < to; key++) {
        const char *head = head_at(stored, key);
        if (key % KEY_GROUP == 0) read_ahead(stored, key + AHEAD, KEY_GROUP);
        for (int64_t at = 0; at < dim; at += 32, keys += 32)
            _mm512_storeu_si512(keys, load_tile_row(kind, head, at, dim));
    }
}

#endif

#endif

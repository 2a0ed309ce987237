/* Attention by products of bf16, for queries that see many keys in pages of bfloat16 or int8. */
#ifndef TRIPTYCH_TILE_ATTENTION_H
#define TRIPTYCH_TILE_ATTENTION_H

#include "amx.h"
#include "key_source.h"
#include "scratch.h"

#ifdef __AVX512BF16__ /* which every CPU with tiles has */
#define HAS_TILED_ATTENTION 1
#else
#define HAS_TILED_ATTENTION 0
#endif

#define BLOCK_KEYS 256
#define TILED_KEYS 64 /* a query with more keys is computed in tiles, where an attention may use them */

/* Rows [first, last) of a segment and the heads that share the keys of heads [first_head, last_head): one row, or up
 * to tiled_rows for one of the latter. */
typedef struct {
    int64_t first, last, first_head, last_head;
} TiledRows;

/* Of a single row whose keys threads divide, a unit is a block of keys of a key head: number block * kv_heads + head. */
INLINE int64_t units_of(const AttentionShape *shape, int64_t from, int64_t to) {
    return ((to + BLOCK_KEYS - 1) / BLOCK_KEYS - from / BLOCK_KEYS) * shape->kv_heads;
}
/* Floats that are kept of a unit for each query head: its sums, totals and largest score. */
INLINE int64_t kept_floats(const AttentionShape *shape) { return round_up(shape->dim, 2 * LANES) + 2 * LANES; }
/* Floats that are kept of a unit. */
INLINE int64_t unit_floats(const AttentionShape *shape) {
    return kept_floats(shape) * (shape->heads / shape->kv_heads);
}

#if HAS_TILED_ATTENTION
/* The rows of a prefill that a thread takes at a time: enough to make packing keys cheap, few enough to give each
 * thread some. No result depends on it. */
int64_t tiled_rows(const AttentionShape *shape, int64_t rows, int64_t threads);
/* Bytes of scratch that attend_tiled needs. */
int64_t tiled_scratch(const AttentionShape *shape);
/* Attend with these rows. */
void attend_tiled(const KeySource *source, const Attention *in, TiledRows rows, Scratch scratch);
/* Keep what units [first, last) of a segment's single row add, at `kept` + unit * unit_floats. */
void attend_units(const KeySource *source, const Attention *in, int64_t first, int64_t last, float *kept,
                  Scratch scratch);
/* Add up what was kept of a head's units, in the order of attend_tiled, and write the head's rows. */
void add_units(const KeySource *source, const Attention *in, int64_t kv_head, const float *kept, Scratch scratch);
#else /* nothing is computed so */
INLINE int64_t tiled_rows(const AttentionShape *shape, int64_t rows, int64_t threads) {
    return shape->heads * rows * threads;
}
INLINE int64_t tiled_scratch(const AttentionShape *shape) { return shape->heads * 0; }
INLINE void attend_tiled(const KeySource *source, const Attention *in, TiledRows rows, Scratch scratch) {
    (void)source, (void)in, (void)rows, (void)scratch;
}
INLINE void attend_units(const KeySource *source, const Attention *in, int64_t first, int64_t last, float *kept,
                         Scratch scratch) {
    (void)source, (void)in, (void)first, (void)last, (void)kept, (void)scratch;
}
INLINE void add_units(const KeySource *source, const Attention *in, int64_t kv_head, const float *kept,
                      Scratch scratch) {
    (void)source, (void)in, (void)kv_head, (void)kept, (void)scratch;
}
#endif

#endif

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

#define TILED_KEYS 64 /* a query with more keys is computed in tiles, where an attention may use them */

/* Rows [first, last) of a segment and the heads that share the keys of heads [first_head, last_head): one row, or up
 * to tiled_rows for one of the latter. */
typedef struct {
    int64_t first, last, first_head, last_head;
} TiledRows;

#if HAS_TILED_ATTENTION
/* The rows of a prefill that a thread takes at a time: enough to make packing keys cheap, few enough to give each
 * thread some. No result depends on it. */
int64_t tiled_rows(const AttentionShape *shape, int64_t rows, int64_t threads);
/* Bytes of scratch that attend_tiled needs. */
int64_t tiled_scratch(const AttentionShape *shape);
/* Attend with these rows. */
void attend_tiled(const KeySource *source, const Attention *in, TiledRows rows, Scratch scratch);
#else /* nothing is computed so */
INLINE int64_t tiled_rows(const AttentionShape *shape, int64_t rows, int64_t threads) {
    return shape->heads * rows * threads;
}
INLINE int64_t tiled_scratch(const AttentionShape *shape) { return shape->heads * 0; }
INLINE void attend_tiled(const KeySource *source, const Attention *in, TiledRows rows, Scratch scratch) {
    (void)source, (void)in, (void)rows, (void)scratch;
}
#endif

#endif

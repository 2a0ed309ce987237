/* Attention over packed rows or over pages read where they lie. */
#ifndef TRIPTYCH_ATTENTION_H
#define TRIPTYCH_ATTENTION_H

#include "gemm.h"

/* One layer's keys and values: rows of kv_heads x dim; a pool's row is a slot. */
typedef struct {
    int64_t kind; /* F32, BF16 or INT8 */
    void *keys, *values;
    float *key_scales, *value_scales; /* INT8: one for each row and head */
    int64_t key_stride, value_stride; /* elements from row to row */
} Memory;

/* Which rows attend to which keys: segment b owns rows [q_starts[b], q_starts[b + 1]) and kv_lens[b] keys, the last
 * query standing at the last key. Without tables the keys are the rows of the segments themselves, k_starts[b] on. */
typedef struct {
    int64_t segments, causal, block_size, table_width;
    const int64_t *q_starts, *k_starts, *kv_lens;
    const int64_t *tables; /* [segments][table_width] blocks, or null */
    const int64_t *slots;  /* [rows] where this step's keys and values go, or null */
} Segments;

typedef struct {
    int64_t heads, kv_heads, dim, window; /* window 0: none */
    float scale;
    const float *bias; /* [heads][bias_width] by key - query + bias_width / 2, or null */
    int64_t bias_width;
} AttentionShape;

/* The most keys of a segment of one row, and of one of more rows. */
typedef struct {
    int64_t decoding, filling;
} Longest;

/* Raises `longest` to what `segments` has. */
void find_longest(const Segments *segments, Longest *longest);
/* Floats of scratch that a thread needs. */
int64_t attention_scratch(const AttentionShape *shape, Longest longest);
/* The share of thread `part` of `parts`: out [rows][heads * dim] for queries of row stride `q_stride`. */
void attend(const AttentionShape *shape, const Segments *segments, const Memory *memory, const float *queries,
            int64_t q_stride, float *out, int part, int parts, float *scratch);
/* The same where a segment's queries all see its own keys, no more and no others, by products of the dtype, F32 or (where
 * operand_kind says so, and a head's dimensions are even) BF16, and tiles of `like`: rows [heads + 2 kv_heads][dim] in that
 * dtype hold queries, keys and values. */
int64_t whole_scratch(const AttentionShape *shape, int64_t longest);
void attend_whole(const PackedMatrix *like, const AttentionShape *shape, const Segments *segments, const void *rows,
                  int64_t stride, float *out, int part, int parts, float *scratch);
/* Put one row of keys and values into the pool's row `slot`. */
void remember(const AttentionShape *shape, const Memory *memory, int64_t slot, const float *key, const float *value);

#endif

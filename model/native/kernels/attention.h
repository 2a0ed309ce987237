/* Attention over pages of a KV cache, over packed rows, and over whole encoder inputs. */
#ifndef TRIPTYCH_ATTENTION_H
#define TRIPTYCH_ATTENTION_H

#include "matrix.h"

/* One layer's keys and values: rows of [kv_heads][dim]. Of a KV cache, row number s is slot s: block s / block_size,
 * place s % block_size. The caller owns all arrays. */
typedef struct {
    int64_t kind; /* F32, BF16 or INT8 */
    void *keys, *values;
    float *key_scales, *value_scales; /* INT8: [rows][kv_heads] */
    int64_t key_stride, value_stride; /* elements from row to row */
} KVPages;

/* Which rows attend to which keys. Segment b owns query rows [q_starts[b], q_starts[b + 1]) and kv_lens[b] keys; its
 * last query is at its last key. Without tables its keys and values are the rows from k_starts[b] on. Entries of
 * `tables` for blocks outside every window are never read. The caller owns all arrays. */
typedef struct {
    int64_t segments, causal, block_size, table_width;
    const int64_t *q_starts, *k_starts, *kv_lens;
    const int64_t *tables; /* [segments][table_width] block numbers, or null */
    const int64_t *slots;  /* [rows] where this step's keys and values are written, or null */
    const int64_t *key_ends; /* [rows] of causal attention how many keys each sees, never fewer than the row before in its
                              * segment; null: those up to itself */
} Segments;

/* What one attention computes: softmax(softcap(q k^T * scale) + bias) v. Query head h reads the keys of head
 * h / (heads / kv_heads). A sink is one more score of a head's queries, without a value: the softmax's sum begins with
 * it (Xiao et al. 2024, as gpt-oss has it). */
typedef struct {
    int64_t heads, kv_heads, dim;
    int64_t window; /* a query sees this many keys up to itself and, unless causal, as many from itself on; 0: all */
    float scale;
    float softcap; /* scores become softcap * tanh(score / softcap) (Gemma 2); 0: none */
    const float *sinks; /* [heads] of attention over pages or rows; null: none */
} AttentionShape;

/* What is added to scores by the distance from query to key: [heads][width], key - query at width / 2 + key - query.
 * Distances up to 32 beyond the longest segment are read, as keys are scored in groups. With slopes there is no table:
 * slope * (key - query) is added (Press et al. 2022), in causal attention. */
typedef struct {
    const float *values;
    int64_t width;
    const float *slopes; /* [heads]; null: values */
} ScoreBias;

/* Vectors of relative positions, for scores of contents with them: q_i . K(i - j) + k_j . Q(i - j) for query i and key
 * j, scaled as their dot product is. Each matrix has 2 * reach rows [dim] a head, of distances from 1 - reach to reach:
 * of keys key - query, of queries query - key. `reach` is a multiple of 32 and no segment has more keys. */
typedef struct {
    PackedMatrix keys, queries; /* without data: no such scores */
    int64_t reach;
} RelativePositions;

/* The most keys of a segment of one row, and of a segment of several. */
typedef struct {
    int64_t decode, prefill;
} LongestSegments;

/* How an attention over pages in BF16 or INT8 computes long contexts: in float32, or with queries and weights rounded to
 * bf16, in AMX tiles or by vectors of bf16. A library without these computes in float32. */
enum { ATTEND_IN_FLOATS = 0, ATTEND_IN_TILES = 1, ATTEND_BY_VECTORS = 2 };

/* One attention over packed rows. The caller owns all that this points to. */
typedef struct {
    const AttentionShape *shape;
    const Segments *segments;
    const KVPages *pages;
    const ScoreBias *bias; /* null: none */
    const float *queries; /* rows of [heads][dim] */
    int64_t query_stride; /* floats from row to row */
    float *out;           /* [rows][heads][dim] */
    int64_t form;         /* how long contexts are computed */
} Attention;

/* One attention of whole segments, whose queries see all keys of their own segment. */
typedef struct {
    const AttentionShape *shape;
    const Segments *segments;
    const ScoreBias *bias; /* null: none */
    const RelativePositions *relative; /* null: none; in the kind of the products */
    int64_t kind;        /* of its products: F32, or BF16 where operand_kind says so and dim is even */
    int64_t tiles;       /* whether these may be in AMX tiles */
    const void *rows;    /* of [heads + 2 kv_heads][dim]: queries, keys and values in that kind */
    int64_t stride;      /* elements from row to row */
    float *out;          /* [rows][heads][dim] */
} EncoderAttention;

/* Raise `longest` to what `segments` has. */
void find_longest(const Segments *segments, LongestSegments *longest);
/* The most bytes in which threads keep what they add to single rows whose keys they divide. A planned step has segments
 * without rows, whose longest has `planned` keys. */
int64_t divided_keys_bytes(const AttentionShape *shape, const Segments *segments, int64_t planned, int64_t threads);
/* Whether threads divide the keys of some row: then add_divided_keys follows paged_attention and a barrier. */
int divides_keys(const Attention *attention, int threads);
/* Bytes of scratch, aligned to SCRATCH_ALIGNMENT, that each thread of paged_attention needs. */
int64_t paged_attention_scratch(const AttentionShape *shape, LongestSegments longest);
/* Compute thread `thread`'s part (of `threads`) of an attention over pages or rows. All threads give the same `kept`, of
 * divided_keys_bytes. */
void paged_attention(const Attention *attention, int thread, int threads, void *scratch, float *kept);
/* Compute thread `thread`'s part of the rows whose keys were divided. */
void add_divided_keys(const Attention *attention, int thread, int threads, void *scratch, const float *kept);
/* Bytes of scratch that each thread of encoder_attention needs for segments of at most `longest` keys, `relative`: with
 * relative positions. */
int64_t encoder_attention_scratch(const AttentionShape *shape, int64_t longest, int relative);
/* Compute thread `thread`'s part (of `threads`) of an encoder's attention. */
void encoder_attention(const EncoderAttention *attention, int thread, int threads, void *scratch);
/* Write one row of keys and values [kv_heads][dim] into row `slot`, rounded or quantised head by head. */
void write_kv(const AttentionShape *shape, const KVPages *pages, int64_t slot, const float *key, const float *value);

#endif

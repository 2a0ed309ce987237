/* Attention in float32 over pages of a KV cache or over packed rows, whatever these are stored as.
 *
 * Invariant: a query's scores, their softmax and its weighted sum of values are each added up in one order, which
 * the query's position alone decides. Decoding a token and prefilling it give the same bits. Work is divided by
 * segment, head and rows, never within a sum. */
#include "attention.h"

#include "attention_lanes.h"
#include "key_source.h"
#include "scratch.h"
#include "tile_attention.h"

#define TASK_ROWS 64   /* rows of a prefill that one thread takes */
#define SHARED_ROWS 32 /* rows that are computed with keys that stay in a near cache, NEAR_KEYS at a time */
#define NEAR_KEYS 128  /* a multiple of KEY_GROUP */

/* Turn scores [first, last), a multiple of LANES, into exp(score - max); returns the inverse of their sum, to which
 * the sink adds, if there is one. */
static float softmax(float *scores, int64_t first, int64_t last, const float *sink) {
    vec most = splat(sink ? *sink : -__builtin_inff()), sum = splat(0.0f);
    for (int64_t at = first; at < last; at += LANES) most = max_vec(most, load(scores + at));
    vec top = splat(reduce_max(most));
    for (int64_t at = first; at < last; at += LANES) {
        vec weight = exp_vec(load(scores + at) - top);
        sum += weight;
        store(scores + at, weight);
    }
    float total = reduce_add(sum);
    if (sink) total += exp_vec(splat(*sink) - top)[0];
    return total == 0.0f ? 0.0f : 1.0f / total; /* no keys: zeros, not 0 / 0 */
}

/* The rows of KEY_GROUP keys from `at`, a multiple of KEY_GROUP. Of those outside of [from, to), which are masked or
 * weigh nothing, it gives rows that are inside or in the same block. */
INLINE void locate_keys(const KeySource *s, int64_t at, int64_t from, int64_t to, int64_t *rows) {
    if (s->contiguous) {
        int64_t first = key_row(s, at);
        for (int i = 0; i < KEY_GROUP; i++) rows[i] = first + min_i64(i, to - 1 - at);
    } else {
        for (int i = 0; i < KEY_GROUP; i++) rows[i] = key_row(s, max_i64(from, min_i64(at + i, to - 1)));
    }
}

/* The scales of one head of KEY_GROUP rows. */
INLINE void load_scales(const float *scales, const int64_t *rows, int64_t kv_heads, int64_t head, float *out) {
    for (int i = 0; i < KEY_GROUP; i++) out[i] = scales[rows[i] * kv_heads + head];
}

/* The one query of a segment, and the heads that share the keys of heads [first, last). It sees keys [from, to). */
typedef struct {
    int64_t first, last, per_kv_head; /* query heads for each key head */
    int64_t position, from, to;
    int64_t begin, width;     /* where the first key's group begins; where the last key's group ends */
    int64_t padded;           /* dim in whole registers */
    float *q, *sums, *scores; /* [heads][padded], [heads][padded], [heads][width] */
} DecodeQuery;

/* Take its buffers, for a shape and keys in groups that end at `width`. */
INLINE void decode_buffers(Scratch *scratch, const AttentionShape *a, int64_t width, DecodeQuery *query) {
    query->padded = round_up(a->dim, LANES), query->width = width;
    query->q = scratch_take(scratch, a->heads * query->padded * sizeof *query->q);
    query->sums = scratch_take(scratch, a->heads * query->padded * sizeof *query->sums);
    query->scores = scratch_take(scratch, a->heads * width * sizeof *query->scores);
}

/* The pointers to KEY_GROUP rows of `base` from key `at`, which are needed now, and their numbers; the next are
 * prefetched. */
INLINE void load_group(const KeySource *s, const DecodeQuery *query, const char *base, int64_t stride, int64_t at,
                       const char **rows, int64_t *numbers) {
    int64_t next[KEY_GROUP], bytes = (query->last - query->first) * s->shape->dim * element_bytes(s->pages->kind);
    locate_keys(s, at, query->from, query->to, numbers);
    for (int i = 0; i < KEY_GROUP; i++) rows[i] = base + numbers[i] * stride;
    if (at + KEY_GROUP >= query->to) return;
    locate_keys(s, at + KEY_GROUP, query->from, query->to, next);
    for (int i = 0; i < KEY_GROUP; i++)
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(base + next[i] * stride + byte);
}

/* Fill the query's scores. */
INLINE void decode_scores(int kind, int64_t dim, const KeySource *s, const DecodeQuery *query) {
    const KVPages *m = s->pages;
    int64_t head_bytes = dim * element_bytes(kind), per = query->per_kv_head, numbers[KEY_GROUP];
    const char *base = (const char *)m->keys + query->first * head_bytes, *rows[KEY_GROUP];
    const void *keys[KEY_GROUP];
    float scales[KEY_GROUP];
    for (int64_t at = query->begin; at < query->to; at += KEY_GROUP) {
        load_group(s, query, base, m->key_stride * element_bytes(kind), at, rows, numbers);
        for (int64_t g = query->first; g < query->last; g++) {
            for (int i = 0; i < KEY_GROUP; i++) keys[i] = rows[i] + (g - query->first) * head_bytes;
            if (kind == INT8) load_scales(m->key_scales, numbers, s->shape->kv_heads, g, scales);
            for (int64_t h = g * per; h < (g + 1) * per; h++)
                for (int i = 0; i < KEY_GROUP; i += LANES) {
                    vec raw = dot_keys(kind, query->q + h * query->padded, keys + i, dim);
                    if (kind == INT8) raw *= load(scales + i);
                    store(query->scores + h * query->width + at + i,
                          finish_scores(s, raw, h, query->position, at + i, query->from, query->to));
                }
        }
    }
}

/* Add the values, weighted by what the scores have become, to the query's sums. */
INLINE void decode_weighted_sum(int kind, int64_t dim, const KeySource *s, const DecodeQuery *query) {
    const KVPages *m = s->pages;
    int64_t head_bytes = dim * element_bytes(kind), per = query->per_kv_head, numbers[KEY_GROUP];
    const char *base = (const char *)m->values + query->first * head_bytes, *rows[KEY_GROUP];
    const void *values[KEY_GROUP];
    float scales[KEY_GROUP];
    for (int64_t at = query->begin; at < query->to; at += KEY_GROUP) {
        load_group(s, query, base, m->value_stride * element_bytes(kind), at, rows, numbers);
        int skip = (int)max_i64(0, query->from - at), count = (int)min_i64(KEY_GROUP, query->to - at) - skip;
        for (int64_t g = query->first; g < query->last; g++) {
            for (int i = 0; i < KEY_GROUP; i++) values[i] = rows[i] + (g - query->first) * head_bytes;
            if (kind == INT8) {
                load_scales(m->value_scales, numbers, s->shape->kv_heads, g, scales);
                for (int64_t h = g * per; h < (g + 1) * per; h++)
                    for (int i = 0; i < KEY_GROUP; i += LANES) {
                        float *w = query->scores + h * query->width + at + i;
                        store(w, load(w) * load(scales + i));
                    }
            }
            for (int64_t h = g * per; h < (g + 1) * per; h += QUERY_ROWS) {
                int count_of_rows = (int)min_i64(QUERY_ROWS, (g + 1) * per - h);
                WeightedSum w = {.values = values + skip, .count = count, .stride = query->padded};
                w.sums = query->sums + h * query->padded;
                for (int r = 0; r < count_of_rows; r++)
                    w.weights[r] = query->scores + (h + r) * query->width + at + skip;
                weighted_sum(kind, count_of_rows, &w, dim);
            }
        }
    }
}

/* Attend with the one query [heads][dim] of a segment, for the heads that share the keys of heads [first, last):
 * pages are read once, where they lie. */
INLINE void decode(int kind, int64_t dim, const KeySource *s, const float *query, float *out, int64_t first,
                   int64_t last, Scratch scratch) {
    const AttentionShape *a = s->shape;
    DecodeQuery one = {.first = first, .last = last, .per_kv_head = a->heads / a->kv_heads};
    one.position = s->segments->kv_lens[s->segment] - 1;
    visible_keys(s, one.position, &one.from, &one.to);
    one.begin = one.from / KEY_GROUP * KEY_GROUP;
    decode_buffers(&scratch, a, round_up(one.to, KEY_GROUP), &one);
    int64_t padded = one.padded;
    for (int64_t h = first * one.per_kv_head; h < last * one.per_kv_head; h++) {
        for (int64_t i = 0; i < padded; i++) one.q[h * padded + i] = i < dim ? query[h * dim + i] : 0.0f;
        memset(one.sums + h * padded, 0, padded * sizeof *one.sums);
    }
    decode_scores(kind, dim, s, &one);
    for (int64_t h = first * one.per_kv_head; h < last * one.per_kv_head; h++) /* the query has done its work */
        one.q[h * padded] = softmax(one.scores + h * one.width, one.begin, one.width, sink_of(a, h));
    decode_weighted_sum(kind, dim, s, &one);
    for (int64_t h = first * one.per_kv_head; h < last * one.per_kv_head; h++)
        for (int64_t i = 0; i < dim; i++) out[h * dim + i] = one.sums[h * padded + i] * one.q[h * padded];
}

/* Some queries of one head, and its gathered keys and values [begin, to). */
typedef struct {
    const KeySource *source;
    int64_t head, position, begin, to; /* of the first query; of keys */
    int64_t rows, width;               /* up to SHARED_ROWS; scores of a row, whole groups */
    int quantised;                     /* whether keys and values have scales */
    float *keys, *values;              /* [to - begin][padded] */
    float *key_scales, *value_scales;  /* [width] */
    float *q, *sums;                   /* [rows][padded]: queries, and what they get */
    float *scores;                     /* [rows][width] */
} QueryTile;

/* A pool's keys or its values. */
typedef struct {
    const void *rows;
    int64_t stride;      /* elements from row to row */
    const float *scales; /* INT8: [rows][kv_heads] */
} StoredRows;

/* Copy head `kv_head` of keys [tile->begin, tile->to), or of their values, as floats [to - begin][padded], and their
 * scales. No query sees keys before `from`: any key may stand for those. The next group's are prefetched: other heads
 * lie between a head's rows. */
INLINE void gather_head(int kind, int64_t dim, const QueryTile *tile, StoredRows stored, int64_t kv_head, int64_t from,
                        float *rows, float *row_scales) {
    const KeySource *s = tile->source;
    int64_t padded = round_up(dim, LANES), bytes = dim * element_bytes(kind);
    int64_t stride = stored.stride * element_bytes(kind);
    int64_t numbers[2][KEY_GROUP], turn = 0;
    const char *base = (const char *)stored.rows + kv_head * bytes;
    locate_keys(s, tile->begin, from, tile->to, numbers[0]);
    for (int64_t at = tile->begin; at < tile->to; at += KEY_GROUP, turn ^= 1) {
        int count = (int)min_i64(KEY_GROUP, tile->to - at);
        if (at + KEY_GROUP < tile->to) {
            locate_keys(s, at + KEY_GROUP, from, tile->to, numbers[turn ^ 1]);
            for (int i = 0; i < KEY_GROUP; i++)
                for (int64_t byte = 0; byte < bytes; byte += 64)
                    __builtin_prefetch(base + numbers[turn ^ 1][i] * stride + byte);
        }
        for (int i = 0; i < count; i++, rows += padded) {
            const char *head = base + numbers[turn][i] * stride;
            for (int64_t j = 0; j < padded; j += LANES) store(rows + j, load_head(kind, head, j, dim));
            if (kind == INT8) *row_scales++ = stored.scales[numbers[turn][i] * s->shape->kv_heads + kv_head];
        }
    }
}

/* Take its buffers, for heads of `dim` and up to `width` keys, whole groups. */
INLINE void prefill_buffers(Scratch *scratch, int64_t dim, int64_t width, QueryTile *tile) {
    int64_t padded = round_up(dim, LANES), number = sizeof(float);
    tile->keys = scratch_take(scratch, width * padded * number);
    tile->values = scratch_take(scratch, width * padded * number);
    tile->key_scales = scratch_take(scratch, width * number);
    tile->value_scales = scratch_take(scratch, width * number);
    tile->scores = scratch_take(scratch, SHARED_ROWS * width * number);
    tile->q = scratch_take(scratch, SHARED_ROWS * padded * number);
    tile->sums = scratch_take(scratch, SHARED_ROWS * padded * number);
    tile->width = width;
}

/* Add KEY_GROUP values from key `at` on to the sums of each row that sees them, which are its keys [from, to). What
 * a row does not see is left out rather than weighted with zero: zero times infinity is NaN. */
INLINE void add_visible_values(int rows, int64_t at, const int64_t *from, const int64_t *to, WeightedSum *all,
                               int64_t padded) {
    int first[QUERY_ROWS], last[QUERY_ROWS] = {0}, alike = 1;
    for (int r = 0; r < rows; r++) {
        first[r] = (int)max_i64(0, from[r] - at), last[r] = (int)min_i64(KEY_GROUP, to[r] - at);
        alike &= !first[r] && last[r] == last[0];
    }
    if (alike) {
        all->count = last[0];
        weighted_sum(F32, rows, all, padded);
        return;
    }
    for (int r = 0; r < rows; r++) {
        if (first[r] >= last[r]) continue;
        WeightedSum one = {.values = all->values + first[r], .count = last[r] - first[r], .stride = padded};
        one.weights[0] = all->weights[r] + first[r], one.sums = all->sums + r * padded;
        weighted_sum(F32, 1, &one, padded);
    }
}

/* The end of the keys that row `row` and the next QUERY_ROWS - 1 rows see. */
INLINE int64_t seen_end(const QueryTile *t, int64_t row) {
    if (!t->source->segments->causal) return t->to;
    return min_i64(t->to, causal_end(t->source, t->position + min_i64(row + QUERY_ROWS, t->rows) - 1));
}

/* Fill the scores of up to QUERY_ROWS rows from `row` on with keys [first, last), which begin a group. */
INLINE void score_keys(int64_t dim, const QueryTile *tile, int64_t row, int64_t first, int64_t last) {
    const QueryTile t = *tile; /* a copy: what is stored could be it, for all that the compiler knows */
    int64_t padded = round_up(dim, LANES), rows = min_i64(QUERY_ROWS, t.rows - row), from[QUERY_ROWS], to[QUERY_ROWS];
    const void *group[KEY_GROUP];
    for (int r = 0; r < rows; r++) visible_keys(t.source, t.position + row + r, from + r, to + r);
    for (int64_t at = first; at < last; at += KEY_GROUP) {
        for (int i = 0; i < KEY_GROUP; i++) group[i] = t.keys + (min_i64(at + i, t.to - 1) - t.begin) * padded;
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < KEY_GROUP; i += LANES) {
                vec raw = dot_keys(F32, t.q + (row + r) * padded, group + i, dim == padded ? dim : padded);
                if (t.quantised) raw *= load(t.key_scales + at - t.begin + i);
                store(t.scores + (row + r) * t.width + at - t.begin + i,
                      finish_scores(t.source, raw, t.head, t.position + row + r, at + i, from[r], to[r]));
            }
        }
    }
}

/* Add the values of keys [first, last), weighted by what the scores have become, to the sums of these rows. */
INLINE void add_values(int64_t dim, const QueryTile *tile, int64_t row, int64_t first, int64_t last) {
    const QueryTile t = *tile;
    int64_t padded = round_up(dim, LANES), rows = min_i64(QUERY_ROWS, t.rows - row), from[QUERY_ROWS], to[QUERY_ROWS];
    const void *group[KEY_GROUP];
    for (int r = 0; r < rows; r++) visible_keys(t.source, t.position + row + r, from + r, to + r);
    for (int64_t at = first; at < last; at += KEY_GROUP) {
        WeightedSum w = {.values = group, .sums = t.sums + row * padded, .stride = padded};
        for (int r = 0; r < rows; r++) {
            float *weights = t.scores + (row + r) * t.width + at - t.begin;
            for (int i = 0; t.quantised && i < KEY_GROUP; i += LANES)
                store(weights + i, load(weights + i) * load(t.value_scales + at - t.begin + i));
            w.weights[r] = weights;
        }
        for (int i = 0; i < KEY_GROUP; i++) group[i] = t.values + (min_i64(at + i, t.to - 1) - t.begin) * padded;
        add_visible_values((int)rows, at, from, to, &w, padded);
    }
}

/* Attend with the queries of a tile, with NEAR_KEYS keys at a time for all of them. */
INLINE void attend_tile(int64_t dim, const QueryTile *t) {
    const float *sink = sink_of(t->source->shape, t->head);
    int64_t padded = round_up(dim, LANES);
    float inverse[SHARED_ROWS];
    for (int64_t at = t->begin; at < t->to; at += NEAR_KEYS)
        for (int64_t row = 0; row < t->rows; row += QUERY_ROWS)
            score_keys(dim, t, row, at, min_i64(at + NEAR_KEYS, seen_end(t, row)));
    for (int64_t row = 0; row < t->rows; row++) {
        int64_t end = seen_end(t, row / QUERY_ROWS * QUERY_ROWS) - t->begin;
        inverse[row] = softmax(t->scores + row * t->width, 0, round_up(end, KEY_GROUP), sink);
    }
    memset(t->sums, 0, t->rows * padded * sizeof *t->sums);
    for (int64_t at = t->begin; at < t->to; at += NEAR_KEYS)
        for (int64_t row = 0; row < t->rows; row += QUERY_ROWS)
            add_values(dim, t, row, at, min_i64(at + NEAR_KEYS, seen_end(t, row)));
    for (int64_t row = 0; row < t->rows; row++)
        for (int64_t i = 0; i < dim; i++) t->sums[row * padded + i] *= inverse[row];
}

/* One copy of that for each width of a head that is worth it, whatever kind of pages was gathered from. */
typedef void PrefillKernel(const QueryTile *);
static __attribute__((noinline)) void prefill_kernel_32(const QueryTile *t) { attend_tile(32, t); }
static __attribute__((noinline)) void prefill_kernel_64(const QueryTile *t) { attend_tile(64, t); }
static __attribute__((noinline)) void prefill_kernel_128(const QueryTile *t) { attend_tile(128, t); }
static __attribute__((noinline)) void prefill_kernel_any(const QueryTile *t) { attend_tile(t->source->shape->dim, t); }

static PrefillKernel *prefill_kernel(int64_t dim) {
    return dim == 32    ? prefill_kernel_32
           : dim == 64  ? prefill_kernel_64
           : dim == 128 ? prefill_kernel_128
                        : prefill_kernel_any;
}

/* Attend with queries [first, last) of a segment, for the heads that share the keys of head `kv_head`. */
INLINE void prefill(int kind, int64_t dim, const KeySource *s, const Attention *in, int64_t kv_head, int64_t first,
                    int64_t last, Scratch scratch) {
    const AttentionShape *a = s->shape;
    const KVPages *m = s->pages;
    int64_t per = a->heads / a->kv_heads, padded = round_up(dim, LANES), start = s->segments->q_starts[s->segment];
    int64_t offset = first_position(s);
    int64_t from, to, unused;
    visible_keys(s, offset + first, &from, &unused);
    visible_keys(s, offset + last - 1, &unused, &to);
    QueryTile tile = {.source = s, .begin = from / KEY_GROUP * KEY_GROUP, .to = to, .quantised = kind == INT8};
    StoredRows keys = {m->keys, m->key_stride, m->key_scales}, values = {m->values, m->value_stride, m->value_scales};
    prefill_buffers(&scratch, dim, round_up(to - tile.begin, KEY_GROUP), &tile);
    gather_head(kind, dim, &tile, keys, kv_head, from, tile.keys, tile.key_scales);
    gather_head(kind, dim, &tile, values, kv_head, from, tile.values, tile.value_scales);
    PrefillKernel *kernel = prefill_kernel(dim);
    for (tile.head = kv_head * per; tile.head < (kv_head + 1) * per; tile.head++)
        for (int64_t row = first; row < last; row += SHARED_ROWS) {
            tile.rows = min_i64(SHARED_ROWS, last - row), tile.position = offset + row;
            tile.to = s->segments->causal ? min_i64(to, causal_end(s, tile.position + tile.rows - 1)) : to;
            for (int r = 0; r < tile.rows; r++) {
                const float *query = in->queries + (start + row + r) * in->query_stride + tile.head * dim;
                for (int64_t i = 0; i < padded; i++) tile.q[r * padded + i] = i < dim ? query[i] : 0.0f;
            }
            kernel(&tile);
            for (int r = 0; r < tile.rows; r++)
                memcpy(in->out + ((start + row + r) * a->heads + tile.head) * dim, tile.sums + r * padded,
                       dim * sizeof *in->out);
        }
}

void find_longest(const Segments *segments, LongestSegments *longest) {
    for (int64_t i = 0; i < segments->segments; i++) {
        int64_t rows = segments->q_starts[i + 1] - segments->q_starts[i];
        int64_t *most = rows == 1 ? &longest->decode : &longest->prefill;
        *most = max_i64(*most, segments->kv_lens[i]);
    }
}

int64_t paged_attention_scratch(const AttentionShape *shape, LongestSegments longest) {
    Scratch decoding = {0}, prefilling = {0};
    DecodeQuery query;
    QueryTile tile;
    decode_buffers(&decoding, shape, round_up(longest.decode, KEY_GROUP), &query);
    if (longest.prefill) /* a window leaves keys out; they are counted here */
        prefill_buffers(&prefilling, shape->dim, round_up(longest.prefill, KEY_GROUP), &tile);
    int64_t bytes = max_i64(decoding.used, prefilling.used);
    if (max_i64(longest.decode, longest.prefill) > TILED_KEYS) bytes = max_i64(bytes, tiled_scratch(shape));
    return bytes;
}

/* The first of a segment's rows that is computed in tiles; `rows`: none is. Its last key decides, whatever other rows
 * there are. Integers that few heads read are not worth making bfloat16 of when a token is decoded. */
INLINE int64_t first_tiled_row(const KeySource *s, const Attention *in, int64_t rows) {
    const AttentionShape *a = s->shape;
    int64_t kind = s->pages->kind;
    if (!HAS_TILED_ATTENTION || !in->form || kind == F32 || (kind == INT8 && a->heads < 4 * a->kv_heads)) return rows;
    if (s->segments->causal) return min_i64(rows, max_i64(0, TILED_KEYS - first_position(s)));
    return s->segments->kv_lens[s->segment] > TILED_KEYS && !s->shape->window ? 0 : rows;
}

/* Whether the single rows of segments `a` and `b` see the same keys, whatever their positions. */
INLINE int same_keys(const Segments *g, int64_t a, int64_t b) {
    int64_t keys = g->kv_lens[a], blocks = (keys + g->block_size - 1) / g->block_size;
    return g->q_starts[b + 1] - g->q_starts[b] == 1 && g->kv_lens[b] == keys &&
           !memcmp(g->tables + a * g->table_width, g->tables + b * g->table_width, blocks * sizeof *g->tables);
}

/* The segments from the source's on whose single rows are computed together, in tiles, as they see the same keys:
 * beams that read one encoder output. A row has the same bits alone. */
INLINE int64_t alike_segments(const KeySource *s, const Attention *in) {
    const Segments *g = s->segments;
    int64_t first = s->segment, count = 1, most = TILE_ROWS / (s->shape->heads / s->shape->kv_heads);
    if (g->causal || !g->tables || s->bias || g->q_starts[first + 1] - g->q_starts[first] != 1) return 1;
    if (first_tiled_row(s, in, 1)) return 1;
    while (count < most && first + count < g->segments && same_keys(g, first, first + count)) count++;
    return count;
}

#define MOST_KEPT_BYTES (32 << 20) /* of all rows whose keys are divided; others are computed as without */

/* Whether few rows have too few heads for all threads to have equal parts. */
INLINE int is_uneven(const AttentionShape *a, const Segments *g, int64_t threads) {
    int64_t tasks = g->segments * a->kv_heads;
    return HAS_TILED_ATTENTION && threads > 1 && tasks < 4 * threads && tasks % threads;
}

/* The units of the source's segment that threads divide, where those before it have `used`; 0: they do not. */
INLINE int64_t divided_units(const KeySource *s, const Attention *in, int64_t used) {
    const int64_t *starts = s->segments->q_starts + s->segment;
    int64_t from, to;
    if (starts[1] - starts[0] != 1 || first_tiled_row(s, in, 1) || alike_segments(s, in) > 1) return 0;
    visible_keys(s, first_position(s), &from, &to);
    int64_t units = units_of(s->shape, from, to), bytes = unit_floats(s->shape) * (int64_t)sizeof(float);
    return (used + units) * bytes <= MOST_KEPT_BYTES ? units : 0;
}

INLINE KeySource key_source(const Attention *in) {
    const Segments *g = in->segments;
    return (KeySource){in->shape, g, in->pages, in->bias, 0, !g->tables || g->block_size % KEY_GROUP == 0};
}

/* The units of all segments. */
static int64_t all_units(const Attention *in, int threads) {
    KeySource s = key_source(in);
    int64_t units = 0;
    if (!is_uneven(in->shape, in->segments, threads)) return 0;
    for (; s.segment < in->segments->segments; s.segment += alike_segments(&s, in)) units += divided_units(&s, in, units);
    return units;
}

int divides_keys(const Attention *in, int threads) { return all_units(in, threads) > 0; }

int64_t divided_keys_bytes(const AttentionShape *shape, const Segments *segments, int64_t planned, int64_t threads) {
    int64_t units = 0;
    if (planned && HAS_TILED_ATTENTION && shape->kv_heads % threads)
        units = units_of(shape, 0, planned) * ((4 * threads + shape->kv_heads - 1) / shape->kv_heads);
    else if (is_uneven(shape, segments, threads))
        for (int64_t i = 0; i < segments->segments; i++)
            if (segments->q_starts[i + 1] - segments->q_starts[i] == 1)
                units += units_of(shape, 0, segments->kv_lens[i]);
    return min_i64(MOST_KEPT_BYTES, units * unit_floats(shape) * (int64_t)sizeof(float));
}

/* Compute a thread's part of the units. */
static void attend_divided_keys(const Attention *in, int thread, int threads, float *kept, Scratch scratch) {
    KeySource s = key_source(in);
    int64_t all = all_units(in, threads), first = all * thread / threads, last = all * (thread + 1) / threads, used = 0;
    for (; s.segment < in->segments->segments && used < last; s.segment += alike_segments(&s, in)) {
        int64_t units = divided_units(&s, in, used), begin = max_i64(first - used, 0), end = min_i64(last - used, units);
        if (begin < end) attend_units(&s, in, begin, end, kept + used * unit_floats(in->shape), scratch);
        used += units;
    }
}

void add_divided_keys(const Attention *in, int thread, int threads, void *scratch, const float *kept) {
    KeySource s = key_source(in);
    int64_t used = 0, task = 0;
    for (; s.segment < in->segments->segments; s.segment += alike_segments(&s, in)) {
        int64_t units = divided_units(&s, in, used);
        for (int64_t head = 0; units && head < in->shape->kv_heads; head++, task++)
            if (task % threads == thread)
                add_units(&s, in, head, kept + used * unit_floats(in->shape), (Scratch){.base = scratch});
        used += units;
    }
}

/* Compute a thread's tasks. Of few segments, heads are divided too; of many, each segment's pages are read by one
 * thread. */
INLINE void attend_segments(int kind, int64_t dim, const Attention *in, int thread, int threads, Scratch scratch,
                            int divides) {
    const AttentionShape *a = in->shape;
    const Segments *g = in->segments;
    KeySource s = key_source(in);
    int64_t alike, groups = 0, task = 0, used = 0;
    for (s.segment = 0; s.segment < g->segments; s.segment += alike_segments(&s, in)) groups++;
    int64_t pieces = groups >= 4 * threads ? 1 : min_i64(threads, a->kv_heads);
    for (s.segment = 0; s.segment < g->segments; s.segment += alike) {
        alike = alike_segments(&s, in);
        int64_t units = divides ? divided_units(&s, in, used) : 0;
        used += units;
        if (units) continue;
        int64_t start = g->q_starts[s.segment], rows = g->q_starts[s.segment + 1] - start;
        int64_t tiled = first_tiled_row(&s, in, rows), step = tiled_rows(a, rows - tiled, threads);
        for (int64_t piece = 0; rows == 1 && piece < pieces; piece++, task++) {
            int64_t head = a->kv_heads * piece / pieces, last = a->kv_heads * (piece + 1) / pieces;
            if (task % threads != thread) continue;
            if (!tiled) attend_tiled(&s, in, (TiledRows){0, alike, head, last}, scratch);
            else decode(kind, dim, &s, in->queries + start * in->query_stride, in->out + start * a->heads * dim, head,
                        last, scratch);
        }
        if (rows == 1) continue;
        for (int64_t kv_head = 0; kv_head < a->kv_heads; kv_head++) {
            for (int64_t first = 0; first < tiled; first += TASK_ROWS, task++)
                if (task % threads == thread)
                    prefill(kind, dim, &s, in, kv_head, first, min_i64(tiled, first + TASK_ROWS), scratch);
            for (int64_t first = tiled; first < rows; first += step, task++) {
                TiledRows part = {first, min_i64(rows, first + step), kv_head, kv_head + 1};
                if (task % threads == thread) attend_tiled(&s, in, part, scratch);
            }
        }
    }
}

/* A copy of that for each kind of pages and for the widths of a head that are worth one. */
#define DEFINE_ATTEND(name, kind)                                                                                      \
    static void name(const Attention *in, int thread, int threads, Scratch scratch, int divides) {                     \
        if (in->shape->dim == 64)                                                                                      \
            attend_segments(kind, 64, in, thread, threads, scratch, divides);                                          \
        else if (in->shape->dim == 128)                                                                                \
            attend_segments(kind, 128, in, thread, threads, scratch, divides);                                         \
        else                                                                                                           \
            attend_segments(kind, in->shape->dim, in, thread, threads, scratch, divides);                              \
    }
DEFINE_ATTEND(attend_f32, F32)
DEFINE_ATTEND(attend_bf16, BF16)
DEFINE_ATTEND(attend_int8, INT8)

void paged_attention(const Attention *in, int thread, int threads, void *scratch, float *kept) {
    int64_t kind = in->pages->kind;
    Scratch own = {.base = scratch};
    int divides = divides_keys(in, threads);
    if (divides) attend_divided_keys(in, thread, threads, kept, own);
    (kind == F32 ? attend_f32 : kind == BF16 ? attend_bf16 : attend_int8)(in, thread, threads, own, divides);
}

/* Write one row of keys or of values. */
static void write_row(const KVPages *pages, const AttentionShape *shape, const float *from, void *rows, int64_t stride,
                      float *scales, int64_t slot) {
    int64_t heads = shape->kv_heads, dim = shape->dim;
    if (pages->kind == F32) {
        memcpy((float *)rows + slot * stride, from, heads * dim * sizeof *from);
        return;
    }
    if (pages->kind == BF16) {
        bf16 *to = (bf16 *)rows + slot * stride;
        int64_t i = 0;
        for (; i + LANES <= heads * dim; i += LANES) store_bf16(to + i, load(from + i));
        for (; i < heads * dim; i++) to[i] = to_bf16(from[i]);
        return;
    }
    for (int64_t head = 0; head < heads; head++) {
        const float *x = from + head * dim;
        int8_t *to = (int8_t *)rows + slot * stride + head * dim;
        float most = max_abs(x, dim), inverse = most > 0.0f ? 127.0f / most : 0.0f;
        int64_t i = 0;
        scales[slot * heads + head] = most / 127.0f;
        for (; i + LANES <= dim; i += LANES) store_int8(to + i, round_vec(load(x + i) * inverse));
        for (; i < dim; i++) to[i] = (int8_t)__builtin_rintf(x[i] * inverse);
    }
}

void write_kv(const AttentionShape *shape, const KVPages *pages, int64_t slot, const float *key, const float *value) {
    write_row(pages, shape, key, pages->keys, pages->key_stride, pages->key_scales, slot);
    write_row(pages, shape, value, pages->values, pages->value_stride, pages->value_scales, slot);
}

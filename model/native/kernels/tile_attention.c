/* Attention by products of bf16: blocks of queries by blocks of keys (FlashAttention, Dao et al. 2022).
 *
 * Queries and weights of values are rounded to bfloat16; sums are float32. Keys are taken in blocks that begin at
 * multiples of BLOCK_KEYS. A query's weights in a block are relative to its largest score there, and blocks are added
 * up in ascending order. All of that depends on the query's position alone, so that a token that is decoded gets the
 * bits of one that is prefilled.
 *
 * The heads that share keys are queries like others: query j is head j % per of row j / per. In AMX tiles, of up to
 * TILE_ROWS queries, as in decoding, keys are a product's rows, where they lie; of more they are packed as its columns.
 * Vectors multiply columns, which for few queries are made in registers. A sum of products has the same bits either way. */
#include "tile_products.h"

#if HAS_TILED_ATTENTION

#define TASK_QUERIES 256       /* that a thread takes at least, of the heads that share keys */
#define MOST_TASK_QUERIES 1024 /* and at most: what they need stays in the second cache while blocks pass */
#define LOG2_E 1.44269504088896341f

INLINE int64_t query_count(const AttentionShape *a, int64_t rows) { return rows * (a->heads / a->kv_heads); }

/* The number of rows that have `queries` queries. */
INLINE int64_t task_rows(const AttentionShape *a, int64_t queries) {
    return max_i64(TILE_ROWS, queries / query_count(a, 1) / TILE_ROWS * TILE_ROWS);
}

int64_t tiled_rows(const AttentionShape *a, int64_t rows, int64_t threads) {
    int64_t queries = TASK_QUERIES;
    while (queries < MOST_TASK_QUERIES && rows / task_rows(a, 2 * queries) * a->kv_heads >= 4 * threads) queries *= 2;
    return task_rows(a, queries);
}

/* Take the buffers of a block, and find a head's sizes. */
static void take_block(Scratch *scratch, const AttentionShape *a, TiledQueries *t) {
    t->depth = round_up(a->dim, 32), t->width = round_up(a->dim, 2 * LANES);
    t->rows = scratch_take(scratch, (BLOCK_KEYS + AHEAD) * sizeof *t->rows);
    t->keys = scratch_take(scratch, BLOCK_KEYS * t->depth * sizeof *t->keys);
    t->values = scratch_take(scratch, BLOCK_KEYS * t->width * sizeof *t->values);
    t->key_scales = scratch_take(scratch, BLOCK_KEYS * sizeof *t->key_scales);
    t->value_scales = scratch_take(scratch, BLOCK_KEYS * sizeof *t->value_scales);
    t->products = scratch_take(scratch, BLOCK_KEYS * 16 * sizeof *t->products);
    t->scores = scratch_take(scratch, PAIR_ROWS * SCORE_STRIDE * sizeof *t->scores);
    t->block_sums = scratch_take(scratch, PAIR_ROWS * t->width * sizeof *t->block_sums);
}

/* Take the buffers of `count` queries. */
static void take_queries(Scratch *scratch, int64_t count, int in_tiles, TiledQueries *t) {
    int64_t padded = round_up(count, PAIR_ROWS);
    t->count = count, t->in_tiles = in_tiles, t->few = in_tiles && count <= TILE_ROWS;
    t->passing = !in_tiles && count <= PASSING_QUERIES;
    t->queries = scratch_take(scratch, padded * t->depth * sizeof *t->queries);
    t->sums = scratch_take(scratch, padded * t->width * sizeof *t->sums);
    t->totals = scratch_take(scratch, padded * LANES * sizeof *t->totals);
    t->tops = scratch_take(scratch, padded * sizeof *t->tops);
}

int64_t tiled_scratch(const AttentionShape *a) {
    Scratch scratch = {0};
    TiledQueries sizes;
    scratch_take(&scratch, a->kv_heads * sizeof sizes);
    int64_t many = query_count(a, task_rows(a, MOST_TASK_QUERIES));
    int64_t few = a->kv_heads * round_up(query_count(a, 1), PAIR_ROWS);
    take_block(&scratch, a, &sizes);
    take_queries(&scratch, max_i64(many, few), 0, &sizes); /* several heads' buffers, or one's of more queries */
    scratch.used += a->kv_heads * 4 * (SCRATCH_ALIGNMENT + SCRATCH_GAP);
    return scratch.used;
}

/* 2^x for x up to 0, to 3e-6; 0 below -125, NaN of NaN. */
INLINE vec power_of_two(vec x) {
    vec n = x + 12582912.0f - 12582912.0f, f = x - n;
    vec y = fma_vec(splat(9.5701e-3f), f, splat(5.591786e-2f));
    y = fma_vec(y, f, splat(2.4024745e-1f));
    y = fma_vec(y, f, splat(6.9312181e-1f));
    y = fma_vec(y, f, splat(9.9999926e-1f));
    __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
    return (vec)_mm512_maskz_scalef_ps(seen, (__m512)y, (__m512)n);
}

/* Cap, bias and scale the scores [begin, end) of query `j`, where more than the scale is due. */
static __attribute__((noinline)) void finish_row(const TiledQueries *t, int64_t j, float *scores, int64_t begin,
                                                 int64_t end, int quantised) {
    int64_t head = t->kv_head * t->per + j % t->per, position = t->position + j / t->per;
    for (int64_t at = begin; at < end; at += LANES) {
        vec score = load(scores + at);
        if (quantised) score *= load(t->key_scales + at);
        int64_t key = t->begin + at; /* what is not seen is masked later */
        store(scores + at, finish_scores(t->source, score, head, position, key, key, key + LANES));
    }
}

/* Lanes of keys [from, to) among LANES keys from `at`. */
INLINE __mmask16 seen_lanes(int64_t at, int64_t from, int64_t to) {
    static const ivec lanes = LANE_INDICES;
    ivec key = lanes + (int32_t)at;
    return _mm512_movepi32_mask((__m512i)((key >= (int32_t)from) & (key < (int32_t)to)));
}

/* Turn row r of the scores into weights 2^(score - top), in bf16 in its first half, and find their total. */
INLINE void weigh_row(int quantised, const TiledQueries *t, BlockTile *tile, int64_t r) {
    const AttentionShape *a = t->source->shape;
    float *scores = t->scores + r * SCORE_STRIDE, factor = a->scale * LOG2_E;
    bf16 *weights = (bf16 *)scores;
    int64_t from = tile->from[r], to = tile->to[r], at = from / LANES * LANES, end = round_up(to, LANES);
    int finished = a->softcap != 0.0f || t->source->bias, scaled = quantised && !finished;
    const vec lowest = splat(-__builtin_inff());
    vec most = lowest, total = splat(0.0f);
    if (from >= to) at = end = tile->end;
    if (finished) finish_row(t, tile->first + r, scores, at, end, quantised), factor = LOG2_E;
    for (int64_t key = at; key < end; key += LANES) {
        vec score = load(scores + key);
        if (scaled) score *= load(t->key_scales + key);
        if (key < from || key + LANES > to)
            score = (vec)_mm512_mask_mov_ps((__m512)lowest, seen_lanes(key, from, to), (__m512)score);
        most = max_vec(most, score);
    }
    tile->tops[r] = reduce_max(most) * factor;
    const vec below = splat(-tile->tops[r]);
    for (int64_t key = tile->begin; key < at; key += LANES) store_bf16(weights + key, splat(0.0f));
    for (int64_t key = at; key < end; key += LANES) {
        vec score = load(scores + key);
        if (scaled) score *= load(t->key_scales + key);
        vec weight = power_of_two(fma_vec(score, splat(factor), below));
        vec value_weight = quantised ? weight * load(t->value_scales + key) : weight;
        if (key < from || key + LANES > to) {
            __mmask16 seen = seen_lanes(key, from, to);
            weight = (vec)_mm512_maskz_mov_ps(seen, (__m512)weight);
            value_weight = (vec)_mm512_maskz_mov_ps(seen, (__m512)value_weight);
        }
        total += weight;
        store_bf16(weights + key, value_weight);
    }
    for (int64_t key = end; key < tile->end; key += LANES) store_bf16(weights + key, splat(0.0f));
    store(tile->totals[r], total);
}

/* Add row r of the block's sums to those of its query: both relative to the larger of their largest scores. */
INLINE void add_block_row(const TiledQueries *t, const BlockTile *tile, int64_t r, float keep, float add) {
    float *sums = t->sums + (tile->first + r) * t->width, *totals = t->totals + (tile->first + r) * LANES;
    const float *block = t->block_sums + r * t->width;
    for (int64_t i = 0; i < t->width; i += LANES)
        store(sums + i, fma_vec(load(sums + i), splat(keep), load(block + i) * add));
    store(totals, fma_vec(load(totals), splat(keep), load(tile->totals[r]) * add));
}

/* Keep the block's sums for later; `only`: of this one row, -1 of all. */
static void keep_block(const TiledQueries *t, const BlockTile *tile, int64_t only) {
    for (int64_t r = only < 0 ? 0 : only; r < (only < 0 ? tile->rows : only + 1); r++) {
        float *to = t->kept + (tile->first + r) * kept_floats(t->source->shape);
        memcpy(to, t->block_sums + r * t->width, t->width * sizeof *to);
        memcpy(to + t->width, tile->totals[r], LANES * sizeof *to);
        to[t->width + LANES] = tile->tops[r];
    }
}

/* Add the block's sums to those of the tile's queries; `only`: of this one row, -1 of all. */
static void add_block(const TiledQueries *t, const BlockTile *tile, int64_t only) {
    float keep[PAIR_ROWS], add[PAIR_ROWS], *tops = t->tops + tile->first;
    for (int64_t r = 0; r < tile->rows; r += LANES) { /* a largest score is no number's, so equal ones are told apart */
        vec before = load(tops + r), block = load(tile->tops + r), top = max_vec(before, block);
        store(keep + r, select_vec(before == top, splat(1.0f), power_of_two(before - top)));
        store(add + r, select_vec(block == top, splat(1.0f), power_of_two(block - top)));
    }
    for (int64_t r = 0; r < tile->rows; r++) {
        if ((only >= 0 && r != only) || tile->from[r] >= tile->to[r]) continue;
        add_block_row(t, tile, r, keep[r], add[r]);
        tops[r] = tile->tops[r] > tops[r] ? tile->tops[r] : tops[r];
    }
}

/* The same where some value is not finite, row by row: zero times infinity is NaN, so that what a row does not see
 * must be out of its product. */
static void add_each_row(int kind, const TiledQueries *t, const BlockTile *tile) {
    for (int64_t r = 0; r < tile->rows; r++) {
        if (tile->from[r] >= tile->to[r]) continue;
        memset(t->values, 0, BLOCK_KEYS * t->width * sizeof *t->values);
        pack_values(kind, t->source->shape->dim, t, tile->from[r], tile->to[r]);
        sum_values(t, tile);
        (t->kept ? keep_block : add_block)(t, tile, r);
    }
    pack_values(kind, t->source->shape->dim, t, t->from - t->begin, t->to - t->begin);
}

/* The keys of the block that the queries [first, first + rows) see. */
static BlockTile block_tile(const TiledQueries *t, int64_t first, int64_t rows) {
    BlockTile tile = {.first = first, .rows = rows, .begin = BLOCK_KEYS};
    for (int64_t r = 0; r < rows; r++) {
        int64_t from, to;
        visible_keys(t->source, t->position + (first + r) / t->per, &from, &to);
        tile.from[r] = max_i64(from, t->begin) - t->begin, tile.to[r] = min_i64(to, t->begin + BLOCK_KEYS) - t->begin;
        if (tile.from[r] >= tile.to[r]) continue;
        tile.begin = min_i64(tile.begin, tile.from[r] / STEP_KEYS * STEP_KEYS);
        tile.end = max_i64(tile.end, round_up(tile.to[r], STEP_KEYS));
    }
    return tile;
}

/* Add the block to all queries. */
INLINE void attend_block(int kind, int64_t dim, TiledQueries *t) {
    if (!t->few && !t->passing) pack_keys(kind, t);
    t->finite = pack_values(kind, dim, t, t->from - t->begin, t->to - t->begin);
    if (kind == INT8) load_block_scales(t);
    int64_t most = t->in_tiles ? PAIR_ROWS : TILE_ROWS; /* whose scores stay in the first cache */
    for (int64_t first = 0; first < t->count; first += most) {
        BlockTile tile = block_tile(t, first, min_i64(most, t->count - first));
        if (tile.begin >= tile.end) continue;
        score_keys(kind, dim, t, &tile);
        for (int64_t r = 0; r < tile.rows; r++) weigh_row(kind == INT8, t, &tile, r);
        if (t->finite) {
            sum_values(t, &tile);
            (t->kept ? keep_block : add_block)(t, &tile, -1);
        } else {
            add_each_row(kind, t, &tile);
        }
    }
}

/* Round the queries of rows from `query` on to bf16; few: as columns of a product. */
static void pack_queries(int kind, const TiledQueries *t, const float *query, int64_t stride) {
    int64_t dim = t->source->shape->dim, head = t->kv_head * t->per;
    memset(t->queries, 0, round_up(t->count, PAIR_ROWS) * t->depth * sizeof *t->queries);
    for (int64_t j = 0; j < t->count; j++) {
        const float *from = query + j / t->per * stride + (head + j % t->per) * dim;
        bf16 *to = t->queries + (t->few ? j * 2 : j * t->depth);
        for (int64_t i = 0; i < dim; i++) {
            int64_t place = tiled_place(kind, i);
            to[t->few ? place / 2 * 32 + place % 2 : place] = to_bf16(from[i]);
        }
    }
}

/* What query j's sums are multiplied with: the inverse of its total, to which its head's sink adds. */
static float inverse_total(const TiledQueries *t, int64_t j) {
    const float *sink = sink_of(t->source->shape, t->kv_head * t->per + j % t->per);
    float total = reduce_add(load(t->totals + j * LANES)), keep = 1.0f;
    if (sink) { /* both relative to the larger one */
        vec scores = {t->tops[j], *sink * LOG2_E}, top = splat(scores[1] > scores[0] ? scores[1] : scores[0]);
        vec weights = select_vec(scores == top, splat(1.0f), power_of_two(scores - top));
        keep = weights[0], total = total * keep + weights[1];
    }
    return total == 0.0f ? 0.0f : keep / total;
}

/* Write the quotients of sums and totals to rows of the output. */
static void write_rows(int kind, const TiledQueries *t, float *out) {
    const AttentionShape *a = t->source->shape;
    for (int64_t j = 0; j < t->count; j++) {
        float *to = out + (j / t->per * a->heads + t->kv_head * t->per + j % t->per) * a->dim;
        float inverse = inverse_total(t, j);
        for (int64_t i = 0; i < a->dim; i++) to[i] = t->sums[j * t->width + tiled_place(kind, i)] * inverse;
    }
}

/* Find where the block's keys, and some after them, are stored. */
static void locate_rows(TiledQueries *t, int64_t last) {
    const KeySource *s = t->source;
    int64_t end = min_i64(last, t->begin + BLOCK_KEYS + AHEAD), at = t->begin;
    t->located = end - t->begin;
    if (!s->contiguous) {
        for (at = t->from; at < end; at++) t->rows[at - t->begin] = key_row(s, at);
        return;
    }
    for (at = t->from / KEY_GROUP * KEY_GROUP; at < end; at += KEY_GROUP) {
        int64_t row = key_row(s, at);
        for (int i = 0; i < KEY_GROUP; i++) t->rows[at - t->begin + i] = row + i;
    }
}

/* Attend with the queries of `heads` key heads, which see keys [from, to): units [first, last), block by block, as what
 * lies together is read together. What they add is kept at `kept` + unit * unit_floats, or added at once. */
INLINE void attend_blocks(int kind, int64_t dim, TiledQueries *all, int64_t heads, int64_t from, int64_t to,
                          int64_t first, int64_t last, float *kept) {
#if HAS_TILES
    int64_t count = all->count, rest = count - TILE_ROWS;
    if (all->in_tiles)
        tiles_begin(shapes_of((int)min_i64(count, TILE_ROWS), rest > 0 && rest < TILE_ROWS ? (int)rest : TILE_ROWS));
#endif
    for (int64_t unit = first, located = 0; unit < last; unit++) {
        TiledQueries *t = all + unit % heads;
        t->begin = (from / BLOCK_KEYS + unit / heads) * BLOCK_KEYS;
        t->from = max_i64(from, t->begin), t->to = min_i64(to, t->begin + BLOCK_KEYS);
        t->located = located;
        if (t == all || unit == first) locate_rows(t, to);
        located = t->located;
        t->kept = kept ? kept + unit * unit_floats(t->source->shape) : NULL;
        attend_block(kind, dim, t);
    }
#if HAS_TILES
    if (all->in_tiles) tiles_end();
#endif
}

/* A copy of that for each kind of pages and for the widths of a head that are worth one. */
#define DEFINE_ATTEND(name, kind)                                                                                      \
    static void name(TiledQueries *all, int64_t heads, int64_t from, int64_t to, int64_t first, int64_t last,          \
                     float *kept) {                                                                                    \
        int64_t dim = all->source->shape->dim;                                                                         \
        if (dim == 64) attend_blocks(kind, 64, all, heads, from, to, first, last, kept);                               \
        else if (dim == 128) attend_blocks(kind, 128, all, heads, from, to, first, last, kept);                        \
        else attend_blocks(kind, dim, all, heads, from, to, first, last, kept);                                        \
    }
DEFINE_ATTEND(attend_bf16, BF16)
DEFINE_ATTEND(attend_int8, INT8)

/* The queries of these rows, by key head, without any key yet. */
static TiledQueries *begin_queries(const KeySource *source, const Attention *in, TiledRows rows, Scratch *scratch) {
    const AttentionShape *a = source->shape;
    int64_t row = source->segments->q_starts[source->segment] + rows.first, heads = rows.last_head - rows.first_head;
    TiledQueries *all = scratch_take(scratch, heads * sizeof *all), block = {0};
    take_block(scratch, a, &block);
    for (int64_t i = 0; i < heads; i++) {
        TiledQueries *t = all + i;
        *t = block;
        t->source = source, t->per = query_count(a, 1), t->kv_head = rows.first_head + i;
        t->position = first_position(source) + rows.first;
        take_queries(scratch, query_count(a, rows.last - rows.first), in->form == ATTEND_IN_TILES, t);
        pack_queries((int)source->pages->kind, t, in->queries + row * in->query_stride, in->query_stride);
        memset(t->sums, 0, t->count * t->width * sizeof *t->sums);
        memset(t->totals, 0, t->count * LANES * sizeof *t->totals);
        for (int64_t j = 0; j < round_up(t->count, PAIR_ROWS); j++) t->tops[j] = -__builtin_inff();
    }
    return all;
}

void attend_tiled(const KeySource *source, const Attention *in, TiledRows rows, Scratch scratch) {
    const AttentionShape *a = source->shape;
    int64_t row = source->segments->q_starts[source->segment] + rows.first, heads = rows.last_head - rows.first_head;
    int64_t position = first_position(source) + rows.first, from, to, unused;
    TiledQueries *all = begin_queries(source, in, rows, &scratch);
    visible_keys(source, position, &from, &unused);
    visible_keys(source, position + rows.last - rows.first - 1, &unused, &to);
    int64_t units = units_of(a, from, to) / a->kv_heads * heads;
    (source->pages->kind == BF16 ? attend_bf16 : attend_int8)(all, heads, from, to, 0, units, NULL);
    for (int64_t i = 0; i < heads; i++) write_rows((int)source->pages->kind, all + i, in->out + row * a->heads * a->dim);
}

void attend_units(const KeySource *source, const Attention *in, int64_t first, int64_t last, float *kept,
                  Scratch scratch) {
    int64_t heads = source->shape->kv_heads, from, to;
    TiledQueries *all = begin_queries(source, in, (TiledRows){0, 1, 0, heads}, &scratch);
    visible_keys(source, first_position(source), &from, &to);
    (source->pages->kind == BF16 ? attend_bf16 : attend_int8)(all, heads, from, to, first, last, kept);
}

void add_units(const KeySource *source, const Attention *in, int64_t kv_head, const float *kept, Scratch scratch) {
    const AttentionShape *a = source->shape;
    int64_t row = source->segments->q_starts[source->segment], from, to;
    TiledQueries *t = begin_queries(source, in, (TiledRows){0, 1, kv_head, kv_head + 1}, &scratch);
    visible_keys(source, first_position(source), &from, &to);
    for (int64_t unit = kv_head; unit < units_of(a, from, to); unit += a->kv_heads)
        for (int64_t first = 0; first < t->count; first += PAIR_ROWS) {
            BlockTile tile = {.first = first, .rows = min_i64(PAIR_ROWS, t->count - first)};
            for (int64_t r = 0; r < tile.rows; r++) {
                const float *of = kept + unit * unit_floats(a) + (first + r) * kept_floats(a);
                tile.to[r] = 1; /* every block of a single row has keys that it sees */
                memcpy(t->block_sums + r * t->width, of, t->width * sizeof *of);
                memcpy(tile.totals[r], of + t->width, LANES * sizeof *of);
                tile.tops[r] = of[t->width + LANES];
            }
            add_block(t, &tile, -1);
        }
    write_rows((int)source->pages->kind, t, in->out + row * a->heads * a->dim);
}

#endif

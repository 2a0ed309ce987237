/* One segment's keys and values: where they lie, which of them a query sees, and what becomes of its scores. */
#ifndef TRIPTYCH_KEY_SOURCE_H
#define TRIPTYCH_KEY_SOURCE_H

#include "attention.h"

#define KEY_GROUP 16 /* keys that are scored together; groups begin at multiples of it */

typedef struct {
    const AttentionShape *shape;
    const Segments *segments;
    const KVPages *pages;
    const ScoreBias *bias;
    int64_t segment;
    int contiguous; /* whether KEY_GROUP keys from a multiple of KEY_GROUP lie in rows that follow each other */
} KeySource;

/* The row of key `at` of the segment. */
INLINE int64_t key_row(const KeySource *s, int64_t at) {
    const Segments *g = s->segments;
    if (!g->tables) return g->k_starts[s->segment] + at;
    return g->tables[s->segment * g->table_width + at / g->block_size] * g->block_size + at % g->block_size;
}

/* The position of the segment's first row. */
INLINE int64_t first_position(const KeySource *s) {
    const int64_t *starts = s->segments->q_starts + s->segment;
    return s->segments->kv_lens[s->segment] - (starts[1] - starts[0]);
}

/* The end of the keys that the query at `position` of causal attention sees. */
INLINE int64_t causal_end(const KeySource *s, int64_t position) {
    const Segments *g = s->segments;
    return g->key_ends ? g->key_ends[g->q_starts[s->segment] + position - first_position(s)] : position + 1;
}

/* Keys [from, to) that the query at `position` sees. */
INLINE void visible_keys(const KeySource *s, int64_t position, int64_t *from, int64_t *to) {
    int64_t window = s->shape->window;
    *from = window ? max_i64(0, position - window + 1) : 0;
    *to = s->segments->kv_lens[s->segment];
    if (s->segments->causal) *to = min_i64(*to, causal_end(s, position));
    else if (window) *to = min_i64(*to, position + window);
}

/* The sink of a head; null: none. */
INLINE const float *sink_of(const AttentionShape *shape, int64_t head) {
    return shape->sinks ? shape->sinks + head : NULL;
}

/* Scale, cap, bias and mask the dot products of the query at `position` with keys [at, at + LANES); it sees
 * [from, to). */
INLINE vec finish_scores(const KeySource *s, vec score, int64_t head, int64_t position, int64_t at, int64_t from,
                         int64_t to) {
    static const ivec lanes = LANE_INDICES;
    score *= s->shape->scale;
    if (s->shape->softcap != 0.0f) score = softcap_vec(score, s->shape->softcap);
    if (s->bias && s->bias->slopes)
        score += __builtin_convertvector(lanes + (int32_t)(at - position), vec) * s->bias->slopes[head];
    else if (s->bias)
        score += load(s->bias->values + head * s->bias->width + s->bias->width / 2 + at - position);
    if (at < from || at + LANES > to) {
        ivec key = lanes + (int32_t)at;
        score = select_vec((key >= (int32_t)from) & (key < (int32_t)to), score, splat(-__builtin_inff()));
    }
    return score;
}

#endif

/* Attention as a sublayer: what lies between its products, and which attention reads it. `number` is the layer's. */
#define _GNU_SOURCE /* sched_getcpu */
#include "attention_layer.h"

#include "low_rank.h"

/* Normalise a row's queries or keys [heads][dim] in place. */
static void norm_heads(const AttentionLayer *layer, int64_t heads, const Norm *norm, float *rows) {
    int64_t dim = layer->shape.dim;
    if (norm->kind == NO_NORM) return;
    if (layer->norm_span == ALL_HEADS) {
        normalise(norm, rows, heads * dim, rows);
        return;
    }
    for (int64_t head = 0; head < heads; head++) {
        Norm own = *norm;
        if (layer->norm_span == OWN_GAINS) own.weight += head * dim;
        normalise(&own, rows + head * dim, dim, rows + head * dim);
    }
}

/* Normalise each row's values, which may be its keys as they are. */
static void finish_values(const AttentionLayer *layer, int64_t kv_heads, const float *keys, float *values) {
    int64_t dim = layer->shape.dim;
    if (layer->keys_as_values) memcpy(values, keys, kv_heads * dim * sizeof *values);
    for (int64_t head = 0; layer->v_norm.kind != NO_NORM && head < kv_heads; head++)
        normalise(&layer->v_norm, values + head * dim, dim, values + head * dim);
}

/* Normalise and rotate each row's queries and keys, and write its keys and values into the layer's pages. As BF16,
 * rows end up in the first halves of theirs. Ends at a barrier. */
static void finish_heads(const StackContext *t, const AttentionLayer *layer, int64_t kv_heads, const KVPages *pages,
                         int kind) {
    const AttentionShape *a = &layer->shape;
    const Step *step = t->step;
    const RotaryTable *rotary = layer->rotary < 0 ? NULL : step->rotary + layer->rotary;
    const int64_t *slots = step->segments[layer->segments].slots;
    int64_t queries = a->heads * a->dim, keys = layer->output_gate ? 2 * queries : queries;
    int64_t values = keys + kv_heads * a->dim, width = values + kv_heads * a->dim, first, last;
    thread_range(&t->team, step->rows, &first, &last);
    for (int64_t row = first; row < last; row++) {
        float *q = t->qkv + row * width;
        norm_heads(layer, a->heads, &layer->q_norm, q);
        finish_values(layer, kv_heads, q + keys, q + values);
        norm_heads(layer, kv_heads, &layer->k_norm, q + keys);
        for (int64_t head = 0; rotary && head < a->heads + kv_heads; head++) {
            int64_t angles = (t->first_row + row) * rotary->dim;
            float *one = head < a->heads ? q + head * a->dim : q + keys + (head - a->heads) * a->dim;
            (rotary->interleaved ? rotate_neighbours : rotate)(one, rotary->cos + angles, rotary->sin + angles,
                                                               rotary->dim);
        }
        if (rotary && rotary->growth) scale_in_place(q, rotary->growth[t->first_row + row], queries);
        if (pages) write_kv(a, pages, slots[row], q + keys, q + values);
        if (kind == BF16) narrow_in_place(q, width);
    }
    wait_for_threads(&t->team);
}

/* Add the projected output of an attention, which is in t->attended, to x. Ends at a barrier. */
static void finish_attention(const StackContext *t, const AttentionLayer *layer, int64_t number, int place) {
    int64_t rows = t->step->rows, first, last;
    thread_range(&t->team, rows, &first, &last);
    for (int64_t row = first; layer->output.bounds && row < last; row++) /* those that prepare_operand converts */
        bound_input(&layer->output, t->attended + row * layer->output.k);
    Operand operand = prepare_operand(&t->team, NULL, &layer->output, t->attended, rows);
    add_sublayer(t, number, place, &layer->output, operand, rows, &layer->norms.output, layer->scale, t->x);
    norm_rows(t, &layer->norms.post, t->x, rows);
}

/* Whether queries, keys or values change between their projection and their use. */
static int changes_heads(const AttentionLayer *layer) {
    return layer->rotary >= 0 || layer->q_norm.kind != NO_NORM || layer->k_norm.kind != NO_NORM ||
           layer->v_norm.kind != NO_NORM || layer->keys_as_values;
}

static const ScoreBias *score_bias_of(const AttentionLayer *layer, const Step *step) {
    return layer->score_bias < 0 ? NULL : step->score_biases + layer->score_bias;
}

void encoder_self_attention(const StackContext *t, const AttentionLayer *layer, int64_t number) {
    const Stack *stack = t->stack;
    const Step *step = t->step;
    const AttentionShape *a = &layer->shape;
    PackedMatrix like = {.dtype = a->dim % 2 ? F32 : stack->dtype};
    int kind = operand_kind(&like); /* changes are finish_heads', which reads floats */
    int changed = changes_heads(layer) || is_added_after(t, number, ATTENTION_INPUT);
    int64_t width = (a->heads + 2 * a->kv_heads) * a->dim;
    Output qkv = {.rows = t->qkv, .stride = width, .bf16_rows = kind == BF16 && !changed};
    Operand operand = prepare_operand(&t->team, &layer->norms.pre, &layer->input, t->x, step->rows);
    project(t, number, ATTENTION_INPUT, &layer->input, operand, 0, step->rows, qkv);
    if (changed) finish_heads(t, layer, a->kv_heads, NULL, kind);
    EncoderAttention attention = {.shape = a, .segments = step->segments + layer->segments, .kind = kind};
    attention.bias = score_bias_of(layer, step), attention.tiles = stack->tiles;
    if (layer->relative >= 0) attention.relative = step->relative + layer->relative;
    attention.rows = t->qkv, attention.stride = kind == BF16 && changed ? 2 * width : width;
    attention.out = t->attended;
    encoder_attention(&attention, t->team.thread, t->team.threads, t->team.scratch);
    wait_for_threads(&t->team);
    finish_attention(t, layer, number, ATTENTION_OUTPUT);
}

/* How attention over pages computes long contexts: in bf16 where the network's products are. */
static int attention_form(const Stack *stack) {
    return stack->dtype != BF16 ? ATTEND_IN_FLOATS : stack->tiles ? ATTEND_IN_TILES : ATTEND_BY_VECTORS;
}

/* Multiply the heads' outputs by the sigmoids of their gates, which follow the queries. Ends at a barrier. */
static void gate_attended(const StackContext *t, const AttentionLayer *layer, int64_t width) {
    int64_t heads = layer->shape.heads, dim = layer->shape.dim, first, last;
    thread_range(&t->team, t->step->rows * heads, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        const float *gate = t->qkv + unit / heads * width + (heads + unit % heads) * dim;
        gate_sigmoid(t->attended + unit * dim, gate, dim);
    }
    wait_for_threads(&t->team);
}

/* Compute an attention over pages or rows. Ends at a barrier. */
static void attend_pages(const StackContext *t, const Attention *attention) {
    const ThreadContext *team = &t->team;
    paged_attention(attention, team->thread, team->threads, team->scratch, t->kept);
    wait_for_threads(team);
    if (!divides_keys(attention, team->threads)) return;
    add_divided_keys(attention, team->thread, team->threads, team->scratch, t->kept);
    wait_for_threads(team);
}

void self_attention(const StackContext *t, const AttentionLayer *layer, int64_t number) {
    const Step *step = t->step;
    const AttentionShape *a = &layer->shape;
    int64_t kv_heads = layer->reads_keys ? 0 : a->kv_heads;
    int64_t keys = (input_heads(layer) - 2 * a->kv_heads) * a->dim;
    int64_t values = keys + kv_heads * a->dim, width = values + kv_heads * a->dim;
    Operand operand = prepare_operand(&t->team, &layer->norms.pre, &layer->input, t->x, step->rows);
    Output qkv = {.rows = t->qkv, .stride = width};
    project(t, number, ATTENTION_INPUT, &layer->input, operand, 0, step->rows, qkv);
    KVPages rows = {.kind = F32, .keys = t->qkv + keys, .values = t->qkv + values};
    rows.key_stride = rows.value_stride = width;
    const KVPages *pages = step->pages ? step->pages + number : NULL;
    if (pages || changes_heads(layer)) finish_heads(t, layer, kv_heads, layer->reads_keys ? NULL : pages, F32);
    Attention attention = {.shape = a, .segments = step->segments + layer->segments, .pages = pages ? pages : &rows};
    attention.bias = score_bias_of(layer, step);
    attention.form = attention_form(t->stack);
    attention.queries = t->qkv, attention.query_stride = width, attention.out = t->attended;
    attend_pages(t, &attention);
    if (layer->output_gate) gate_attended(t, layer, width);
    finish_attention(t, layer, number, ATTENTION_OUTPUT);
}

void cross_attention(const StackContext *t, const AttentionLayer *layer, int64_t number) {
    const Step *step = t->step;
    int64_t width = layer->shape.heads * layer->shape.dim;
    Operand operand = prepare_operand(&t->team, &layer->norms.pre, &layer->input, t->x, step->rows);
    Output queries = {.rows = t->qkv, .stride = width};
    project(t, number, CROSS_INPUT, &layer->input, operand, 0, step->rows, queries);
    if (changes_heads(layer)) finish_heads(t, layer, 0, NULL, F32);
    if (step->cross_queries && step->cross_queries[number]) {
        int64_t first, last;
        thread_range(&t->team, step->rows, &first, &last);
        memcpy(step->cross_queries[number] + first * width, t->qkv + first * width,
               (last - first) * width * sizeof *t->qkv);
    }
    Attention attention = {.shape = &layer->shape, .segments = step->segments + layer->segments};
    attention.pages = step->pages + number, attention.bias = score_bias_of(layer, step);
    attention.form = attention_form(t->stack);
    attention.queries = t->qkv, attention.query_stride = width, attention.out = t->attended;
    attend_pages(t, &attention);
    finish_attention(t, layer, number, CROSS_OUTPUT);
}

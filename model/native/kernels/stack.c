/* Layers of a Transformer stack over packed rows, in one parallel region: norms, products, attention, pages.
 *
 * Rows are float32 throughout; products read them as their matrix needs. Nothing is kept between calls: the caller
 * gives the scratch memory, whose size `scratch_bytes` tells. Threads divide rows, outputs or heads, and wait for
 * each other at barriers wherever one reads what another wrote. */
#define _GNU_SOURCE /* sched_getcpu */
#include "stack.h"

#include <omp.h>

#include "delta.h"
#include "experts.h"
#include "scratch.h"
#include "thread_context.h"

#define CHUNK_ROWS 256    /* rows that go through an MLP together */
#define GROUP_ROWS 128    /* rows of whole segments that one thread takes through all layers: they stay in its caches */
#define MIN_GROUP_ROWS 64 /* of the last groups, for which threads would wait */

/* One thread's view of a step. The buffers are shared, and hold rows of the whole step or group. */
typedef struct {
    ThreadContext team;
    const Stack *stack;
    const Step *step;
    int64_t first_row; /* of the step's rotary tables: the row of x's first */
    float *x;          /* [rows][hidden]: what layers change */
    float *saved;      /* [rows][hidden]: what a parallel layer's MLP reads */
    float *sublayer;   /* [rows][hidden]: what a sublayer gives before its output norm */
    float *qkv;        /* [rows][(heads + 2 kv_heads) dim], or more with gates; what a recurrence mixes */
    float *attended;   /* [rows][heads dim] */
    DeltaBuffers delta;
    float *inner;      /* [chunk][inner]: between an MLP's products */
    ExpertBuffers experts;
} StackContext;

/* Whether a layer's self attention is over whole segments, without pages, and sees them in both directions. */
static int is_bidirectional(const Layer *layer, const Step *step) {
    return !layer->delta && !step->pages && !step->segments[layer->self.segments].causal;
}

/* The most keys of a segment of some rows' segments. */
static LongestSegments longest_of(const Step *step, int64_t segments) {
    LongestSegments longest = {step->planned_keys, step->planned_keys};
    find_longest(step->segments + segments, &longest);
    return longest;
}

/* The most keys of a segment of a step whose rows attend in one way. */
static int64_t longest_keys(const Step *step) {
    LongestSegments longest = longest_of(step, 0);
    return max_i64(longest.decode, longest.prefill);
}

/* Bytes of scratch that a thread needs for the step's attentions. */
static int64_t attention_scratch(const Stack *stack, const Step *step) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < step->num_segments; i++) {
        LongestSegments longest = longest_of(step, i);
        int64_t keys = max_i64(longest.decode, longest.prefill);
        for (int64_t number = 0; number < stack->num_layers; number++) {
            const Layer *layer = stack->layers[number];
            if (layer->delta) continue;
            if (layer->self.segments == i && is_bidirectional(layer, step))
                bytes = max_i64(bytes, encoder_attention_scratch(&layer->self.shape, keys, layer->self.relative >= 0));
            else if (layer->self.segments == i)
                bytes = max_i64(bytes, paged_attention_scratch(&layer->self.shape, longest));
            if (layer->has_cross && layer->cross.segments == i)
                bytes = max_i64(bytes, paged_attention_scratch(&layer->cross.shape, longest));
        }
    }
    return bytes;
}

/* The largest sizes of a stack's layers, for one row: elements, or bytes where the name says so. */
typedef struct {
    int64_t qkv, attended, inner_bytes; /* inner_bytes: between an MLP's products */
    int64_t operand_bytes, mlp_operand_bytes;
    int saved, sublayer; /* whether any layer needs such a buffer */
    DeltaSizes delta;
    ExpertSizes experts;
} LayerSizes;

/* Raise `sizes` to what an attention needs whose input has so many heads. */
static void measure_attention(const AttentionLayer *layer, int64_t heads, LayerSizes *sizes) {
    sizes->qkv = max_i64(sizes->qkv, heads * layer->shape.dim);
    sizes->attended = max_i64(sizes->attended, layer->shape.heads * layer->shape.dim);
    sizes->operand_bytes = max_i64(sizes->operand_bytes, operand_bytes(&layer->input));
    sizes->operand_bytes = max_i64(sizes->operand_bytes, operand_bytes(&layer->output));
    sizes->sublayer |= layer->norms.output.kind != NO_NORM;
}

/* Raise `sizes` to what an MLP's products need. */
static void measure_mlp(const MLPLayer *mlp, LayerSizes *sizes) {
    sizes->inner_bytes = max_i64(sizes->inner_bytes, max_i64(mlp->up.n * 4, operand_bytes(&mlp->down)));
    sizes->mlp_operand_bytes = max_i64(sizes->mlp_operand_bytes, operand_bytes(&mlp->up));
    sizes->mlp_operand_bytes = max_i64(sizes->mlp_operand_bytes, operand_bytes(&mlp->down));
    sizes->sublayer |= mlp->norms.output.kind != NO_NORM;
}

/* The same of a recurrence. */
static void measure_recurrence(const DeltaLayer *layer, LayerSizes *sizes) {
    measure_delta(layer, &sizes->delta);
    sizes->qkv = max_i64(sizes->qkv, sizes->delta.mixed);
    sizes->attended = max_i64(sizes->attended, sizes->delta.values);
    sizes->operand_bytes = max_i64(sizes->operand_bytes, operand_bytes(&layer->input));
    sizes->operand_bytes = max_i64(sizes->operand_bytes, operand_bytes(&layer->output));
    sizes->sublayer |= layer->norms.output.kind != NO_NORM;
}

/* Heads of a row that self attention's input gives: queries, maybe their gates, keys and values. */
static int64_t input_heads(const AttentionLayer *layer) {
    return (layer->output_gate ? 2 : 1) * layer->shape.heads + 2 * layer->shape.kv_heads;
}

static LayerSizes measure_layers(const Stack *stack) {
    LayerSizes sizes = {0};
    for (int64_t number = 0; number < stack->num_layers; number++) {
        const Layer *layer = stack->layers[number];
        const MLPLayer *mlp = &layer->mlp;
        if (layer->delta) measure_recurrence(layer->delta, &sizes);
        else measure_attention(&layer->self, input_heads(&layer->self), &sizes);
        if (layer->has_cross) measure_attention(&layer->cross, layer->cross.shape.heads, &sizes);
        measure_mlp(mlp, &sizes);
        if (layer->has_vectors) measure_mlp(&layer->vectors, &sizes);
        if (mlp->experts) measure_experts(mlp->experts, &sizes.experts);
        sizes.saved |= layer->parallel != 0;
    }
    return sizes;
}

/* Take the buffers of `rows` rows of a step at a time: those that threads share, then each thread's own. */
static void take_buffers(Scratch *scratch, const Stack *stack, const Step *step, int64_t rows, StackContext *t) {
    LayerSizes sizes = measure_layers(stack);
    int64_t number = sizeof(float), hidden = rows * stack->hidden * number, chunk = min_i64(rows, CHUNK_ROWS);
    int64_t own_bytes = max_i64(attention_scratch(stack, step), rows * GEMM_SCRATCH * number);
    own_bytes = max_i64(own_bytes, sizes.delta.state_bytes);
    ThreadContext *team = &t->team;
    t->saved = scratch_take(scratch, sizes.saved ? hidden : 0);
    t->sublayer = scratch_take(scratch, sizes.sublayer ? hidden : 0);
    t->qkv = scratch_take(scratch, rows * sizes.qkv * number);
    t->attended = scratch_take(scratch, rows * sizes.attended * number);
    t->inner = scratch_take(scratch, chunk * sizes.inner_bytes);
    t->delta.mixed = t->qkv, t->delta.outputs = t->attended;
    take_delta_buffers(scratch, &sizes.delta, stack->hidden, rows, &t->delta);
    team->operand = scratch_take(scratch, max_i64(rows * sizes.operand_bytes, chunk * sizes.mlp_operand_bytes));
    team->operand_scales = scratch_take(scratch, rows * number);
    take_expert_buffers(scratch, &sizes.experts, stack->hidden, expert_rows(rows), team, &t->experts);
    for (int thread = 0; thread < team->threads; thread++) {
        void *own = scratch_take(scratch, own_bytes);
        float *line = scratch_take(scratch, stack->hidden * number);
        if (thread == team->thread) team->scratch = own, team->line = line;
    }
}

/* Normalise rows [rows][hidden] of x in place. Ends at a barrier, unless there is no norm. */
static void norm_rows(const StackContext *t, const Norm *norm, float *x, int64_t rows) {
    if (norm->kind == NO_NORM) return;
    int64_t hidden = t->stack->hidden, first, last;
    thread_range(&t->team, rows, &first, &last);
    for (int64_t row = first; row < last; row++) normalise(norm, x + row * hidden, hidden, x + row * hidden);
    wait_for_threads(&t->team);
}

/* Add the output norm of what a sublayer gave, which is in t->sublayer, to rows of x. Ends at a barrier. */
static void add_normed(const StackContext *t, const Norm *output_norm, float *x, int64_t rows) {
    int64_t hidden = t->stack->hidden, first, last;
    thread_range(&t->team, rows, &first, &last);
    for (int64_t row = first; row < last; row++) {
        normalise(output_norm, t->sublayer + row * hidden, hidden, t->team.line);
        add_in_place(x + row * hidden, t->team.line, hidden);
    }
    wait_for_threads(&t->team);
}

/* Add output norm(operand x matrix^T + bias) to rows of x, or without a norm `scale` times that product. Ends at a
 * barrier. */
static void add_sublayer(const StackContext *t, const PackedMatrix *matrix, Operand operand, int64_t rows,
                         const Norm *output_norm, float scale, float *x) {
    int64_t hidden = t->stack->hidden;
    if (output_norm->kind == NO_NORM) {
        multiply(&t->team, matrix, operand, rows, (Output){.rows = x, .stride = hidden, .add = 1, .add_scale = scale});
        return;
    }
    multiply(&t->team, matrix, operand, rows, (Output){.rows = t->sublayer, .stride = hidden});
    add_normed(t, output_norm, x, rows);
}

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
static void finish_attention(const StackContext *t, const AttentionLayer *layer) {
    int64_t rows = t->step->rows;
    Operand operand = prepare_operand(&t->team, NULL, &layer->output, t->attended, rows);
    add_sublayer(t, &layer->output, operand, rows, &layer->norms.output, layer->scale, t->x);
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

/* Self attention of segments that see themselves in both directions: products in the operands' kind, no pages. */
static void encoder_self_attention(const StackContext *t, const AttentionLayer *layer) {
    const Stack *stack = t->stack;
    const Step *step = t->step;
    const AttentionShape *a = &layer->shape;
    PackedMatrix like = {.dtype = a->dim % 2 ? F32 : stack->dtype};
    int kind = operand_kind(&like), changed = changes_heads(layer); /* by finish_heads, which reads floats */
    int64_t width = (a->heads + 2 * a->kv_heads) * a->dim;
    Output qkv = {.rows = t->qkv, .stride = width, .bf16_rows = kind == BF16 && !changed};
    Operand operand = prepare_operand(&t->team, &layer->norms.pre, &layer->input, t->x, step->rows);
    multiply(&t->team, &layer->input, operand, step->rows, qkv);
    if (changed) finish_heads(t, layer, a->kv_heads, NULL, kind);
    EncoderAttention attention = {.shape = a, .segments = step->segments + layer->segments, .kind = kind};
    attention.bias = score_bias_of(layer, step), attention.tiles = stack->tiles;
    if (layer->relative >= 0) attention.relative = step->relative + layer->relative;
    attention.rows = t->qkv, attention.stride = kind == BF16 && changed ? 2 * width : width;
    attention.out = t->attended;
    encoder_attention(&attention, t->team.thread, t->team.threads, t->team.scratch);
    wait_for_threads(&t->team);
    finish_attention(t, layer);
}

/* Whether attention over pages may be in tiles: where products of bfloat16 are. */
static int tiled_attention(const Stack *stack) { return stack->tiles && stack->dtype == BF16; }

/* Multiply what the heads have read by the sigmoids of their gates, which are behind the queries. Ends at a barrier. */
static void gate_attended(const StackContext *t, const AttentionLayer *layer, int64_t width) {
    int64_t heads = layer->shape.heads, dim = layer->shape.dim, first, last;
    thread_range(&t->team, t->step->rows * heads, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        const float *gate = t->qkv + unit / heads * width + (heads + unit % heads) * dim;
        gate_sigmoid(t->attended + unit * dim, gate, dim);
    }
    wait_for_threads(&t->team);
}

/* Self attention over pages, which get this step's keys and values first, or over the rows themselves. A layer that
 * reads an earlier one's keys finds them in its pages, which are that one's. */
static void self_attention(const StackContext *t, const AttentionLayer *layer, int64_t number) {
    const Step *step = t->step;
    const AttentionShape *a = &layer->shape;
    int64_t kv_heads = layer->reads_keys ? 0 : a->kv_heads;
    int64_t keys = (input_heads(layer) - 2 * a->kv_heads) * a->dim;
    int64_t values = keys + kv_heads * a->dim, width = values + kv_heads * a->dim;
    Operand operand = prepare_operand(&t->team, &layer->norms.pre, &layer->input, t->x, step->rows);
    multiply(&t->team, &layer->input, operand, step->rows, (Output){.rows = t->qkv, .stride = width});
    KVPages rows = {.kind = F32, .keys = t->qkv + keys, .values = t->qkv + values};
    rows.key_stride = rows.value_stride = width;
    const KVPages *pages = step->pages ? step->pages + number : NULL;
    if (pages || changes_heads(layer)) finish_heads(t, layer, kv_heads, layer->reads_keys ? NULL : pages, F32);
    Attention attention = {.shape = a, .segments = step->segments + layer->segments, .pages = pages ? pages : &rows};
    attention.bias = score_bias_of(layer, step);
    attention.tiles = tiled_attention(t->stack);
    attention.queries = t->qkv, attention.query_stride = width, attention.out = t->attended;
    paged_attention(&attention, t->team.thread, t->team.threads, t->team.scratch);
    wait_for_threads(&t->team);
    if (layer->output_gate) gate_attended(t, layer, width);
    finish_attention(t, layer);
}

/* A recurrence in the place of self attention. */
static void recurrence(const StackContext *t, const DeltaLayer *layer, int64_t number) {
    const Step *step = t->step;
    const LayerStates *states = step->states ? step->states + number : NULL;
    Operand operand = delta_operand(&t->team, layer, step, states, &t->delta, t->stack->hidden, t->x);
    add_sublayer(t, &layer->output, operand, step->rows, &layer->norms.output, layer->scale, t->x);
    norm_rows(t, &layer->norms.post, t->x, step->rows);
}

/* Cross attention to keys and values that are in the pages already. */
static void cross_attention(const StackContext *t, const AttentionLayer *layer, int64_t number) {
    const Step *step = t->step;
    int64_t width = layer->shape.heads * layer->shape.dim;
    Operand operand = prepare_operand(&t->team, &layer->norms.pre, &layer->input, t->x, step->rows);
    multiply(&t->team, &layer->input, operand, step->rows, (Output){.rows = t->qkv, .stride = width});
    if (changes_heads(layer)) finish_heads(t, layer, 0, NULL, F32);
    if (step->cross_queries && step->cross_queries[number]) {
        int64_t first, last;
        thread_range(&t->team, step->rows, &first, &last);
        memcpy(step->cross_queries[number] + first * width, t->qkv + first * width,
               (last - first) * width * sizeof *t->qkv);
    }
    Attention attention = {.shape = &layer->shape, .segments = step->segments + layer->segments};
    attention.pages = step->pages + number, attention.bias = score_bias_of(layer, step);
    attention.tiles = tiled_attention(t->stack);
    attention.queries = t->qkv, attention.query_stride = width, attention.out = t->attended;
    paged_attention(&attention, t->team.thread, t->team.threads, t->team.scratch);
    wait_for_threads(&t->team);
    finish_attention(t, layer);
}

/* Activate and gate what `up` gave, or multiply it by `vectors`, rows `stride` apart, and write it as the operand that
 * `down` reads. Ends at a barrier. */
static Operand gated_operand(const StackContext *t, const MLPLayer *layer, int64_t rows, const float *vectors,
                             int64_t stride) {
    int kind = operand_kind(&layer->down);
    int64_t size = layer->down.k, width = layer->up.n, bytes = operand_bytes(&layer->down), first, last;
    const ThreadContext *team = &t->team;
    thread_range(team, rows, &first, &last);
    for (int64_t row = first; row < last; row++) {
        float *at = t->inner + row * width;
        if (layer->gated) gate_in_place(layer->activation, (GateClamp){layer->limit, layer->gain}, at, size);
        if (vectors) multiply_in_place(at, vectors + row * stride, size);
        if (kind != F32) write_operand(&layer->down, at, team->operand + row * bytes, team->operand_scales + row);
    }
    wait_for_threads(team);
    if (kind == F32) return (Operand){t->inner, width, NULL};
    return (Operand){team->operand, bytes / element_bytes(kind), team->operand_scales};
}

/* What the second product of an MLP reads, of the norm `pre` of `rows` rows from `from`. Ends at a barrier. */
static Operand mlp_inner(const StackContext *t, const MLPLayer *layer, const Norm *pre, const float *from,
                         int64_t rows) {
    Operand operand = prepare_operand(&t->team, pre, &layer->up, from, rows);
    int kind = operand_kind(&layer->down);
    int64_t size = layer->down.k, bytes = operand_bytes(&layer->down);
    Output up = {.rows = t->inner, .activation = layer->gated ? NO_ACTIVATION : layer->activation};
    if (!layer->gated && (kind == F32 || (kind == BF16 && bytes == 2 * size))) { /* what comes out is what goes in */
        up.stride = size, up.bf16_rows = kind == BF16;
        multiply(&t->team, &layer->up, operand, rows, up);
        return (Operand){t->inner, size, NULL};
    }
    up.stride = layer->up.n;
    multiply(&t->team, &layer->up, operand, rows, up);
    return gated_operand(t, layer, rows, NULL, 0);
}

/* Add the MLP of `rows` rows from `from` to those of x. Ends at a barrier. */
static void mlp(const StackContext *t, const MLPLayer *layer, const float *from, float *x, int64_t rows) {
    Operand inner = mlp_inner(t, layer, &layer->norms.pre, from, rows);
    add_sublayer(t, &layer->down, inner, rows, &layer->norms.output, layer->scale, x);
}

/* Add what a layer makes of the step's vectors to `rows` rows of x from row `begin` on. Ends at a barrier. */
static void add_vectors(const StackContext *t, const MLPLayer *layer, int64_t number, int64_t begin, int64_t rows) {
    float *x = t->x + begin * t->stack->hidden;
    int64_t size = layer->up.n, stride = t->stack->num_layers * size;
    Operand operand = prepare_operand(&t->team, NULL, &layer->up, x, rows);
    Output up = {.rows = t->inner, .stride = size, .activation = layer->activation};
    multiply(&t->team, &layer->up, operand, rows, up);
    const float *vectors = t->step->vectors + (t->first_row + begin) * stride + number * size;
    Operand inner = gated_operand(t, layer, rows, vectors, stride);
    add_sublayer(t, &layer->down, inner, rows, &layer->norms.output, layer->scale, x);
}

/* Multiply all rows by a layer's scale. Ends at a barrier. */
static void scale_rows(const StackContext *t, float scale) {
    int64_t hidden = t->stack->hidden, first, last;
    thread_range(&t->team, t->step->rows, &first, &last);
    scale_in_place(t->x + first * hidden, scale, (last - first) * hidden);
    wait_for_threads(&t->team);
}

/* Add the normed MLP beside experts, of `rows` rows from `from`, to the norm of what experts gave, which is in
 * t->sublayer. Ends at a barrier. */
static void add_beside(const StackContext *t, const MLPLayer *layer, const float *from, int64_t rows) {
    const ExpertsLayer *experts = layer->experts;
    int64_t hidden = t->stack->hidden, first, last;
    norm_rows(t, &experts->norms.output, t->sublayer, rows);
    for (int64_t at = 0; at < rows; at += CHUNK_ROWS) {
        int64_t some = min_i64(rows - at, CHUNK_ROWS);
        float *to = t->experts.outputs;
        Operand inner = mlp_inner(t, layer, &experts->mlp_norms.pre, from + at * hidden, some);
        multiply(&t->team, &layer->down, inner, some, (Output){.rows = to, .stride = hidden});
        thread_range(&t->team, some, &first, &last);
        for (int64_t row = first; row < last; row++) {
            normalise(&experts->mlp_norms.output, to + row * hidden, hidden, t->team.line);
            add_in_place(t->sublayer + (at + row) * hidden, t->team.line, hidden);
        }
        wait_for_threads(&t->team);
    }
}

/* Add the experts of `rows` rows from `from` to those of x. Ends at a barrier. */
static void experts(const StackContext *t, const MLPLayer *layer, const float *from, float *x, int64_t rows) {
    int64_t hidden = t->stack->hidden, first, last;
    if (layer->norms.output.kind == NO_NORM) {
        add_experts(&t->team, layer, &t->experts, hidden, from, x, rows, layer->scale);
        return;
    }
    thread_range(&t->team, rows, &first, &last); /* behind the first of its barriers add_experts adds to these */
    memset(t->sublayer + first * hidden, 0, (last - first) * hidden * sizeof *x);
    add_experts(&t->team, layer, &t->experts, hidden, from, t->sublayer, rows, 1.0f);
    if (layer->experts->norms.output.kind != NO_NORM) add_beside(t, layer, from, rows);
    add_normed(t, &layer->norms.output, x, rows);
}

static void run_layer(const StackContext *t, int64_t number) {
    const Layer *layer = t->stack->layers[number];
    int64_t rows = t->step->rows, hidden = t->stack->hidden, first, last;
    const float *from = t->x;
    if (layer->parallel) {
        thread_range(&t->team, rows, &first, &last);
        memcpy(t->saved + first * hidden, t->x + first * hidden, (last - first) * hidden * sizeof *t->x);
        from = t->saved;
    }
    if (layer->delta) recurrence(t, layer->delta, number);
    else if (is_bidirectional(layer, t->step)) encoder_self_attention(t, &layer->self);
    else self_attention(t, &layer->self, number);
    if (layer->has_cross) cross_attention(t, &layer->cross, number);
    int64_t chunk = layer->mlp.experts ? expert_rows(rows) : CHUNK_ROWS;
    for (int64_t at = 0; at < rows; at += chunk)
        (layer->mlp.experts ? experts : mlp)(t, &layer->mlp, from + at * hidden, t->x + at * hidden,
                                             min_i64(rows - at, chunk));
    norm_rows(t, &layer->mlp.norms.post, t->x, rows);
    for (int64_t at = 0; layer->has_vectors && at < rows; at += CHUNK_ROWS)
        add_vectors(t, &layer->vectors, number, at, min_i64(rows - at, CHUNK_ROWS));
    if (layer->scale) scale_rows(t, *layer->scale);
}

static void run_layers(const StackContext *t) {
    for (int64_t number = t->step->first_layer; number < t->step->last_layer; number++) run_layer(t, number);
    if (t->step->last_layer == t->stack->num_layers) norm_rows(t, &t->stack->final, t->x, t->step->rows);
}

/* Whether threads take groups of segments through all layers by themselves, without a barrier: segments must need
 * nothing of each other, and be so many that the last group is not waited for long. */
static int in_groups(const Stack *stack, const Step *step, int64_t threads) {
    if (step->num_segments != 1 || !is_bidirectional(stack->layers[0], step)) return 0;
    if (step->rows < 2 * threads * max_i64(longest_keys(step), GROUP_ROWS)) return 0;
    for (int64_t i = 0; i < stack->num_layers; i++)
        if (!is_bidirectional(stack->layers[i], step)) return 0;
    return 1;
}

/* A thread's view of a step whose buffers, for `rows` rows at a time, are at `memory`; null: only `bytes` is found. */
static StackContext stack_context(const Stack *stack, const Step *step, int64_t rows, char *memory, int thread,
                                  int threads, int64_t *bytes) {
    StackContext t = {.stack = stack, .step = step, .team = {.thread = thread, .threads = threads}};
    Scratch scratch = {.base = memory};
    take_buffers(&scratch, stack, step, rows, &t);
    *bytes = scratch.used;
    return t;
}

/* The most rows of a group: it begins below GROUP_ROWS and takes whole segments. */
static int64_t group_rows(const Step *step) { return GROUP_ROWS + longest_keys(step); }

/* Bytes of scratch of one group of segments, or of the whole step where it is not divided into groups. */
static int64_t buffer_bytes(const Stack *stack, const Step *step, int64_t threads) {
    int grouped = in_groups(stack, step, threads);
    int64_t bytes, rows = grouped ? group_rows(step) : step->rows;
    stack_context(stack, step, rows, NULL, 0, grouped ? 1 : (int)threads, &bytes);
    return bytes;
}

/* Bytes of scratch memory that run_stack needs for a step. A planned step may have empty segments, and matrices
 * without data. */
EXPORTED int64_t scratch_bytes(const Stack *stack, const Step *step, int64_t threads) {
    int64_t buffers = in_groups(stack, step, threads) ? threads : 1;
    return buffers * buffer_bytes(stack, step, threads) + SCRATCH_ALIGNMENT;
}

/* Segments from `first` on make a group, a smaller one towards the end; returns the one behind the last. */
static int64_t group_end(const Segments *s, int64_t first, int64_t threads) {
    int64_t last = first + 1, share = (s->q_starts[s->segments] - s->q_starts[first]) / (3 * threads);
    int64_t rows = share > GROUP_ROWS ? GROUP_ROWS : max_i64(share, MIN_GROUP_ROWS);
    while (last < s->segments && last - first < GROUP_ROWS && s->q_starts[last] - s->q_starts[first] < rows) last++;
    return last;
}

/* Take segments [first, last) through all layers, by one thread. */
static void run_group(const Stack *stack, const Step *step, int64_t first, int64_t last, float *x, char *memory) {
    const Segments *all = step->segments;
    int64_t starts[GROUP_ROWS + 1], row = all->q_starts[first], bytes;
    for (int64_t i = first; i <= last; i++) starts[i - first] = all->q_starts[i] - row;
    Segments own = {.segments = last - first, .q_starts = starts, .k_starts = starts, .kv_lens = all->kv_lens + first};
    Step part = *step;
    part.rows = starts[last - first], part.segments = &own;
    Barrier alone = {0};
    StackContext t = stack_context(stack, &part, part.rows, memory, 0, 1, &bytes);
    t.x = x + row * stack->hidden, t.first_row = row, t.team.barrier = &alone;
    run_layers(&t);
}

/* Take the first segments that no thread has taken; false when there are none left. */
static int next_group(const Segments *segments, int64_t threads, _Atomic int64_t *next, int64_t *first, int64_t *last) {
    *first = atomic_load(next);
    do {
        if (*first == segments->segments) return 0;
        *last = group_end(segments, *first, threads);
    } while (!atomic_compare_exchange_weak(next, first, *last));
    return 1;
}

/* Run rows x [rows][hidden] through layers of a stack, in place. `memory` has the bytes that scratch_bytes told. */
EXPORTED void run_stack(const Stack *stack, const Step *step, float *x, char *memory, int64_t threads) {
    int grouped = in_groups(stack, step, threads);
    int64_t bytes = buffer_bytes(stack, step, threads);
    _Atomic int64_t next = 0;
    Barrier barrier = {0};
    memory = scratch_aligned(memory);
#pragma omp parallel num_threads((int)threads)
    if (grouped) {
        int64_t first, last;
        while (next_group(step->segments, threads, &next, &first, &last))
            run_group(stack, step, first, last, x, memory + omp_get_thread_num() * bytes);
    } else {
        int64_t used;
        StackContext t =
            stack_context(stack, step, step->rows, memory, omp_get_thread_num(), omp_get_num_threads(), &used);
        t.x = x, t.team.barrier = &barrier;
        run_layers(&t);
    }
}

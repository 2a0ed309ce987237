/* The buffers of a step through a stack: as large as the largest of its layers needs them. */
#define _GNU_SOURCE /* sched_getcpu */
#include "stack_context.h"

/* The most keys of a segment of some rows' segments. */
static LongestSegments longest_of(const Step *step, int64_t segments) {
    LongestSegments longest = {step->planned_keys, step->planned_keys};
    find_longest(step->segments + segments, &longest);
    return longest;
}

int64_t longest_keys(const Step *step) {
    LongestSegments longest = longest_of(step, 0);
    return max_i64(longest.decode, longest.prefill);
}

/* Bytes in which threads keep what they add to rows whose keys they divide. */
static int64_t kept_bytes(const Stack *stack, const Step *step, int64_t threads) {
    int64_t bytes = 0;
    for (int64_t number = 0; number < stack->num_layers && stack->dtype == BF16; number++) {
        const Layer *layer = stack->layers[number];
        const AttentionLayer *attentions[] = {&layer->self, layer->has_cross ? &layer->cross : &layer->self};
        for (int i = layer->delta || is_bidirectional(layer, step); i < 1 + (layer->has_cross != 0); i++) {
            const AttentionLayer *one = attentions[i];
            const Segments *segments = step->segments + one->segments;
            bytes = max_i64(bytes, divided_keys_bytes(&one->shape, segments, step->planned_keys, threads));
        }
    }
    return bytes;
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
    int64_t attention_k, mlp_k;     /* of what their products read */
    int saved, sublayer, integers; /* whether any layer needs such a buffer, or multiplies integers */
    DeltaSizes delta;
    ExpertSizes experts;
} LayerSizes;

/* Raise `sizes` to what an attention needs whose input has `heads` heads. */
static void measure_attention(const AttentionLayer *layer, int64_t heads, LayerSizes *sizes) {
    sizes->qkv = max_i64(sizes->qkv, heads * layer->shape.dim);
    sizes->attended = max_i64(sizes->attended, layer->shape.heads * layer->shape.dim);
    sizes->operand_bytes = max_i64(sizes->operand_bytes, operand_bytes(&layer->input));
    sizes->operand_bytes = max_i64(sizes->operand_bytes, operand_bytes(&layer->output));
    sizes->attention_k = max_i64(sizes->attention_k, max_i64(layer->input.k, layer->output.k));
    sizes->integers |= layer->input.dtype >= INT8 || layer->output.dtype >= INT8;
    sizes->sublayer |= layer->norms.output.kind != NO_NORM;
}

/* Raise `sizes` to what an MLP's products need. */
static void measure_mlp(const MLPLayer *mlp, LayerSizes *sizes) {
    sizes->inner_bytes = max_i64(sizes->inner_bytes, max_i64(mlp->up.n * 4, operand_bytes(&mlp->down)));
    sizes->mlp_operand_bytes = max_i64(sizes->mlp_operand_bytes, operand_bytes(&mlp->up));
    sizes->mlp_operand_bytes = max_i64(sizes->mlp_operand_bytes, operand_bytes(&mlp->down));
    sizes->mlp_k = max_i64(sizes->mlp_k, max_i64(mlp->up.k, mlp->down.k));
    sizes->integers |= mlp->up.dtype >= INT8 || mlp->down.dtype >= INT8;
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

void take_stack_buffers(Scratch *scratch, const Stack *stack, const Step *step, int64_t rows, StackContext *t) {
    LayerSizes sizes = measure_layers(stack);
    int64_t number = sizeof(float), hidden = rows * stack->hidden * number, chunk = min_i64(rows, CHUNK_ROWS);
    int64_t own_bytes = max_i64(attention_scratch(stack, step), rows * GEMM_SCRATCH * number);
    own_bytes = max_i64(own_bytes, sizes.delta.state_bytes);
    ThreadContext *team = &t->team;
    t->saved = scratch_take(scratch, sizes.saved ? hidden : 0);
    t->sublayer = scratch_take(scratch, sizes.sublayer ? hidden : 0);
    t->qkv = scratch_take(scratch, rows * sizes.qkv * number);
    t->attended = scratch_take(scratch, rows * sizes.attended * number);
    t->kept = scratch_take(scratch, kept_bytes(stack, step, team->threads));
    t->inner = scratch_take(scratch, chunk * sizes.inner_bytes);
    t->delta.mixed = t->qkv, t->delta.outputs = t->attended;
    take_delta_buffers(scratch, &sizes.delta, stack->hidden, rows, &t->delta);
    team->operand = scratch_take(scratch, max_i64(rows * sizes.operand_bytes, chunk * sizes.mlp_operand_bytes));
    team->operand_scales = scratch_take(scratch, rows * number);
    take_expert_buffers(scratch, &sizes.experts, stack->hidden, expert_rows(rows), team, &t->experts);
    int adapts = step->num_runs && sizes.integers;
    PackedMatrix of_attention = {.dtype = stack->dtype, .k = sizes.attention_k}, of_mlp = of_attention;
    of_mlp.k = sizes.mlp_k;
    int64_t adapted = max_i64(rows * operand_bytes(&of_attention), chunk * operand_bytes(&of_mlp));
    t->ranks = scratch_take(scratch, step->num_runs ? rows * step->rank_width * number : 0);
    t->adapted_operand = scratch_take(scratch, adapts ? adapted : 0);
    for (int thread = 0; thread < team->threads; thread++) {
        float *widened = scratch_take(scratch, adapts ? max_i64(sizes.attention_k, sizes.mlp_k) * number : 0);
        if (thread == team->thread) t->adapted_line = widened;
        void *own = scratch_take(scratch, own_bytes);
        float *line = scratch_take(scratch, stack->hidden * number);
        if (thread == team->thread) team->scratch = own, team->line = line;
    }
}

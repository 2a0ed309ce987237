/* Layers of a Transformer stack over packed rows, in one parallel region: norms, products, attention, pages.
 *
 * Rows are float32 throughout; products read them as their matrix needs. Nothing is kept between calls: the caller
 * gives the scratch memory, whose size `scratch_bytes` tells. Threads divide rows, outputs or heads, and wait for
 * each other at barriers wherever one reads what another wrote. */
#define _GNU_SOURCE /* sched_getcpu */
#include "attention_layer.h"
#include "binding.h"
#include "low_rank.h"

#include <omp.h>

#define GROUP_ROWS 128    /* rows of whole segments that one thread takes through all layers: they stay in its caches */
#define MIN_GROUP_ROWS 64 /* of the last groups, for which threads would wait */

/* A recurrence in the place of self attention. */
static void recurrence(const StackContext *t, const DeltaLayer *layer, int64_t number) {
    const Step *step = t->step;
    const LayerStates *states = step->states ? step->states + number : NULL;
    Operand operand = delta_operand(&t->team, layer, step, states, &t->delta, t->stack->hidden, t->x);
    add_sublayer(t, number, NOT_ADAPTED, &layer->output, operand, step->rows, &layer->norms.output, layer->scale, t->x);
    norm_rows(t, &layer->norms.post, t->x, step->rows);
}

/* Gate what `up` gave, apply `activation` to it, or multiply it by `vectors`, rows `stride` apart, and write it as the
 * operand that `down` reads. Ends at a barrier. */
static Operand gated_operand(const StackContext *t, const MLPLayer *layer, int64_t rows, int64_t activation,
                             const float *vectors, int64_t stride) {
    int kind = operand_kind(&layer->down);
    int64_t size = layer->down.k, width = layer->up.n, bytes = operand_bytes(&layer->down), first, last;
    const ThreadContext *team = &t->team;
    thread_range(team, rows, &first, &last);
    for (int64_t row = first; row < last; row++) {
        float *at = t->inner + row * width;
        if (layer->gated) gate_in_place(layer->activation, (GateClamp){layer->limit, layer->gain}, at, size);
        if (activation) activate_in_place(activation, at, size);
        if (vectors) multiply_in_place(at, vectors + row * stride, size);
        bound_input(&layer->down, at);
        if (kind != F32) write_operand(&layer->down, at, team->operand + row * bytes, team->operand_scales + row);
    }
    wait_for_threads(team);
    if (kind == F32) return (Operand){t->inner, width, NULL};
    return (Operand){team->operand, bytes / element_bytes(kind), team->operand_scales};
}

/* What the second product of an MLP reads, of the norm `pre` of `rows` rows from `from`, the context's from `begin` on.
 * Ends at a barrier. */
static Operand mlp_inner(const StackContext *t, const MLPLayer *layer, int64_t number, const Norm *pre,
                         const float *from, int64_t begin, int64_t rows) {
    Operand operand = prepare_operand(&t->team, pre, &layer->up, from, rows);
    int kind = operand_kind(&layer->down), apart = is_added_after(t, number, MLP_UP);
    int64_t size = layer->down.k, bytes = operand_bytes(&layer->down), after = NO_ACTIVATION;
    Output up = {.rows = t->inner, .activation = layer->gated ? NO_ACTIVATION : layer->activation};
    if (apart) after = up.activation, up.activation = NO_ACTIVATION;
    if (!layer->gated && !apart && (kind == F32 || (kind == BF16 && padded_k(BF16, size) == size))) { /* comes out as it goes in */
        up.stride = bytes / element_bytes(kind), up.bf16_rows = kind == BF16;
        project(t, number, MLP_UP, &layer->up, operand, begin, rows, up);
        return (Operand){t->inner, up.stride, NULL};
    }
    up.stride = layer->up.n;
    project(t, number, MLP_UP, &layer->up, operand, begin, rows, up);
    return gated_operand(t, layer, rows, after, NULL, 0);
}

/* Add the MLP of `rows` rows from `from` to those of x. Ends at a barrier. */
static void mlp(const StackContext *t, const MLPLayer *layer, int64_t number, const float *from, float *x,
                int64_t rows) {
    int64_t begin = (x - t->x) / t->stack->hidden;
    Operand inner = mlp_inner(t, layer, number, &layer->norms.pre, from, begin, rows);
    add_sublayer(t, number, MLP_DOWN, &layer->down, inner, rows, &layer->norms.output, layer->scale, x);
}

/* Add what a layer makes of the step's vectors to `rows` rows of x from row `begin` on. Ends at a barrier. */
static void add_vectors(const StackContext *t, const MLPLayer *layer, int64_t number, int64_t begin, int64_t rows) {
    float *x = t->x + begin * t->stack->hidden;
    int64_t size = layer->up.n, stride = t->stack->num_layers * size;
    Operand operand = prepare_operand(&t->team, NULL, &layer->up, x, rows);
    Output up = {.rows = t->inner, .stride = size, .activation = layer->activation};
    multiply(&t->team, &layer->up, operand, rows, up);
    const float *vectors = t->step->vectors + (t->first_row + begin) * stride + number * size;
    Operand inner = gated_operand(t, layer, rows, NO_ACTIVATION, vectors, stride);
    add_sublayer(t, number, NOT_ADAPTED, &layer->down, inner, rows, &layer->norms.output, layer->scale, x);
}

/* Multiply all rows by a layer's scale. Ends at a barrier. */
static void scale_rows(const StackContext *t, float scale) {
    int64_t hidden = t->stack->hidden, first, last;
    thread_range(&t->team, t->step->rows, &first, &last);
    scale_in_place(t->x + first * hidden, scale, (last - first) * hidden);
    wait_for_threads(&t->team);
}

/* Normalise the experts' outputs in t->sublayer, and add the normed MLP of `rows` rows from `from`. Ends at a
 * barrier. */
static void add_parallel_mlp(const StackContext *t, const MLPLayer *layer, int64_t number, const float *from,
                             int64_t rows) {
    const ExpertsLayer *experts = layer->experts;
    int64_t hidden = t->stack->hidden, first, last;
    norm_rows(t, &experts->norms.output, t->sublayer, rows);
    for (int64_t at = 0; at < rows; at += CHUNK_ROWS) {
        int64_t some = min_i64(rows - at, CHUNK_ROWS);
        float *to = t->experts.outputs;
        Operand inner = mlp_inner(t, layer, number, &experts->mlp_norms.pre, from + at * hidden, at, some);
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
static void experts(const StackContext *t, const MLPLayer *layer, int64_t number, const float *from, float *x,
                    int64_t rows) {
    int64_t hidden = t->stack->hidden, first, last;
    if (layer->norms.output.kind == NO_NORM) {
        add_experts(&t->team, layer, &t->experts, hidden, from, x, rows, layer->scale);
        return;
    }
    thread_range(&t->team, rows, &first, &last); /* add_experts adds to these after its first barrier */
    memset(t->sublayer + first * hidden, 0, (last - first) * hidden * sizeof *x);
    add_experts(&t->team, layer, &t->experts, hidden, from, t->sublayer, rows, 1.0f);
    if (layer->experts->norms.output.kind != NO_NORM) add_parallel_mlp(t, layer, number, from, rows);
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
    else if (is_bidirectional(layer, t->step)) encoder_self_attention(t, &layer->self, number);
    else self_attention(t, &layer->self, number);
    if (layer->has_cross) cross_attention(t, &layer->cross, number);
    int64_t chunk = layer->mlp.experts ? expert_rows(rows) : CHUNK_ROWS;
    for (int64_t at = 0; at < rows; at += chunk)
        (layer->mlp.experts ? experts : mlp)(t, &layer->mlp, number, from + at * hidden,
                                             t->x + at * hidden, min_i64(rows - at, chunk));
    norm_rows(t, &layer->mlp.norms.post, t->x, rows);
    for (int64_t at = 0; layer->has_vectors && at < rows; at += CHUNK_ROWS)
        add_vectors(t, &layer->vectors, number, at, min_i64(rows - at, CHUNK_ROWS));
    if (layer->scale) scale_rows(t, *layer->scale);
}

static void run_layers(const StackContext *t) {
    for (int64_t number = t->step->first_layer; number < t->step->last_layer; number++) run_layer(t, number);
    if (t->step->last_layer == t->stack->num_layers) norm_rows(t, &t->stack->final, t->x, t->step->rows);
}

/* Whether each thread takes groups of segments through all layers, without barriers. Segments must be independent, and
 * there must be enough of them that no thread waits long for the last group. */
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
    take_stack_buffers(&scratch, stack, step, rows, &t);
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

/* The end of the group of segments from `first` on; groups get smaller towards the end. */
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
    {
        int64_t first, last, used;
        bind_thread(omp_get_thread_num());
        if (grouped) {
            while (next_group(step->segments, threads, &next, &first, &last))
                run_group(stack, step, first, last, x, memory + omp_get_thread_num() * bytes);
        } else {
            StackContext t =
                stack_context(stack, step, step->rows, memory, omp_get_thread_num(), omp_get_num_threads(), &used);
            t.x = x, t.team.barrier = &barrier;
            run_layers(&t);
        }
    }
}

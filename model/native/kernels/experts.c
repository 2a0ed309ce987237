/* A mixture of experts (Shazeer et al. 2017): each row takes a few of a layer's many feed-forwards.
 *
 * Rows are sorted by expert, so that each expert's weights are read once for all rows that chose it, and no others are
 * read. Consecutive experts make a wave: their rows together are few enough for caches. Threads divide the panels of a
 * wave's first products by what these cost, so that they are balanced for one row as for many, and the columns of its
 * second ones: each adds its columns to the rows, in ascending order of experts, whatever other rows there are. */
#define _GNU_SOURCE /* sched_getcpu */
#include "experts.h"

#define CHUNK_ROWS 2048 /* rows that take their experts together */
#define WAVE_ROWS 512   /* rows of a wave's experts, unless one of them has more */
#define FIXED_ROWS 32   /* the cost of reading a panel, in rows */
#define OWN_ROWS 8      /* of a thread, from which on it computes the logits of its own rows */

int64_t expert_rows(int64_t rows) { return min_i64(rows, CHUNK_ROWS); }

/* How many experts of a layer there are, the shared one included, which is the last. */
INLINE int64_t expert_count(const ExpertsLayer *layer) { return layer->count + (layer->has_shared != 0); }

/* Whether the shared expert reads rows in another form than the others. */
INLINE int shared_differs(const ExpertsLayer *layer) {
    const PackedMatrix *first = &layer->experts->up, *shared = &layer->experts[layer->count].up;
    return layer->has_shared && (shared->dtype != first->dtype || shared->group != first->group);
}

INLINE void raise_to(int64_t *size, int64_t needed) { *size = max_i64(*size, needed); }

void measure_experts(const ExpertsLayer *layer, ExpertSizes *sizes) {
    raise_to(&sizes->experts, expert_count(layer));
    raise_to(&sizes->taken, layer->active + (layer->has_shared != 0));
    raise_to(&sizes->operand_bytes, operand_bytes(&layer->experts->up));
    if (shared_differs(layer)) raise_to(&sizes->shared_operand_bytes, operand_bytes(&layer->experts[layer->count].up));
    for (int64_t i = 0; i < expert_count(layer); i += max_i64(1, layer->count)) { /* those to choose from are alike */
        raise_to(&sizes->inner_bytes, layer->experts[i].up.n * (int64_t)sizeof(float));
        raise_to(&sizes->down_operand_bytes, operand_bytes(&layer->experts[i].down));
    }
}

static OperandBuffer take_operand(Scratch *scratch, int64_t rows, int64_t bytes) {
    OperandBuffer buffer = {scratch_take(scratch, rows * bytes), NULL};
    buffer.scales = scratch_take(scratch, rows * sizeof *buffer.scales);
    return buffer;
}

void take_expert_buffers(Scratch *scratch, const ExpertSizes *sizes, int64_t hidden, int64_t rows,
                         const ThreadContext *t, ExpertBuffers *b) {
    int64_t taken = rows * sizes->taken, wave = min_i64(taken, max_i64(rows, WAVE_ROWS)), number = sizeof(float);
    if (!sizes->experts) return;
    b->normed = scratch_take(scratch, rows * hidden * number);
    b->logits = scratch_take(scratch, rows * sizes->experts * number);
    b->chosen = scratch_take(scratch, taken * sizeof *b->chosen);
    b->weights = scratch_take(scratch, taken * number);
    b->outputs = scratch_take(scratch, rows * hidden * number);
    b->inner = scratch_take(scratch, wave * sizes->inner_bytes);
    b->operand = take_operand(scratch, rows, sizes->operand_bytes);
    b->shared = take_operand(scratch, rows, sizes->shared_operand_bytes);
    b->gathered = take_operand(scratch, wave, sizes->operand_bytes);
    b->down = take_operand(scratch, wave, sizes->down_operand_bytes);
    for (int thread = 0; thread < t->threads; thread++) {
        int64_t *starts = scratch_take(scratch, (sizes->experts + 1) * sizeof *starts);
        int32_t *row_of = scratch_take(scratch, taken * sizeof *row_of);
        float *weight_of = scratch_take(scratch, taken * number);
        if (thread == t->thread) b->starts = starts, b->row_of = row_of, b->weight_of = weight_of;
    }
}

/* One call of add_experts, as one of its threads sees it. */
typedef struct {
    const ThreadContext *team;
    const MLPLayer *mlp;
    const ExpertsLayer *layer;
    const ExpertBuffers *buffers;
    int64_t rows, hidden;
    float *scratch; /* the thread's own, of products */
} Mixture;

/* Elements from row to row of what a product with `matrix` reads. */
INLINE int64_t operand_stride(const PackedMatrix *matrix) {
    return operand_bytes(matrix) / element_bytes(operand_kind(matrix));
}

/* Normalise this thread's rows, and write them as experts read them. */
static void normalise_rows(const Mixture *m, const float *from) {
    const Norm *norm = m->layer->norms.pre.kind != NO_NORM ? &m->layer->norms.pre : &m->mlp->norms.pre;
    const Norm *router = &m->layer->router_norm;
    const ExpertBuffers *b = m->buffers;
    const PackedMatrix *up = &m->layer->experts->up, *shared = &m->layer->experts[m->layer->count].up;
    int differs = shared_differs(m->layer);
    int64_t first, last;
    thread_range(m->team, m->rows, &first, &last);
    for (int64_t row = first; row < last; row++) {
        float *to = b->normed + row * m->hidden;
        if (norm->kind != NO_NORM) normalise(norm, from + row * m->hidden, m->hidden, to);
        else memcpy(to, from + row * m->hidden, m->hidden * sizeof *to);
        write_operand(up, to, b->operand.rows + row * operand_bytes(up), b->operand.scales + row);
        if (differs) write_operand(shared, to, b->shared.rows + row * operand_bytes(shared), b->shared.scales + row);
        if (router->kind != NO_NORM) normalise(router, from + row * m->hidden, m->hidden, to);
    }
}

/* e^(x - top) of `count` numbers into `out`, which may be x; returns their sum. */
static float exponentials(const float *x, int64_t count, float top, float *out) {
    vec sum = splat(0.0f);
    for (int64_t i = 0; i < count; i += LANES) {
        float some[LANES];
        int64_t left = min_i64(LANES, count - i);
        for (int64_t lane = 0; lane < LANES; lane++) some[lane] = lane < left ? x[i + lane] - top : -__builtin_inff();
        vec powers = exp_vec(load(some));
        sum += powers;
        store(some, powers);
        memcpy(out + i, some, left * sizeof *out);
    }
    return reduce_add(sum);
}

/* Choose a row's experts, those of the largest logits and of equal ones the first, and find their weights. The logits
 * are overwritten. */
static void choose_experts(const ExpertsLayer *layer, float *logits, int32_t *chosen, float *weights) {
    int64_t active = layer->active;
    for (int64_t expert = 0; expert < layer->count; expert++) {
        float logit = logits[expert];
        if (expert >= active && !(logit > weights[active - 1])) continue;
        int64_t place = min_i64(expert, active - 1);
        for (; place && logit > weights[place - 1]; place--)
            chosen[place] = chosen[place - 1], weights[place] = weights[place - 1];
        chosen[place] = (int32_t)expert, weights[place] = logit;
    }
    float top = weights[0], all = layer->of_chosen ? 0.0f : exponentials(logits, layer->count, top, logits);
    float of_chosen = exponentials(weights, active, top, weights), sum = layer->of_chosen ? of_chosen : all;
    for (int64_t i = 0; i < active; i++) weights[i] /= sum;
    for (int64_t i = 0; layer->scales && i < active; i++) weights[i] *= layer->scales[chosen[i]];
}

/* The shared expert's weights of rows [first, last), of their gate's logits. */
static void weigh_shared(const ExpertsLayer *layer, float *weights, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
        float logit[LANES] = {weights[row]};
        store(logit, 1.0f / (1.0f + exp_vec(-load(logit))));
        weights[row] = layer->shared_gate.data ? logit[0] : 1.0f;
    }
}

/* Multiply rows [first, last) with thread `thread`'s part (of `threads`) of a matrix of logits. */
static void multiply_logits(const Mixture *m, const PackedMatrix *matrix, float *logits, int64_t first, int64_t last,
                            int thread, int threads) {
    Operand operand = {m->buffers->normed + first * m->hidden, m->hidden, NULL};
    Output output = {.rows = logits + first * matrix->n, .stride = matrix->n};
    if (matrix->data) gemm(matrix, operand, last - first, output, thread, threads, m->scratch);
}

/* Choose the experts of all rows, and their weights. Runs after normalise_rows and ends at a barrier. */
static void route(const Mixture *m) {
    const ExpertsLayer *layer = m->layer;
    const ThreadContext *t = m->team;
    const ExpertBuffers *b = m->buffers;
    float *shared = b->weights + m->rows * layer->active;
    int64_t first, last;
    thread_range(t, m->rows, &first, &last);
    if (m->rows >= OWN_ROWS * t->threads) {
        multiply_logits(m, &layer->router, b->logits, first, last, 0, 1);
        if (layer->has_shared) multiply_logits(m, &layer->shared_gate, shared, first, last, 0, 1);
    } else {
        wait_for_threads(t);
        multiply_logits(m, &layer->router, b->logits, 0, m->rows, t->thread, t->threads);
        if (layer->has_shared) multiply_logits(m, &layer->shared_gate, shared, 0, m->rows, t->thread, t->threads);
        wait_for_threads(t);
    }
    for (int64_t row = first; row < last; row++)
        choose_experts(layer, b->logits + row * layer->count, b->chosen + row * layer->active,
                       b->weights + row * layer->active);
    if (layer->has_shared) weigh_shared(layer, shared, first, last);
    wait_for_threads(t);
}

/* Sort rows by expert, those of an expert in their order: each thread for itself. */
static void sort_rows(const Mixture *m) {
    const ExpertsLayer *layer = m->layer;
    const ExpertBuffers *b = m->buffers;
    int64_t experts = expert_count(layer), taken = m->rows * layer->active, *starts = b->starts;
    memset(starts, 0, (experts + 1) * sizeof *starts);
    for (int64_t i = 0; i < taken; i++) starts[b->chosen[i] + 1]++;
    for (int64_t expert = 0; expert < layer->count; expert++) starts[expert + 1] += starts[expert];
    for (int64_t i = 0; i < taken; i++) { /* moves each start to the next expert's */
        int64_t place = starts[b->chosen[i]]++;
        b->row_of[place] = (int32_t)(i / layer->active), b->weight_of[place] = b->weights[i];
    }
    memmove(starts + 1, starts, layer->count * sizeof *starts);
    starts[0] = 0;
    if (!layer->has_shared) return;
    for (int64_t row = 0; row < m->rows; row++)
        b->row_of[taken + row] = (int32_t)row, b->weight_of[taken + row] = b->weights[taken + row];
    starts[experts] = taken + m->rows;
}

/* Experts [first, last), whose rows are computed together. */
typedef struct {
    int64_t first, last;
} Wave;

INLINE int64_t rows_of(const Mixture *m, int64_t expert) {
    return m->buffers->starts[expert + 1] - m->buffers->starts[expert];
}

/* Where an expert's rows begin among those of its wave. */
INLINE int64_t place_of(const Mixture *m, Wave wave, int64_t expert) {
    return m->buffers->starts[expert] - m->buffers->starts[wave.first];
}

static Wave wave_from(const Mixture *m, int64_t first) {
    Wave wave = {first, first + 1};
    while (wave.last < expert_count(m->layer) && place_of(m, wave, wave.last + 1) <= WAVE_ROWS) wave.last++;
    return wave;
}

/* Whether an expert's rows do not lie together as they are. */
INLINE int is_gathered(const Mixture *m, int64_t expert) {
    int64_t rows = rows_of(m, expert);
    return rows > 1 && rows < m->rows;
}

/* Copy this thread's rows of those that must be gathered; where there are any, ends at a barrier. */
static void gather_rows(const Mixture *m, Wave wave) {
    const ExpertBuffers *b = m->buffers;
    int64_t bytes = operand_bytes(&m->layer->experts->up), begin = b->starts[wave.first], first, last, any = 0;
    thread_range(m->team, b->starts[wave.last] - begin, &first, &last);
    for (int64_t expert = wave.first; expert < wave.last; expert++) {
        if (!is_gathered(m, expert)) continue;
        int64_t place = max_i64(first, b->starts[expert] - begin), end = min_i64(last, b->starts[expert + 1] - begin);
        for (any = 1; place < end; place++) {
            int64_t row = b->row_of[begin + place];
            memcpy(b->gathered.rows + place * bytes, b->operand.rows + row * bytes, bytes);
            b->gathered.scales[place] = b->operand.scales[row];
        }
    }
    if (any) wait_for_threads(m->team);
}

/* The rows that an expert reads. */
static Operand rows_for(const Mixture *m, Wave wave, int64_t expert) {
    const ExpertBuffers *b = m->buffers;
    const PackedMatrix *up = &m->layer->experts[expert].up;
    int64_t place = place_of(m, wave, expert);
    OperandBuffer from = b->gathered;
    if (!is_gathered(m, expert)) {
        place = b->row_of[b->starts[expert]];
        from = expert == m->layer->count && shared_differs(m->layer) ? b->shared : b->operand;
    }
    return (Operand){from.rows + place * operand_bytes(up), operand_stride(up), from.scales + place};
}

/* How many of an expert's `panels` panels, at `cost` each, lie before `position`. */
INLINE int64_t panels_before(int64_t position, int64_t cost, int64_t panels) {
    return max_i64(0, min_i64(panels, (position + cost - 1) / cost));
}

/* What a panel of an expert costs; nothing if no row takes it. */
INLINE int64_t panel_cost(const Mixture *m, int64_t expert) {
    int64_t rows = rows_of(m, expert);
    return rows ? rows + FIXED_ROWS : 0;
}

/* Compute this thread's part of a wave's first products. Ends at a barrier. */
static void multiply_up(const Mixture *m, Wave wave) {
    const ThreadContext *t = m->team;
    int64_t total = 0, at = 0;
    char *to = m->buffers->inner;
    for (int64_t i = wave.first; i < wave.last; i++) total += panel_cost(m, i) * panel_count(&m->layer->experts[i].up);
    int64_t begin = total * t->thread / t->threads, end = total * (t->thread + 1) / t->threads;
    for (int64_t i = wave.first; i < wave.last; i++) {
        const PackedMatrix *up = &m->layer->experts[i].up;
        int64_t rows = rows_of(m, i), cost = panel_cost(m, i), panels = panel_count(up);
        if (!rows) continue;
        int64_t first = panels_before(begin - at, cost, panels), last = panels_before(end - at, cost, panels);
        Output output = {.rows = to, .stride = up->n};
        if (!m->mlp->gated) output.activation = m->mlp->activation;
        if (first < last) gemm_panels(up, rows_for(m, wave, i), rows, output, first, last, m->scratch);
        at += cost * panels, to += rows * up->n * (int64_t)sizeof(float);
    }
    wait_for_threads(t);
}

/* Gate this thread's rows of what a wave's first products gave, and write them as the second read them. Ends at a
 * barrier. */
static void gate_rows(const Mixture *m, Wave wave) {
    const ExpertBuffers *b = m->buffers;
    const MLPLayer *mlp = m->mlp;
    int64_t first, last;
    char *from = b->inner, *to = b->down.rows;
    thread_range(m->team, b->starts[wave.last] - b->starts[wave.first], &first, &last);
    for (int64_t i = wave.first; i < wave.last; i++) {
        const PackedMatrix *up = &m->layer->experts[i].up, *down = &m->layer->experts[i].down;
        int64_t rows = rows_of(m, i), place = place_of(m, wave, i), bytes = operand_bytes(down);
        for (int64_t row = max_i64(0, first - place); row < min_i64(rows, last - place); row++) {
            float *at = (float *)from + row * up->n;
            if (mlp->gated) gate_in_place(mlp->activation, (GateClamp){mlp->limit, mlp->gain}, at, down->k);
            write_operand(down, at, to + row * bytes, b->down.scales + place + row);
        }
        from += rows * up->n * (int64_t)sizeof(float), to += rows * bytes;
    }
    wait_for_threads(m->team);
}

/* Add rows [rows] of one expert's outputs, times their weights, to columns [first, last) of theirs. */
static void add_weighted(const Mixture *m, int64_t expert, float scale, int64_t first, int64_t last, float *x) {
    const ExpertBuffers *b = m->buffers;
    int64_t start = b->starts[expert], rows = rows_of(m, expert);
    for (int64_t i = 0; i < rows; i++) {
        const float *from = b->outputs + i * m->hidden;
        float *to = x + b->row_of[start + i] * m->hidden, weight = b->weight_of[start + i] * scale;
        int64_t column = first;
        for (; column + LANES <= last; column += LANES)
            store(to + column, fma_vec(load(from + column), splat(weight), load(to + column)));
        for (; column < last; column++) to[column] += from[column] * weight;
    }
}

/* Compute this thread's columns of a wave's second products, and add them to the rows. Ends at a barrier. */
static void add_down(const Mixture *m, Wave wave, float scale, float *x) {
    const ThreadContext *t = m->team;
    const ExpertBuffers *b = m->buffers;
    const char *from = b->down.rows;
    for (int64_t i = wave.first; i < wave.last; i++) {
        const PackedMatrix *down = &m->layer->experts[i].down;
        int64_t rows = rows_of(m, i), first, last;
        if (!rows) continue;
        thread_range(t, panel_count(down), &first, &last);
        if (first < last) {
            Operand operand = {from, operand_stride(down), b->down.scales + place_of(m, wave, i)};
            Output output = {.rows = b->outputs, .stride = m->hidden};
            gemm_panels(down, operand, rows, output, first, last, m->scratch);
            add_weighted(m, i, scale, first * PANEL_WIDTH, min_i64(m->hidden, last * PANEL_WIDTH), x);
        }
        from += rows * operand_bytes(down);
    }
    wait_for_threads(t);
}

void add_experts(const ThreadContext *t, const MLPLayer *layer, const ExpertBuffers *buffers, int64_t hidden,
                 const float *from, float *to, int64_t rows, float scale) {
    Mixture m = {t, layer, layer->experts, buffers, rows, hidden, product_scratch(t, rows)};
    normalise_rows(&m, from);
    route(&m);
    sort_rows(&m);
    for (Wave wave = wave_from(&m, 0);; wave = wave_from(&m, wave.last)) {
        gather_rows(&m, wave);
        multiply_up(&m, wave);
        gate_rows(&m, wave);
        add_down(&m, wave, scale, to);
        if (wave.last == expert_count(m.layer)) return;
    }
}

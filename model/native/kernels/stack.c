/* All layers of a stack over packed rows, in one parallel region: norms, products, attention, pages.
 *
 * Rows are float32 throughout; products read them as their matrix wants. Nothing is kept between calls: the caller gives
 * the scratch memory, whose size `scratch_bytes` tells. Threads meet at barriers and share rows, outputs or heads. */
#define _GNU_SOURCE /* sched_getcpu */
#include <omp.h>
#include <stddef.h>

#include "attention.h"
#include "gemm.h"
#include "barrier.h"
#include "rowwise.h"

#define CHUNK 256      /* rows that go through an MLP together */
#define GROUP_ROWS 128 /* rows of whole segments that one thread takes through all layers: they stay near it */
#define LEAST_ROWS 64  /* of the last groups, for which threads would wait */

typedef struct {
    Norm attn_in, attn_out, cross_in, cross_out, ffn_in, ffn_out, q_norm, k_norm;
    PackedMatrix qkv, out, cross_q, cross_proj, up, down;
    int64_t has_cross, gated, activation, parallel;
} Layer;

typedef struct {
    int64_t hidden, layers, distinct; /* layer i runs through layer_data[i % distinct] */
    const Layer *layer_data;
    AttentionShape shape; /* its bias is the step's */
    int64_t rotary;       /* dimensions of a head that turn */
    int64_t dtype, tiles; /* of the products in attention of whole segments: F32 or BF16 */
    Norm final;
} Stack;

typedef struct {
    int64_t rows;
    int64_t first_layer, last_layer; /* of those that are run: [first, last); behind the stack's last comes its norm */
    Segments self, cross;
    const KVPages *memory; /* of each layer's pool; null: keys are the rows themselves */
    const float *cos, *sin; /* [rows][rotary], or null */
    const float *bias;    /* self attention's, [bias_layers][heads][bias_width], or null */
    int64_t bias_layers, bias_width, longest; /* the longest segment's keys, self or cross */
} Step;

typedef struct {
    const Stack *stack;
    const Step *step;
    float *x, *saved, *qkv, *mixed, *hidden;
    char *operand;
    float *operand_scales;
    Barrier *barrier;
    int thread, threads;
    float *scratch, *line; /* this thread's */
} ThreadContext;

INLINE int64_t aligned(int64_t bytes) { return (bytes + 127) / 64 * 64; }

INLINE void thread_range(const ThreadContext *t, int64_t rows, int64_t *first, int64_t *last) {
    *first = rows * t->thread / t->threads;
    *last = rows * (t->thread + 1) / t->threads;
}

/* Rows, normalised or as they are, in the form that a product with `matrix` reads; ends at a barrier. */
static Operand prepare(const ThreadContext *t, const Norm *norm, const PackedMatrix *matrix, const float *rows, int64_t count) {
    int kind = operand_kind(matrix);
    int64_t bytes = operand_bytes(matrix), size = matrix->k, first, last;
    Operand operand = {rows, size, t->operand_scales};
    if (kind != F32 || norm->kind != NO_NORM) {
        thread_range(t, count, &first, &last);
        for (int64_t row = first; row < last; row++) {
            const float *from = rows + row * size;
            if (norm->kind != NO_NORM) {
                normalise(norm, from, size, t->line);
                from = t->line;
            }
            write_operand(kind, from, size, t->operand + row * bytes, t->operand_scales + row);
        }
        operand.rows = t->operand;
        operand.stride = bytes / (kind == F32 ? 4 : kind == BF16 ? 2 : 1);
    }
    barrier_wait(t->barrier, t->thread, t->threads);
    return operand;
}

/* target = (float or bf16) or += (float) operand x matrix^T; ends at a barrier. */
static void multiply_into(const ThreadContext *t, const PackedMatrix *matrix, Operand operand, int64_t rows, int kind, void *target,
                          int64_t add) {
    Output to = {target, matrix->n, kind == BF16, NO_ACTIVATION, add};
    gemm(matrix, operand, rows, to, t->thread, t->threads, t->scratch);
    barrier_wait(t->barrier, t->thread, t->threads);
}

static void multiply(const ThreadContext *t, const PackedMatrix *matrix, Operand operand, int64_t rows, float *target, int64_t add) {
    multiply_into(t, matrix, operand, rows, F32, target, add);
}

static void norm_in_place(const ThreadContext *t, const Norm *norm, float *x, int64_t size, int64_t rows) {
    if (norm->kind == NO_NORM) return;
    int64_t first, last;
    thread_range(t, rows, &first, &last);
    for (int64_t row = first; row < last; row++) normalise(norm, x + row * size, size, x + row * size);
    barrier_wait(t->barrier, t->thread, t->threads);
}

/* Norms and rotations of each row's queries and keys, its keys and values into the pool; as BF16, rows end up in the first
 * halves of theirs. */
static void place(const ThreadContext *t, const Layer *layer, const KVPages *memory, int kind) {
    const AttentionShape *a = &t->stack->shape;
    const Step *step = t->step;
    int64_t query = a->heads * a->dim, kv = a->kv_heads * a->dim, width = query + 2 * kv, first, last;
    thread_range(t, step->rows, &first, &last);
    for (int64_t row = first; row < last; row++) {
        float *q = t->qkv + row * width;
        for (int64_t head = 0; head < a->heads + a->kv_heads; head++) {
            const Norm *norm = head < a->heads ? &layer->q_norm : &layer->k_norm;
            if (norm->kind != NO_NORM) normalise(norm, q + head * a->dim, a->dim, q + head * a->dim);
            if (step->cos)
                rotate(q + head * a->dim, step->cos + row * t->stack->rotary, step->sin + row * t->stack->rotary,
                     t->stack->rotary);
        }
        if (step->memory) write_kv(a, memory, step->self.slots[row], q + query, q + query + kv);
        if (kind == BF16) narrow_in_place(q, width);
    }
    barrier_wait(t->barrier, t->thread, t->threads);
}

/* Whether every query sees all keys of its own segment and no others. */
static int is_whole(const Stack *stack, const Step *step) {
    return !step->memory && !step->self.causal && !stack->shape.window;
}

/* The dtype and tiles of such attention's products. */
static PackedMatrix whole_like(const Stack *stack) {
    PackedMatrix like = {.dtype = stack->shape.dim % 2 ? F32 : stack->dtype, .tiles = stack->tiles};
    like.dtype = operand_kind(&like);
    return like;
}

static void self_attention(const ThreadContext *t, const Layer *layer, int64_t number) {
    const Stack *stack = t->stack;
    const Step *step = t->step;
    AttentionShape shape = stack->shape;
    int64_t query = shape.heads * shape.dim, kv = shape.kv_heads * shape.dim, width = query + 2 * kv;
    if (step->bias) {
        shape.bias = step->bias + number % step->bias_layers * shape.heads * step->bias_width;
        shape.bias_width = step->bias_width;
    }
    PackedMatrix like = whole_like(stack);
    int whole = is_whole(stack, step), kind = whole ? (int)like.dtype : F32;
    int turned = step->cos || layer->q_norm.kind != NO_NORM; /* by place, which wants floats */
    Operand operand = prepare(t, &layer->attn_in, &layer->qkv, t->x, step->rows);
    multiply_into(t, &layer->qkv, operand, step->rows, turned ? F32 : kind, t->qkv, 0);
    KVPages rows = {F32, t->qkv + query, t->qkv + query + kv, NULL, NULL, width, width};
    const KVPages *memory = step->memory ? step->memory + number : &rows;
    if (step->memory || turned) place(t, layer, memory, kind);
    if (whole)
        encoder_attention(&(EncoderAttention){&shape, &step->self, like.dtype, like.tiles, t->qkv,
                                              kind == BF16 && turned ? 2 * width : width, t->mixed},
                          t->thread, t->threads, t->scratch);
    else
        paged_attention(&(Attention){&shape, &step->self, memory, t->qkv, width, t->mixed}, t->thread, t->threads,
                        t->scratch);
    barrier_wait(t->barrier, t->thread, t->threads);
    Norm none = {0};
    multiply(t, &layer->out, prepare(t, &none, &layer->out, t->mixed, step->rows), step->rows, t->x, 1);
    norm_in_place(t, &layer->attn_out, t->x, stack->hidden, step->rows);
}

static void cross_attention(const ThreadContext *t, const Layer *layer, int64_t number) {
    const Step *step = t->step;
    AttentionShape shape = t->stack->shape;
    shape.window = 0;
    Operand operand = prepare(t, &layer->cross_in, &layer->cross_q, t->x, step->rows);
    multiply(t, &layer->cross_q, operand, step->rows, t->qkv, 0);
    Attention attention = {&shape, &step->cross, step->memory + number, t->qkv, shape.heads * shape.dim, t->mixed};
    paged_attention(&attention, t->thread, t->threads, t->scratch);
    barrier_wait(t->barrier, t->thread, t->threads);
    Norm none = {0};
    multiply(t, &layer->cross_proj, prepare(t, &none, &layer->cross_proj, t->mixed, step->rows), step->rows, t->x, 1);
    norm_in_place(t, &layer->cross_out, t->x, t->stack->hidden, step->rows);
}

static void mlp(const ThreadContext *t, const Layer *layer, const float *from, float *to, int64_t rows) {
    Operand operand = prepare(t, &layer->ffn_in, &layer->up, from, rows);
    int kind = operand_kind(&layer->down);
    int64_t size = layer->down.k, width = layer->up.n, bytes = operand_bytes(&layer->down), first, last;
    Operand inner = {t->hidden, width, t->operand_scales};
    if (!layer->gated && (kind == F32 || (kind == BF16 && bytes == 2 * size))) { /* what comes out is what goes in */
        Output target = {t->hidden, size, kind == BF16, layer->activation, 0};
        if (kind == BF16) target.stride = bytes / 2;
        inner.stride = target.stride;
        gemm(&layer->up, operand, rows, target, t->thread, t->threads, t->scratch);
    } else {
        Output target = {t->hidden, width, 0, layer->gated ? NO_ACTIVATION : layer->activation, 0};
        gemm(&layer->up, operand, rows, target, t->thread, t->threads, t->scratch);
        barrier_wait(t->barrier, t->thread, t->threads);
        thread_range(t, rows, &first, &last);
        for (int64_t row = first; row < last; row++) {
            float *at = t->hidden + row * width;
            if (layer->gated) gate_in_place(layer->activation, at, size);
            if (kind != F32) write_operand(kind, at, size, t->operand + row * bytes, t->operand_scales + row);
        }
        if (kind != F32) {
            inner.rows = t->operand;
            inner.stride = kind == BF16 ? bytes / 2 : bytes;
        }
    }
    barrier_wait(t->barrier, t->thread, t->threads);
    multiply(t, &layer->down, inner, rows, to, 1);
}

static void run_layer(const ThreadContext *t, int64_t number) {
    const Stack *stack = t->stack;
    const Layer *layer = stack->layer_data + number % stack->distinct;
    int64_t rows = t->step->rows, hidden = stack->hidden, first, last;
    const float *from = t->x;
    if (layer->parallel) {
        thread_range(t, rows, &first, &last);
        memcpy(t->saved + first * hidden, t->x + first * hidden, (last - first) * hidden * sizeof *t->x);
        from = t->saved;
    }
    self_attention(t, layer, number);
    if (layer->has_cross) cross_attention(t, layer, number);
    for (int64_t at = 0; at < rows; at += CHUNK)
        mlp(t, layer, from + at * hidden, t->x + at * hidden, rows - at < CHUNK ? rows - at : CHUNK);
    norm_in_place(t, &layer->ffn_out, t->x, hidden, rows);
}

typedef struct {
    int64_t saved, qkv, mixed, hidden, operand, scales, scratch, line;
} Sizes; /* bytes; the last two for each thread */

/* Floats that a thread needs for attention. A step without segments is one that is planned: a segment may have one row or many. */
static int64_t attending_scratch(const Stack *stack, const Step *step) {
    if (is_whole(stack, step)) return encoder_attention_scratch(&stack->shape, step->longest) / 4;
    LongestSegments longest = {0};
    find_longest(&step->self, &longest);
    find_longest(&step->cross, &longest);
    if (!step->self.segments) longest.decode = longest.prefill = step->longest;
    return paged_attention_scratch(&stack->shape, longest) / 4;
}

/* For `rows` of a step's rows at a time. */
static Sizes sizes_of(const Stack *stack, const Step *step, int64_t rows) {
    const AttentionShape *a = &stack->shape;
    int64_t widest = 0, inner = 0, parallel = 0, hidden = 0, line = stack->hidden;
    for (int64_t i = 0; i < stack->distinct; i++) {
        const Layer *layer = stack->layer_data + i;
        widest = max_i64(widest, max_i64(operand_bytes(&layer->qkv), operand_bytes(&layer->out)));
        inner = max_i64(inner, max_i64(operand_bytes(&layer->up), operand_bytes(&layer->down)));
        if (layer->has_cross)
            widest = max_i64(widest, max_i64(operand_bytes(&layer->cross_q), operand_bytes(&layer->cross_proj)));
        parallel |= layer->parallel;
        hidden = max_i64(hidden, max_i64(layer->up.n * 4, operand_bytes(&layer->down)));
    }
    int64_t chunk = rows < CHUNK ? rows : CHUNK;
    Sizes s = {
        .saved = aligned(parallel * rows * stack->hidden * 4),
        .qkv = aligned(rows * (a->heads + 2 * a->kv_heads) * a->dim * 4),
        .mixed = aligned(rows * a->heads * a->dim * 4),
        .hidden = aligned(chunk * hidden),
        .operand = aligned(max_i64(rows * widest, chunk * inner)),
        .scales = aligned(rows * 4),
        .scratch = aligned(max_i64(attending_scratch(stack, step), rows * 48) * 4),
        .line = aligned(line * 4 + 64),
    };
    return s;
}

/* Whether threads take groups of segments through all layers by themselves, without a barrier: segments must need
 * nothing of each other, and be so many that the last group is not waited for long. */
static int in_groups(const Stack *stack, const Step *step, int64_t threads) {
    return is_whole(stack, step) && step->rows >= 2 * threads * max_i64(step->longest, GROUP_ROWS);
}

static int64_t team_bytes(const Stack *stack, const Step *step, int64_t threads) {
    int grouped = in_groups(stack, step, threads);
    Sizes s = sizes_of(stack, step, grouped ? GROUP_ROWS + step->longest : step->rows);
    int64_t shared = s.saved + s.qkv + s.mixed + s.hidden + s.operand + s.scales;
    return grouped ? shared + s.scratch + s.line : shared + threads * (s.scratch + s.line);
}

EXPORTED int64_t scratch_bytes(const Stack *stack, const Step *step, int64_t threads) {
    return (in_groups(stack, step, threads) ? threads : 1) * team_bytes(stack, step, threads) + 64;
}

/* A thread's view of a step whose buffers begin at `memory` and are for so many rows at most. */
static ThreadContext thread_context(const Stack *stack, const Step *step, int64_t rows, float *x, char *memory, Barrier *barrier, int thread,
                    int threads) {
    Sizes s = sizes_of(stack, step, rows);
    ThreadContext t = {.stack = stack, .step = step, .x = x, .barrier = barrier, .thread = thread, .threads = threads};
    t.saved = (float *)memory, memory += s.saved;
    t.qkv = (float *)memory, memory += s.qkv;
    t.mixed = (float *)memory, memory += s.mixed;
    t.hidden = (float *)memory, memory += s.hidden;
    t.operand = memory, memory += s.operand;
    t.operand_scales = (float *)memory, memory += s.scales;
    t.scratch = (float *)(memory + thread * (s.scratch + s.line));
    t.line = (float *)((char *)t.scratch + s.scratch);
    return t;
}

static void run_layers(const ThreadContext *t) {
    for (int64_t number = t->step->first_layer; number < t->step->last_layer; number++) run_layer(t, number);
    if (t->step->last_layer < t->stack->layers) return;
    norm_in_place(t, &t->stack->final, t->x, t->stack->hidden, t->step->rows);
}

/* Segments from `first` on that make a group, towards the end a smaller one; returns the one behind the last. */
static int64_t group_end(const Segments *s, int64_t first, int64_t threads) {
    int64_t last = first + 1, share = (s->q_starts[s->segments] - s->q_starts[first]) / (3 * threads);
    int64_t rows = share > GROUP_ROWS ? GROUP_ROWS : max_i64(share, LEAST_ROWS);
    while (last < s->segments && last - first < GROUP_ROWS && s->q_starts[last] - s->q_starts[first] < rows) last++;
    return last;
}

/* All layers of segments [first, last), by one thread. */
static void run_group(const Stack *stack, const Step *step, int64_t first, int64_t last, float *x, char *memory) {
    int64_t starts[GROUP_ROWS + 1], row = step->self.q_starts[first];
    for (int64_t i = first; i <= last; i++) starts[i - first] = step->self.q_starts[i] - row;
    Step part = *step;
    part.rows = starts[last - first];
    part.self = (Segments){.segments = last - first, .q_starts = starts, .k_starts = starts};
    part.self.kv_lens = step->self.kv_lens + first;
    if (step->cos) part.cos += row * stack->rotary, part.sin += row * stack->rotary;
    Barrier alone = {0};
    ThreadContext t = thread_context(stack, &part, GROUP_ROWS + step->longest, x + row * stack->hidden, memory, &alone, 0, 1);
    run_layers(&t);
}

EXPORTED void run_stack(const Stack *stack, const Step *step, float *x, char *memory, int64_t threads) {
    int grouped = in_groups(stack, step, threads);
    int64_t bytes = team_bytes(stack, step, threads);
    _Atomic int64_t next = 0; /* the first segment that nobody has taken */
    Barrier barrier = {0};
    memory = (char *)(((uintptr_t)memory + 63) / 64 * 64);
#pragma omp parallel num_threads((int)threads)
    if (grouped) {
        for (;;) {
            int64_t first = atomic_load(&next), last;
            do {
                if (first == step->self.segments) break;
                last = group_end(&step->self, first, threads);
            } while (!atomic_compare_exchange_weak(&next, &first, last));
            if (first == step->self.segments) break;
            run_group(stack, step, first, last, x, memory + omp_get_thread_num() * bytes);
        }
    } else {
        ThreadContext t = thread_context(stack, step, step->rows, x, memory, &barrier, omp_get_thread_num(), omp_get_num_threads());
        run_layers(&t);
    }
}

EXPORTED int64_t linear_scratch_bytes(const PackedMatrix *matrix, int64_t rows, int64_t threads) {
    return aligned(rows * operand_bytes(matrix)) + aligned(rows * 4) + threads * aligned(rows * 192) + 64;
}

/* out [rows][n] = x [rows][k] x matrix^T + bias. */
EXPORTED void run_linear(const PackedMatrix *matrix, const float *x, int64_t rows, float *out, char *memory, int64_t threads) {
    Barrier barrier = {0};
    memory = (char *)(((uintptr_t)memory + 63) / 64 * 64);
#pragma omp parallel num_threads((int)threads)
    {
        ThreadContext t = {.operand = memory, .barrier = &barrier};
        t.thread = omp_get_thread_num(), t.threads = omp_get_num_threads();
        t.operand_scales = (float *)(memory + aligned(rows * operand_bytes(matrix)));
        t.scratch = (float *)((char *)t.operand_scales + aligned(rows * 4) + t.thread * aligned(rows * 192));
        Norm none = {0};
        Operand operand = prepare(&t, &none, matrix, x, rows);
        multiply(&t, matrix, operand, rows, out, 0);
    }
}

static int64_t attend_bytes(const AttentionShape *shape, const Segments *segments) { /* for each thread */
    LongestSegments longest = {0};
    find_longest(segments, &longest);
    return aligned(paged_attention_scratch(shape, longest));
}

EXPORTED int64_t attend_scratch_bytes(const AttentionShape *shape, const Segments *segments, int64_t threads) {
    return threads * attend_bytes(shape, segments) + 64;
}

/* Attention alone: writes `rows` keys and values where `segments` has slots, then attends. */
EXPORTED void run_attention(const AttentionShape *shape, const Segments *segments, const KVPages *memory,
                            const float *queries, const float *keys, const float *values, float *out, int64_t rows,
                            char *scratch, int64_t threads) {
    scratch = (char *)(((uintptr_t)scratch + 63) / 64 * 64);
    int64_t kv = shape->kv_heads * shape->dim, bytes = attend_bytes(shape, segments);
    if (segments->slots)
        for (int64_t row = 0; row < rows; row++)
            write_kv(shape, memory, segments->slots[row], keys + row * kv, values + row * kv);
#pragma omp parallel num_threads((int)threads)
    paged_attention(&(Attention){shape, segments, memory, queries, shape->heads * shape->dim, out}, omp_get_thread_num(),
                    omp_get_num_threads(), scratch + omp_get_thread_num() * bytes);
}

/* The sizes of the structures that a caller fills, in the order in which they are declared to Python; returns their number. */
EXPORTED int64_t structure_sizes(int64_t *sizes) {
    const int64_t found[] = {sizeof(PackedMatrix), sizeof(KVPages), sizeof(Segments), sizeof(AttentionShape),
                             sizeof(Norm),   sizeof(Layer),  sizeof(Stack),    sizeof(Step)};
    memcpy(sizes, found, sizeof found);
    return sizeof found / sizeof *found;
}

/* What the machine code was made for, to be shown: bit 0 AVX-512, 1 its bf16 products, 2 its integer products. */
EXPORTED int64_t features(void) {
    int64_t found = 0;
#ifdef __AVX512F__
    found |= 1;
#endif
#ifdef __AVX512BF16__
    found |= 2;
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    found |= 4;
#endif
    return found;
}

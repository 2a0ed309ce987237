/* Single operations that Python calls: one product, one attention; and what a library says of itself. */
#define _GNU_SOURCE /* sched_getcpu */
#include <omp.h>

#include "binding.h"
#include "scratch.h"
#include "stack.h"
#include "thread_context.h"

/* Take the buffers of a product of `rows` rows for a thread. */
static void linear_buffers(Scratch *scratch, const PackedMatrix *matrix, int64_t rows, ThreadContext *t) {
    t->operand = scratch_take(scratch, rows * operand_bytes(matrix));
    t->operand_scales = scratch_take(scratch, rows * sizeof(float));
    for (int thread = 0; thread < t->threads; thread++) {
        void *own = scratch_take(scratch, rows * GEMM_SCRATCH * sizeof(float));
        if (thread == t->thread) t->scratch = own;
    }
}

/* Bytes of scratch memory that run_linear needs. */
EXPORTED int64_t linear_scratch_bytes(const PackedMatrix *matrix, int64_t rows, int64_t threads) {
    Scratch scratch = {0};
    ThreadContext t = {.threads = (int)threads};
    linear_buffers(&scratch, matrix, rows, &t);
    return scratch.used + SCRATCH_ALIGNMENT;
}

/* Compute out [rows][n] = softcap(x [rows][k] x matrix^T + bias); a softcap of 0 is none. */
EXPORTED void run_linear(const PackedMatrix *matrix, const float *x, int64_t rows, float *out, float softcap,
                         char *memory, int64_t threads) {
    Barrier barrier = {0};
    Output output = {.rows = out, .stride = matrix->n, .softcap = softcap};
    if (softcap != 0.0f) output.activation = SOFTCAP;
#pragma omp parallel num_threads((int)threads)
    {
        bind_thread(omp_get_thread_num());
        Scratch scratch = {.base = scratch_aligned(memory)};
        ThreadContext t = {.thread = omp_get_thread_num(), .threads = omp_get_num_threads(), .barrier = &barrier};
        linear_buffers(&scratch, matrix, rows, &t);
        multiply(&t, matrix, prepare_operand(&t, NULL, matrix, x, rows), rows, output);
    }
}

/* Bytes of scratch that each thread of run_attention needs. */
static int64_t attention_bytes(const AttentionShape *shape, const Segments *segments) {
    LongestSegments longest = {0};
    find_longest(segments, &longest);
    return paged_attention_scratch(shape, longest);
}

/* Bytes of scratch memory that run_attention needs. */
EXPORTED int64_t attention_scratch_bytes(const AttentionShape *shape, const Segments *segments, int64_t threads) {
    return threads * attention_bytes(shape, segments) + divided_keys_bytes(shape, segments, 0, threads) +
           SCRATCH_ALIGNMENT;
}

/* Compute an attention, whose segments' slots, if it has any, get the `rows` keys and values [rows][kv_heads][dim]
 * first. */
EXPORTED void run_attention(const Attention *attention, const float *keys, const float *values, int64_t rows,
                            char *memory, int64_t threads) {
    const AttentionShape *shape = attention->shape;
    const int64_t *slots = attention->segments->slots;
    int64_t kv = shape->kv_heads * shape->dim, bytes = attention_bytes(shape, attention->segments);
    if (slots)
        for (int64_t row = 0; row < rows; row++)
            write_kv(shape, attention->pages, slots[row], keys + row * kv, values + row * kv);
    memory = scratch_aligned(memory);
    float *kept = (float *)(memory + threads * bytes);
#pragma omp parallel num_threads((int)threads)
    {
        int thread = omp_get_thread_num(), all = omp_get_num_threads();
        paged_attention(attention, thread, all, memory + thread * bytes, kept);
#pragma omp barrier
        if (divides_keys(attention, all)) add_divided_keys(attention, thread, all, memory + thread * bytes, kept);
    }
}

/* Write rows [2][kv_heads][dim], keys before values, into these slots of pages. */
EXPORTED void write_pages(const AttentionShape *shape, const KVPages *pages, const int64_t *slots, const float *rows,
                          int64_t count, int64_t threads) {
    int64_t kv = shape->kv_heads * shape->dim;
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t row = 0; row < count; row++)
        write_kv(shape, pages, slots[row], rows + 2 * row * kv, rows + (2 * row + 1) * kv);
}

/* Write the sizes of up to `count` of the structures that a caller fills, in the order in which Python declares
 * them; returns how many there are. */
EXPORTED int64_t structure_sizes(int64_t *sizes, int64_t count) {
    const int64_t found[] = {
        sizeof(PackedMatrix),  sizeof(KVPages),        sizeof(Segments), sizeof(AttentionShape), sizeof(ScoreBias),
        sizeof(RelativePositions), sizeof(Attention),  sizeof(Norm), sizeof(SublayerNorms), sizeof(AttentionLayer),
        sizeof(DeltaLayer),    sizeof(Expert),         sizeof(ExpertsLayer), sizeof(MLPLayer),   sizeof(Layer),
        sizeof(Stack),         sizeof(RotaryTable),    sizeof(LayerStates),  sizeof(StateSpan),  sizeof(LowRank),
        sizeof(Addition),      sizeof(AdapterRun),     sizeof(Step),
    };
    int64_t known = sizeof found / sizeof *found;
    for (int64_t i = 0; i < count && i < known; i++) sizes[i] = found[i];
    return known;
}

/* What the machine code was made for, to be shown: bit 0 AVX-512, 1 products of bf16, 2 integer products of x86-64, 3 and
 * 4 those of AArch64. */
EXPORTED int64_t features(void) {
    int64_t found = 0;
#ifdef __AVX512F__
    found |= 1;
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    found |= 2;
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    found |= 4;
#endif
#ifdef __ARM_FEATURE_DOTPROD
    found |= 8;
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
    found |= 16;
#endif
    return found;
}

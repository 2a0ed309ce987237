/* What one thread of a parallel region knows, and the steps that all its threads take together. */
#ifndef TRIPTYCH_THREAD_CONTEXT_H
#define TRIPTYCH_THREAD_CONTEXT_H

#include "barrier.h"
#include "gemm.h"
#include "rowwise.h"
#include "scratch.h"

/* One thread's place among others, and the buffers that they share. All are the caller's scratch memory. */
typedef struct {
    int thread, threads;
    Barrier *barrier;      /* shared */
    char *operand;         /* shared: rows in the form that products read */
    float *operand_scales; /* shared: [rows] */
    void *scratch;         /* the thread's own: of products and of attention */
    float *line;           /* the thread's own: one normalised row */
} ThreadContext;

/* Rows [first, last) of `rows` are this thread's. */
INLINE void thread_range(const ThreadContext *t, int64_t rows, int64_t *first, int64_t *last) {
    *first = rows * t->thread / t->threads;
    *last = rows * (t->thread + 1) / t->threads;
}

INLINE void wait_for_threads(const ThreadContext *t) { barrier_wait(t->barrier, t->thread, t->threads); }

/* Keep a row that a product with `matrix` reads within the matrix's bounds, if it has any. */
INLINE void bound_input(const PackedMatrix *matrix, float *row) {
    if (matrix->bounds) bound_in_place(matrix->bounds[0], matrix->bounds[1], row, matrix->k);
}

/* Give the operand of a product of `count` rows [matrix->k] with `matrix`: normalised if there is a norm, in the
 * form that the product reads, in place where they have it already. A norm's outputs are kept within the matrix's
 * bounds; rows without one must be already. Ends at a barrier. */
INLINE Operand prepare_operand(const ThreadContext *t, const Norm *norm, const PackedMatrix *matrix, const float *rows,
                               int64_t count) {
    int kind = operand_kind(matrix), normed = norm && norm->kind != NO_NORM;
    int64_t bytes = operand_bytes(matrix), size = matrix->k, first, last;
    Operand operand = {rows, size, t->operand_scales};
    if (kind != F32 || normed) {
        thread_range(t, count, &first, &last);
        for (int64_t row = first; row < last; row++) {
            const float *from = rows + row * size;
            if (normed) {
                normalise(norm, from, size, t->line);
                bound_input(matrix, t->line);
                from = t->line;
            }
            write_operand(matrix, from, t->operand + row * bytes, t->operand_scales + row);
        }
        operand.rows = t->operand;
        operand.stride = bytes / element_bytes(kind);
    }
    wait_for_threads(t);
    return operand;
}

/* The thread's own scratch for products of up to `rows` rows, where an attention may have laid out other buffers. */
INLINE float *product_scratch(const ThreadContext *t, int64_t rows) {
    Scratch own = {.base = t->scratch};
    return scratch_take(&own, rows * GEMM_SCRATCH * (int64_t)sizeof(float));
}

/* Compute output = operand x matrix^T + bias. Ends at a barrier. */
INLINE void multiply(const ThreadContext *t, const PackedMatrix *matrix, Operand operand, int64_t rows, Output output) {
    gemm(matrix, operand, rows, output, t->thread, t->threads, product_scratch(t, rows));
    wait_for_threads(t);
}

#endif

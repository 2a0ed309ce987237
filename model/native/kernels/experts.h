/* The products of a mixture of experts: rows choose experts, and each expert multiplies the rows that chose it. */
#ifndef TRIPTYCH_EXPERTS_H
#define TRIPTYCH_EXPERTS_H

#include "stack.h"
#include "thread_context.h"

/* What buffers depend on, the most of a stack's layers: numbers, or bytes of a row where the name says so. */
typedef struct {
    int64_t experts, taken; /* of a layer, and by a row: the shared one included */
    int64_t operand_bytes, shared_operand_bytes, inner_bytes, down_operand_bytes;
} ExpertSizes;

/* Rows in the form that products read. */
typedef struct {
    char *rows;
    float *scales;
} OperandBuffer;

/* What lies between a mixture's products. Threads share all but the last three. */
typedef struct {
    float *normed;    /* [rows][hidden] */
    float *logits;    /* [rows][experts] */
    int32_t *chosen;  /* [rows][active] */
    float *weights;   /* [rows][active], and [rows] of the shared expert */
    float *outputs;   /* [rows][hidden] of one expert; each thread has its columns of all experts */
    char *inner;      /* what `up` gives */
    OperandBuffer operand, shared, gathered, down;
    int64_t *starts;  /* [experts + 1] where each expert's rows begin in the next two */
    int32_t *row_of;  /* [rows * taken] rows sorted by expert */
    float *weight_of; /* [rows * taken] and their weights */
} ExpertBuffers;

/* The most rows of `rows` that go through a mixture together. */
int64_t expert_rows(int64_t rows);
/* Raise `sizes` to what a layer needs. */
void measure_experts(const ExpertsLayer *layer, ExpertSizes *sizes);
/* Take the buffers of layers of these sizes for up to `rows` rows, and this thread's of each thread's own. */
void take_expert_buffers(Scratch *scratch, const ExpertSizes *sizes, int64_t hidden, int64_t rows,
                         const ThreadContext *t, ExpertBuffers *buffers);
/* Add `scale` times the experts of up to `expert_rows` rows from `from` to those of `to`. Ends at a barrier. */
void add_experts(const ThreadContext *t, const MLPLayer *layer, const ExpertBuffers *buffers, int64_t hidden,
                 const float *from, float *to, int64_t rows, float scale);

#endif

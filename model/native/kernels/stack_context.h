/* What one thread knows of a step through a stack, and what sublayers of every kind do with their rows. */
#ifndef TRIPTYCH_STACK_CONTEXT_H
#define TRIPTYCH_STACK_CONTEXT_H

#include "delta.h"
#include "experts.h"
#include "scratch.h"
#include "stack.h"
#include "thread_context.h"

#define CHUNK_ROWS 256 /* rows that go through an MLP together */

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
    float *kept;       /* what attention over divided keys keeps */
    DeltaBuffers delta;
    float *inner;      /* [chunk][inner]: between an MLP's products */
    ExpertBuffers experts;
    float *ranks;          /* [rows][rank_width]: between the products of adapters */
    char *adapted_operand; /* rows as an adapter's first product reads them, where the layer's are integers */
    float *adapted_line;   /* the thread's own: one of them as floats */
} StackContext;

/* Whether a layer's self attention is over whole segments, without pages, and sees them in both directions. */
INLINE int is_bidirectional(const Layer *layer, const Step *step) {
    return !layer->delta && !step->pages && !step->segments[layer->self.segments].causal;
}

/* Heads of a row that self attention's input gives: queries, maybe their gates, keys and values. */
INLINE int64_t input_heads(const AttentionLayer *layer) {
    return (layer->output_gate ? 2 : 1) * layer->shape.heads + 2 * layer->shape.kv_heads;
}

/* The most keys of a segment of a step whose rows attend in one way. */
int64_t longest_keys(const Step *step);
/* Take the buffers of `rows` rows of a step at a time: those that threads share, then each thread's own. */
void take_stack_buffers(Scratch *scratch, const Stack *stack, const Step *step, int64_t rows, StackContext *t);

/* Normalise rows [rows][hidden] of x in place. Ends at a barrier, unless there is no norm. */
INLINE void norm_rows(const StackContext *t, const Norm *norm, float *x, int64_t rows) {
    if (norm->kind == NO_NORM) return;
    int64_t hidden = t->stack->hidden, first, last;
    thread_range(&t->team, rows, &first, &last);
    for (int64_t row = first; row < last; row++) normalise(norm, x + row * hidden, hidden, x + row * hidden);
    wait_for_threads(&t->team);
}

/* Add the output norm of what a sublayer gave, which is in t->sublayer, to rows of x. Ends at a barrier. */
INLINE void add_normed(const StackContext *t, const Norm *output_norm, float *x, int64_t rows) {
    int64_t hidden = t->stack->hidden, first, last;
    thread_range(&t->team, rows, &first, &last);
    for (int64_t row = first; row < last; row++) {
        normalise(output_norm, t->sublayer + row * hidden, hidden, t->team.line);
        add_in_place(x + row * hidden, t->team.line, hidden);
    }
    wait_for_threads(&t->team);
}

#endif

/* What low-rank adapters add to products (Hu et al. 2021: LoRA): rows of a step have one of several, or none.
 *
 * A row's sums are one chain of multiply-adds, as those of every product: they do not depend on the other rows. */
#ifndef TRIPTYCH_LOW_RANK_H
#define TRIPTYCH_LOW_RANK_H

#include "stack_context.h"

/* The projections of a layer that may have adapters, in the order of an adapter's table. */
enum { NOT_ADAPTED = -1, ATTENTION_INPUT = 0, ATTENTION_OUTPUT, CROSS_INPUT, CROSS_OUTPUT, MLP_UP, MLP_DOWN, ADAPTED };

/* Whether what adapters add to a layer's projection follows the product: then this has no activation, and its outputs
 * are floats. */
int is_added_after(const StackContext *t, int64_t number, int place);
/* As multiply, of rows from `begin` of the context's on, with what their adapters add to the projection `place` of the
 * layer `number`. Ends at a barrier. */
void project(const StackContext *t, int64_t number, int place, const PackedMatrix *matrix, Operand operand,
             int64_t begin, int64_t rows, Output output);

/* Add output norm(projection) to rows of x, which are the context's from some row on, or without a norm `scale` times
 * the projection. Ends at a barrier. */
void add_sublayer(const StackContext *t, int64_t number, int place, const PackedMatrix *matrix, Operand operand,
                  int64_t rows, const Norm *output_norm, float scale, float *x);

#endif

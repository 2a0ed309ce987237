/* Products with integers of 4 or 8 bits that share scales in groups along k, weights and rows alike.
 *
 * output = sum over groups of (integers of the row x integers of the weights) * row's scale * weights' scale, plus
 * the row's sum * row's scale * offset where weights have offsets. Sums within a group are integers, and exact in any
 * order; groups are added in ascending order, by the same multiplications with vectors and with tiles. */
#ifndef TRIPTYCH_GROUPS_H
#define TRIPTYCH_GROUPS_H

#include "matrix.h"

/* Follows a row's numbers [grouped_k] of int8, one for each group. */
typedef struct {
    float scale;
    int32_t sum; /* of the group's integers */
} GroupStep;

INLINE int64_t grouped_row_bytes(const PackedMatrix *matrix) {
    return odd_lines(grouped_k(matrix) + group_count(matrix) * (int64_t)sizeof(GroupStep));
}

/* The steps of a row's groups. */
INLINE const GroupStep *group_steps(const PackedMatrix *matrix, const void *row) {
    return (const GroupStep *)((const char *)row + grouped_k(matrix));
}

/* Add one more group, with the integer sums `whole`, to the sums of up to 16 outputs. */
INLINE vec add_group(vec sums, ivec whole, GroupStep step, vec scale) {
    return fma_vec(__builtin_convertvector(whole, vec) * splat(step.scale), scale, sums);
}

/* What follows it where weights have offsets. */
INLINE vec add_offset(vec sums, GroupStep step, vec offset) {
    return fma_vec(splat(step.scale * (float)step.sum), offset, sums);
}

/* Round a row of floats to integers between -127 and 127, a group at a time. */
void write_grouped_row(const PackedMatrix *matrix, const float *from, void *to);
/* Multiply one or more rows by panels [first, last). */
void multiply_groups(const Product *product, int64_t rows, int64_t first, int64_t last);

#endif

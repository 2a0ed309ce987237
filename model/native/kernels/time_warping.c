/* Dynamic time warping: the cheapest way through a matrix of costs from its first corner to its last (Sakoe and Chiba
 * 1978), which aligns the rows of one with the columns. */
#include "vector.h"

enum { DIAGONAL = 0, NEXT_ROW = 1, NEXT_COLUMN = 2 };

/* Where a cell is entered from: the cheapest of the three cells before it. Of equal ones it is the column before. */
INLINE char cheapest(float diagonal, float above, float left) {
    if (diagonal < above && diagonal < left) return DIAGONAL;
    return above < diagonal && above < left ? NEXT_ROW : NEXT_COLUMN;
}

/* Bytes of scratch memory that time_warping needs. */
EXPORTED int64_t time_warping_bytes(int64_t rows, int64_t columns) {
    return (columns + 1) * (int64_t)sizeof(float) + rows * columns;
}

/* Find the column at which the way through costs [rows][columns] enters each row. Costs are finite. */
EXPORTED void time_warping(const float *costs, int64_t rows, int64_t columns, int64_t *starts, char *memory) {
    float *sums = (float *)memory; /* [columns + 1] of the row before, and of this one up to a column */
    char *moves = (char *)(sums + columns + 1); /* [rows][columns] */
    const float never = __builtin_inff();
    for (int64_t column = 0; column <= columns; column++) sums[column] = column ? never : 0.0f;
    for (int64_t row = 0; row < rows; row++) {
        float diagonal = sums[0], left = never;
        sums[0] = never;
        for (int64_t column = 0; column < columns; column++) {
            float above = sums[column + 1];
            char move = cheapest(diagonal, above, left);
            float least = move == DIAGONAL ? diagonal : move == NEXT_ROW ? above : left;
            left = (float)((double)costs[row * columns + column] + (double)least);
            moves[row * columns + column] = move;
            diagonal = above, sums[column + 1] = left;
        }
    }
    int64_t column = columns - 1;
    for (int64_t row = rows - 1; row >= 0;) {
        char move = moves[row * columns + column];
        if (move != NEXT_COLUMN) starts[row--] = column;
        if (move != NEXT_ROW) column--;
    }
}

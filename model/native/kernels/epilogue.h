/* What follows the sums of a product: scale, bias, activation, and where they are written. */
#ifndef TRIPTYCH_EPILOGUE_H
#define TRIPTYCH_EPILOGUE_H

#include "matrix.h"

/* A rectangle of finished sums: `rows` rows from `row`, `vectors` registers' worth of outputs from `column`. */
typedef struct {
    int64_t row, column;
    int rows, vectors;
    vec *sums;      /* [rows][stride], of INT8 matrices the bits of integers; the caller's, and overwritten */
    int64_t stride; /* registers from row to row */
} SumTile;

/* Scale, bias, activate and write what of the rectangle the matrix has. The rectangle is passed by address: copying
 * it to the stack took up to a quarter of the time of products in tiles, as a wide load from fields stored just
 * before must wait. */
void epilogue(const Product *product, const SumTile *tile);

#endif

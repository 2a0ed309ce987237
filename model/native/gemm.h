/* Products of rows with a packed matrix. */
#ifndef TRIPTYCH_GEMM_H
#define TRIPTYCH_GEMM_H

#include "vector.h"

#define PANEL 16

/* A matrix [n, k] in panels of 16 outputs, rows beyond n being zero:
 *   F32   [panels][k][16] float          BF16  [panels][k / 2][16][2] bf16, k rounded up to even
 *   INT8  [panels][k / 4][16][4] int8, k rounded up to a multiple of 4, times scale[n]; sums[n] of each row's integers */
typedef struct {
    int64_t dtype, n, k;
    const void *data;
    const float *bias;  /* [n padded to 16], or null */
    const float *scale; /* INT8: [n padded to 16] */
    const int32_t *sums; /* INT8: [n padded to 16] */
} Linear;

/* What a product reads: rows of floats, or of what the matrix units take (see operand_kind). */
typedef struct {
    const void *rows;
    int64_t stride;     /* elements from row to row */
    const float *scale; /* INT8: of each row */
} Operand;

typedef struct {
    void *rows; /* float, or an operand's bf16 */
    int64_t stride;
    int64_t bf16_rows;  /* whether rows are bf16 */
    int64_t activation;
    int64_t add; /* to what the rows hold, after the activation */
} Target;

/* F32, BF16 or INT8: in which form a product with `matrix` wants its rows. */
int operand_kind(const Linear *matrix);
/* Bytes of one row of k elements in that form. */
int64_t operand_bytes(const Linear *matrix);
/* Put a row of k floats (and up to 63 bytes beyond) into that form. */
void write_operand(int kind, const float *from, int64_t k, void *to, float *scale);
/* The share of thread `part` of `parts` in target = operand x matrix^T; `scratch` holds 48 floats a row. */
void product(const Linear *matrix, Operand from, int64_t rows, Target to, int part, int parts, float *scratch);

#endif

/* Products of rows with a packed matrix. */
#ifndef TRIPTYCH_GEMM_H
#define TRIPTYCH_GEMM_H

#include "vector.h"

#define PANEL 16

/* A matrix [n, k] in panels of 16 outputs, rows beyond n and columns beyond k being zero:
 *   F32   [panels][k][16] float          BF16  [panels][k / 2][16][2] bf16, k rounded up to a multiple of 32
 *   INT8  [panels][k / 4][16][4] int8, k rounded up to a multiple of 64, times scale[n]; sums[n] of each row's integers */
typedef struct {
    int64_t dtype, n, k;
    const void *data;
    const float *bias;  /* [n padded to 16], or null */
    const float *scale; /* INT8: [n padded to 16] */
    const int32_t *sums; /* INT8: [n padded to 16] */
    int64_t tiles;      /* whether it is multiplied in tiles, where there are (see start_tiles) */
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

/* A product as its parts see it. */
typedef struct {
    const Linear *matrix;
    Operand from;
    Target to;
    float *scratch;
} Job;

INLINE int64_t up_to(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
INLINE int64_t element_bytes(int64_t dtype) { return dtype == F32 ? 4 : dtype == BF16 ? 2 : 1; }
/* The k of a matrix's panels and its operands' rows: narrow numbers fill 64 bytes, a row of a tile. */
INLINE int64_t padded_k(int64_t dtype, int64_t k) { return up_to(k, dtype == F32 ? 1 : 64 / element_bytes(dtype)); }

/* F32, BF16 or INT8: in which form a product with `matrix` wants its rows. */
int operand_kind(const Linear *matrix);
/* Bytes of one row of k elements in that form. */
int64_t operand_bytes(const Linear *matrix);
/* Put a row of k floats (and up to 63 bytes beyond) into that form, elsewhere. */
void write_operand(int kind, const float *from, int64_t k, void *to, float *scale);
/* Round a row of k floats to as many bf16, which take the first half of its place. */
void narrow_in_place(float *row, int64_t k);
/* The share of thread `part` of `parts` in target = operand x matrix^T; `scratch` holds 48 floats a row. */
void product(const Linear *matrix, Operand from, int64_t rows, Target to, int part, int parts, float *scratch);
/* Finished sums of `count` rows from `row`, so many registers of each: scale, bias, activation, addition. */
void finish(const Job *job, int64_t row, int count, int64_t column, int registers, vec *sums, int64_t stride);
/* At least one row of BF16 or INT8 times the panels [first, last). */
void product_in_tiles(const Job *job, int64_t rows, int64_t first, int64_t last);

#endif

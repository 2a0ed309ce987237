/* Products of rows with a packed matrix. */
#ifndef TRIPTYCH_GEMM_H
#define TRIPTYCH_GEMM_H

#include "matrix.h"

#define GEMM_SCRATCH 48 /* floats of scratch for each row of a product */

/* The form in which a product with `matrix` reads rows: F32, BF16, INT8 or GROUPS. */
int operand_kind(const PackedMatrix *matrix);
/* Bytes of one row of k elements in that form. */
int64_t operand_bytes(const PackedMatrix *matrix);
/* Convert a row of k floats to what a product with `matrix` reads at `to` (padded to 64 bytes), elsewhere; INT8:
 * `scale` gets its step. */
void write_operand(const PackedMatrix *matrix, const float *from, void *to, float *scale);
/* Round a row of k floats to as many bf16, which take the first half of its place. */
void narrow_in_place(float *row, int64_t k);
/* Compute thread `thread`'s part (of `threads`) of the outputs of output = operand x matrix^T + bias for `rows`
 * rows. `scratch` is that thread's own, [rows][GEMM_SCRATCH]. No output is shared, and threads need not wait for
 * each other. */
void gemm(const PackedMatrix *matrix, Operand operand, int64_t rows, Output output, int thread, int threads,
          float *scratch);
/* Compute those of panels [first, last), for one or more rows. */
void gemm_panels(const PackedMatrix *matrix, Operand operand, int64_t rows, Output output, int64_t first, int64_t last,
                 float *scratch);

#endif

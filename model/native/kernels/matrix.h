/* The types of matrix products: packed matrices, their operands and outputs. */
#ifndef TRIPTYCH_MATRIX_H
#define TRIPTYCH_MATRIX_H

#include "vector.h"

#define PANEL_WIDTH 16                    /* outputs whose weights lie together */
#define PANEL_VECS (PANEL_WIDTH / LANES) /* registers that the outputs of a panel fill */

/* A weight matrix [n, k] in panels of 16 outputs; rows beyond n and columns beyond k are zero:
 *   F32   [panels][k][16] float
 *   BF16  [panels][k / 2][16][2] bf16, k rounded up to a multiple of 32
 *   INT8  [panels][k / 4][16][4] int8, k rounded up to a multiple of 64; weight = integer * scale of its row
 *   INT4  [panels][k / 8][16][4] pairs of numbers + 8: of 8 numbers of k, the first 4 are the bytes' low halves
 * INT4, and INT8 with a `group`, have a scale for every `group` numbers of k, and k is rounded up to a multiple of that
 * and of 64; weight = integer * scale + offset of its group.
 * The caller owns all arrays, which hold n rounded up to 16 elements. */
typedef struct {
    int64_t dtype, n, k;     /* F32, BF16, INT8 or INT4 */
    const void *data;
    const float *bias;       /* null: none */
    const float *scale;      /* INT8: of each row; of groups: [panels][groups][16] */
    const int32_t *row_sums; /* INT8 without groups: the sum of each row's integers */
    int64_t tiles;           /* whether AMX tiles multiply it, where there are any (see start_tiles) */
    int64_t group;           /* numbers of k that share a scale: 32, 64 or 128; 0: a row's share one */
    const float *offset;     /* of groups: [panels][groups][16]; null: none */
    const float *bounds;     /* lowest and highest input, then of each output, [n rounded up to 16] each; null: none */
} PackedMatrix;

/* The rows [rows][k] that a product reads, in the form that `operand_kind` names. The caller owns them. */
typedef struct {
    const void *rows;
    int64_t stride;     /* elements from row to row */
    const float *scale; /* INT8: of each row; GROUPS have their scales after the numbers of a row */
} Operand;

typedef struct AdaptedRows AdaptedRows; /* adapted_rows.h */

/* Where a product writes its rows [rows][n]. The caller owns them. */
typedef struct {
    void *rows;         /* floats, or bf16 */
    int64_t stride;     /* elements from row to row */
    int64_t bf16_rows;  /* whether rows are bf16 */
    int64_t activation; /* SOFTCAP: by `softcap` */
    int64_t add;        /* whether the product, `add_scale` times, is added to what float rows hold */
    float add_scale;
    float softcap;
    const AdaptedRows *adapted; /* what is added to its sums; null: nothing */
    int64_t first_row;          /* the row of `adapted` that its first row is */
} Output;

/* One product, as all the functions that compute it see it. */
typedef struct {
    const PackedMatrix *matrix;
    Operand operand;
    Output output;
    float *scratch; /* [rows][48]: sums of products whose k is taken in parts */
} Product;

INLINE int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
INLINE int64_t element_bytes(int64_t dtype) { return dtype == F32 ? 4 : dtype == BF16 ? 2 : 1; }

/* Bytes of a row in an odd number of lines of memory: rows that are read together lie in different sets of caches. */
INLINE int64_t odd_lines(int64_t bytes) { return round_up(bytes - 64, 128) + 64; }

/* How many panels a matrix has. */
INLINE int64_t panel_count(const PackedMatrix *matrix) { return round_up(matrix->n, PANEL_WIDTH) / PANEL_WIDTH; }

/* The k of a matrix's panels and of its operands' rows: narrow numbers fill 64 bytes, which are a row of an AMX
 * tile. */
INLINE int64_t padded_k(int64_t dtype, int64_t k) { return round_up(k, dtype == F32 ? 1 : 64 / element_bytes(dtype)); }

/* The same of a matrix with groups, and how many of them that makes. */
INLINE int64_t grouped_k(const PackedMatrix *matrix) { return round_up(matrix->k, max_i64(matrix->group, 64)); }
INLINE int64_t group_count(const PackedMatrix *matrix) { return grouped_k(matrix) / matrix->group; }

/* Bytes of a panel of a matrix with groups. */
INLINE int64_t grouped_panel_bytes(const PackedMatrix *matrix) {
    return grouped_k(matrix) * PANEL_WIDTH / (matrix->dtype == INT4 ? 2 : 1);
}

#endif

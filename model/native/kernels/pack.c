/* Rows of a matrix into the panels that products read (matrix.h).
 *
 * Each row is converted, and quantised, for itself: rows may come in any order and in any number at a time. Panels must
 * be zero before, where no row and no column will be. Threads share the panels. */
#include "matrix.h"

#define TILE 64 /* numbers of each row that are converted before they are laid between those of the other rows */

typedef struct {
    const PackedMatrix *matrix;
    const void *rows;           /* [count][stride], F32 or BF16; BF16 where the matrix is */
    int64_t kind, stride;
    int64_t first, count;       /* which rows of the matrix they are */
} Rows;

INLINE const char *number(const Rows *rows, int64_t row, int64_t k) {
    return (const char *)rows->rows + ((row - rows->first) * rows->stride + k) * element_bytes(rows->kind);
}

/* Up to TILE numbers of a row as floats, zero behind its end. */
INLINE void floats_of(const Rows *rows, int64_t row, int64_t k, float *to) {
    int64_t count = min_i64(TILE, rows->matrix->k - k), i = 0;
    const char *from = number(rows, row, k);
    if (rows->kind == F32) {
        memcpy(to, from, count * sizeof(float));
    } else {
        for (; i + LANES <= count; i += LANES) store(to + i, load_bf16((const bf16 *)from + i));
        for (; i < count; i++) to[i] = from_bf16(((const bf16 *)from)[i]);
    }
    for (i = count; i < TILE; i++) to[i] = 0.0f;
}

/* The step between a row's integers: its largest size is 127 of them. */
static float scale_of(const Rows *rows, int64_t row) {
    float numbers[TILE], most = 0.0f;
    for (int64_t k = 0; k < rows->matrix->k; k += TILE) {
        floats_of(rows, row, k, numbers);
        float size = max_abs(numbers, TILE);
        most = size <= most ? most : size; /* NaN stays */
    }
    return most / 127.0f;
}

/* Numbers as bytes, and their sum. */
INLINE int32_t quantise(const float *numbers, float scale, int8_t *to) {
    vec step = splat(scale < 1e-30f ? 1e-30f : scale);
    int32_t each[LANES], sum = 0;
    ivec sums = {0};
    for (int64_t i = 0; i < TILE; i += LANES) {
        ivec whole = round_vec(load(numbers + i) / step);
        store_int8(to + i, whole);
        sums += whole;
    }
    memcpy(each, &sums, sizeof each);
    for (int lane = 0; lane < LANES; lane++) sum += each[lane];
    return sum;
}

/* What of the rows belongs to one panel. */
static void pack_panel(const Rows *rows, int64_t panel) {
    const PackedMatrix *matrix = rows->matrix;
    int64_t kind = matrix->dtype, depth = padded_k(kind, matrix->k), step = 4 / element_bytes(kind);
    int64_t begin = max_i64(rows->first, panel * PANEL_WIDTH), end = min_i64(rows->first + rows->count, (panel + 1) * PANEL_WIDTH);
    uint32_t *to = (uint32_t *)matrix->data + panel * PANEL_WIDTH * (depth / step); /* [depth / step][16] words of 4 bytes */
    float numbers[TILE], scales[PANEL_WIDTH];
    uint32_t words[PANEL_WIDTH][TILE];
    int32_t sums[PANEL_WIDTH] = {0};
    if (kind == INT8)
        for (int64_t row = begin; row < end; row++) scales[row % PANEL_WIDTH] = scale_of(rows, row);
    for (int64_t k = 0; k < depth; k += TILE) {
        int64_t count = min_i64(TILE, depth - k) / step, filled = min_i64(TILE, matrix->k - k);
        for (int64_t row = begin; row < end; row++) {
            uint32_t *line = words[row % PANEL_WIDTH];
            if (kind == BF16) {
                memset(line, 0, TILE * sizeof(bf16));
                memcpy(line, number(rows, row, k), filled * sizeof(bf16));
            } else if (kind == F32) {
                floats_of(rows, row, k, (float *)line);
            } else {
                floats_of(rows, row, k, numbers);
                sums[row % PANEL_WIDTH] += quantise(numbers, scales[row % PANEL_WIDTH], (int8_t *)line);
            }
        }
        uint32_t *at = to + k / step * PANEL_WIDTH + begin % PANEL_WIDTH;
        for (int64_t word = 0; word < count; word++, at += PANEL_WIDTH)
            for (int64_t row = 0; row < end - begin; row++) at[row] = words[begin % PANEL_WIDTH + row][word];
    }
    if (kind == INT8)
        for (int64_t row = begin; row < end; row++) {
            ((float *)matrix->scale)[row] = scales[row % PANEL_WIDTH];
            ((int32_t *)matrix->row_sums)[row] = sums[row % PANEL_WIDTH];
        }
}

EXPORTED void pack_rows(const PackedMatrix *matrix, const void *from, int64_t kind, int64_t stride, int64_t first,
                        int64_t count, int64_t threads) {
    Rows rows = {matrix, from, kind, stride, first, count};
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t panel = first / PANEL_WIDTH; panel < (first + count + PANEL_WIDTH - 1) / PANEL_WIDTH; panel++) pack_panel(&rows, panel);
}

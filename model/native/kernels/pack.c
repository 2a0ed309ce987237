/* Writes rows of a matrix into the panels that products read (matrix.h).
 *
 * Each row is converted, and quantised, by itself: rows may come in any order and in any number at a time. Panels
 * must be zero before, as padding is not written. Threads divide the panels. */
#include "quantise.h"

#define PACK_DEPTH 64 /* numbers of each row that are converted before they are interleaved with those of other rows */

/* Rows of a matrix before they are packed. */
typedef struct {
    const PackedMatrix *matrix;
    const void *rows;     /* [count][stride], F32 or BF16; BF16 if the matrix is; INT8 only if it is of integers */
    int64_t kind, stride; /* stride: elements */
    int64_t first, count; /* which rows of the matrix these are */
} UnpackedRows;

/* The address of number k of a row of the matrix. */
INLINE const char *unpacked_number(const UnpackedRows *rows, int64_t row, int64_t k) {
    return (const char *)rows->rows + ((row - rows->first) * rows->stride + k) * element_bytes(rows->kind);
}

/* Read PACK_DEPTH numbers of a row from k on as floats, with zeros after its end. */
INLINE void read_floats(const UnpackedRows *rows, int64_t row, int64_t k, float *to) {
    int64_t count = max_i64(0, min_i64(PACK_DEPTH, rows->matrix->k - k)), i = 0;
    const char *from = unpacked_number(rows, row, k);
    if (rows->kind == F32) {
        memcpy(to, from, count * sizeof(float));
    } else {
        for (; i + LANES <= count; i += LANES) store(to + i, load_bf16((const bf16 *)from + i));
        for (; i < count; i++) to[i] = from_bf16(((const bf16 *)from)[i]);
    }
    for (i = count; i < PACK_DEPTH; i++) to[i] = 0.0f;
}

/* The step between a row's integers: its largest absolute value becomes 127. */
static float row_scale(const UnpackedRows *rows, int64_t row) {
    float numbers[PACK_DEPTH], most = 0.0f;
    for (int64_t k = 0; k < rows->matrix->k; k += PACK_DEPTH) {
        read_floats(rows, row, k, numbers);
        float size = max_abs(numbers, PACK_DEPTH);
        most = size <= most ? most : size; /* NaN stays */
    }
    return most / 127.0f;
}

/* Write PACK_DEPTH numbers as bytes; returns their sum. */
INLINE int32_t quantise(const float *numbers, float scale, int8_t *to) {
    vec step = splat(scale < 1e-30f ? 1e-30f : scale);
    int32_t each[LANES], sum = 0;
    ivec sums = {0};
    for (int64_t i = 0; i < PACK_DEPTH; i += LANES) {
        ivec whole = round_vec(load(numbers + i) / step);
        store_int8(to + i, whole);
        sums += whole;
    }
    memcpy(each, &sums, sizeof each);
    for (int lane = 0; lane < LANES; lane++) sum += each[lane];
    return sum;
}

/* The integers of one group of a row; returns the scale of those that are quantised here. */
static float group_integers(const UnpackedRows *rows, int64_t row, int64_t k, int8_t *to) {
    const PackedMatrix *matrix = rows->matrix;
    float numbers[MOST_IN_GROUP];
    if (rows->kind == INT8) {
        int64_t filled = max_i64(0, min_i64(matrix->group, matrix->k - k));
        memcpy(to, unpacked_number(rows, row, k), filled);
        memset(to + filled, 0, matrix->group - filled);
        return 0.0f;
    }
    for (int64_t at = 0; at < matrix->group; at += PACK_DEPTH) read_floats(rows, row, k + at, numbers + at);
    return quantise_group(matrix->dtype, numbers, matrix->group, to);
}

/* Write those of the rows that belong to one panel of a matrix with groups. */
static void pack_grouped_panel(const UnpackedRows *rows, int64_t panel) {
    const PackedMatrix *matrix = rows->matrix;
    int64_t groups = group_count(matrix), group = matrix->group, words = group / (matrix->dtype == INT4 ? 8 : 4);
    int64_t begin = max_i64(rows->first, panel * PANEL_WIDTH);
    int64_t end = min_i64(rows->first + rows->count, (panel + 1) * PANEL_WIDTH);
    uint32_t *to = (uint32_t *)((char *)matrix->data + panel * grouped_panel_bytes(matrix));
    float *scales = (float *)matrix->scale + panel * groups * PANEL_WIDTH;
    int8_t integers[MOST_IN_GROUP];
    for (int64_t row = begin; row < end; row++)
        for (int64_t g = 0; g < groups; g++) {
            float scale = group_integers(rows, row, g * group, integers);
            if (rows->kind != INT8) scales[g * PANEL_WIDTH + row % PANEL_WIDTH] = scale;
            uint32_t *at = to + g * words * PANEL_WIDTH + row % PANEL_WIDTH, four, next;
            for (int64_t word = 0; word < words; word++) {
                if (matrix->dtype == INT4) { /* in 4 bits, adding 8 turns the sign bit over */
                    memcpy(&four, integers + 8 * word, 4);
                    memcpy(&next, integers + 8 * word + 4, 4);
                    four = ((four & 0x0f0f0f0fu) ^ 0x08080808u) | ((next & 0x0f0f0f0fu) ^ 0x08080808u) << 4;
                } else {
                    memcpy(&four, integers + 4 * word, 4);
                }
                at[word * PANEL_WIDTH] = four;
            }
        }
}

/* Write those of the rows that belong to one panel. */
static void pack_panel(const UnpackedRows *rows, int64_t panel) {
    const PackedMatrix *matrix = rows->matrix;
    int64_t kind = matrix->dtype, depth = padded_k(kind, matrix->k), step = 4 / element_bytes(kind);
    int64_t begin = max_i64(rows->first, panel * PANEL_WIDTH);
    int64_t end = min_i64(rows->first + rows->count, (panel + 1) * PANEL_WIDTH);
    uint32_t *to = (uint32_t *)matrix->data + panel * PANEL_WIDTH * (depth / step); /* [depth / step][16] words */
    float numbers[PACK_DEPTH], scales[PANEL_WIDTH];
    uint32_t words[PANEL_WIDTH][PACK_DEPTH];
    int32_t sums[PANEL_WIDTH] = {0};
    int quantised = kind == INT8 && rows->kind != INT8; /* here, not before */
    if (quantised)
        for (int64_t row = begin; row < end; row++) scales[row % PANEL_WIDTH] = row_scale(rows, row);
    for (int64_t k = 0; k < depth; k += PACK_DEPTH) {
        int64_t count = min_i64(PACK_DEPTH, depth - k) / step, filled = min_i64(PACK_DEPTH, matrix->k - k);
        for (int64_t row = begin; row < end; row++) {
            uint32_t *line = words[row % PANEL_WIDTH];
            if (kind == BF16) {
                memset(line, 0, PACK_DEPTH * sizeof(bf16));
                memcpy(line, unpacked_number(rows, row, k), filled * sizeof(bf16));
            } else if (kind == F32) {
                read_floats(rows, row, k, (float *)line);
            } else if (rows->kind == INT8) {
                memset(line, 0, PACK_DEPTH);
                memcpy(line, unpacked_number(rows, row, k), filled);
                for (int64_t i = 0; i < filled; i++) sums[row % PANEL_WIDTH] += ((int8_t *)line)[i];
            } else {
                read_floats(rows, row, k, numbers);
                sums[row % PANEL_WIDTH] += quantise(numbers, scales[row % PANEL_WIDTH], (int8_t *)line);
            }
        }
        uint32_t *at = to + k / step * PANEL_WIDTH + begin % PANEL_WIDTH;
        for (int64_t word = 0; word < count; word++, at += PANEL_WIDTH)
            for (int64_t row = 0; row < end - begin; row++) at[row] = words[begin % PANEL_WIDTH + row][word];
    }
    if (kind == INT8)
        for (int64_t row = begin; row < end; row++) {
            if (quantised) ((float *)matrix->scale)[row] = scales[row % PANEL_WIDTH];
            ((int32_t *)matrix->row_sums)[row] = sums[row % PANEL_WIDTH];
        }
}

/* Pack rows [first, first + count) of a matrix from `from`, floats, bf16 or, if the matrix is of integers, these as
 * INT8, `stride` elements apart. Fills row sums too, and scales unless the rows are integers. */
EXPORTED void pack_rows(const PackedMatrix *matrix, const void *from, int64_t kind, int64_t stride, int64_t first,
                        int64_t count, int64_t threads) {
    UnpackedRows rows = {matrix, from, kind, stride, first, count};
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t panel = first / PANEL_WIDTH; panel < (first + count + PANEL_WIDTH - 1) / PANEL_WIDTH; panel++)
        if (matrix->group) pack_grouped_panel(&rows, panel);
        else pack_panel(&rows, panel);
}

/* Write a row of a matrix as floats [k]; `kind` is a constant. */
INLINE void unpack_row(int64_t kind, const PackedMatrix *matrix, int64_t row, float *to) {
    int64_t panel = row / PANEL_WIDTH, lane = row % PANEL_WIDTH, group = matrix->group;
    int64_t step = kind == INT4 ? 8 : 4 / element_bytes(kind); /* numbers of k in a word */
    int64_t depth = group ? grouped_k(matrix) : padded_k(kind, matrix->k), shared = group ? group : matrix->k;
    const uint32_t *from = (const uint32_t *)matrix->data + panel * PANEL_WIDTH * (depth / step) + lane;
    const float *scales = matrix->scale;
    if (group) scales += panel * group_count(matrix) * PANEL_WIDTH + lane;
    else if (kind == INT8) scales += row;
    for (int64_t k = 0; k < matrix->k; scales += PANEL_WIDTH) {
        float scale = kind == INT4 || kind == INT8 ? *scales : 1.0f;
        for (int64_t end = min_i64(k + shared, matrix->k); k < end; k += step, from += PANEL_WIDTH) {
            float numbers[8];
            for (int64_t i = 0; i < step; i++) {
                if (kind == F32) memcpy(numbers, from, sizeof *numbers);
                else if (kind == BF16) numbers[i] = from_bf16((bf16)(*from >> 16 * i));
                else if (kind == INT8) numbers[i] = (float)(int8_t)(*from >> 8 * i) * scale;
                else numbers[i] = (float)((int)(*from >> (i < 4 ? 8 * i : 8 * i - 28) & 15) - 8) * scale;
            }
            memcpy(to + k, numbers, (end - k < step ? end - k : step) * sizeof *numbers);
        }
    }
}

static void unpack_any_row(const PackedMatrix *matrix, int64_t row, float *to) {
    switch (matrix->dtype) {
    case F32: unpack_row(F32, matrix, row, to); break;
    case BF16: unpack_row(BF16, matrix, row, to); break;
    case INT8: unpack_row(INT8, matrix, row, to); break;
    default: unpack_row(INT4, matrix, row, to);
    }
}

/* Write rows `ids` [count] of a matrix without offsets as floats [count][k]; of an id that it has not, zeros. */
EXPORTED void unpack_rows(const PackedMatrix *matrix, const int64_t *ids, int64_t count, float *to, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t i = 0; i < count; i++)
        if (ids[i] >= 0 && ids[i] < matrix->n) unpack_any_row(matrix, ids[i], to + i * matrix->k);
        else memset(to + i * matrix->k, 0, matrix->k * sizeof(float));
}

/* The integers of a row whose numbers share one scale, which is returned. */
static float whole_row_integers(const UnpackedRows *rows, int64_t row, int8_t *to) {
    float numbers[PACK_DEPTH], scale = row_scale(rows, row);
    int8_t integers[PACK_DEPTH];
    int64_t length = rows->matrix->k;
    for (int64_t k = 0; k < length; k += PACK_DEPTH) {
        read_floats(rows, row, k, numbers);
        quantise(numbers, scale, integers);
        memcpy(to + k, integers, min_i64(PACK_DEPTH, length - k));
    }
    return scale;
}

/* The integers [k] and scales [ceil(k / group)] of a row; `weights` [k] say how much each number's error counts, or
 * are null. */
static void row_integers(const UnpackedRows *rows, int64_t row, const float *weights, int8_t *to, float *scales) {
    const PackedMatrix *matrix = rows->matrix;
    float numbers[MOST_IN_GROUP], counts[MOST_IN_GROUP];
    int8_t integers[MOST_IN_GROUP];
    if (!matrix->group) {
        scales[0] = whole_row_integers(rows, row, to);
        return;
    }
    for (int64_t k = 0; k < matrix->k; k += matrix->group) {
        int64_t filled = min_i64(matrix->group, matrix->k - k);
        if (weights) {
            for (int64_t at = 0; at < matrix->group; at += PACK_DEPTH) read_floats(rows, row, k + at, numbers + at);
            memset(counts, 0, sizeof counts);
            memcpy(counts, weights + k, filled * sizeof(float));
            scales[k / matrix->group] = quantise_weighted_group(numbers, counts, matrix->group, integers);
        } else {
            scales[k / matrix->group] = group_integers(rows, row, k, integers);
        }
        memcpy(to + k, integers, filled);
    }
}

/* What `pack_rows` makes of floats or bf16, as they are stored in files: integers [count][k], of 4 bits a byte each,
 * and scales [count][groups], one a row where `matrix` (its sizes alone) has no groups. In 4 bits `weights` [k] may say
 * how much the error of each number counts. */
EXPORTED void quantise_rows(const PackedMatrix *matrix, const void *from, int64_t kind, int64_t stride, int64_t count,
                            const float *weights, int8_t *integers, float *scales, int64_t threads) {
    UnpackedRows rows = {matrix, from, kind, stride, 0, count};
    int64_t k = matrix->k, groups = matrix->group ? (k + matrix->group - 1) / matrix->group : 1;
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t row = 0; row < count; row++) row_integers(&rows, row, weights, integers + row * k, scales + row * groups);
}

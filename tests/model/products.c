/* Writes the results of products to its output, so that those of different levels of instructions can be compared.
 *
 * Compiled together with the kernels, for another kind of machine too (tests/model/test_aarch64.py). Integers are
 * whole numbers of both signs, up to -128 and 127, whose sums are computed here as well: of INT8 by row, whose scales
 * are 1, a result must be that sum. */
#include <stdio.h>
#include <stdlib.h>

#include "matrix.h"

int64_t linear_scratch_bytes(const PackedMatrix *matrix, int64_t rows, int64_t threads);
void run_linear(const PackedMatrix *matrix, const float *x, int64_t rows, float *out, float softcap, char *memory,
                int64_t threads);
void pack_rows(const PackedMatrix *matrix, const void *from, int64_t kind, int64_t stride, int64_t first, int64_t count,
               int64_t threads);

enum { ROWS = 15 };

static uint64_t state = 1;

static int32_t drawn(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)(state >> 32);
}

/* A whole number in [-most - 1, most], often one of both ends. */
static int32_t whole(int32_t most) {
    uint32_t at = (uint32_t)drawn() >> 4;
    return at % 8 == 0 ? most : at % 8 == 1 ? -most - 1 : (int32_t)(at % (2 * (uint32_t)most + 2)) - most - 1;
}

static float *scales(int64_t count) {
    float *x = malloc(count * sizeof *x);
    for (int64_t i = 0; i < count; i++) x[i] = (float)drawn() * 0x1p-31f;
    return x;
}

/* The integers [n][k] of a matrix, which is filled with them. */
static int8_t *filled(PackedMatrix *m) {
    int64_t padded = round_up(m->n, PANEL_WIDTH), bytes = padded * padded_k(m->dtype, m->k);
    if (m->group) bytes = padded / PANEL_WIDTH * grouped_panel_bytes(m);
    m->data = calloc(1, bytes);
    m->row_sums = calloc(padded, sizeof *m->row_sums);
    if (m->group) {
        m->scale = scales(padded * group_count(m));
        if (m->n % 2) m->offset = scales(padded * group_count(m));
    } else {
        float *ones = malloc(padded * sizeof *ones);
        for (int64_t i = 0; i < padded; i++) ones[i] = 1.0f;
        m->scale = ones;
    }
    int8_t *integers = malloc(m->n * m->k);
    for (int64_t i = 0; i < m->n * m->k; i++) integers[i] = (int8_t)whole(m->dtype == INT4 ? 7 : 127);
    pack_rows(m, integers, INT8, m->k, 0, m->n, 1);
    return integers;
}

/* Write what `rows` rows give. */
static void multiply(const PackedMatrix *m, const float *x, int64_t rows, const int8_t *integers) {
    float *out = malloc(rows * m->n * sizeof *out);
    char *memory = malloc(linear_scratch_bytes(m, rows, 1));
    run_linear(m, x, rows, out, 0.0f, memory, 1);
    fwrite(out, sizeof *out, rows * m->n, stdout);
    for (int64_t row = 0; !m->group && m->dtype == INT8 && row < rows; row++)
        for (int64_t n = 0; n < m->n; n++) {
            int64_t sum = 0;
            for (int64_t k = 0; k < m->k; k++) sum += (int64_t)x[row * m->k + k] * integers[n * m->k + k];
            if (out[row * m->n + n] == (float)sum) continue;
            fprintf(stderr, "%ld x %ld: %f is not %ld\n", (long)m->n, (long)m->k, out[row * m->n + n], (long)sum);
            exit(1);
        }
    free(out), free(memory);
}

static void check(int64_t dtype, int64_t group, int64_t n, int64_t k) {
    PackedMatrix m = {.dtype = dtype, .n = n, .k = k, .group = group};
    int8_t *integers = filled(&m);
    float *x = malloc(ROWS * k * sizeof *x);
    for (int64_t i = 0; i < ROWS * k; i++) x[i] = (float)max_i64(whole(127), -127);
    for (int64_t row = 0; row < ROWS; row++) x[row * k] = 127.0f; /* a row's scale is 1, so its integers are itself */
    for (int64_t rows = 1; rows <= ROWS; rows++) multiply(&m, x, rows, integers);
}

/* The same numbers in bfloat16, whose sums are exact: they stay below 2^24. */
static void check_bf16(int64_t n, int64_t k) {
    PackedMatrix m = {.dtype = BF16, .n = n, .k = k};
    m.data = calloc(round_up(n, PANEL_WIDTH) * padded_k(BF16, k), sizeof(bf16));
    float *weights = malloc(n * k * sizeof *weights), *x = malloc(ROWS * k * sizeof *x);
    bf16 *narrow = malloc(n * k * sizeof *narrow);
    for (int64_t i = 0; i < n * k; i++) weights[i] = (float)whole(127), narrow[i] = to_bf16(weights[i]);
    for (int64_t i = 0; i < ROWS * k; i++) x[i] = (float)whole(31);
    pack_rows(&m, narrow, BF16, k, 0, n, 1);
    for (int64_t rows = 1; rows <= ROWS; rows++) multiply(&m, x, rows, NULL);
}

int main(void) {
    static const int64_t shapes[][2] = {{1, 1}, {7, 5}, {16, 64}, {33, 70}, {50, 700}, {20, 1500}};
    for (unsigned i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check(INT8, 0, shapes[i][0], shapes[i][1]);
        for (int64_t group = 32; group <= 128; group *= 2)
            check(INT4, group, shapes[i][0], shapes[i][1]), check(INT8, group, shapes[i][0], shapes[i][1]);
        check_bf16(shapes[i][0], shapes[i][1]);
    }
    return 0;
}

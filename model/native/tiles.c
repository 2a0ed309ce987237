/* Products in tiles, over the panels that the vectors read: what 64 bytes of k hold for 16 outputs is a tile as it lies.
 *
 * A tile has 16 rows. Fewer stay with the vectors, which then keep up with memory: 16 rows cost some 16 cycles for the 64
 * bytes of weights they read. Sums of bf16 have an order of their own (see TILE_DOT_BF16), those of int8 are exact. */
#define _GNU_SOURCE /* syscall */
#include "tiles.h"

#include "gemm.h"

enum { NONE_COMPILED = 0, USABLE = 1, NOT_IN_CPU = 2, NOT_PERMITTED = 3, WRONG = 4 };

#if HAS_TILES

/* Of two tiles of rows by two panels; those of one are [0] and [2], or [0] and [1]. */
typedef vec Sums[4][TILE_ROWS * PANEL / LANES];

#define TILE_DOT(dtype, sums, a, b)     \
    do {                                \
        if ((dtype) == BF16)            \
            TILE_DOT_BF16(sums, a, b);  \
        else                            \
            TILE_DOT_INT8(sums, a, b);  \
    } while (0)

/* Sums over `depth` times 64 bytes of k for one or two tiles of rows (`high`) and one or two panels (`wide`). */
INLINE void accumulate(int dtype, int high, int wide, const char *const a[2], int64_t stride, const char *const b[2],
                       int64_t depth, Sums sums) {
    TILE_ZERO(0);
    if (wide) TILE_ZERO(1);
    if (high) TILE_ZERO(2);
    if (high && wide) TILE_ZERO(3);
    for (int64_t at = 0; at < depth; at++) {
        TILE_LOAD(4, a[0] + at * TILE_BYTES, stride);
        TILE_LOAD(6, b[0] + at * TILE_ROWS * TILE_BYTES, TILE_BYTES);
        TILE_DOT(dtype, 0, 4, 6);
        if (wide) {
            TILE_LOAD(7, b[1] + at * TILE_ROWS * TILE_BYTES, TILE_BYTES);
            TILE_DOT(dtype, 1, 4, 7);
        }
        if (high) {
            TILE_LOAD(5, a[1] + at * TILE_BYTES, stride);
            TILE_DOT(dtype, 2, 5, 6);
        }
        if (high && wide) TILE_DOT(dtype, 3, 5, 7);
    }
    TILE_STORE(0, sums[0], TILE_BYTES);
    if (wide) TILE_STORE(1, sums[1], TILE_BYTES);
    if (high) TILE_STORE(2, sums[2], TILE_BYTES);
    if (high && wide) TILE_STORE(3, sums[3], TILE_BYTES);
}

/* Up to 32 rows from `row` by one or two panels from `panel`. The last tile of a product starts early enough to be whole;
 * which rows of it another has done is left as it is. */
INLINE void four_tiles(int dtype, const Job *job, int64_t rows, int64_t row, int64_t panel, int wide) {
    const Linear *m = job->matrix;
    int64_t bytes = padded_k(dtype, m->k) * element_bytes(dtype), stride = job->from.stride * element_bytes(dtype);
    int high = rows - row > TILE_ROWS;
    int64_t starts[2];
    const char *a[2], *b[2];
    Sums sums;
    for (int i = 0; i < 2; i++) {
        int64_t start = row + i * TILE_ROWS;
        starts[i] = start + TILE_ROWS <= rows ? start : rows - TILE_ROWS;
        a[i] = (const char *)job->from.rows + starts[i] * stride;
        b[i] = (const char *)m->data + (panel + i) * bytes * PANEL;
    }
    if (high && wide)
        accumulate(dtype, 1, 1, a, stride, b, bytes / TILE_BYTES, sums);
    else if (high)
        accumulate(dtype, 1, 0, a, stride, b, bytes / TILE_BYTES, sums);
    else if (wide)
        accumulate(dtype, 0, 1, a, stride, b, bytes / TILE_BYTES, sums);
    else
        accumulate(dtype, 0, 0, a, stride, b, bytes / TILE_BYTES, sums);
    for (int i = 0; i <= high; i++)
        for (int j = 0; j <= wide; j++) {
            int64_t done = row + i * TILE_ROWS - starts[i], registers = PANEL / LANES;
            finish(job, starts[i] + done, (int)(TILE_ROWS - done), (panel + j) * PANEL, (int)registers,
                   sums[2 * i + j] + done * registers, registers);
        }
}

/* Rows are taken as many at a time as stay in the second cache while all panels pass. */
INLINE void pairs(int dtype, const Job *job, int64_t rows, int64_t first, int64_t last) {
    int64_t bytes = rows * padded_k(dtype, job->matrix->k) * element_bytes(dtype);
    int64_t times = bytes / CACHED_ROW_BYTES + 1, pair = 2 * TILE_ROWS, chunk = up_to((rows + times - 1) / times, pair);
    for (int64_t from = 0; from < rows; from += chunk)
        for (int64_t panel = first; panel < last; panel += 2)
            for (int64_t row = from; row < rows && row < from + chunk; row += pair)
                four_tiles(dtype, job, rows, row, panel, last - panel > 1);
}

void product_in_tiles(const Job *job, int64_t rows, int64_t first, int64_t last) {
    tiles_begin();
    if (job->matrix->dtype == BF16)
        pairs(BF16, job, rows, first, last);
    else
        pairs(INT8, job, rows, first, last);
    tiles_end();
}

enum { CHECK_ROWS = 2 * TILE_ROWS + 7, CHECK_N = 2 * PANEL + 8, CHECK_K = 128 }; /* two tiles and one, of each */

/* Whether a product in tiles is the vectors': of small whole numbers, whose sums are exact in any order. */
static int as_by_vectors(int dtype) {
    union {
        bf16 wide[3 * PANEL * CHECK_K];
        int8_t narrow[3 * PANEL * CHECK_K];
    } weights, rows;
    float results[2][CHECK_ROWS * CHECK_N], scratch[CHECK_ROWS * 48], ones[3 * PANEL];
    int32_t zeros[3 * PANEL] = {0};
    for (int i = 0; i < 3 * PANEL * CHECK_K; i++) {
        int weight = i * 5 % 7 - i % 3, value = i * 3 % 11 - 5;
        if (dtype == BF16)
            weights.wide[i] = to_bf16((float)weight), rows.wide[i] = to_bf16((float)value);
        else
            weights.narrow[i] = (int8_t)weight, rows.narrow[i] = (int8_t)(value + 128);
    }
    for (int i = 0; i < 3 * PANEL; i++) ones[i] = 1.0f;
    Linear matrix = {.dtype = dtype, .n = CHECK_N, .k = CHECK_K, .data = &weights, .scale = ones, .sums = zeros};
    Operand from = {&rows, CHECK_K, ones};
    for (int tiles = 0; tiles < 2; tiles++) {
        Target to = {results[tiles], CHECK_N, 0, NO_ACTIVATION, 0};
        matrix.tiles = tiles;
        product(&matrix, from, CHECK_ROWS, to, 0, 1, scratch);
    }
    return memcmp(results[0], results[1], sizeof results[0]) == 0;
}

#endif

/* Ask once for the use of tiles and see them work; matrices may have `tiles` set only where this gives USABLE. */
EXPORTED int64_t start_tiles(void) {
#if HAS_TILES
    if (!cpu_has_tiles()) return NOT_IN_CPU;
    if (!tiles_permitted()) return NOT_PERMITTED;
    return as_by_vectors(BF16) && as_by_vectors(INT8) ? USABLE : WRONG;
#else
    return NONE_COMPILED;
#endif
}

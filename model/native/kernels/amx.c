/* Products in tiles, over the panels that the vectors read: what 64 bytes of k hold for 16 outputs is a tile as it lies.
 *
 * Any number of rows goes this way. Sums of bf16 have an order of their own (see TILE_DOT_BF16), so a row has the same bits
 * whatever is beside it only if none ever goes to the vectors; those of int8 are exact. */
#define _GNU_SOURCE /* syscall */
#include "amx.h"

#include "gemm.h"

enum { NONE_COMPILED = 0, USABLE = 1, NOT_IN_CPU = 2, NOT_PERMITTED = 3, WRONG = 4 };

#if HAS_TILES

#define PAIR (2 * TILE_ROWS)
#define WEIGHTS (TILE_ROWS * TILE_BYTES) /* of a panel, that a step in k takes */
#define AHEAD (4 * WEIGHTS)              /* of weights that may be in no cache yet: they are asked for so much earlier */

#define TILE_DOT(dtype, sums, a, b)     \
    do {                                \
        if ((dtype) == BF16)            \
            TILE_DOT_BF16(sums, a, b);  \
        else                            \
            TILE_DOT_INT8(sums, a, b);  \
    } while (0)

/* Up to PAIR rows from `row`, of which `done` are another's to finish, by one or (`wide`) two panels from `panel`. */
typedef struct {
    int64_t row, panel;
    int rows, done, wide;
} Tiles;

/* Sums that wait for their scales, biases, activations and places: the vector units have time for them while the tiles of the
 * next are multiplied. Those of rows before of.done are. */
typedef struct {
    Tiles of;
    vec sums[PAIR][2 * PANEL / LANES];
} Waiting;

INLINE void finish_some(const Job *job, Waiting *w, int rows) {
    int count = (int)smaller(rows, w->of.rows - w->of.done), registers = PANEL / LANES;
    if (count <= 0) return;
    finish(job, w->of.row + w->of.done, count, w->of.panel * PANEL, w->of.wide ? 2 * registers : registers,
           w->sums[w->of.done], 2 * registers);
    w->of.done += count;
}

/* Asks for where `count` rows of sums from `first` will go. */
INLINE void expect(const Target *to, const Tiles *t, int first, int count) {
    int64_t size = to->bf16_rows ? 2 : 4;
    for (int row = first; row < first + count && row < t->rows; row++) {
        const char *at = (const char *)to->rows + ((t->row + row) * to->stride + t->panel * PANEL) * size;
        __builtin_prefetch(at, 1, 3);
        if (t->wide && size == 4) __builtin_prefetch(at + PANEL * size, 1, 3);
    }
}

/* Asks for the weights of a later step in k: behind a panel come those of the pair after this one. */
INLINE void fetch(const char *const b[2], int wide, int64_t at, int64_t bytes) {
    int64_t ahead = at + AHEAD < bytes || !wide ? at + AHEAD : at + AHEAD + bytes;
    for (int line = 0; line < TILE_ROWS; line++) {
        __builtin_prefetch(b[0] + ahead + line * TILE_BYTES, 0, 3);
        if (wide) __builtin_prefetch(b[1] + ahead + line * TILE_BYTES, 0, 3);
    }
}

/* Sums over `steps` times 64 bytes of k for one or (`high`) two tiles of rows; finishes those `before` meanwhile. */
INLINE void accumulate(int dtype, int high, int wide, int cold, const Job *job, const Tiles *now, const char *a,
                       int64_t stride, const char *const b[2], int64_t steps, vec (*sums)[2 * PANEL / LANES],
                       Waiting *before) {
    int each = (int)((PAIR + steps - 1) / steps);
    TILE_ZERO(0);
    if (wide) TILE_ZERO(1);
    if (high) TILE_ZERO(2);
    if (high && wide) TILE_ZERO(3);
    for (int64_t at = 0; at < steps; at++) {
        TILE_LOAD(6, b[0] + at * WEIGHTS, TILE_BYTES);
        TILE_LOAD(4, a + at * TILE_BYTES, stride);
        TILE_DOT(dtype, 0, 4, 6);
        if (wide) {
            TILE_LOAD(7, b[1] + at * WEIGHTS, TILE_BYTES);
            TILE_DOT(dtype, 1, 4, 7);
        }
        if (high) {
            TILE_LOAD(5, a + TILE_ROWS * stride + at * TILE_BYTES, stride);
            TILE_DOT(dtype, 2, 5, 6);
        }
        if (high && wide) TILE_DOT(dtype, 3, 5, 7);
        if (cold) fetch(b, wide, at * WEIGHTS, steps * WEIGHTS);
        expect(&job->to, now, (int)at * each, each);
        finish_some(job, before, each);
    }
    finish_some(job, before, PAIR);
    const int64_t row = sizeof *sums;
    TILE_STORE(0, sums[0], row);
    if (wide) TILE_STORE(1, (float *)sums[0] + PANEL, row);
    if (high) TILE_STORE(2, sums[TILE_ROWS], row);
    if (high && wide) TILE_STORE(3, (float *)sums[TILE_ROWS] + PANEL, row);
}

INLINE void multiply_tiles(int dtype, int cold, const Job *job, const Tiles *t, vec (*sums)[2 * PANEL / LANES],
                           Waiting *before) {
    int64_t bytes = padded_k(dtype, job->matrix->k) * element_bytes(dtype), steps = bytes / TILE_BYTES;
    int64_t stride = job->from.stride * element_bytes(dtype);
    const char *a = (const char *)job->from.rows + t->row * stride;
    const char *panel = (const char *)job->matrix->data + t->panel * bytes * PANEL, *b[2] = {panel, panel + bytes * PANEL};
    if (t->rows > TILE_ROWS && t->wide)
        accumulate(dtype, 1, 1, cold, job, t, a, stride, b, steps, sums, before);
    else if (t->rows > TILE_ROWS)
        accumulate(dtype, 1, 0, cold, job, t, a, stride, b, steps, sums, before);
    else if (t->wide)
        accumulate(dtype, 0, 1, cold, job, t, a, stride, b, steps, sums, before);
    else
        accumulate(dtype, 0, 0, cold, job, t, a, stride, b, steps, sums, before);
}

/* The next rows of a product, `rows` in all: the last begin early enough for their tiles to be whole, which is what tiles are
 * configured as unless these rows are all there are. */
INLINE Tiles tiles_at(int64_t rows, int64_t row, int64_t panel, int wide) {
    int64_t left = rows - row, height = left > TILE_ROWS ? PAIR : TILE_ROWS;
    if (rows <= height) return (Tiles){0, panel, (int)rows, 0, wide};
    int64_t start = smaller(row, rows - height);
    return (Tiles){start, panel, (int)height, (int)(row - start), wide};
}

/* Rows are taken as many at a time as stay in the second cache while all panels pass. */
INLINE void pairs(int dtype, const Job *job, int64_t rows, int64_t first, int64_t last) {
    int64_t bytes = rows * padded_k(dtype, job->matrix->k) * element_bytes(dtype);
    int64_t times = bytes / CACHED_ROW_BYTES + 1, chunk = up_to((rows + times - 1) / times, PAIR);
    Waiting waiting[2], *now = waiting, *before = waiting + 1;
    before->of = (Tiles){0};
    for (int64_t from = 0; from < rows; from += chunk)
        for (int64_t panel = first; panel < last; panel += 2)
            for (int64_t row = from; row < rows && row < from + chunk; row += PAIR) {
                now->of = tiles_at(rows, row, panel, last - panel > 1);
                if (row == from) multiply_tiles(dtype, 1, job, &now->of, now->sums, before);
                else multiply_tiles(dtype, 0, job, &now->of, now->sums, before);
                Waiting *finished = before;
                before = now, now = finished;
            }
    finish_some(job, before, PAIR);
}

void product_in_tiles(const Job *job, int64_t rows, int64_t first, int64_t last) {
    int low = (int)smaller(rows, TILE_ROWS), high = rows > TILE_ROWS && rows < PAIR ? (int)rows - TILE_ROWS : TILE_ROWS;
    tiles_begin(low, high);
    if (job->matrix->dtype == BF16)
        pairs(BF16, job, rows, first, last);
    else
        pairs(INT8, job, rows, first, last);
    tiles_end();
}

enum { CHECK_ROWS = PAIR + 7, CHECK_N = 2 * PANEL + 8, CHECK_K = 128 }; /* two tiles and one, of each */

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
    const int counts[] = {CHECK_ROWS, PAIR - 5, TILE_ROWS, 1};
    for (int i = 0; i < 4; i++) {
        for (int tiles = 0; tiles < 2; tiles++) {
            Target to = {results[tiles], CHECK_N, 0, NO_ACTIVATION, 0};
            matrix.tiles = tiles;
            product(&matrix, from, counts[i], to, 0, 1, scratch);
        }
        if (memcmp(results[0], results[1], counts[i] * CHECK_N * sizeof **results)) return 0;
    }
    return 1;
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

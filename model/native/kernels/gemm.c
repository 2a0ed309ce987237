/* Matrix products by vectors: of few rows at the speed of memory, of many at that of the vector units.
 *
 * Invariant: each output is one chain of multiply-adds over k, ascending, whatever the number of rows, so a row's
 * result does not depend on its neighbours. Threads divide the outputs (panels, and rows where there are many), never a
 * sum. A matrix that may use AMX tiles is multiplied by amx.c, in bfloat16 whatever the number of rows. */
#include "gemm.h"

#include "adapted_rows.h"
#include "amx.h"
#include "dot.h"
#include "epilogue.h"
#include "float_kernels.h"
#include "groups.h"

#define MIN_TILED_INT8_ROWS 3 /* fewer are faster by vectors, and the bits are the same */
#define L2_BYTES 524288       /* of weights that are used for all rows before the next */
#define MIN_PART_ROWS 64      /* of one thread, where threads divide rows too */
#define ROW_BLOCK 16          /* rows of a tile, which threads do not divide */

_Static_assert(KERNEL_PANELS * PANEL_WIDTH <= GEMM_SCRATCH, "a row's sums must fit its scratch");

int operand_kind(const PackedMatrix *matrix) {
    if (matrix->dtype == BF16) return HAS_BF16_DOT ? BF16 : F32;
    return matrix->group ? GROUPS : (int)matrix->dtype;
}

int64_t operand_bytes(const PackedMatrix *matrix) {
    int kind = operand_kind(matrix);
    if (kind == GROUPS) return grouped_row_bytes(matrix);
    return odd_lines(padded_k(kind, matrix->k) * element_bytes(kind));
}

void write_operand(const PackedMatrix *matrix, const float *from, void *to, float *scale) {
    int kind = operand_kind(matrix);
    int64_t k = matrix->k;
    if (kind == GROUPS) {
        write_grouped_row(matrix, from, to);
    } else if (kind == F32) {
        memcpy(to, from, k * sizeof(float));
    } else if (kind == BF16) {
        int64_t i = 0;
        for (; i + LANES <= k; i += LANES) store_bf16((bf16 *)to + i, load(from + i));
        for (; i < k; i++) ((bf16 *)to)[i] = to_bf16(from[i]);
        for (; i < padded_k(BF16, k); i++) ((bf16 *)to)[i] = 0;
    } else { /* unsigned bytes around 128 where the integer dot product takes them so */
        float most = max_abs(from, k), inverse = most > 0.0f ? 127.0f / most : 0.0f;
        int64_t i = 0;
        *scale = most / 127.0f;
        for (; i + LANES <= k; i += LANES) store_int8((int8_t *)to + i, round_vec(load(from + i) * inverse) + ROW_ZERO);
        for (; i < k; i++) ((uint8_t *)to)[i] = (uint8_t)((int)__builtin_rintf(from[i] * inverse) + ROW_ZERO);
        for (; i < padded_k(INT8, k); i++) ((uint8_t *)to)[i] = ROW_ZERO;
    }
}

void narrow_in_place(float *row, int64_t k) { /* ascending: what is overwritten has been read */
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) store_bf16((bf16 *)row + i, load(row + i));
    for (; i < k; i++) {
        float wide;
        memcpy(&wide, (char *)row + i * sizeof wide, sizeof wide);
        bf16 narrow = to_bf16(wide);
        memcpy((char *)row + i * sizeof narrow, &narrow, sizeof narrow);
    }
}

#if !HAS_INT8_DOT
/* The dot product of each pair of 16-bit numbers with the pair in x. */
INLINE ivec dot_pairs(ivec w, int32_t x) {
#if defined(__AVX512BW__)
    return (ivec)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    return (ivec)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x));
#else
    return (w << 16 >> 16) * (x & 0xffff) + (w >> 16) * (x >> 16);
#endif
}
#endif

#if HAS_INT8_BLOCKS
/* kernel_int8 of an even number of rows, two at a time. */
INLINE void kernel_int8_blocks(int rows, const int8_t *const *a, const int8_t *b, int64_t count, WeightStream *stream,
                               Accumulators acc) {
    ivec sums[KERNEL_ROWS][PANEL_VECS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i += 2)
#pragma GCC unroll 4
        for (int j = 0; j < PANEL_VECS; j++) {
            sums[i][j] = (ivec)acc[i][j], sums[i + 1][j] = (ivec)acc[i + 1][j];
            swap_blocks(&sums[i][j], &sums[i + 1][j]);
        }
    for (int64_t k = 0; k < count; k += 8, b += 8 * PANEL_WIDTH) {
        prefetch_weights(1, b, stream);
        prefetch_weights(1, b + CACHE_LINE, stream);
        int8x16_t x[KERNEL_ROWS / 2];
#pragma GCC unroll 4
        for (int i = 0; i < rows; i += 2) x[i / 2] = two_rows(a[i] + k, a[i + 1] + k);
#pragma GCC unroll 4
        for (int j = 0; j < PANEL_VECS; j++) {
            ivec low, high;
            memcpy(&low, b + j * 4 * LANES, sizeof low);
            memcpy(&high, b + CACHE_LINE + j * 4 * LANES, sizeof high);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i += 2) dot_blocks(&sums[i][j], &sums[i + 1][j], x[i / 2], low, high);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i += 2)
#pragma GCC unroll 4
        for (int j = 0; j < PANEL_VECS; j++) {
            swap_blocks(&sums[i][j], &sums[i + 1][j]);
            acc[i][j] = (vec)sums[i][j], acc[i + 1][j] = (vec)sums[i + 1][j];
        }
}
#endif

/* Sums are integers, in the bits of `acc`. */
INLINE void kernel_int8(int rows, int vecs, const void *const *a, const int8_t *b, int64_t panel, int64_t count,
                      WeightStream *stream, Accumulators acc) {
#if HAS_INT8_BLOCKS
    if (rows > 1) {
        kernel_int8_blocks(rows, (const int8_t *const *)a, b, count, stream, acc);
        return;
    }
#endif
    for (int64_t k = 0; k < count; k += 4, b += 4 * PANEL_WIDTH) {
        prefetch_weights(vecs / PANEL_VECS, b, stream);
        ivec w[KERNEL_PANELS * PANEL_VECS];
#if !HAS_INT8_DOT
        ivec odd[KERNEL_PANELS * PANEL_VECS]; /* bytes 1 and 3 of each four; w keeps 0 and 2 */
#endif
#pragma GCC unroll 4
        for (int j = 0; j < vecs; j++) {
            memcpy(w + j, b + weight_offset(j, panel, 4), sizeof *w);
#if !HAS_INT8_DOT
            odd[j] = (ivec)((svec)w[j] >> 8), w[j] = (ivec)((svec)w[j] << 8 >> 8);
#endif
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            uint32_t four;
            memcpy(&four, (const uint8_t *)a[i] + k, 4);
#pragma GCC unroll 4
            for (int j = 0; j < vecs; j++) {
#if HAS_INT8_DOT
                acc[i][j] = (vec)dot_bytes((ivec)acc[i][j], (int32_t)four - (ivec){0}, w[j]);
#else
                acc[i][j] = (vec)((ivec)acc[i][j] + dot_pairs(w[j], (int32_t)(four & 0x00ff00ff)) +
                                  dot_pairs(odd[j], (int32_t)(four >> 8 & 0x00ff00ff)));
#endif
            }
        }
    }
}

/* Ask for where a kernel's outputs go, so that those lines are there when its sums are: they are a few of each of
 * many rows, which no prefetcher of the hardware foresees. */
INLINE void prefetch_outputs(const Output *to, int rows, int panels, int64_t row, int64_t column) {
    int64_t size = to->bf16_rows ? 2 : 4;
    const char *at = (const char *)to->rows + (row * to->stride + column) * size;
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++, at += to->stride * size)
        for (int64_t byte = 0; byte < panels * PANEL_WIDTH * size; byte += CACHE_LINE)
            __builtin_prefetch(at + byte, 1, 3);
}

/* What one call of the kernel computes: `count` rows from `row` times whole panels from `column`, over k in [start,
 * stop). */
typedef struct {
    int64_t row, column, start, stop;
    int count;
    int cold; /* whether the weights may be in no cache yet */
    const Ahead *ahead;
} KernelTile;

enum { ASKS_FOR_NOTHING, ASKS_AHEAD, COLD }; /* what a kernel asks memory for: a constant, as it costs registers */

/* Compute a tile of at most `rows` rows and of `panels` panels, which are constants as `asks` is. Sums over a part of k
 * are kept in the product's scratch until the last part. */
INLINE void kernel_asking(int asks, int dtype, int rows, int panels, const Product *p, KernelTile t) {
    const PackedMatrix *m = p->matrix;
    int64_t panel = padded_k(dtype, m->k) * PANEL_WIDTH, count = t.stop - t.start, bytes = element_bytes(dtype);
    const char *b = (const char *)m->data + (t.column / PANEL_WIDTH * panel + t.start * PANEL_WIDTH) * bytes;
    WeightStream stream = {.end = b + count * PANEL_WIDTH * bytes, .panel_bytes = panel * bytes, .cold = asks == COLD};
    if (asks == ASKS_AHEAD) stream.ahead = t.ahead;
    int operand = dtype == BF16 && !HAS_BF16_DOT ? F32 : dtype;
    const void *a[KERNEL_ROWS];
    Accumulators acc;
    if (rows == KERNEL_ROWS && t.count == KERNEL_ROWS && t.stop == m->k)
        prefetch_outputs(&p->output, rows, panels, t.row, t.column);
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        int64_t at = t.row + (i < t.count ? i : t.count - 1);
        a[i] = (const char *)p->operand.rows + (at * p->operand.stride + t.start) * element_bytes(operand);
#pragma GCC unroll 4
        for (int j = 0; j < panels * PANEL_VECS; j++)
            acc[i][j] = t.start ? load(p->scratch + at * GEMM_SCRATCH + j * LANES) : splat(0.0f);
    }
    if (dtype == F32)
        kernel_f32(rows, panels * PANEL_VECS, (const float *const *)a, (const float *)b, panel, count, &stream, acc);
    else if (dtype == BF16)
        kernel_bf16(rows, panels * PANEL_VECS, a, (const bf16 *)b, panel, count, &stream, acc);
    else
        kernel_int8(rows, panels * PANEL_VECS, a, (const int8_t *)b, panel, count, &stream, acc);
    Accumulators done; /* a copy, so that acc stays in registers */
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < panels * PANEL_VECS; j++) {
            if (t.stop == m->k)
                done[i][j] = acc[i][j];
            else if (i < t.count)
                store(p->scratch + (t.row + i) * GEMM_SCRATCH + j * LANES, acc[i][j]);
        }
    if (t.stop == m->k)
        epilogue(p, &(SumTile){t.row, t.column, t.count, panels * PANEL_VECS, done[0], KERNEL_PANELS * PANEL_VECS});
}

INLINE void kernel(int dtype, int rows, int panels, const Product *p, KernelTile t) {
    if (t.cold)
        kernel_asking(COLD, dtype, rows, panels, p, t);
    else if (rows < KERNEL_ROWS || t.ahead)
        kernel_asking(ASKS_AHEAD, dtype, rows, panels, p, t);
    else
        kernel_asking(ASKS_FOR_NOTHING, dtype, rows, panels, p, t);
}

/* Multiply all rows by `panels` panels (a constant) from `column`, over k in [start, stop). */
INLINE void multiply_rows(int dtype, int panels, const Product *p, const RowPass *pass, int64_t column, int64_t start,
                          int64_t stop) {
    KernelTile t = {.column = column, .start = start, .stop = stop, .count = KERNEL_ROWS};
    int adapts = stop == p->matrix->k;
    Ahead ahead;
    for (int64_t block = 0; t.row < pass->rows; block++, t.row += KERNEL_ROWS) {
        t.cold = pass->cold && !block;
        t.ahead = may_ask(pass, block) ? asked_ahead(p, pass, column, panels, adapts, block, &ahead) : NULL;
        if (t.row + KERNEL_ROWS > pass->rows) break;
        kernel(dtype, KERNEL_ROWS, panels, p, t);
    }
    t.count = (int)(pass->rows - t.row);
    if (t.count > 4)
        kernel(dtype, KERNEL_ROWS, panels, p, t);
    else if (t.count > 2)
        kernel(dtype, 4, panels, p, t);
    else if (t.count == 2)
        kernel(dtype, 2, panels, p, t);
    else if (t.count == 1)
        kernel(dtype, 1, panels, p, t);
}

/* Multiply all rows by panels [first, last): as many weights at a time as stay in the second cache while all rows
 * pass. */
INLINE void multiply_panels(int dtype, const Product *p, int64_t rows, int64_t first, int64_t last) {
    int64_t k = p->matrix->k, bytes = element_bytes(dtype), panel_bytes = padded_k(dtype, k) * PANEL_WIDTH * bytes;
    int64_t depth = L2_BYTES / (KERNEL_PANELS * PANEL_WIDTH * bytes) / 64 * 64;
    RowPass pass = {.rows = rows, .block_rows = KERNEL_ROWS, .cold = 1};
    for (int64_t panel = first; panel < last; panel += KERNEL_PANELS)
        for (int64_t start = 0; start < k; start += depth) {
            int64_t stop = min_i64(start + depth, k), column = panel * PANEL_WIDTH;
            int64_t after = stop < k ? panel : panel + KERNEL_PANELS, from = stop < k ? stop : 0;
            NextPanels next = {NULL, (min_i64(from + depth, k) - from) * PANEL_WIDTH * bytes, panel_bytes,
                                min_i64(KERNEL_PANELS, last - after)};
            if (next.panels > 0) next.at = (const char *)p->matrix->data + after * panel_bytes + from * PANEL_WIDTH * bytes;
            pass.next = next, pass.steps = (stop - start) / (dtype == F32 ? 1 : 4 / bytes);
            switch (last - panel) {
            case 1: multiply_rows(dtype, 1, p, &pass, column, start, stop); break;
#if KERNEL_PANELS > 1
            case 2: multiply_rows(dtype, 2, p, &pass, column, start, stop); break;
#endif
            default: multiply_rows(dtype, KERNEL_PANELS, p, &pass, column, start, stop);
            }
            pass.cold = full_blocks(rows, KERNEL_ROWS) < 2; /* else the last blocks asked for what comes */
        }
}

void gemm_panels(const PackedMatrix *matrix, Operand operand, int64_t rows, Output output, int64_t first, int64_t last,
                 float *scratch) {
    Product p = {matrix, operand, output, scratch};
    if (matrix->group) {
        multiply_groups(&p, rows, first, last);
        return;
    }
#if HAS_TILES
    int64_t least = matrix->dtype == BF16 ? 1 : MIN_TILED_INT8_ROWS;
    if (matrix->tiles && matrix->dtype != F32 && rows >= least) {
        amx_gemm(&p, rows, first, last);
        return;
    }
#endif
    if (matrix->dtype == F32)
        multiply_panels(F32, &p, rows, first, last);
    else if (matrix->dtype == BF16)
        multiply_panels(BF16, &p, rows, first, last);
    else
        multiply_panels(INT8, &p, rows, first, last);
}

/* Into how many parts to divide the rows, each computed by threads / parts threads, which divide the panels. More than
 * one where that saves a tenth of what the busiest thread computes: its part reads all weights again. */
static int row_parts(int64_t panels, int64_t rows, int threads) {
    int64_t least = (panels + threads - 1) / threads * rows;
    int parts = 1;
    for (int p = 2; p <= threads && rows / p >= MIN_PART_ROWS; p++) {
        int64_t each = threads / p, most = (panels + each - 1) / each * ((rows + p - 1) / p);
        if (threads % p == 0 && 10 * most < 9 * least) least = most, parts = p;
    }
    return parts;
}

void gemm(const PackedMatrix *matrix, Operand operand, int64_t rows, Output output, int thread, int threads,
          float *scratch) {
    int64_t count = panel_count(matrix), parts = row_parts(count, rows, threads), each = threads / parts;
    int64_t part = thread % parts, place = thread / parts, blocks = round_up(rows, ROW_BLOCK) / ROW_BLOCK;
    int64_t first = blocks * part / parts * ROW_BLOCK, last = min_i64(rows, blocks * (part + 1) / parts * ROW_BLOCK);
    operand.rows = (const char *)operand.rows + first * operand.stride * element_bytes(operand_kind(matrix));
    if (operand.scale) operand.scale += first;
    output.rows = (char *)output.rows + first * output.stride * (output.bf16_rows ? 2 : 4);
    output.first_row += first;
    gemm_panels(matrix, operand, last - first, output, count * place / each, count * (place + 1) / each, scratch);
}

/* Matrix products for few rows at the speed of memory and for many at that of the vector units.
 *
 * Each output is one chain of multiply-adds over k, ascending, whatever the number of rows: a row's result does not
 * depend on its neighbours. Threads share the outputs, never a sum. A matrix that may use tiles is multiplied there
 * (amx.c), in bfloat16 whatever the number of rows. */
#include "gemm.h"

#include "amx.h"

#ifdef __AVX512F__
#define PANELS 3 /* 8 x 3 accumulators of the 32 registers */
#define ROWS 8
#else
#define PANELS 1 /* 6 x 1 accumulators of two AVX2 or four NEON registers each */
#define ROWS 6
#endif
#define PARTS (PANEL / LANES) /* registers that the outputs of a panel fill */
#define LEAST_INT8_ROWS 3 /* in tiles: one or two are faster by vectors, and the bits are the same */
#define L2_BYTES 524288 /* of weights that are used for all rows before the next */
#define LINE 64         /* bytes that memory gives at once, and that a step in k takes of a panel */
#define AHEAD (32 * LINE)

#if defined(__AVX512BF16__)
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && LANES == 8)
#define HAS_INT8_DOT 1
#else
#define HAS_INT8_DOT 0
#endif

int operand_kind(const Linear *matrix) {
    if (matrix->dtype == BF16) return HAS_BF16_DOT ? BF16 : F32;
    return (int)matrix->dtype;
}

int64_t operand_bytes(const Linear *matrix) {
    int kind = operand_kind(matrix);
    return kind == F32 ? up_to(matrix->k, PANEL) * 4 : padded_k(kind, matrix->k) * element_bytes(kind);
}

void write_operand(int kind, const float *from, int64_t k, void *to, float *scale) {
    if (kind == F32) {
        memcpy(to, from, k * sizeof(float));
    } else if (kind == BF16) {
        int64_t i = 0;
        for (; i + LANES <= k; i += LANES) store_bf16((bf16 *)to + i, load(from + i));
        for (; i < k; i++) ((bf16 *)to)[i] = to_bf16(from[i]);
        for (; i < padded_k(BF16, k); i++) ((bf16 *)to)[i] = 0;
    } else { /* unsigned bytes around 128, as the integer dot product wants them */
        float most = largest_size(from, k), inverse = most > 0.0f ? 127.0f / most : 0.0f;
        int64_t i = 0;
        *scale = most / 127.0f;
        for (; i + LANES <= k; i += LANES) store_int8((int8_t *)to + i, round_vec(load(from + i) * inverse) + 128);
        for (; i < k; i++) ((uint8_t *)to)[i] = (uint8_t)((int)__builtin_rintf(from[i] * inverse) + 128);
        for (; i < padded_k(INT8, k); i++) ((uint8_t *)to)[i] = 128;
    }
}

void narrow_in_place(float *row, int64_t k) { /* what is written has been read */
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) store_bf16((bf16 *)row + i, load(row + i));
    for (; i < k; i++) {
        float wide;
        memcpy(&wide, (char *)row + i * sizeof wide, sizeof wide);
        bf16 narrow = to_bf16(wide);
        memcpy((char *)row + i * sizeof narrow, &narrow, sizeof narrow);
    }
}

/* Sums of mr rows times nv registers' worth of outputs. */
typedef vec Sums[ROWS][PANELS * PARTS];

/* Where register j's weights are from the first's, at `step` elements an output, panels being `panel` apart. */
INLINE int64_t at_part(int j, int64_t panel, int step) { return j / PARTS * panel + j % PARTS * LANES * step; }

/* Where weights are, in bytes. */
typedef struct {
    const char *end; /* of the block's first panel */
    int64_t panel;   /* from one panel to the next */
} Place;

/* Asks memory for weights a little before they are wanted: the block's panels, and towards their end what follows the
 * last of them. One row is as fast as memory without. Weights are to stay in caches: the third may hold them all until the
 * next step. */
INLINE void fetch(int mr, int panels, const void *weights, Place place) {
    if (mr == 1) return;
    const char *line = (const char *)weights + AHEAD;
    if (line >= place.end) line += (panels - 1) * place.panel;
#pragma GCC unroll 4
    for (int j = 0; j < panels; j++, line += place.panel) __builtin_prefetch(line, 0, 3);
}

/* Sums over k in [0, count), continued from acc. Constant mr and nv unroll completely. */
INLINE void block_f32(int mr, int nv, const float *const *a, const float *b, int64_t panel, int64_t count,
                      int cold, Place place, Sums acc) {
    for (int64_t k = 0; k < count; k++, b += PANEL) {
        if (cold) fetch(mr, nv / PARTS, b, place);
        vec w[PANELS * PARTS];
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) w[j] = load(b + at_part(j, panel, 1));
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            vec x = splat(a[i][k]);
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++) acc[i][j] = fma_vec(x, w[j], acc[i][j]);
        }
    }
}

INLINE void block_bf16(int mr, int nv, const void *const *a, const bf16 *b, int64_t panel, int64_t count,
                      int cold, Place place, Sums acc) {
    for (int64_t k = 0; k < count; k += 2, b += 2 * PANEL) {
        if (cold) fetch(mr, nv / PARTS, b, place);
        uvec w[PANELS * PARTS];
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) memcpy(w + j, b + at_part(j, panel, 2), sizeof *w);
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
#if HAS_BF16_DOT
            int32_t pair;
            memcpy(&pair, (const bf16 *)a[i] + k, 4);
            __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++) acc[i][j] = (vec)_mm512_dpbf16_ps((__m512)acc[i][j], x, (__m512bh)w[j]);
#else
            const float *row = a[i];
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++) {
                acc[i][j] = fma_vec(splat(row[k]), (vec)(w[j] << 16), acc[i][j]);
                if (k + 1 < count) acc[i][j] = fma_vec(splat(row[k + 1]), (vec)(w[j] & 0xffff0000u), acc[i][j]);
            }
#endif
        }
    }
}

#if HAS_INT8_DOT
/* sums + the dot product of each four of w's bytes, which have a sign, with those of x, which have none. */
INLINE ivec dot_fours(ivec sums, ivec w, uint32_t x) {
#if LANES == 16
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32((int)x), (__m512i)w);
#else
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sums, _mm256_set1_epi32((int)x), (__m256i)w);
#endif
}
#else
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

/* Integer sums in the bits of acc. */
INLINE void block_int8(int mr, int nv, const void *const *a, const int8_t *b, int64_t panel, int64_t count,
                      int cold, Place place, Sums acc) {
    for (int64_t k = 0; k < count; k += 4, b += 4 * PANEL) {
        if (cold) fetch(mr, nv / PARTS, b, place);
        ivec w[PANELS * PARTS];
#if !HAS_INT8_DOT
        ivec odd[PANELS * PARTS]; /* bytes 1 and 3 of each four, w keeping 0 and 2 */
#endif
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) {
            memcpy(w + j, b + at_part(j, panel, 4), sizeof *w);
#if !HAS_INT8_DOT
            odd[j] = (ivec)((svec)w[j] >> 8), w[j] = (ivec)((svec)w[j] << 8 >> 8);
#endif
        }
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            uint32_t four;
            memcpy(&four, (const uint8_t *)a[i] + k, 4);
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++) {
#if HAS_INT8_DOT
                acc[i][j] = (vec)dot_fours((ivec)acc[i][j], w[j], four);
#else
                acc[i][j] = (vec)((ivec)acc[i][j] + dot_pairs(w[j], (int32_t)(four & 0x00ff00ff)) +
                                  dot_pairs(odd[j], (int32_t)(four >> 8 & 0x00ff00ff)));
#endif
            }
        }
    }
}

enum { FLOATS, ADDED, HALVES }; /* outputs: put, added to what is there, or rounded to bf16 and put */

/* Up to LANES outputs to where they belong. */
INLINE void put(const Target *to, int form, int64_t row, int64_t column, int64_t left, vec sum) {
    int64_t at = row * to->stride + column;
    if (form == HALVES) {
        bf16 *out = (bf16 *)to->rows + at, rest[LANES];
        if (left >= LANES) {
            store_bf16(out, sum);
        } else {
            store_bf16(rest, sum);
            memcpy(out, rest, left * sizeof *rest);
        }
        return;
    }
    float *out = (float *)to->rows + at, rest[LANES];
    if (left >= LANES) {
        store(out, form == ADDED ? load(out) + sum : sum);
        return;
    }
    store(rest, sum);
    for (int64_t i = 0; i < left; i++) out[i] = form == ADDED ? out[i] + rest[i] : rest[i];
}

/* Sums of `count` rows, of one activation and one form of outputs, which are constants. */
INLINE void finish_as(int activation, int form, const Job *job, int64_t row, int count, int64_t column, int registers,
                      const vec *sums, int64_t stride) {
    const Linear *m = job->matrix;
    Target to = job->to; /* a copy: what is stored could be it, for all that the compiler knows */
    for (int j = 0; j < registers; j++, column += LANES) {
        vec bias = m->bias ? load(m->bias + column) : splat(-0.0f); /* which changes nothing, not even a zero's sign */
        int64_t left = m->n - column;
        if (left >= LANES)
            for (int i = 0; i < count; i++)
                put(&to, form, row + i, column, LANES, activate(activation, sums[i * stride + j] + bias));
        else
            for (int i = 0; i < count; i++)
                put(&to, form, row + i, column, left, activate(activation, sums[i * stride + j] + bias));
    }
}

INLINE void finish_in(int form, const Job *job, int64_t row, int count, int64_t column, int registers, const vec *sums,
                      int64_t stride) {
    switch (job->to.activation) {
    case RELU: finish_as(RELU, form, job, row, count, column, registers, sums, stride); break;
    case GELU: finish_as(GELU, form, job, row, count, column, registers, sums, stride); break;
    case GELU_TANH: finish_as(GELU_TANH, form, job, row, count, column, registers, sums, stride); break;
    case SILU: finish_as(SILU, form, job, row, count, column, registers, sums, stride); break;
    case TANH: finish_as(TANH, form, job, row, count, column, registers, sums, stride); break;
    default: finish_as(NO_ACTIVATION, form, job, row, count, column, registers, sums, stride);
    }
}

__attribute__((noinline)) void finish(const Job *job, int64_t row, int count, int64_t column, int registers, vec *sums,
                                      int64_t stride) {
    const Linear *m = job->matrix;
    while (column + (registers - 1) * LANES >= m->n) registers--; /* a panel's outputs beyond the last */
    for (int j = 0; m->dtype == INT8 && j < registers; j++) {
        ivec shift;
        memcpy(&shift, m->sums + column + j * LANES, sizeof shift);
        vec scale = load(m->scale + column + j * LANES);
        for (int i = 0; i < count; i++) {
            vec *sum = sums + i * stride + j;
            *sum = __builtin_convertvector((ivec)*sum - 128 * shift, vec) * scale * job->from.scale[row + i];
        }
    }
    if (job->to.bf16_rows)
        finish_in(HALVES, job, row, count, column, registers, sums, stride);
    else if (job->to.add)
        finish_in(ADDED, job, row, count, column, registers, sums, stride);
    else
        finish_in(FLOATS, job, row, count, column, registers, sums, stride);
}

/* Asks for where a block's outputs go, so that they are there when its sums are: these are a few lines of each of many
 * rows, which no prefetcher of the hardware foresees. */
INLINE void expect(const Target *to, int mr, int nv, int64_t row, int64_t column) {
    int64_t size = to->bf16_rows ? 2 : 4;
    const char *at = (const char *)to->rows + (row * to->stride + column) * size;
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++, at += to->stride * size)
        for (int64_t byte = 0; byte < nv * PANEL * size; byte += LINE) __builtin_prefetch(at + byte, 1, 3);
}

/* `count` rows from `row` (at most mr) times nv panels from `column`, k in [start, stop);
 * cold: they may be in no cache yet. */
INLINE void block(int dtype, int mr, int nv, const Job *job, int64_t row, int count, int64_t column, int64_t start,
                  int64_t stop, int cold) {
    const Linear *m = job->matrix;
    int64_t panel = padded_k(dtype, m->k) * PANEL;
    const char *b = (const char *)m->data + (column / PANEL * panel + start * PANEL) * element_bytes(dtype);
    Place place = {b + (stop - start) * PANEL * element_bytes(dtype), panel * element_bytes(dtype)};
    int operand = dtype == BF16 && !HAS_BF16_DOT ? F32 : dtype;
    const void *a[ROWS];
    Sums acc;
    if (mr == ROWS && count == ROWS && stop == m->k) expect(&job->to, mr, nv, row, column);
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) {
        int64_t at = row + (i < count ? i : count - 1);
        a[i] = (const char *)job->from.rows + (at * job->from.stride + start) * element_bytes(operand);
#pragma GCC unroll 4
        for (int j = 0; j < nv * PARTS; j++)
            acc[i][j] = start ? load(job->scratch + at * PANELS * PANEL + j * LANES) : splat(0.0f);
    }
    if (dtype == F32)
        block_f32(mr, nv * PARTS, (const float *const *)a, (const float *)b, panel, stop - start, cold, place, acc);
    else if (dtype == BF16)
        block_bf16(mr, nv * PARTS, a, (const bf16 *)b, panel, stop - start, cold, place, acc);
    else
        block_int8(mr, nv * PARTS, a, (const int8_t *)b, panel, stop - start, cold, place, acc);
    Sums done; /* a copy, so that acc stays in registers */
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nv * PARTS; j++) {
            if (stop == m->k)
                done[i][j] = acc[i][j];
            else if (i < count)
                store(job->scratch + (row + i) * PANELS * PANEL + j * LANES, acc[i][j]);
        }
    if (stop == m->k) finish(job, row, count, column, nv * PARTS, done[0], PANELS * PARTS);
}

INLINE void blocks(int dtype, int nv, const Job *job, int64_t rows, int64_t column, int64_t start, int64_t stop) {
    int64_t row = 0; /* the first block brings the weights for all others; of few rows it is the one below */
    if (rows >= ROWS) block(dtype, ROWS, nv, job, row, ROWS, column, start, stop, 1), row += ROWS;
    for (; row + ROWS <= rows; row += ROWS) block(dtype, ROWS, nv, job, row, ROWS, column, start, stop, 0);
    int left = (int)(rows - row);
    if (left > 4)
        block(dtype, ROWS, nv, job, row, left, column, start, stop, !row);
    else if (left > 2)
        block(dtype, 4, nv, job, row, left, column, start, stop, !row);
    else if (left == 2)
        block(dtype, 2, nv, job, row, left, column, start, stop, !row);
    else if (left == 1)
        block(dtype, 1, nv, job, row, left, column, start, stop, !row);
}

INLINE void panels(int dtype, const Job *job, int64_t rows, int64_t first, int64_t last) {
    int64_t k = job->matrix->k;
    int64_t depth = L2_BYTES / (PANELS * PANEL * element_bytes(dtype)) / 64 * 64;
    for (int64_t panel = first; panel < last; panel += PANELS)
        for (int64_t start = 0; start < k; start += depth) {
            int64_t stop = start + depth < k ? start + depth : k, column = panel * PANEL;
            switch (last - panel) {
            case 1: blocks(dtype, 1, job, rows, column, start, stop); break;
#if PANELS > 1
            case 2: blocks(dtype, 2, job, rows, column, start, stop); break;
#endif
            default: blocks(dtype, PANELS, job, rows, column, start, stop);
            }
        }
}

void product(const Linear *matrix, Operand from, int64_t rows, Target to, int part, int parts, float *scratch) {
    Job job = {matrix, from, to, scratch};
    int64_t count = up_to(matrix->n, PANEL) / PANEL;
    int64_t first = count * part / parts, last = count * (part + 1) / parts;
#if HAS_TILES
    int64_t least = matrix->dtype == BF16 ? 1 : LEAST_INT8_ROWS;
    if (matrix->tiles && matrix->dtype != F32 && rows >= least) {
        product_in_tiles(&job, rows, first, last);
        return;
    }
#endif
    if (matrix->dtype == F32)
        panels(F32, &job, rows, first, last);
    else if (matrix->dtype == BF16)
        panels(BF16, &job, rows, first, last);
    else
        panels(INT8, &job, rows, first, last);
}

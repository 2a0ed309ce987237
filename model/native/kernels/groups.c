/* Products in groups by vectors (groups.h), from one row at the speed of memory to as many as stay in caches. */
#include "groups.h"

#include "adapted_rows.h"
#include "amx.h"
#include "dot.h"
#include "epilogue.h"

#ifdef __AVX512F__
#define GROUP_PANELS 3 /* 8 x 3 sums of the 32 registers */
#define GROUP_ROWS 8
#else
#define GROUP_PANELS 1
#define GROUP_ROWS 4
#endif
#define MIN_TILED_ROWS 5 /* fewer are faster by vectors, and the bits are the same */
#define LINE_BYTES 64
#define PREFETCH_LINES 32

/* Write one group: `count` numbers, then zeros up to `group`. */
INLINE GroupStep write_group(const float *from, int64_t count, int64_t group, int8_t *to) {
    float most = max_abs(from, count), inverse = most > 0.0f ? 127.0f / most : 0.0f;
    GroupStep step = {most / 127.0f, 0};
    int32_t each[LANES];
    ivec sums = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        ivec whole = round_vec(load(from + i) * inverse);
        store_int8(to + i, whole);
        sums += whole;
    }
    memcpy(each, &sums, sizeof each);
    for (int lane = 0; lane < LANES; lane++) step.sum += each[lane];
    for (; i < count; i++) {
        int whole = (int)__builtin_rintf(from[i] * inverse);
        to[i] = (int8_t)whole;
        step.sum += whole;
    }
    if (!(most < __builtin_inff())) step.sum = 0; /* integers of what is no number mean nothing */
    memset(to + i, 0, group - i);
    return step;
}

void write_grouped_row(const PackedMatrix *matrix, const float *from, void *to) {
    GroupStep *steps = (GroupStep *)group_steps(matrix, to);
    int64_t group = matrix->group, groups = group_count(matrix);
    for (int64_t g = 0; g < groups; g++) {
        int64_t count = max_i64(0, min_i64(group, matrix->k - g * group));
        steps[g] = write_group(from + g * group, count, group, (int8_t *)to + g * group);
    }
}

/* What a weight has more than it stands for when it is multiplied. */
INLINE int zero_point(int dtype) { return dtype == INT4 ? 8 : DOT_ZERO; }

#if !HAS_INT8_DOT
/* The dot product of each pair of 16-bit numbers. */
INLINE ivec dot_pairs(ivec w, ivec x) {
#if defined(__AVX512BW__)
    return (ivec)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
    return (ivec)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#else
    return (w << 16 >> 16) * (x << 16 >> 16) + (w >> 16) * (x >> 16);
#endif
}
#endif

/* sums + the dot product of each four bytes of w, to which the zero point is added, with the four signed bytes at x. */
INLINE ivec dot(int dtype, ivec sums, ivec w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    ivec all = four - (ivec){0};
#if HAS_INT8_DOT
    return dot_bytes(sums, w, all);
#else
#if defined(__AVX512BW__)
    if (dtype == INT4) /* pairs of products of 15 and 127 are far below 2^15 */
        return sums + dot_pairs((ivec)_mm512_maddubs_epi16((__m512i)w, (__m512i)all), (ivec)_mm512_set1_epi16(1));
#elif defined(__AVX2__)
    if (dtype == INT4)
        return sums + dot_pairs((ivec)_mm256_maddubs_epi16((__m256i)w, (__m256i)all), (ivec)_mm256_set1_epi16(1));
#endif
    ivec even = (ivec)((svec)w << 8 >> 8), odd = (ivec)((svec)w >> 8);
    return sums + dot_pairs(even, (ivec)((svec)all << 8 >> 8)) + dot_pairs(odd, (ivec)((svec)all >> 8));
#endif
}

/* Read the next weights of LANES outputs: of INT4 eight numbers of k, of INT8 four. */
INLINE void read_weights(int dtype, const char *at, ivec w[2]) {
    memcpy(w, at, sizeof *w);
    if (dtype == INT4)
        w[1] = (ivec)((uvec)w[0] >> 4) & 0x0f0f0f0f, w[0] &= 0x0f0f0f0f;
    else if (DOT_ZERO)
        w[0] ^= (int32_t)0x80808080;
}

#if HAS_INT8_BLOCKS
/* Add the products of an even number of rows with a panel over k in [first, stop), two rows at a time; returns the
 * address after the weights that were read. */
INLINE const char *add_blocks(int dtype, int rows, const int8_t *const *a, int64_t first, int64_t stop,
                              const char *weights, int cold, ivec sums[][PANEL_VECS]) {
    int64_t step = dtype == INT4 ? LINE_BYTES : 2 * LINE_BYTES; /* of weights, for eight numbers of k */
#pragma GCC unroll 4
    for (int i = 0; i < rows; i += 2)
#pragma GCC unroll 4
        for (int j = 0; j < PANEL_VECS; j++) swap_blocks(&sums[i][j], &sums[i + 1][j]);
    for (int64_t k = first; k < stop; k += 8, weights += step) {
        if (cold)
            for (int64_t line = 0; line < step; line += LINE_BYTES)
                __builtin_prefetch(weights + PREFETCH_LINES * LINE_BYTES + line, 0, 3);
        int8x16_t x[GROUP_ROWS / 2];
#pragma GCC unroll 4
        for (int i = 0; i < rows; i += 2) x[i / 2] = two_rows(a[i] + k, a[i + 1] + k);
#pragma GCC unroll 4
        for (int j = 0; j < PANEL_VECS; j++) {
            ivec w[2];
            read_weights(dtype, weights + j * 4 * LANES, w);
            if (dtype == INT8) memcpy(w + 1, weights + LINE_BYTES + j * 4 * LANES, sizeof *w);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i += 2) dot_blocks(&sums[i][j], &sums[i + 1][j], x[i / 2], w[0], w[1]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i += 2)
#pragma GCC unroll 4
        for (int j = 0; j < PANEL_VECS; j++) swap_blocks(&sums[i][j], &sums[i + 1][j]);
    return weights;
}
#endif

/* Rows and panels of one call of the kernel: `count` rows from `row`, panels from `panel` on. */
typedef struct {
    int64_t row, panel;
    int count;
    int cold; /* whether the weights may be in no cache yet */
    const Ahead *ahead;
} GroupTile;

/* Compute up to `rows` rows of `panels` panels; `dtype`, `rows` and `panels` are constants. */
INLINE void group_kernel(int dtype, int rows, int panels, const Product *p, GroupTile t) {
    enum { VECS = GROUP_PANELS * PANEL_VECS };
    const PackedMatrix *m = p->matrix;
    int64_t panel_bytes = grouped_panel_bytes(m), groups = group_count(m), group = m->group;
    int64_t depth = dtype == INT4 ? 8 : 4; /* numbers of k in a line of weights */
    const char *weights = (const char *)m->data + t.panel * panel_bytes, *end = weights + panel_bytes;
    const float *scale = m->scale + t.panel * groups * PANEL_WIDTH;
    const float *offset = m->offset ? m->offset + t.panel * groups * PANEL_WIDTH : NULL;
    WeightStream stream = {.ahead = t.ahead};
    const int8_t *a[GROUP_ROWS];
    const GroupStep *steps[GROUP_ROWS];
    vec acc[GROUP_ROWS][VECS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        int64_t at = t.row + (i < t.count ? i : t.count - 1);
        a[i] = (const int8_t *)p->operand.rows + at * p->operand.stride;
        steps[i] = group_steps(m, a[i]);
        for (int j = 0; j < panels * PANEL_VECS; j++) acc[i][j] = splat(0.0f);
    }
    for (int64_t g = 0; g < groups; g++, scale += PANEL_WIDTH, offset += offset ? PANEL_WIDTH : 0) {
        ivec sums[GROUP_ROWS][VECS], more[VECS]; /* more: chains of one row, which would wait for itself */
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < panels * PANEL_VECS; j++)
                sums[i][j] = (ivec){0} - zero_point(dtype) * steps[i][g].sum, more[j] = (ivec){0};
        int64_t k = g * group, stop = k + group;
#if HAS_INT8_BLOCKS
        if (rows > 1) weights = add_blocks(dtype, rows, a, k, stop, weights, t.cold, sums), k = stop;
#endif
        for (; k < stop; k += depth, weights += LINE_BYTES) {
            ivec w[VECS][2];
            if (t.cold) {
                const char *line = weights + PREFETCH_LINES * LINE_BYTES;
                if (line >= end) line += (panels - 1) * panel_bytes;
#pragma GCC unroll 4
                for (int j = 0; j < panels; j++) __builtin_prefetch(line + j * panel_bytes, 0, 3);
            } else {
                prefetch_ahead(&stream);
            }
#pragma GCC unroll 4
            for (int j = 0; j < panels * PANEL_VECS; j++)
                read_weights(dtype, weights + j / PANEL_VECS * panel_bytes + j % PANEL_VECS * 4 * LANES, w[j]);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
                for (int j = 0; j < panels * PANEL_VECS; j++) {
                    sums[i][j] = dot(dtype, sums[i][j], w[j][0], a[i] + k);
                    if (dtype == INT4 && rows == 1) more[j] = dot(dtype, more[j], w[j][1], a[i] + k + 4);
                    else if (dtype == INT4) sums[i][j] = dot(dtype, sums[i][j], w[j][1], a[i] + k + 4);
                }
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < panels * PANEL_VECS; j++) {
                int64_t at = j / PANEL_VECS * groups * PANEL_WIDTH + j % PANEL_VECS * LANES;
                ivec whole = rows == 1 ? sums[i][j] + more[j] : sums[i][j];
                acc[i][j] = add_group(acc[i][j], whole, steps[i][g], load(scale + at));
                if (offset) acc[i][j] = add_offset(acc[i][j], steps[i][g], load(offset + at));
            }
    }
    SumTile tile = {t.row, t.panel * PANEL_WIDTH, t.count, panels * PANEL_VECS, acc[0], VECS};
    epilogue(p, &tile);
}

/* Multiply all rows by one or more panels; `dtype` and `panels` are constants. */
INLINE void multiply_grouped_rows(int dtype, int panels, const Product *p, const RowPass *pass, int64_t panel) {
    GroupTile t = {0, panel, GROUP_ROWS, 0, NULL};
    Ahead ahead;
    for (int64_t block = 0; t.row < pass->rows; block++, t.row += GROUP_ROWS) {
        t.cold = pass->cold && !block;
        t.ahead = may_ask(pass, block) ? asked_ahead(p, pass, panel * PANEL_WIDTH, panels, 1, block, &ahead) : NULL;
        if (t.row + GROUP_ROWS > pass->rows) break;
        group_kernel(dtype, GROUP_ROWS, panels, p, t);
    }
    t.count = (int)(pass->rows - t.row);
    if (t.count > 4)
        group_kernel(dtype, GROUP_ROWS, panels, p, t);
    else if (t.count > 2)
        group_kernel(dtype, 4, panels, p, t);
    else if (t.count == 2)
        group_kernel(dtype, 2, panels, p, t);
    else if (t.count == 1)
        group_kernel(dtype, 1, panels, p, t);
}

INLINE void multiply_grouped_panels(int dtype, const Product *p, int64_t rows, int64_t first, int64_t last) {
    int64_t panel_bytes = grouped_panel_bytes(p->matrix);
    RowPass pass = {.rows = rows, .block_rows = GROUP_ROWS, .steps = panel_bytes / LINE_BYTES, .cold = 1};
    for (int64_t panel = first; panel < last; panel += GROUP_PANELS) {
        int64_t after = panel + GROUP_PANELS;
        pass.next = (NextPanels){NULL, panel_bytes, panel_bytes, min_i64(GROUP_PANELS, last - after)};
        if (pass.next.panels > 0) pass.next.at = (const char *)p->matrix->data + after * panel_bytes;
        switch (last - panel) {
        case 1: multiply_grouped_rows(dtype, 1, p, &pass, panel); break;
#if GROUP_PANELS > 1
        case 2: multiply_grouped_rows(dtype, 2, p, &pass, panel); break;
#endif
        default: multiply_grouped_rows(dtype, GROUP_PANELS, p, &pass, panel);
        }
        pass.cold = full_blocks(rows, GROUP_ROWS) < 2;
    }
}

void multiply_groups(const Product *p, int64_t rows, int64_t first, int64_t last) {
#if HAS_TILES
    if (p->matrix->tiles && rows >= MIN_TILED_ROWS) {
        amx_multiply_groups(p, rows, first, last);
        return;
    }
#endif
    if (p->matrix->dtype == INT4)
        multiply_grouped_panels(INT4, p, rows, first, last);
    else
        multiply_grouped_panels(INT8, p, rows, first, last);
}

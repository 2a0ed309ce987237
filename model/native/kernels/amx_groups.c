/* Products in groups (groups.h) in AMX tiles: integers of a group are summed in tiles, groups by vectors.
 *
 * Weights of 4 bits become bytes in a buffer that stays in the first cache while rows pass. A row's sums over the
 * groups before lie in the product's scratch meanwhile. */
#include "amx.h"

#if HAS_TILES

#include "epilogue.h"
#include "gemm.h"
#include "groups.h"

#define PAIR_ROWS (2 * TILE_ROWS)
#define PASS_GROUPS 2  /* whose sums are kept before rows get their scales */
#define DEPTH 256      /* numbers of k that are unpacked before rows pass; one or more passes */
#define LINE_NUMBERS 8 /* of k in 64 bytes of INT4 */
#define SLOTS 4        /* products of tiles of one pass of a tile of rows, or of one group of two */
#define SUMS_STRIDE (GEMM_SCRATCH / LANES)

/* Sums of one or two groups, of up to 32 rows and two panels, that are not scaled yet: the vector units scale them while
 * the next groups are multiplied in tiles. */
typedef struct {
    int64_t row, panel;              /* the first ones */
    int rows, wide, groups;          /* wide: both panels are used, else only the first */
    int done, overlapping;           /* rows that have their scales; of them by the block before */
    int last;                        /* whether k ends with these groups */
    const float *scale[2], *offset[2];
    const char *steps;               /* of row 0 */
    int32_t sums[PASS_GROUPS][2][PAIR_ROWS][PANEL_WIDTH] __attribute__((aligned(64)));
} PendingGroups;

/* Lines of two panels that are asked for while others are multiplied. */
typedef struct {
    const char *at[2];
    int64_t left; /* of each */
} ColdLines;

/* What a thread keeps while it multiplies. */
typedef struct {
    const Product *product;
    const char *weights[2]; /* [k / 4][16][4] int8, of the part of k that is multiplied */
    int32_t *late[SLOTS];   /* where tiles 1 to 3 go: they are stored while later ones are multiplied */
    ColdLines cold;
    PendingGroups pending[2], *now, *before;
    char unpacked[2][DEPTH * PANEL_WIDTH] __attribute__((aligned(64)));
} GroupWork;

/* Write `count` numbers of k of INT4 as bytes. */
static void unpack(const char *from, int64_t count, char *to) {
    const __m512i halves = _mm512_set1_epi8(15), eights = _mm512_set1_epi8(8);
    for (int64_t k = 0; k < count; k += LINE_NUMBERS, from += TILE_BYTES, to += 2 * TILE_BYTES) {
        __m512i line = _mm512_loadu_si512(from);
        __m512i low = _mm512_and_si512(line, halves), high = _mm512_and_si512(_mm512_srli_epi16(line, 4), halves);
        _mm512_storeu_si512(to, _mm512_sub_epi8(low, eights));
        _mm512_storeu_si512(to + TILE_BYTES, _mm512_sub_epi8(high, eights));
    }
    STORED_FOR_TILES();
}

/* Add the groups of the next `rows` rows to what lies in the scratch; `rows`, `groups` and `has_offset` are
 * constants. */
INLINE void scale_rows(int rows, int groups, int has_offset, const Product *p, PendingGroups *pending) {
    int64_t stride = p->operand.stride, row = pending->row + pending->done;
    const char *steps = pending->steps + row * stride;
    const int32_t *sums = pending->sums[0][0][pending->done];
    float *to = p->scratch + row * GEMM_SCRATCH;
    vec scale[PASS_GROUPS][2], offset[PASS_GROUPS][2];
    for (int g = 0; g < groups; g++)
        for (int j = 0; j < 2; j++) {
            scale[g][j] = load(pending->scale[j] + g * PANEL_WIDTH);
            if (has_offset) offset[g][j] = load(pending->offset[j] + g * PANEL_WIDTH);
        }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++, to += GEMM_SCRATCH, steps += stride) {
        vec totals[2] = {load(to), load(to + PANEL_WIDTH)};
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) {
            const GroupStep *step = (const GroupStep *)steps + g;
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
                ivec whole;
                memcpy(&whole, sums + ((g * 2 + j) * PAIR_ROWS + i) * PANEL_WIDTH, sizeof whole);
                totals[j] = add_group(totals[j], whole, *step, scale[g][j]);
                if (has_offset) totals[j] = add_offset(totals[j], *step, offset[g][j]);
            }
        }
        for (int j = 0; j < 2; j++) store(to + j * PANEL_WIDTH, totals[j]);
    }
    pending->done += rows;
}

/* Do that for up to `most` rows; `groups` and `has_offset` are constants. */
INLINE void scale_some(int most, int groups, int has_offset, const Product *p, PendingGroups *pending) {
    int left = (int)min_i64(most, pending->rows - pending->done);
    for (; left >= 8; left -= 8) scale_rows(8, groups, has_offset, p, pending);
    for (; left > 0; left--) scale_rows(1, groups, has_offset, p, pending);
}

INLINE void scale_before(int most, int has_offset, GroupWork *w) {
    if (w->before->groups == PASS_GROUPS) scale_some(most, PASS_GROUPS, has_offset, w->product, w->before);
    else scale_some(most, 1, has_offset, w->product, w->before);
}

/* Scale the last pending rows; after the last part of k write the outputs. */
INLINE void finish_before(int has_offset, GroupWork *w) {
    const PendingGroups *before = w->before;
    scale_before(PAIR_ROWS, has_offset, w);
    if (!before->last || !before->rows) return;
    SumTile tile = {.row = before->row + before->overlapping, .column = before->panel * PANEL_WIDTH};
    tile.rows = before->rows - before->overlapping, tile.vectors = before->wide ? 2 * PANEL_VECS : PANEL_VECS;
    tile.sums = (vec *)(w->product->scratch + tile.row * GEMM_SCRATCH), tile.stride = SUMS_STRIDE;
    epilogue(w->product, &tile);
    for (int i = 0; i < tile.rows; i++) /* for the panels that follow */
        for (int j = 0; j < 2; j++) tile.sums[i * SUMS_STRIDE + j] = splat(0.0f);
}

/* Prefetch a few of the lines that are needed next. */
INLINE void prefetch_cold(int count, ColdLines *cold) {
    if (cold->left <= 0) return;
    for (int i = 0; i < count; i++, cold->at[0] += TILE_BYTES, cold->at[1] += TILE_BYTES) {
        __builtin_prefetch(cold->at[0], 0, 3);
        __builtin_prefetch(cold->at[1], 0, 3);
    }
    cold->left -= count;
}

/* Sum the integers of one pass: of two tiles of rows one group after the other (`high`), of one tile two groups at
 * once, by two panels, so that four sums are in tiles. A sum is stored three tile products after its last one: storing it
 * sooner would stall. Meanwhile the sums of the previous pass are scaled. A group is one or two (`steps`) tiles of k. `steps`, `high` and `has_offset` are constants. */
INLINE void sum_pass(int steps, int high, int has_offset, GroupWork *w, const char *rows, const char *left,
                     const char *right) {
    PendingGroups *now = w->now;
    int64_t group = w->product->matrix->group, step = group / steps, stride = w->product->operand.stride;
    for (int g = 0; g < now->groups; g += high ? 1 : PASS_GROUPS) {
        int64_t second = !high && now->groups == PASS_GROUPS ? group : 0; /* if there is none, its sums are not used */
        const char *low = high ? rows + TILE_ROWS * stride : rows + second;
#pragma GCC unroll 2
        for (int i = 0; i < steps; i++) {
            TILE_LOAD(4, rows, stride);
            TILE_LOAD(6, left, TILE_BYTES);
            if (!i) {
                TILE_STORE(1, w->late[1], TILE_BYTES);
                TILE_ZERO(0);
            }
            TILE_DOT_SIGNED(0, 4, 6);
            TILE_LOAD(7, right, TILE_BYTES);
            if (!i) {
                TILE_STORE(2, w->late[2], TILE_BYTES);
                TILE_ZERO(1);
            }
            TILE_DOT_SIGNED(1, 4, 7);
            TILE_LOAD(5, low, stride);
            if (!high) TILE_LOAD(6, left + second * PANEL_WIDTH, TILE_BYTES);
            if (!i) {
                TILE_STORE(3, w->late[3], TILE_BYTES);
                TILE_ZERO(2);
            }
            TILE_DOT_SIGNED(2, 5, 6);
            prefetch_cold(4, &w->cold);
            scale_before(8, has_offset, w);
            if (!high) TILE_LOAD(7, right + second * PANEL_WIDTH, TILE_BYTES);
            if (i == steps - 1) TILE_STORE(0, now->sums[g][0][0], TILE_BYTES);
            if (!i) TILE_ZERO(3);
            TILE_DOT_SIGNED(3, 5, 7);
            prefetch_cold(4, &w->cold);
            scale_before(8, has_offset, w);
            rows += step, low += step, left += step * PANEL_WIDTH, right += step * PANEL_WIDTH;
        }
        w->late[1] = now->sums[g][1][0];
        w->late[2] = high ? now->sums[g][0][TILE_ROWS] : now->sums[g + 1][0][0];
        w->late[3] = high ? now->sums[g][1][TILE_ROWS] : now->sums[g + 1][1][0];
    }
}

/* A part of k: numbers [from, to) of one panel, or of two (`wide`), from `panel` on. */
typedef struct {
    int64_t panel, from, to;
    int wide;
} GroupPart;

/* Multiply rows from `row` on, two tiles of them or the last one, by a part of k. `steps`, `high` and `has_offset`
 * are constants. */
INLINE void multiply_rows(int steps, int high, int has_offset, GroupWork *w, GroupPart part, int64_t rows, int64_t row) {
    const Product *p = w->product;
    const PackedMatrix *m = p->matrix;
    int64_t groups = group_count(m), g = part.from / m->group, end = part.to / m->group;
    /* the last tiles overlap the previous ones if that makes them whole */
    int64_t height = high ? PAIR_ROWS : TILE_ROWS, begin = rows <= height ? 0 : min_i64(row, rows - height);
    const char *values = (const char *)p->operand.rows + begin * p->operand.stride + part.from;
    const char *left = w->weights[0], *right = w->weights[1];
    int64_t size = PASS_GROUPS * m->group;
    for (; g < end; g += PASS_GROUPS, values += size, left += size * PANEL_WIDTH, right += size * PANEL_WIDTH) {
        PendingGroups *now = w->now;
        now->row = begin, now->panel = part.panel, now->wide = part.wide, now->rows = (int)min_i64(rows, height);
        now->groups = end - g > 1 ? PASS_GROUPS : 1, now->done = now->overlapping = (int)(row - begin);
        now->last = g + now->groups == groups;
        now->steps = (const char *)(group_steps(m, p->operand.rows) + g);
        for (int j = 0; j < 2; j++) {
            int64_t at = ((part.panel + (part.wide ? j : 0)) * groups + g) * PANEL_WIDTH;
            now->scale[j] = m->scale + at;
            if (has_offset) now->offset[j] = m->offset + at;
        }
        sum_pass(steps, high, has_offset, w, values, left, right);
        finish_before(has_offset, w);
        PendingGroups *finished = w->before;
        w->before = now, w->now = finished;
    }
}

/* Where a panel's weights lie from number k on. */
INLINE const char *panel_weights(const PackedMatrix *m, int64_t panel, int64_t k) {
    return (const char *)m->data + panel * grouped_panel_bytes(m) + k * PANEL_WIDTH / (m->dtype == INT4 ? 2 : 1);
}

/* Multiply rows [from, to) of `rows` by one or two panels, of [.., last); `steps` and `has_offset` are constants. */
INLINE void multiply_group_panels(int steps, int has_offset, GroupWork *w, int64_t rows, int64_t from, int64_t to,
                                  GroupPart part, int64_t last) {
    const PackedMatrix *m = w->product->matrix;
    int64_t depth = grouped_k(m);
    for (part.from = 0; part.from < depth; part.from = part.to) {
        part.to = min_i64(part.from + DEPTH, depth);
        for (int j = 0; j < 2; j++) {
            const char *weights = panel_weights(m, part.panel + (part.wide ? j : 0), part.from);
            if (m->dtype == INT4) unpack(weights, part.to - part.from, w->unpacked[j]);
            w->weights[j] = m->dtype == INT4 ? w->unpacked[j] : weights;
        }
        int more = part.to < depth;
        int64_t ahead = min_i64(part.panel + (more ? 0 : 2), last - 1);
        for (int j = 0; j < 2; j++) w->cold.at[j] = panel_weights(m, min_i64(ahead + j, last - 1), more ? part.to : 0);
        w->cold.left = (part.to - part.from) * PANEL_WIDTH / (m->dtype == INT4 ? 2 : 1) / TILE_BYTES;
        for (int64_t row = from; row < to; row += PAIR_ROWS)
            if (rows - row > TILE_ROWS) multiply_rows(steps, 1, has_offset, w, part, rows, row);
            else multiply_rows(steps, 0, has_offset, w, part, rows, row);
    }
}

/* Multiply all rows by panels [first, last), as many rows at a time as stay in the second cache; `steps` and
 * `has_offset` are constants. */
INLINE void multiply_group_rows(int steps, int has_offset, GroupWork *w, int64_t rows, int64_t first, int64_t last) {
    int64_t bytes = rows * w->product->operand.stride, times = bytes / CACHED_ROW_BYTES + 1;
    int64_t chunk = round_up((rows + times - 1) / times, PAIR_ROWS);
    for (int64_t from = 0; from < rows; from += chunk)
        for (int64_t panel = first; panel < last; panel += 2) {
            GroupPart part = {.panel = panel, .wide = last - panel > 1};
            multiply_group_panels(steps, has_offset, w, rows, from, min_i64(from + chunk, rows), part, last);
        }
    TILE_STORE(1, w->late[1], TILE_BYTES);
    TILE_STORE(2, w->late[2], TILE_BYTES);
    TILE_STORE(3, w->late[3], TILE_BYTES);
    finish_before(has_offset, w);
}

void amx_multiply_groups(const Product *p, int64_t rows, int64_t first, int64_t last) {
    const PackedMatrix *m = p->matrix;
    GroupWork work __attribute__((aligned(64)));
    int low = (int)min_i64(rows, TILE_ROWS);
    TileShapes shapes = shapes_of(low, rows > TILE_ROWS && rows < PAIR_ROWS ? (int)rows - TILE_ROWS : low);
    if (m->group < TILE_BYTES) { /* half a tile of k */
        shapes.row_bytes[4] = shapes.row_bytes[5] = (uint16_t)m->group;
        shapes.rows[6] = shapes.rows[7] = (uint8_t)(m->group / 4);
    }
    work.product = p, work.now = work.pending, work.before = work.pending + 1;
    work.before->rows = work.before->done = work.before->groups = 0;
    for (int slot = 0; slot < SLOTS; slot++) work.late[slot] = work.before->sums[slot / 2][slot % 2][0];
    memset(p->scratch, 0, rows * GEMM_SCRATCH * sizeof(float));
    tiles_begin(shapes);
    if (m->group > TILE_BYTES && m->offset) multiply_group_rows(2, 1, &work, rows, first, last);
    else if (m->group > TILE_BYTES) multiply_group_rows(2, 0, &work, rows, first, last);
    else if (m->offset) multiply_group_rows(1, 1, &work, rows, first, last);
    else multiply_group_rows(1, 0, &work, rows, first, last);
    tiles_end();
}

#endif

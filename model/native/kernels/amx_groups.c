/* Products in groups (groups.h) in AMX tiles: integers of a group are summed in tiles, groups by vectors.
 *
 * Weights of 4 bits become bytes in a buffer that stays in the first cache while rows pass. A row's sums over the
 * groups before lie in the product's scratch meanwhile. */
#include "amx.h"

#if HAS_TILES

#include "epilogue.h"
#include "gemm.h"
#include "groups.h"

#define MOST_GROUPS 4  /* whose weights are unpacked, and whose sums are kept, before rows pass */
#define LINE_NUMBERS 8 /* of k in 64 bytes of INT4 */
#define UNPACK_PREFETCH 4096 /* bytes: how much before their use weights are asked for */
#define ROWS_AT_ONCE 4 /* that get their scales between two groups of the next block */
#define SUMS_STRIDE (GEMM_SCRATCH / LANES)

/* 16 rows (or all) by one or two panels over a part of k: groups [first, last) of `groups`. */
typedef struct {
    int64_t row, panel, first, last, groups;
    int rows, wide;
    int done;               /* rows whose scales are applied: here or, of overlapping ones, by the block before */
    const char *weights[2]; /* [k / 4][16][4] int8 */
} GroupBlock;

/* Sums of groups that wait for their scales: the vector units have time for it while the next block is multiplied. */
typedef struct {
    GroupBlock block;
    int32_t sums[2][MOST_GROUPS][TILE_ROWS][PANEL_WIDTH];
} PendingGroups;

/* Write `count` numbers of k of INT4 as bytes. */
static void unpack(const char *from, int64_t count, char *to) {
    const __m512i halves = _mm512_set1_epi8(15), eights = _mm512_set1_epi8(8);
    for (int64_t k = 0; k < count; k += LINE_NUMBERS, from += TILE_BYTES, to += 2 * TILE_BYTES) {
        __m512i line = _mm512_loadu_si512(from);
        __m512i low = _mm512_and_si512(line, halves), high = _mm512_and_si512(_mm512_srli_epi16(line, 4), halves);
        _mm512_storeu_si512(to, _mm512_sub_epi8(low, eights));
        _mm512_storeu_si512(to + TILE_BYTES, _mm512_sub_epi8(high, eights));
        __builtin_prefetch(from + UNPACK_PREFETCH, 0, 3);
    }
}

/* Add the groups of the next `count` rows of a block to what lies in the scratch; `count`, `wide` and `has_offset` are
 * constants. */
INLINE void scale_rows(int count, int wide, int has_offset, const Product *p, PendingGroups *pending) {
    const PackedMatrix *m = p->matrix;
    GroupBlock *block = &pending->block;
    int64_t groups = block->groups, stride = p->operand.stride, row = block->row + block->done;
    int64_t at = (block->panel * groups + block->first) * PANEL_WIDTH, next = groups * PANEL_WIDTH;
    const char *steps = (const char *)p->operand.rows + row * stride + groups * m->group;
    const int32_t *sums = pending->sums[0][0][block->done];
    float *to = p->scratch + row * GEMM_SCRATCH;
    vec totals[ROWS_AT_ONCE][2];
    for (int i = 0; i < count; i++)
        for (int j = 0; j <= wide; j++)
            totals[i][j] = block->first ? load(to + i * GEMM_SCRATCH + j * PANEL_WIDTH) : splat(0.0f);
    steps += block->first * (int64_t)sizeof(GroupStep);
    for (int64_t g = block->first; g < block->last; g++, at += PANEL_WIDTH, sums += TILE_ROWS * PANEL_WIDTH) {
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            GroupStep step = ((const GroupStep *)(steps + i * stride))[g - block->first];
#pragma GCC unroll 2
            for (int j = 0; j <= wide; j++) {
                ivec whole;
                memcpy(&whole, sums + (j * MOST_GROUPS * TILE_ROWS + i) * PANEL_WIDTH, sizeof whole);
                const float *offset = has_offset ? m->offset + at + j * next : NULL;
                totals[i][j] = add_group(totals[i][j], whole, step, m->scale + at + j * next, offset);
            }
        }
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j <= wide; j++) store(to + i * GEMM_SCRATCH + j * PANEL_WIDTH, totals[i][j]);
    block->done += count;
}

/* Do that for ROWS_AT_ONCE rows, or those that are left; behind the last part of k write the outputs. */
INLINE void scale_some(const Product *p, PendingGroups *pending) {
    GroupBlock *block = &pending->block;
    int left = block->rows - block->done, has_offset = p->matrix->offset != NULL;
    if (left >= ROWS_AT_ONCE && block->wide && !has_offset) {
        scale_rows(ROWS_AT_ONCE, 1, 0, p, pending);
        return;
    }
    for (int i = 0; i < left && i < ROWS_AT_ONCE; i++)
        if (block->wide) scale_rows(1, 1, has_offset, p, pending);
        else scale_rows(1, 0, has_offset, p, pending);
}

/* Give a block's last rows their scales; behind the last part of k write the outputs. */
static void finish_groups(const Product *p, PendingGroups *pending, int overlapping) {
    GroupBlock *block = &pending->block;
    while (block->done < block->rows) scale_some(p, pending);
    if (block->rows == 0 || block->last < block->groups) return;
    SumTile tile = {.row = block->row + overlapping, .column = block->panel * PANEL_WIDTH};
    tile.rows = block->rows - overlapping, tile.vectors = block->wide ? 2 * PANEL_VECS : PANEL_VECS;
    tile.sums = (vec *)(p->scratch + tile.row * GEMM_SCRATCH), tile.stride = SUMS_STRIDE;
    epilogue(p, &tile);
}

/* Sum the integers of a block's groups, each in one or two (`steps`) tiles of k; meanwhile scale the block before.
 * `steps` and `wide` are constants. */
INLINE void sum_groups(int steps, int wide, const Product *p, PendingGroups *now, PendingGroups *before) {
    const GroupBlock *block = &now->block;
    int64_t step = p->matrix->group / steps, stride = p->operand.stride;
    const char *rows = (const char *)p->operand.rows + block->row * stride + block->first * p->matrix->group;
    const char *left = block->weights[0], *right = block->weights[1];
    for (int64_t g = 0; g < block->last - block->first; g++) {
        TILE_ZERO(0);
        if (wide) TILE_ZERO(1);
#pragma GCC unroll 2
        for (int i = 0; i < steps; i++, rows += step, left += step * PANEL_WIDTH, right += step * PANEL_WIDTH) {
            TILE_LOAD(4, rows, stride);
            TILE_LOAD(6, left, TILE_BYTES);
            TILE_DOT_SIGNED(0, 4, 6);
            if (wide) {
                TILE_LOAD(7, right, TILE_BYTES);
                TILE_DOT_SIGNED(1, 4, 7);
            }
        }
        TILE_STORE(0, now->sums[0][g], TILE_BYTES);
        if (wide) TILE_STORE(1, now->sums[1][g], TILE_BYTES);
        scale_some(p, before);
    }
}

/* Multiply the block that `now` names, and finish the one before. */
static void multiply_group_block(const Product *p, PendingGroups *now, PendingGroups *before) {
    int steps = p->matrix->group > TILE_BYTES ? 2 : 1, overlapping = before->block.done;
    if (steps == 2 && now->block.wide) sum_groups(2, 1, p, now, before);
    else if (steps == 2) sum_groups(2, 0, p, now, before);
    else if (now->block.wide) sum_groups(1, 1, p, now, before);
    else sum_groups(1, 0, p, now, before);
    finish_groups(p, before, overlapping);
}

/* What threads keep while they multiply. */
typedef struct {
    PendingGroups pending[2], *now, *before;
    char unpacked[2][MOST_GROUPS * 128 * PANEL_WIDTH];
} GroupBuffers;

/* Multiply rows [from, to) of `rows` by one or two panels. */
static void multiply_group_panels(const Product *p, int64_t rows, int64_t from, int64_t to, GroupBlock block,
                                  GroupBuffers *buffers) {
    const PackedMatrix *m = p->matrix;
    int64_t groups = block.groups;
    for (block.first = 0; block.first < groups; block.first = block.last) {
        block.last = min_i64(block.first + MOST_GROUPS, groups);
        int64_t k = block.first * m->group, count = (block.last - block.first) * m->group;
        for (int j = 0; j <= block.wide; j++) {
            const char *panel = (const char *)m->data + (block.panel + j) * grouped_panel_bytes(m);
            if (m->dtype == INT4) unpack(panel + k * PANEL_WIDTH / 2, count, buffers->unpacked[j]);
            block.weights[j] = m->dtype == INT4 ? buffers->unpacked[j] : panel + k * PANEL_WIDTH;
        }
        if (!block.wide) block.weights[1] = block.weights[0];
        for (int64_t row = from; row < to; row += TILE_ROWS) {
            block.row = max_i64(0, min_i64(row, rows - TILE_ROWS)); /* the last tile is whole, if there are so many */
            block.done = (int)(row - block.row), block.rows = (int)min_i64(TILE_ROWS, rows);
            PendingGroups *now = buffers->now, *before = buffers->before;
            now->block = block;
            multiply_group_block(p, now, before);
            buffers->now = before, buffers->before = now;
        }
    }
}

void amx_multiply_groups(const Product *p, int64_t rows, int64_t first, int64_t last) {
    const PackedMatrix *m = p->matrix;
    GroupBuffers buffers __attribute__((aligned(64)));
    TileShapes shapes = shapes_of((int)min_i64(rows, TILE_ROWS), TILE_ROWS);
    if (m->group < TILE_BYTES) { /* half a tile of k */
        shapes.row_bytes[4] = (uint16_t)m->group;
        shapes.rows[6] = shapes.rows[7] = (uint8_t)(m->group / 4);
    }
    int64_t bytes = rows * p->operand.stride, times = bytes / CACHED_ROW_BYTES + 1;
    int64_t chunk = round_up((rows + times - 1) / times, TILE_ROWS); /* rows that stay in the second cache */
    buffers.now = buffers.pending, buffers.before = buffers.pending + 1;
    buffers.before->block = (GroupBlock){0};
    tiles_begin(shapes);
    for (int64_t from = 0; from < rows; from += chunk)
        for (int64_t panel = first; panel < last; panel += 2) {
            GroupBlock block = {.panel = panel, .groups = group_count(m), .wide = last - panel > 1};
            multiply_group_panels(p, rows, from, min_i64(from + chunk, rows), block, &buffers);
        }
    tiles_end();
    finish_groups(p, buffers.before, buffers.before->block.done);
}

#endif

/* Second products of low-rank adapters, added to a product's sums while these are in the first cache.
 *
 * Invariant: a row's sums of `up` are one chain over the ranks, which begins at zero and is then multiplied by the scale
 * and added: they do not depend on the tile's other rows. */
#include "adapted_rows.h"

#include "float_kernels.h"

#define MOST_LINES 4 /* of memory that a kernel asks for in one step */

/* What one call of the kernel adds: `count` rows, by panels from `weights` on. */
typedef struct {
    const char *rows; /* of ranks */
    int64_t stride;   /* bytes from row to row */
    const char *weights;
    int64_t panel; /* elements from panel to panel */
    vec *sums;
    int64_t sums_stride;
    int count;
} RankTile;

/* Numbers of a panel, whose ranks are not rounded up as the k of other matrices is. */
INLINE int64_t rank_panel(const PackedMatrix *up) { return round_up(up->k, up->dtype == BF16 ? 2 : 1) * PANEL_WIDTH; }

/* `dtype`, `rows` and `panels` are constants. */
INLINE void rank_kernel(int dtype, int rows, int panels, const LowRank *part, RankTile t) {
    const void *a[KERNEL_ROWS];
    Accumulators acc;
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        a[i] = t.rows + (i < t.count ? i : t.count - 1) * t.stride;
#pragma GCC unroll 4
        for (int j = 0; j < panels * PANEL_VECS; j++) acc[i][j] = splat(0.0f);
    }
    WeightStream stream = {.cold = 0}, *cached = &stream;
    int vecs = panels * PANEL_VECS;
    if (dtype == F32)
        kernel_f32(rows, vecs, (const float *const *)a, (const float *)t.weights, t.panel, part->up.k, cached, acc);
    else
        kernel_bf16(rows, vecs, a, (const bf16 *)t.weights, t.panel, part->up.k, cached, acc);
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vecs; j++) {
            vec *sum = t.sums + i * t.sums_stride + j;
            if (i < t.count) *sum = fma_vec(acc[i][j], splat(part->scale), *sum);
        }
}

/* Rows of a constant number of panels. */
INLINE void add_panels(int dtype, int panels, const LowRank *part, RankTile t, int64_t rows) {
    for (t.count = KERNEL_ROWS; rows >= KERNEL_ROWS; rows -= KERNEL_ROWS) {
        rank_kernel(dtype, KERNEL_ROWS, panels, part, t);
        t.rows += KERNEL_ROWS * t.stride, t.sums += KERNEL_ROWS * t.sums_stride;
    }
    t.count = (int)rows;
    if (rows > 4)
        rank_kernel(dtype, KERNEL_ROWS, panels, part, t);
    else if (rows > 2)
        rank_kernel(dtype, 4, panels, part, t);
    else if (rows == 2)
        rank_kernel(dtype, 2, panels, part, t);
    else if (rows == 1)
        rank_kernel(dtype, 1, panels, part, t);
}

INLINE void add_part(int dtype, const LowRank *part, RankTile t, int64_t rows, int64_t panels) {
    int64_t step = KERNEL_PANELS * t.panel * element_bytes(dtype);
    for (; panels >= KERNEL_PANELS; panels -= KERNEL_PANELS) {
        add_panels(dtype, KERNEL_PANELS, part, t, rows);
        t.weights += step, t.sums += KERNEL_PANELS * PANEL_VECS;
    }
#if KERNEL_PANELS > 1
    if (panels == 2) add_panels(dtype, 2, part, t, rows);
    if (panels == 1) add_panels(dtype, 1, part, t, rows);
#endif
}

/* Add a part to the rows of a tile from `row` of the product on, which are `count`. */
static void add_to_rows(const Output *output, const SumTile *tile, const LowRank *part, int64_t row, int64_t count) {
    const AdaptedRows *adapted = output->adapted;
    const PackedMatrix *up = &part->up;
    int dtype = (int)up->dtype, narrow = dtype == BF16 && HAS_BF16_DOT;
    int64_t begin = tile->column / PANEL_WIDTH, own = part->first_output / PANEL_WIDTH, bytes = narrow ? 2 : 4;
    int64_t first = max_i64(begin, own);
    int64_t last = min_i64(begin + tile->vectors / PANEL_VECS, own + panel_count(up));
    if (first >= last) return;
    RankTile t = {.stride = adapted->stride * bytes, .panel = rank_panel(up)};
    t.rows = (const char *)adapted->ranks + row * t.stride + part->first_rank * bytes;
    t.weights = (const char *)up->data + (first - own) * t.panel * element_bytes(dtype);
    t.sums_stride = tile->stride;
    t.sums = tile->sums + (row - output->first_row - tile->row) * tile->stride + (first - begin) * PANEL_VECS;
    if (dtype == F32)
        add_part(F32, part, t, count, last - first);
    else
        add_part(BF16, part, t, count, last - first);
}

/* The first run that ends after a row of the step. */
static int64_t first_run(const AdaptedRows *adapted, int64_t row) {
    int64_t low = 0, high = adapted->num_runs;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (adapted->runs[middle].last > row) high = middle;
        else low = middle + 1;
    }
    return low;
}

void add_low_ranks(const Output *output, const SumTile *tile) {
    const AdaptedRows *adapted = output->adapted;
    int64_t begin = output->first_row + tile->row, end = begin + tile->rows;
    for (int64_t i = first_run(adapted, adapted->row + begin); i < adapted->num_runs; i++) {
        const AdapterRun *run = adapted->runs + i;
        int64_t first = max_i64(run->first - adapted->row, begin), last = min_i64(run->last - adapted->row, end);
        if (run->first - adapted->row >= end) break;
        const Addition *found = run->additions + adapted->place;
        for (int64_t part = 0; part < found->count; part++)
            add_to_rows(output, tile, found->parts + part, first, last - first);
    }
}

/* Find what the product's `rows` rows read of adapters for `panels` panels from `column`, to be asked for in `steps`
 * steps of a kernel. Returns whether there is anything. */
static int ranks_ahead(const Output *output, int64_t rows, int64_t column, int64_t panels, int64_t steps, Ahead *ahead) {
    const AdaptedRows *adapted = output->adapted;
    const Addition *found = NULL;
    if (!adapted) return 0;
    int64_t begin = adapted->row + output->first_row, lines = 0;
    ahead->count = 0;
    for (int64_t i = first_run(adapted, begin); i < adapted->num_runs && adapted->runs[i].first < begin + rows; i++) {
        if (adapted->runs[i].additions + adapted->place == found) continue;
        found = adapted->runs[i].additions + adapted->place;
        for (const LowRank *part = found->parts; part < found->parts + found->count; part++) {
            int64_t panel = (column - part->first_output) / PANEL_WIDTH, first = max_i64(panel, 0);
            int64_t last = min_i64(panel + panels, panel_count(&part->up));
            if (first >= last || ahead->count == MOST_AHEAD) continue;
            int64_t bytes = rank_panel(&part->up) * element_bytes(part->up.dtype);
            ahead->pieces[ahead->count].at = (const char *)part->up.data + first * bytes;
            ahead->pieces[ahead->count++].end = (const char *)part->up.data + last * bytes;
            lines += (last - first) * bytes / CACHE_LINE;
        }
    }
    ahead->lines = (int)min_i64(lines / max_i64(steps, 1) + 1, MOST_LINES);
    return lines > 0;
}

const Ahead *asked_ahead(const Product *product, const RowPass *pass, int64_t column, int64_t panels, int adapts,
                         int64_t block, Ahead *ahead) {
    int64_t full = full_blocks(pass->rows, pass->block_rows), parts = min_i64(MOST_PARTS, full - pass->cold);
    int64_t part = block - (full - parts), next = column + panels * PANEL_WIDTH;
    if (pass->cold && !block) return NULL;
    if (block != 1 || !adapts || !ranks_ahead(&product->output, pass->rows, next, panels, pass->steps, ahead))
        ahead->count = ahead->lines = 0;
    if (pass->next.at && 0 <= part && part < parts) add_weights_ahead(&pass->next, part, parts, pass->steps, ahead);
    return ahead->count ? ahead : NULL;
}

/* Matrix products in AMX tiles, over the panels that vectors read too: 64 bytes of k for 16 outputs are a tile as
 * they lie.
 *
 * Invariant: a matrix that may use tiles uses them for every number of rows. Tiles add bf16 products in another
 * order than vectors (see emulated_dot_bf16 in amx.h), and a row's bits must not depend on how many rows there are.
 * Integer sums are exact either way. */
#define _GNU_SOURCE /* syscall */
#include "amx.h"

#include "epilogue.h"

enum { NONE_COMPILED = 0, USABLE = 1, NOT_IN_CPU = 2, NOT_PERMITTED = 3, WRONG = 4 };

#if HAS_TILES

#define PAIR_ROWS (2 * TILE_ROWS)
#define WEIGHT_TILE (TILE_ROWS * TILE_BYTES) /* bytes of a panel that a step in k takes */
#define TILE_PREFETCH (4 * WEIGHT_TILE)      /* bytes: how much before their use weights are asked for */
#define SUMS_WIDTH (2 * PANEL_WIDTH)         /* floats of a row of a block's sums */
#define SUMS_BYTES (SUMS_WIDTH * sizeof(float))
#define PART_PANELS 16 /* whose sums are kept while k is taken in parts */

#define TILE_DOT(dtype, sums, a, b)     \
    do {                                \
        if ((dtype) == BF16)            \
            TILE_DOT_BF16(sums, a, b);  \
        else                            \
            TILE_DOT_INT8(sums, a, b);  \
    } while (0)

/* A block of outputs: up to PAIR_ROWS rows from `row` by one or (`wide`) two panels from `panel`. */
typedef struct {
    int64_t row, panel;
    int rows, wide;
    int done; /* rows whose outputs are finished: by this block or, of overlapping ones, by the one before */
} TileBlock;

/* Sums that wait for their epilogue: the vector units have time for it while the next block is multiplied. */
typedef struct {
    TileBlock block;
    vec sums[PAIR_ROWS][2 * PANEL_VECS];
} PendingSums;

/* Finish the next `rows` rows of a block whose sums wait. */
INLINE void finish_rows(const Product *p, PendingSums *pending, int rows) {
    TileBlock *block = &pending->block;
    int count = (int)min_i64(rows, block->rows - block->done);
    if (count <= 0) return;
    SumTile tile = {.row = block->row + block->done, .column = block->panel * PANEL_WIDTH, .rows = count};
    tile.vectors = block->wide ? 2 * PANEL_VECS : PANEL_VECS;
    tile.sums = pending->sums[block->done], tile.stride = 2 * PANEL_VECS;
    epilogue(p, &tile);
    block->done += count;
}

/* Ask for the lines to which `count` rows of a block's outputs from its row `first` will go. */
INLINE void prefetch_block_outputs(const Output *to, const TileBlock *block, int first, int count) {
    int64_t size = to->bf16_rows ? 2 : 4;
    for (int row = first; row < first + count && row < block->rows; row++) {
        const char *at = (const char *)to->rows + ((block->row + row) * to->stride + block->panel * PANEL_WIDTH) * size;
        __builtin_prefetch(at, 1, 3);
        if (block->wide && size == 4) __builtin_prefetch(at + PANEL_WIDTH * size, 1, 3);
    }
}

/* Lines of two panels that are asked for while others are multiplied. */
typedef struct {
    const char *at[2];
    int64_t left; /* of each */
    int lines;    /* of each, in a step in k */
} NextWeights;

/* Where the part of a block's operand rows and weights lies that is multiplied now. */
typedef struct {
    const char *rows, *panels[2];
    int64_t stride;    /* bytes from row to row */
    int64_t steps;     /* of 64 bytes of k */
    int cold;          /* whether the weights may be in no cache yet */
    NextWeights *next; /* what is asked for if they are */
    const float *from; /* sums of earlier parts of k; null: there are none */
    float *to;         /* where sums go if later parts follow; null: this is the last */
} BlockInput;

/* Ask for the weights of a later step in k; towards a panel's end for those of the two panels that follow. */
INLINE void prefetch_weight_tiles(const BlockInput *in, int wide, int64_t step) {
    int64_t bytes = in->steps * WEIGHT_TILE, ahead = step * WEIGHT_TILE + TILE_PREFETCH;
    if (wide && ahead >= bytes) ahead += bytes;
    for (int line = 0; line < TILE_ROWS; line++) {
        __builtin_prefetch(in->panels[0] + ahead + line * TILE_BYTES, 0, 3);
        if (wide) __builtin_prefetch(in->panels[1] + ahead + line * TILE_BYTES, 0, 3);
    }
}

/* Ask for some of the weights that follow this part's. */
INLINE void prefetch_next(NextWeights *next) {
    if (next->left <= 0) return;
    for (int line = 0; line < next->lines; line++, next->at[0] += TILE_BYTES, next->at[1] += TILE_BYTES) {
        __builtin_prefetch(next->at[0], 0, 2);
        __builtin_prefetch(next->at[1], 0, 2);
    }
    next->left -= next->lines;
}

/* Compute the sums of a block of one or (`high`) two tiles of rows by one or (`wide`) two panels; meanwhile finish
 * the block before it. `dtype`, `high` and `wide` are constants. */
INLINE void accumulate_tiles(int dtype, int high, int wide, const Product *p, const BlockInput *in, PendingSums *now,
                             PendingSums *before) {
    int each = (int)((PAIR_ROWS + in->steps - 1) / in->steps); /* rows of the block before that a step finishes */
    if (in->from) {
        TILE_LOAD(0, in->from, SUMS_BYTES);
        if (wide) TILE_LOAD(1, in->from + PANEL_WIDTH, SUMS_BYTES);
        if (high) TILE_LOAD(2, in->from + TILE_ROWS * SUMS_WIDTH, SUMS_BYTES);
        if (high && wide) TILE_LOAD(3, in->from + TILE_ROWS * SUMS_WIDTH + PANEL_WIDTH, SUMS_BYTES);
    } else {
        TILE_ZERO(0);
        if (wide) TILE_ZERO(1);
        if (high) TILE_ZERO(2);
        if (high && wide) TILE_ZERO(3);
    }
    for (int64_t step = 0; step < in->steps; step++) {
        const char *rows = in->rows + step * TILE_BYTES;
        TILE_LOAD(6, in->panels[0] + step * WEIGHT_TILE, TILE_BYTES);
        TILE_LOAD(4, rows, in->stride);
        TILE_DOT(dtype, 0, 4, 6);
        if (wide) {
            TILE_LOAD(7, in->panels[1] + step * WEIGHT_TILE, TILE_BYTES);
            TILE_DOT(dtype, 1, 4, 7);
        }
        if (high) {
            TILE_LOAD(5, rows + TILE_ROWS * in->stride, in->stride);
            TILE_DOT(dtype, 2, 5, 6);
        }
        if (high && wide) TILE_DOT(dtype, 3, 5, 7);
        if (in->cold) prefetch_weight_tiles(in, wide, step);
        else prefetch_next(in->next);
        if (!in->to) prefetch_block_outputs(&p->output, &now->block, (int)step * each, each);
        finish_rows(p, before, each);
    }
    finish_rows(p, before, PAIR_ROWS);
    float *to = in->to ? in->to : (float *)now->sums[0];
    TILE_STORE(0, to, SUMS_BYTES);
    if (wide) TILE_STORE(1, to + PANEL_WIDTH, SUMS_BYTES);
    if (high) TILE_STORE(2, to + TILE_ROWS * SUMS_WIDTH, SUMS_BYTES);
    if (high && wide) TILE_STORE(3, to + TILE_ROWS * SUMS_WIDTH + PANEL_WIDTH, SUMS_BYTES);
}

/* Compute the sums of the block that `now` names, over a part of k; `dtype` is a constant. */
INLINE void multiply_block(int dtype, const Product *p, const BlockInput *in, PendingSums *now, PendingSums *before) {
    const TileBlock *block = &now->block;
    if (block->rows > TILE_ROWS && block->wide)
        accumulate_tiles(dtype, 1, 1, p, in, now, before);
    else if (block->rows > TILE_ROWS)
        accumulate_tiles(dtype, 1, 0, p, in, now, before);
    else if (block->wide)
        accumulate_tiles(dtype, 0, 1, p, in, now, before);
    else
        accumulate_tiles(dtype, 0, 0, p, in, now, before);
}

/* The block at `row` of a product of `rows` rows. Tiles are configured once, whole unless there are too few rows for
 * that, so the last block begins early enough to be whole: rows that it shares with the block before count as done. */
INLINE TileBlock block_at(int64_t rows, int64_t row, int64_t panel, int wide) {
    int64_t left = rows - row, height = left > TILE_ROWS ? PAIR_ROWS : TILE_ROWS;
    if (rows <= height) return (TileBlock){.panel = panel, .rows = (int)rows, .wide = wide};
    int64_t start = min_i64(row, rows - height);
    return (TileBlock){start, panel, (int)height, wide, (int)(row - start)};
}

/* How a product is divided: rows [row, row_end) by panels [panel, panel_end), over steps [step, step_end) of k. */
typedef struct {
    int64_t row, row_end, panel, panel_end, step, step_end;
} TilePart;

/* Where a panel's weights lie from a step on. */
INLINE const char *panel_at(const Product *p, int64_t steps, int64_t panel, int64_t step) {
    return (const char *)p->matrix->data + (panel * steps + step) * WEIGHT_TILE;
}

/* Begin to ask for two panels of `next`, while `blocks` blocks of `steps` steps are multiplied. */
INLINE NextWeights next_weights(const Product *p, int64_t all, const TilePart *next, int64_t panel, int64_t blocks) {
    int64_t second = min_i64(panel + 1, next->panel_end - 1);
    int lines = (int)((TILE_ROWS + blocks - 1) / blocks);
    int64_t left = (next->step_end - next->step) * TILE_ROWS;
    return (NextWeights){{panel_at(p, all, panel, next->step), panel_at(p, all, second, next->step)}, left, lines};
}

/* Multiply one part, whose first panels nothing has asked for yet if it is `cold`. Meanwhile ask for the weights of the
 * next panels, after the last for those of part `after`, if it is another one. */
INLINE void multiply_part(int dtype, const Product *p, int64_t rows, int64_t steps, const TilePart *part,
                          const TilePart *after, int cold, float *partial, PendingSums **now, PendingSums **before) {
    int64_t blocks = (part->row_end - part->row + PAIR_ROWS - 1) / PAIR_ROWS;
    int64_t stride = p->operand.stride * element_bytes(dtype);
    int more = memcmp(part, after, sizeof *part) != 0;
    for (int64_t panel = part->panel; panel < part->panel_end; panel += 2) {
        int follows = panel + 2 < part->panel_end;
        NextWeights next = next_weights(p, steps, follows ? part : after, follows ? panel + 2 : after->panel, blocks);
        if (!follows && !more) next.left = 0;
        for (int64_t row = part->row; row < part->row_end; row += PAIR_ROWS, partial += PAIR_ROWS * SUMS_WIDTH) {
            (*now)->block = block_at(rows, row, panel, part->panel_end - panel > 1);
            BlockInput in = {.stride = stride, .steps = part->step_end - part->step, .next = &next};
            in.rows = (const char *)p->operand.rows + (*now)->block.row * stride + part->step * TILE_BYTES;
            for (int j = 0; j < 2; j++) in.panels[j] = panel_at(p, steps, panel + j, part->step);
            in.cold = row == part->row && (blocks == 1 || (cold && panel == part->panel));
            in.from = part->step ? partial : NULL, in.to = part->step_end < steps ? partial : NULL;
            multiply_block(dtype, p, &in, *now, *before);
            if (in.to) continue;
            PendingSums *finished = *before;
            *before = *now, *now = finished;
        }
    }
}

/* The part that follows: the next of k, of panels or of rows; past the end the last one again. `size` has how many of
 * each a part takes at most. */
INLINE TilePart part_after(const TilePart *part, const TilePart *all, const TilePart *size) {
    TilePart next = *part;
    if (part->step_end < all->step_end) {
        next.step = part->step_end;
    } else if (part->panel_end < all->panel_end) {
        next.panel = part->panel_end, next.step = 0;
    } else if (part->row_end < all->row_end) {
        next.row = part->row_end, next.panel = all->panel, next.step = 0;
    }
    next.row_end = min_i64(next.row + size->row, all->row_end);
    next.panel_end = min_i64(next.panel + size->panel, all->panel_end);
    next.step_end = min_i64(next.step + size->step, all->step_end);
    return next;
}

/* Multiply all blocks: as many rows at a time, of as much of k, as stay in the second cache while panels pass. */
INLINE void multiply_blocks(int dtype, const Product *p, int64_t rows, int64_t first, int64_t last) {
    int64_t steps = padded_k(dtype, p->matrix->k) * element_bytes(dtype) / TILE_BYTES;
    int64_t most = max_i64(CACHED_ROW_BYTES / (steps * TILE_BYTES) / PAIR_ROWS * PAIR_ROWS, PART_ROWS);
    int64_t times = (rows + most - 1) / most, together = round_up((rows + times - 1) / times, PAIR_ROWS);
    int64_t depth = max_i64(1, CACHED_ROW_BYTES / (together * TILE_BYTES));
    int64_t parts = together == PAIR_ROWS ? 1 : (steps + depth - 1) / depth;
    TilePart all = {0, rows, first, last, 0, steps};
    TilePart size = {.row = together, .panel = parts > 1 ? PART_PANELS : last - first, .step = (steps + parts - 1) / parts};
    float partial[PART_ROWS * PART_PANELS * PANEL_WIDTH] __attribute__((aligned(64))); /* sums of a part's blocks */
    PendingSums pending[2], *now = pending, *before = pending + 1;
    before->block = (TileBlock){0};
    TilePart none = {0, 0, first, first, 0, 0}, part = part_after(&none, &all, &size);
    for (int cold = 1, more = first < last; more; cold = 0) {
        TilePart next = part_after(&part, &all, &size);
        more = memcmp(&next, &part, sizeof part) != 0;
        multiply_part(dtype, p, rows, steps, &part, &next, cold, partial, &now, &before);
        part = next;
    }
    finish_rows(p, before, PAIR_ROWS);
}

void amx_gemm(const Product *p, int64_t rows, int64_t first, int64_t last) {
    int low = (int)min_i64(rows, TILE_ROWS);
    int high = rows > TILE_ROWS && rows < PAIR_ROWS ? (int)rows - TILE_ROWS : TILE_ROWS;
    tiles_begin(shapes_of(low, high));
    if (p->matrix->dtype == BF16)
        multiply_blocks(BF16, p, rows, first, last);
    else
        multiply_blocks(INT8, p, rows, first, last);
    tiles_end();
}

/* A product that tries all shapes of blocks: two tiles of rows and one, two panels and one. */
enum { CHECK_ROWS = PAIR_ROWS + 7, CHECK_N = 2 * PANEL_WIDTH + 8, CHECK_PANELS = 3, CHECK_K = 128 };

/* Small integers, whose products' sums are exact in any order. */
static int check_weight(int output, int k) { return (output * 5 + k * 3) % 7 - (output + k) % 3; }
static int check_value(int row, int k) { return (row * 7 + k * 3) % 11 - 5; }

/* Whether products in tiles are exact where they must be. */
static int tiles_are_exact(int dtype) {
    union {
        bf16 wide[CHECK_PANELS * PANEL_WIDTH * CHECK_K];
        int8_t narrow[CHECK_PANELS * PANEL_WIDTH * CHECK_K];
    } weights, rows;
    float ones[CHECK_PANELS * PANEL_WIDTH], outputs[CHECK_ROWS * CHECK_N];
    int32_t row_sums[CHECK_PANELS * PANEL_WIDTH] = {0};
    int together = dtype == BF16 ? 2 : 4; /* elements of k that lie together in a panel */
    for (int output = 0; output < CHECK_PANELS * PANEL_WIDTH; output++) {
        ones[output] = 1.0f;
        for (int k = 0; k < CHECK_K; k++) {
            int weight = check_weight(output, k), value = check_value(output, k);
            int at = output / PANEL_WIDTH * PANEL_WIDTH * CHECK_K + k / together * PANEL_WIDTH * together +
                     output % PANEL_WIDTH * together + k % together;
            row_sums[output] += weight;
            if (dtype == BF16)
                weights.wide[at] = to_bf16((float)weight), rows.wide[output * CHECK_K + k] = to_bf16((float)value);
            else
                weights.narrow[at] = (int8_t)weight, rows.narrow[output * CHECK_K + k] = (int8_t)(value + 128);
        }
    }
    PackedMatrix matrix = {.dtype = dtype, .n = CHECK_N, .k = CHECK_K, .data = &weights, .scale = ones};
    matrix.row_sums = row_sums;
    Product p = {&matrix, {&rows, CHECK_K, ones}, {.rows = outputs, .stride = CHECK_N}, NULL};
    const int counts[] = {CHECK_ROWS, PAIR_ROWS - 5, TILE_ROWS, 1};
    for (int i = 0; i < 4; i++) {
        amx_gemm(&p, counts[i], 0, CHECK_PANELS);
        for (int row = 0; row < counts[i]; row++)
            for (int output = 0; output < CHECK_N; output++) {
                int sum = 0;
                for (int k = 0; k < CHECK_K; k++) sum += check_weight(output, k) * check_value(row, k);
                if (outputs[row * CHECK_N + output] != (float)sum) return 0;
            }
    }
    return 1;
}

#endif

/* Ask the system for the use of tiles and check what they compute; a library calls this once, when it is loaded. A
 * matrix may have `tiles` set only if this returned USABLE. */
EXPORTED int64_t start_tiles(void) {
#if HAS_TILES
    if (!cpu_has_tiles()) return NOT_IN_CPU;
    if (!tiles_permitted()) return NOT_PERMITTED;
    return tiles_are_exact(BF16) && tiles_are_exact(INT8) ? USABLE : WRONG;
#else
    return NONE_COMPILED;
#endif
}

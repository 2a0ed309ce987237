/* What low-rank adapters add to a product's sums before these are finished: scale * up(down(x)) (Hu et al. 2021). */
#ifndef TRIPTYCH_ADAPTED_ROWS_H
#define TRIPTYCH_ADAPTED_ROWS_H

#include "epilogue.h"
#include "float_kernels.h"

/* A part of an adapter's product: its outputs are those of a projection from a whole panel on. */
typedef struct {
    PackedMatrix up; /* [outputs, rank]: F32 or BF16, no bias; rows of zeros come first where a part begins within a panel */
    int64_t first_output, first_rank;
    float scale;
} LowRank;

/* What an adapter adds to one projection. Products with `down` are rounded as rows of a product with `up` are. */
typedef struct {
    PackedMatrix down; /* [ranks of all parts, k]: F32 or BF16, no bias; a part's ranks are rounded up by rows of zeros */
    int64_t count;     /* of parts; 0: the adapter does not change the projection */
    const LowRank *parts;
} Addition;

/* Rows [first, last) of a step, which have one adapter. */
typedef struct {
    int64_t first, last;
    const Addition *additions; /* [num_layers][ADAPTED] (low_rank.h) */
} AdapterRun;

/* The adapters of a product's rows, whose products with `down` are computed. */
struct AdaptedRows {
    const AdapterRun *runs; /* [num_runs] ascending */
    int64_t num_runs, place; /* place: of the projection in `additions` */
    int64_t row;             /* the step's row of the product's first */
    const void *ranks;       /* [rows][stride] as operands of the products with `up` */
    int64_t stride;
};

/* Add what adapters add to a rectangle of float sums. */
void add_low_ranks(const Output *output, const SumTile *tile);
/* Find what a kernel prefetches for block `block` of a pass over `panels` panels from `column`: a part of the next
 * weights in each of the last full blocks, as memory has nothing else to do there, and, if `adapts`, in the second block
 * what adapters read for the panels that follow. A cold block prefetches its own weights alone. Returns `ahead`; null:
 * nothing. */
const Ahead *asked_ahead(const Product *product, const RowPass *pass, int64_t column, int64_t panels, int adapts,
                         int64_t block, Ahead *ahead);

#endif

/* Low-rank products: rows [k] to [ranks] before a projection, then what these add to its outputs.
 *
 * What is added to a projection's sums before they are finished is in adapted_rows.c. Tiles add in another order than
 * vectors, so matrices that tiles multiply are added to outputs after the projection, whatever the number of rows. */
#define _GNU_SOURCE /* sched_getcpu */
#include "low_rank.h"

#include "amx.h"
#include "dot.h"
#include "groups.h"

#define ROWS_OF_THREAD 64 /* from which on threads divide rows, not panels */

static const Addition *addition(const AdapterRun *run, int64_t number, int place) {
    return run->additions + number * ADAPTED + place;
}

/* The rows of a run among `rows` rows of the step from `begin` on, counted from there. */
static int rows_of_run(const AdapterRun *run, int64_t begin, int64_t rows, int64_t *first, int64_t *last) {
    *first = max_i64(run->first - begin, 0);
    *last = min_i64(run->last - begin, rows);
    return *first < *last;
}

/* Whether tiles multiply what an adapter adds. */
static int added_after(const Addition *found) {
    return HAS_TILES && found->count && found->down.tiles && found->down.dtype == BF16;
}

int is_added_after(const StackContext *t, int64_t number, int place) {
    const Step *step = t->step;
    int64_t first, last;
    if (place == NOT_ADAPTED) return 0;
    for (int64_t i = 0; i < step->num_runs; i++)
        if (added_after(addition(step->runs + i, number, place)) &&
            rows_of_run(step->runs + i, t->first_row, step->rows, &first, &last))
            return 1;
    return 0;
}

/* Widen integers of a row, which are `zero` more than they stand for. */
static void widen_integers(const void *from, int64_t count, int zero, float scale, float *to) {
    const int8_t *bytes = from;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec x = load_int8(bytes + i); /* as signed bytes */
        if (zero) x += select_vec(x < 0.0f, splat(256.0f - zero), splat(-(float)zero));
        store(to + i, x * scale);
    }
    for (; i < count; i++) to[i] = (float)(zero ? (int)(uint8_t)bytes[i] - zero : bytes[i]) * scale;
}

/* Write a row of an operand of integers as floats. */
static void widen_operand(const PackedMatrix *matrix, const Operand *operand, int64_t row, float *to) {
    const int8_t *from = (const int8_t *)operand->rows + row * operand->stride;
    if (operand_kind(matrix) != GROUPS) {
        widen_integers(from, matrix->k, ROW_ZERO, operand->scale[row], to);
        return;
    }
    const GroupStep *steps = group_steps(matrix, from);
    for (int64_t i = 0; i < matrix->k; i += matrix->group)
        widen_integers(from + i, min_i64(matrix->group, matrix->k - i), 0, steps[i / matrix->group].scale, to + i);
}

/* Write rows [first, last) of a product's operand, which are integers, as the product with `down` reads them. */
static void widen_rows(const StackContext *t, const PackedMatrix *matrix, const Operand *operand,
                       const PackedMatrix *down, int64_t first, int64_t last) {
    int64_t bytes = operand_bytes(down);
    for (int64_t row = first; row < last; row++) {
        widen_operand(matrix, operand, row, t->adapted_line);
        write_operand(down, t->adapted_line, t->adapted_operand + row * bytes, NULL);
    }
}

/* The rows of a product, and the adapters that any of them has. */
typedef struct {
    const StackContext *t;
    int64_t number, begin, rows;
    int place;
} Projected;

/* The next run from `i` on that changes rows of the product, and these rows; null: there is none. */
static const Addition *next_addition(const Projected *p, int64_t *i, int64_t *first, int64_t *last) {
    const Step *step = p->t->step;
    for (; *i < step->num_runs; ++*i) {
        const Addition *found = addition(step->runs + *i, p->number, p->place);
        if (found->count && rows_of_run(step->runs + *i, p->t->first_row + p->begin, p->rows, first, last)) return found;
    }
    return NULL;
}

/* What is shared out among threads: of all rows of runs or, of few, of all panels of their first matrices. */
static int64_t shares_of(const Projected *p, int64_t *rows) {
    int64_t panels = 0, first, last;
    *rows = 0;
    const Addition *found;
    for (int64_t i = 0; (found = next_addition(p, &i, &first, &last)); i++)
        panels += panel_count(&found->down), *rows += last - first;
    return *rows >= ROWS_OF_THREAD * p->t->team.threads ? *rows : panels;
}

/* Compute this thread's part of the products with the first matrices of all runs. Ends at a barrier. */
static void multiply_down(const Projected *p, const PackedMatrix *matrix, Operand operand) {
    const StackContext *t = p->t;
    int64_t width = t->step->rank_width, first, last, mine, end, rows, share, at = 0;
    const Addition *found;
    int64_t shares = shares_of(p, &rows), by_rows = shares == rows;
    thread_range(&t->team, shares, &share, &end);
    for (int64_t i = 0; (found = next_addition(p, &i, &first, &last)); i++) {
        const PackedMatrix *down = &found->down;
        int64_t panels = panel_count(down), count = by_rows ? last - first : panels;
        int kind = operand_kind(down);
        Operand read = operand;
        if (operand_kind(matrix) != kind) read = (Operand){t->adapted_operand, operand_bytes(down) / element_bytes(kind), NULL};
        mine = max_i64(share - at, 0);
        int64_t stop = min_i64(end - at, count);
        at += count;
        if (mine >= stop) continue;
        int64_t row = by_rows ? first + mine : first;
        read.rows = (const char *)read.rows + row * read.stride * element_bytes(kind);
        Output to = {.stride = width, .bf16_rows = kind == BF16};
        to.rows = (char *)t->ranks + row * width * element_bytes(kind);
        if (by_rows) gemm_panels(down, read, stop - mine, to, 0, panels, product_scratch(&t->team, stop - mine));
        else gemm_panels(down, read, last - first, to, mine, stop, product_scratch(&t->team, last - first));
    }
    wait_for_threads(&t->team);
}

/* Add this thread's outputs of the second matrices of runs that are added after the product. */
static void multiply_up(const Projected *p, Output output) {
    const StackContext *t = p->t;
    int64_t width = t->step->rank_width, first, last;
    const Addition *found;
    float scale = output.add ? output.add_scale : 1.0f;
    for (int64_t i = 0; (found = next_addition(p, &i, &first, &last)); i++) {
        float *scratch = product_scratch(&t->team, last - first);
        for (const LowRank *part = found->parts; part < found->parts + found->count; part++) {
            int64_t bytes = element_bytes(operand_kind(&part->up));
            Operand rows = {(const char *)t->ranks + (first * width + part->first_rank) * bytes, width, NULL};
            Output to = {.stride = output.stride, .add = 1, .add_scale = scale * part->scale};
            to.rows = (float *)output.rows + first * output.stride + part->first_output;
            gemm(&part->up, rows, last - first, to, t->team.thread, t->team.threads, scratch);
        }
    }
    wait_for_threads(&t->team);
}

void project(const StackContext *t, int64_t number, int place, const PackedMatrix *matrix, Operand operand,
             int64_t begin, int64_t rows, Output output) {
    const Step *step = t->step;
    Projected p = {t, number, begin, rows, place};
    int64_t i = 0, first, last, mine, end;
    const Addition *found = place == NOT_ADAPTED ? NULL : next_addition(&p, &i, &first, &last);
    if (!found) {
        multiply(&t->team, matrix, operand, rows, output);
        return;
    }
    if (operand_kind(matrix) != operand_kind(&found->down)) {
        thread_range(&t->team, rows, &mine, &end);
        for (; (found = next_addition(&p, &i, &first, &last)); i++)
            widen_rows(t, matrix, &operand, &found->down, max_i64(first, mine), min_i64(last, end));
        wait_for_threads(&t->team);
        i = 0, found = next_addition(&p, &i, &first, &last);
    }
    multiply_down(&p, matrix, operand);
    AdaptedRows adapted = {step->runs, step->num_runs, number * ADAPTED + place, t->first_row + begin, t->ranks};
    adapted.stride = step->rank_width;
    if (!added_after(found)) output.adapted = &adapted;
    multiply(&t->team, matrix, operand, rows, output);
    if (added_after(found)) multiply_up(&p, output);
}

void add_sublayer(const StackContext *t, int64_t number, int place, const PackedMatrix *matrix, Operand operand,
                  int64_t rows, const Norm *output_norm, float scale, float *x) {
    int64_t hidden = t->stack->hidden, begin = (x - t->x) / hidden;
    if (output_norm->kind == NO_NORM) {
        Output sum = {.rows = x, .stride = hidden, .add = 1, .add_scale = scale};
        project(t, number, place, matrix, operand, begin, rows, sum);
        return;
    }
    project(t, number, place, matrix, operand, begin, rows, (Output){.rows = t->sublayer, .stride = hidden});
    add_normed(t, output_norm, x, rows);
}

/* Low-rank products: rows [k] to [rank], then to what they add to rows of outputs. */
#define _GNU_SOURCE /* sched_getcpu */
#include "low_rank.h"

#include "dot.h"
#include "groups.h"

static const Addition *addition(const AdapterRun *run, int64_t number, int place) {
    return run->additions + number * ADAPTED + place;
}

/* The rows of a run among `rows` rows of the step from `begin` on, counted from there. */
static int rows_of_run(const AdapterRun *run, int64_t begin, int64_t rows, int64_t *first, int64_t *last) {
    *first = max_i64(run->first - begin, 0);
    *last = min_i64(run->last - begin, rows);
    return *first < *last;
}

int is_adapted(const StackContext *t, int64_t number, int place) {
    const Step *step = t->step;
    int64_t first, last;
    for (int64_t i = 0; i < step->num_runs; i++)
        if (addition(step->runs + i, number, place)->count &&
            rows_of_run(step->runs + i, t->first_row, step->rows, &first, &last))
            return 1;
    return 0;
}

/* Write a row of an operand of integers as floats. */
static void widen_operand(const PackedMatrix *matrix, const Operand *operand, int64_t row, float *to) {
    const char *from = (const char *)operand->rows + row * operand->stride;
    if (operand_kind(matrix) == GROUPS) {
        const GroupStep *steps = group_steps(matrix, from);
        for (int64_t i = 0; i < matrix->k; i++) to[i] = (float)((const int8_t *)from)[i] * steps[i / matrix->group].scale;
        return;
    }
    float scale = operand->scale[row];
    for (int64_t i = 0; i < matrix->k; i++)
        to[i] = (float)(ROW_ZERO ? (int)((const uint8_t *)from)[i] - ROW_ZERO : (int)((const int8_t *)from)[i]) * scale;
}

/* The product's operand as the product with `down` reads it, for this thread's rows [first, last). */
static Operand narrow_operand(const StackContext *t, const PackedMatrix *matrix, Operand operand,
                              const PackedMatrix *down, int64_t first, int64_t last) {
    if (operand_kind(matrix) == operand_kind(down)) return operand;
    int64_t bytes = operand_bytes(down);
    for (int64_t row = first; row < last; row++) {
        widen_operand(matrix, &operand, row, t->adapted_line);
        write_operand(down, t->adapted_line, t->adapted_operand + row * bytes, NULL);
    }
    return (Operand){t->adapted_operand, bytes / element_bytes(operand_kind(down)), NULL};
}

static Operand rows_from(Operand operand, int kind, int64_t row) {
    operand.rows = (const char *)operand.rows + row * operand.stride * element_bytes(kind);
    return operand;
}

/* Where a part's products lie within a row of t->ranks: floats, then in the form that `up` reads. */
static int64_t part_width(const LowRank *part) { return round_up(part->down.n, 32); }

/* Multiply this thread's rows by the first matrices of a run. */
static void multiply_down(const StackContext *t, const Addition *found, const PackedMatrix *matrix, Operand operand,
                          int64_t first, int64_t last) {
    float *scratch = product_scratch(&t->team, last - first);
    int64_t width = t->step->rank_width, at = 0;
    Operand read = narrow_operand(t, matrix, operand, &found->parts[0].down, first, last);
    for (const LowRank *part = found->parts; part < found->parts + found->count; at += 2 * part_width(part), part++) {
        float *to = t->ranks + first * width + at;
        Operand rows = rows_from(read, operand_kind(&part->down), first);
        gemm_panels(&part->down, rows, last - first, (Output){.rows = to, .stride = width}, 0, panel_count(&part->down),
                    scratch);
        for (int64_t row = first; row < last && operand_kind(&part->up) != F32; row++, to += width)
            write_operand(&part->up, to, to + part_width(part), NULL);
    }
}

/* Add this thread's outputs of the second matrices of a run, for its rows [first, last). */
static void multiply_up(const StackContext *t, const Addition *found, int64_t first, int64_t last, Output output) {
    float *scratch = product_scratch(&t->team, last - first);
    int64_t width = t->step->rank_width, at = 0;
    float scale = output.add ? output.add_scale : 1.0f;
    for (const LowRank *part = found->parts; part < found->parts + found->count; at += 2 * part_width(part), part++) {
        int kind = operand_kind(&part->up);
        const float *from = t->ranks + first * width + at + (kind == F32 ? 0 : part_width(part));
        Operand rows = {from, width * 4 / element_bytes(kind), NULL};
        Output to = {.stride = output.stride, .add = 1, .add_scale = scale * part->scale};
        to.rows = (float *)output.rows + first * output.stride + part->first_output;
        gemm(&part->up, rows, last - first, to, t->team.thread, t->team.threads, scratch);
    }
}

void project(const StackContext *t, int64_t number, int place, const PackedMatrix *matrix, Operand operand,
             int64_t begin, int64_t rows, Output output) {
    const Step *step = t->step;
    int64_t mine, end, first, last;
    if (!step->num_runs || place == NOT_ADAPTED) {
        multiply(&t->team, matrix, operand, rows, output);
        return;
    }
    gemm(matrix, operand, rows, output, t->team.thread, t->team.threads, product_scratch(&t->team, rows));
    thread_range(&t->team, rows, &mine, &end);
    for (int64_t i = 0; i < step->num_runs; i++) {
        const Addition *found = addition(step->runs + i, number, place);
        if (!found->count || !rows_of_run(step->runs + i, t->first_row + begin, rows, &first, &last)) continue;
        first = max_i64(first, mine), last = min_i64(last, end);
        if (first < last) multiply_down(t, found, matrix, operand, first, last);
    }
    wait_for_threads(&t->team);
    for (int64_t i = 0; i < step->num_runs; i++) {
        const Addition *found = addition(step->runs + i, number, place);
        if (found->count && rows_of_run(step->runs + i, t->first_row + begin, rows, &first, &last))
            multiply_up(t, found, first, last, output);
    }
    wait_for_threads(&t->team);
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

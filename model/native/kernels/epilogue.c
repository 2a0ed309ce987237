/* What follows the sums of a product: scale, bias, activation, and where they are written. */
#include "epilogue.h"

#include "adapted_rows.h"
#include "dot.h"

/* How outputs are written: put, added to what is there, or rounded and put. */
enum { PUT_FLOATS, ADD_FLOATS, ADD_SCALED, PUT_BF16 };

/* Write the first `left` lanes (all of them if it is LANES or more) of a vector of outputs. */
INLINE void put(const Output *to, int how, int64_t row, int64_t column, int64_t left, vec value) {
    int64_t at = row * to->stride + column;
    if (how == PUT_BF16) {
        bf16 *out = (bf16 *)to->rows + at, rest[LANES];
        if (left >= LANES) {
            store_bf16(out, value);
        } else {
            store_bf16(rest, value);
            memcpy(out, rest, left * sizeof *rest);
        }
        return;
    }
    float *out = (float *)to->rows + at, rest[LANES];
    int adds = how == ADD_FLOATS || how == ADD_SCALED;
    if (how == ADD_SCALED) value *= to->add_scale;
    if (left >= LANES) {
        store(out, adds ? load(out) + value : value);
        return;
    }
    store(rest, value);
    for (int64_t i = 0; i < left; i++) out[i] = adds ? out[i] + rest[i] : rest[i];
}

/* Apply an activation, which is a constant. */
INLINE vec apply(int activation, vec x, float softcap) {
    return activation == SOFTCAP ? softcap_vec(x, softcap) : activate(activation, x);
}

/* Finish a rectangle of float sums; `activation` and `how` are constants. */
INLINE void finish_as(int activation, int how, const Product *product, const SumTile *tile, int vectors) {
    const PackedMatrix *m = product->matrix;
    Output to = product->output; /* a copy: what is stored could be it, for all that the compiler knows */
    int64_t row = tile->row, column = tile->column, stride = tile->stride;
    const vec *sums = tile->sums;
    int rows = tile->rows;
    for (int j = 0; j < vectors; j++, column += LANES) {
        vec bias = m->bias ? load(m->bias + column) : splat(-0.0f); /* which changes nothing, not even a zero's sign */
        int64_t left = m->n - column;
        if (left >= LANES)
            for (int i = 0; i < rows; i++)
                put(&to, how, row + i, column, LANES, apply(activation, sums[i * stride + j] + bias, to.softcap));
        else
            for (int i = 0; i < rows; i++)
                put(&to, how, row + i, column, left, apply(activation, sums[i * stride + j] + bias, to.softcap));
    }
}

/* Finish a rectangle of float sums; `how` is a constant. */
INLINE void finish_in(int how, const Product *product, const SumTile *tile, int vectors) {
    switch (product->output.activation) {
    case RELU: finish_as(RELU, how, product, tile, vectors); break;
    case RELU_SQUARED: finish_as(RELU_SQUARED, how, product, tile, vectors); break;
    case GELU: finish_as(GELU, how, product, tile, vectors); break;
    case GELU_TANH: finish_as(GELU_TANH, how, product, tile, vectors); break;
    case SILU: finish_as(SILU, how, product, tile, vectors); break;
    case QUICK_GELU: finish_as(QUICK_GELU, how, product, tile, vectors); break;
    case TANH: finish_as(TANH, how, product, tile, vectors); break;
    case SOFTCAP: finish_as(SOFTCAP, how, product, tile, vectors); break;
    default: finish_as(NO_ACTIVATION, how, product, tile, vectors);
    }
}

/* Turn integer sums into floats. What is added to the bytes of operands adds as many row sums to a sum. */
INLINE void scale_integers(const Product *product, const SumTile *tile, int vectors) {
    const PackedMatrix *m = product->matrix;
    const float *operand_scale = product->operand.scale + tile->row;
    int64_t column = tile->column, stride = tile->stride;
    vec *sums = tile->sums;
    int rows = tile->rows;
    for (int j = 0; j < vectors; j++, column += LANES) {
        ivec row_sum;
        memcpy(&row_sum, m->row_sums + column, sizeof row_sum);
        vec scale = load(m->scale + column);
        for (int i = 0; i < rows; i++) {
            vec *sum = sums + i * stride + j;
            *sum = __builtin_convertvector((ivec)*sum - ROW_ZERO * row_sum, vec) * scale * operand_scale[i];
        }
    }
}

/* Keep sums, of a matrix without a bias, within the bounds of their outputs. */
INLINE void bound_sums(const Product *product, const SumTile *tile, int vectors) {
    const float *least = product->matrix->bounds + 2 + tile->column;
    const float *most = least + round_up(product->matrix->n, PANEL_WIDTH);
    for (int j = 0; j < vectors; j++) {
        vec low = load(least + j * LANES), high = load(most + j * LANES);
        for (int i = 0; i < tile->rows; i++) {
            vec *sum = tile->sums + i * tile->stride + j;
            *sum = max_vec(low, min_vec(high, *sum));
        }
    }
}

__attribute__((noinline)) void epilogue(const Product *product, const SumTile *tile) {
    int vectors = tile->vectors;
    while (tile->column + (vectors - 1) * LANES >= product->matrix->n) vectors--; /* beyond the last output */
    if (product->matrix->dtype == INT8 && !product->matrix->group) scale_integers(product, tile, vectors);
    if (product->output.adapted) add_low_ranks(&product->output, tile);
    if (product->matrix->bounds) bound_sums(product, tile, vectors);
    if (product->output.bf16_rows)
        finish_in(PUT_BF16, product, tile, vectors);
    else if (product->output.add && product->output.add_scale != 1.0f) /* of a sublayer, without an activation */
        finish_as(NO_ACTIVATION, ADD_SCALED, product, tile, vectors);
    else if (product->output.add)
        finish_in(ADD_FLOATS, product, tile, vectors);
    else
        finish_in(PUT_FLOATS, product, tile, vectors);
}

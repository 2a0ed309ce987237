/* Operations on one row by itself: norms, rotary positions, gates. */
#ifndef TRIPTYCH_ROWWISE_H
#define TRIPTYCH_ROWWISE_H

#include "vector.h"

enum { NO_NORM = 0, LAYER_NORM = 1, RMS_NORM = 2 };

/* LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019). The caller owns the arrays. */
typedef struct {
    int64_t kind;
    float eps;
    const float *weight, *bias; /* weight: 1 + w where a model stores w (Gemma); bias null: none */
} Norm;

/* Normalise x [size] into out, which may be x. */
static inline void normalise(const Norm *norm, const float *x, int64_t size, float *out) {
    vec sum = splat(0.0f), squares = splat(0.0f);
    float mean = 0.0f, tail = 0.0f;
    int64_t i = 0;
    if (norm->kind == LAYER_NORM) {
        for (; i + LANES <= size; i += LANES) sum += load(x + i);
        for (; i < size; i++) tail += x[i];
        mean = (reduce_add(sum) + tail) / (float)size;
    }
    for (i = 0, tail = 0.0f; i + LANES <= size; i += LANES) {
        vec centred = load(x + i) - mean;
        squares = fma_vec(centred, centred, squares);
    }
    for (; i < size; i++) tail += (x[i] - mean) * (x[i] - mean);
    float inverse = 1.0f / __builtin_sqrtf((reduce_add(squares) + tail) / (float)size + norm->eps);
    for (i = 0; i + LANES <= size; i += LANES) {
        vec y = (load(x + i) - mean) * inverse * load(norm->weight + i);
        store(out + i, norm->bias ? y + load(norm->bias + i) : y);
    }
    for (; i < size; i++) out[i] = (x[i] - mean) * inverse * norm->weight[i] + (norm->bias ? norm->bias[i] : 0.0f);
}

/* Add y [size] to x [size]. */
static inline void add_in_place(float *x, const float *y, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(x + i, load(x + i) + load(y + i));
    for (; i < size; i++) x[i] += y[i];
}

/* Multiply x [size] by y [size]. */
static inline void multiply_in_place(float *x, const float *y, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(x + i, load(x + i) * load(y + i));
    for (; i < size; i++) x[i] *= y[i];
}

/* Multiply x [size] by `factor`. */
static inline void scale_in_place(float *x, float factor, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(x + i, load(x + i) * factor);
    for (; i < size; i++) x[i] *= factor;
}

/* Apply an activation to x [size]. */
static inline void activate_in_place(int64_t activation, float *x, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(x + i, activate((int)activation, load(x + i)));
    for (; i < size; i++) {
        float some[LANES] = {x[i]};
        store(some, activate((int)activation, load(some)));
        x[i] = some[0];
    }
}

/* Multiply x [size] by the sigmoids of gates [size]. */
static inline void gate_sigmoid(float *x, const float *gates, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(x + i, load(x + i) / (1.0f + exp_vec(-load(gates + i))));
    for (; i < size; i++) {
        float some[LANES] = {gates[i]};
        store(some, x[i] / (1.0f + exp_vec(-load(some))));
        x[i] = some[0];
    }
}

/* Rotate pairs (i, i + size / 2) of a head's first `size` numbers by the angles whose cosines and sines [size] these
 * are (Su et al. 2021, in the order of GPT-NeoX). */
static inline void rotate(float *head, const float *cos, const float *sin, int64_t size) {
    for (int64_t i = 0; i < size / 2; i++) {
        float a = head[i], b = head[i + size / 2];
        head[i] = a * cos[i] - b * sin[i];
        head[i + size / 2] = b * cos[i + size / 2] + a * sin[i + size / 2];
    }
}

/* The same of neighbours: pairs (2 i, 2 i + 1) (GPT-J). */
static inline void rotate_neighbours(float *head, const float *cos, const float *sin, int64_t size) {
    for (int64_t i = 0; i < size; i += 2) {
        float a = head[i], b = head[i + 1];
        head[i] = a * cos[i] - b * sin[i];
        head[i + 1] = b * cos[i + 1] + a * sin[i + 1];
    }
}

/* Keep numbers [size] from `least` to `most`. */
static inline void bound_in_place(float least, float most, float *row, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store(row + i, max_vec(splat(least), min_vec(splat(most), load(row + i))));
    for (; i < size; i++) row[i] = row[i] < least ? least : row[i] > most ? most : row[i];
}

/* Of the gated unit of gpt-oss: gate at most `limit`, up within it, (up + 1) * gate * sigmoid(gain * gate). */
typedef struct {
    float limit, gain;
} GateClamp;

/* activation(gate) * up of LANES numbers; CLAMPED_SILU: as the clamp says. */
INLINE vec gate_lanes(int activation, GateClamp clamp, vec gate, vec up) {
    if (activation != CLAMPED_SILU) return activate(activation, gate) * up;
    gate = min_vec(splat(clamp.limit), gate), up = max_vec(splat(-clamp.limit), min_vec(splat(clamp.limit), up));
    return (up + 1.0f) * (gate / (1.0f + exp_vec(-clamp.gain * gate)));
}

/* The same of a row that holds gate [size] and up [size], into its first half (Shazeer 2020). */
static inline void gate_in_place(int64_t activation, GateClamp clamp, float *row, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store(row + i, gate_lanes((int)activation, clamp, load(row + i), load(row + size + i)));
    for (; i < size; i++) {
        float gate[LANES] = {row[i]}, up[LANES] = {row[size + i]};
        store(gate, gate_lanes((int)activation, clamp, load(gate), load(up)));
        row[i] = gate[0];
    }
}

#endif

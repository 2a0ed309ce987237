/* Recurrent layers: the gated delta rule over packed rows. */
#ifndef TRIPTYCH_DELTA_H
#define TRIPTYCH_DELTA_H

#include "stack.h"
#include "thread_context.h"

/* What buffers depend on, the most of a stack's layers, for one row: elements. */
typedef struct {
    int64_t keys, values, heads, products;
    int64_t mixed;          /* what the first product gives */
    int64_t state_bytes;    /* of a slice of a head's state */
} DeltaSizes;

/* What lies between a recurrent layer's products. Threads share all of it. */
typedef struct {
    float *normed;   /* [rows][hidden] */
    float *mixed;    /* [rows][channels + value_heads value_dim]: before the convolution, and the outputs' gate */
    float *gates;    /* [rows][2 value_heads]: rates, and decays */
    float *keys;     /* [key_heads][rows][2 key_dim]: a key, and a query */
    float *values;   /* [value_heads][rows][value_dim] */
    float *products; /* [key_heads][rows]: of key and query */
    float *outputs;  /* [rows][value_heads value_dim] */
} DeltaBuffers;

INLINE int64_t delta_channels(const DeltaLayer *layer) {
    return 2 * layer->key_heads * layer->key_dim + layer->value_heads * layer->value_dim;
}

/* Raise `sizes` to what a layer needs. */
void measure_delta(const DeltaLayer *layer, DeltaSizes *sizes);
/* Take the buffers of layers of these sizes, but for `mixed` and `outputs`, which others can use too. */
void take_delta_buffers(Scratch *scratch, const DeltaSizes *sizes, int64_t hidden, int64_t rows, DeltaBuffers *buffers);
/* Compute what a layer makes of rows x [step->rows][hidden], as the product with layer->output reads it; `states` are
 * the layer's, null: all begin with zeros and keep nothing. Ends at a barrier. */
Operand delta_operand(const ThreadContext *t, const DeltaLayer *layer, const Step *step, const LayerStates *states,
                      const DeltaBuffers *buffers, int64_t hidden, const float *x);

#endif

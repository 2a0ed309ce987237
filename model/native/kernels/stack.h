/* What a caller describes to run the layers of a Transformer stack: the stack, and one step through it.
 *
 * model/native/library.py mirrors these structures and those that they are made of; `structure_sizes` compares their
 * sizes when the library is loaded. The caller owns everything that they point to. docs/kernels.md explains them. */
#ifndef TRIPTYCH_STACK_H
#define TRIPTYCH_STACK_H

#include "adapted_rows.h"
#include "attention.h"
#include "rowwise.h"

/* The norms of a sublayer: x = post(x + output(sublayer(pre(x)))). Each may be NO_NORM. */
typedef struct {
    Norm pre, output, post;
} SublayerNorms;

/* A norm of queries or keys is of each head, all with gains [dim] (Qwen3) or each with its own [heads][dim] (Cohere), or
 * of all heads of a row together, with gains [heads][dim] (OLMo 2). */
enum { EACH_HEAD = 0, OWN_GAINS = 1, ALL_HEADS = 2 };

/* Self or cross attention of one layer. The indices name entries of the step's arrays. */
typedef struct {
    SublayerNorms norms;
    AttentionShape shape;
    Norm q_norm, k_norm; /* of queries and keys; cross attention has no k_norm: its keys are in the cache */
    Norm v_norm;         /* of each head's values */
    int64_t norm_span;   /* of what these are taken: EACH_HEAD, OWN_GAINS or ALL_HEADS */
    PackedMatrix input;  /* self: queries, keys, values [(heads + 2 kv_heads) dim, hidden]; cross: queries */
    int64_t keys_as_values; /* whether `input` gives no values: they are the keys before their norm (Gemma 4) */
    int64_t reads_keys;     /* whether it gives queries alone, for keys that an earlier layer has written */
    int64_t output_gate; /* self: whether gates follow the queries; outputs are multiplied by their sigmoids
                          * (Qwen3-Next); without pages or in causal attention */
    PackedMatrix output; /* [hidden, heads dim] */
    int64_t segments;    /* which segments: layers of one KV cache pool share block tables */
    int64_t rotary;      /* which rotary table; -1: no rotary positions */
    int64_t score_bias;  /* which bias is added to scores; -1: none */
    int64_t relative;    /* which relative positions contents are compared with, in encoders; -1: none */
    float scale;         /* of what is added to x (Granite), where there is no output norm */
} AttentionLayer;

/* A recurrent layer by the gated delta rule (Yang et al. 2025), in the place of self attention. Its channels are those of
 * queries [key_heads][key_dim], of keys, and of values [value_heads][value_dim]. */
typedef struct {
    SublayerNorms norms;
    int64_t key_heads, value_heads; /* value_heads / key_heads neighbours share a query and a key */
    int64_t key_dim, value_dim;
    int64_t kernel;                 /* tokens that the convolution of a channel sees */
    PackedMatrix input;             /* [channels + value_heads value_dim, hidden]: channels, and the outputs' gate */
    PackedMatrix gates;             /* F32 [2 value_heads, hidden]: of rates, and of decays */
    PackedMatrix output;            /* [hidden, value_heads value_dim] */
    const float *taps;              /* [kernel][channels] of the convolution, the oldest token's first */
    const float *decay, *dt_bias;   /* [value_heads] of exp(-decay softplus(gate + dt_bias)) */
    Norm norm;                      /* of each head's outputs */
    float scale;                    /* as of attention */
} DeltaLayer;

/* One expert: a feed-forward without a norm of its own. */
typedef struct {
    PackedMatrix up;   /* [inner, hidden]; gated: gate, then up [2 inner, hidden] */
    PackedMatrix down; /* [hidden, inner] */
} Expert;

/* A layer's experts, and how rows choose among them. Those that are chosen read rows in one form. The caller owns the
 * arrays. */
typedef struct {
    int64_t count, active;     /* experts that rows choose from; how many each row takes */
    int64_t of_chosen;         /* whether weights are a softmax over the logits of the chosen experts, not of all */
    PackedMatrix router;       /* F32 [count, hidden] */
    const Expert *experts;     /* [count], then one that all rows take, if `has_shared` */
    int64_t has_shared;
    PackedMatrix shared_gate;  /* F32 [1, hidden]: sigmoid of this is the shared expert's weight; without data: 1 */
    const float *scales;       /* [count] what each expert's weights are multiplied by; null: nothing */
    Norm router_norm;          /* of what the router reads; NO_NORM: it reads what experts read */
    SublayerNorms norms;       /* of the experts alone, if a layer has an MLP too: pre and output */
    SublayerNorms mlp_norms;   /* and of that MLP */
} ExpertsLayer;

/* The feed-forward of one layer: down(activation(up(x))), or down(activation(gate(x)) * up(x)). With `experts` the
 * matrices here are empty, or those of a parallel MLP: then both sides have norms of their own, and their sum goes
 * through the layer's output norm (Gemma 4). */
typedef struct {
    SublayerNorms norms;
    PackedMatrix up;   /* [inner, hidden]; gated: gate, then up [2 inner, hidden] */
    PackedMatrix down; /* [hidden, inner] */
    int64_t gated, activation;
    float limit, gain; /* CLAMPED_SILU */
    float scale;       /* as of attention */
    const ExpertsLayer *experts; /* null: none */
} MLPLayer;

/* One layer. Layers may differ in everything but the hidden size. */
typedef struct {
    AttentionLayer self, cross;
    const DeltaLayer *delta; /* a recurrence in the place of self attention, which is not there then; null: none */
    MLPLayer mlp;
    int64_t has_cross;
    int64_t parallel; /* whether attention and MLP read the same x, and both are added to it (GPT-NeoX) */
    MLPLayer vectors; /* after the MLP: between its products rows are multiplied by the step's vectors (Gemma 4) */
    int64_t has_vectors;
    const float *scale; /* of x in the end; null: none */
} Layer;

typedef struct {
    int64_t hidden, num_layers;
    const Layer *const *layers; /* [num_layers]; layers that share weights are one and the same (ALBERT) */
    int64_t dtype, tiles;       /* of products within encoder attention: F32 or BF16, and whether in AMX tiles */
    Norm final;                 /* after the last layer */
} Stack;

/* Rotary positions of a step's rows for one base: cosines and sines [rows][dim] of the first `dim` numbers of a
 * head. */
typedef struct {
    const float *cos, *sin;
    int64_t dim;
    int64_t interleaved; /* whether pairs are neighbours, not a half of dim apart */
    const float *growth; /* [rows] what queries are multiplied by; null: nothing */
} RotaryTable;

/* What recurrent layers keep of sequences, by slots. */
typedef struct {
    float *recurrent; /* [slots][value_heads][key_dim][value_dim] */
    float *channels;  /* [slots][kernel - 1][channels] of the last tokens, before the convolution */
} LayerStates;

/* Rows [first, last) of one sequence. They continue from the state in slot `source` and write theirs to slot `target`,
 * which no other span reads in this step unless it follows this one. Negative: start from zeros; write nothing. */
typedef struct {
    int64_t first, last, source, target;
} StateSpan;

/* One run through layers [first_layer, last_layer) of a stack; the final norm follows its last layer. */
typedef struct {
    int64_t rows, first_layer, last_layer;
    int64_t num_segments;
    const Segments *segments; /* [num_segments] ways in which the rows attend */
    const KVPages *pages;     /* [num_layers] each layer's keys and values; null: keys are the rows themselves */
    const RotaryTable *rotary;
    const ScoreBias *score_biases;
    const RelativePositions *relative;
    const float *vectors;     /* [rows][num_layers][vectors.up.n] of each row for each layer, where layers have them */
    const LayerStates *states; /* [num_layers] of recurrent layers; null: their spans begin with zeros and keep nothing */
    int64_t num_spans;
    const StateSpan *spans; /* [num_spans] all rows in their order, where a layer is recurrent */
    int64_t planned_keys; /* of a step that is only planned, whose segments are empty: its longest segment's keys */
    float *const *cross_queries; /* [num_layers] where a layer's queries of cross attention [rows][heads dim] are kept,
                                    null: nowhere; or null */
    int64_t num_runs;
    const AdapterRun *runs; /* [num_runs] ascending; rows of no run have no adapter */
    int64_t rank_width;     /* numbers of a row between the products of an adapter for one projection, at most */
} Step;

#endif

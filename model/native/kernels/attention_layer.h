/* Attention as a sublayer of a stack: norm, projections, heads, attention and what is added to the rows. */
#ifndef TRIPTYCH_ATTENTION_LAYER_H
#define TRIPTYCH_ATTENTION_LAYER_H

#include "stack_context.h"

/* Self attention of segments that see themselves in both directions: products in the operands' kind, no pages. */
void encoder_self_attention(const StackContext *t, const AttentionLayer *layer, int64_t number);
/* Self attention over pages, which get this step's keys and values first, or over the rows themselves. A layer that
 * reads an earlier one's keys finds them in its pages, which are that one's. */
void self_attention(const StackContext *t, const AttentionLayer *layer, int64_t number);
/* Cross attention to keys and values that are in the pages already. */
void cross_attention(const StackContext *t, const AttentionLayer *layer, int64_t number);

#endif

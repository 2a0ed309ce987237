/* Integers for a group of weights, and the scale that they share. */
#ifndef TRIPTYCH_QUANTISE_H
#define TRIPTYCH_QUANTISE_H

#include "matrix.h"

#define MOST_IN_GROUP 128 /* numbers that share a scale */

/* Round `count` numbers (a multiple of 16, zeros after a row's end) to integers of INT8 or INT4; returns their
 * scale. */
float quantise_group(int64_t dtype, const float *numbers, int64_t count, int8_t *to);

/* The same in 4 bits, where each number's squared error counts `weights` times. */
float quantise_weighted_group(const float *numbers, const float *weights, int64_t count, int8_t *to);

#endif

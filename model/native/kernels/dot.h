/* Dot products of bytes by the instructions that a level has for them: VNNI of x86-64, SDOT and SMMLA of AArch64, or
 * what its plain level has. */
#ifndef TRIPTYCH_DOT_H
#define TRIPTYCH_DOT_H

#include "vector.h"

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && LANES == 8)
#define HAS_INT8_DOT 1
#define DOT_ZERO 128 /* what is added to the bytes that it takes first, which are unsigned */
#elif defined(__aarch64__)
#define HAS_INT8_DOT 1
#define DOT_ZERO 0 /* all are signed */
#else
#define HAS_INT8_DOT 0
#define DOT_ZERO 0
#endif
#define ROW_ZERO (HAS_INT8_DOT ? DOT_ZERO : 128) /* what is added to the bytes of rows without groups */
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define HAS_INT8_BLOCKS 1
#else
#define HAS_INT8_BLOCKS 0
#endif

#if HAS_INT8_DOT
/* sums + the dot product of each four bytes of a, DOT_ZERO more than they stand for, with the four of b. Those of rows
 * are -127 to 127, so that the sum of two products fills 16 bits at most. */
INLINE ivec dot_bytes(ivec sums, ivec a, ivec b) {
#if defined(__ARM_FEATURE_DOTPROD)
    return (ivec)vdotq_s32((int32x4_t)sums, (int8x16_t)a, (int8x16_t)b);
#elif defined(__aarch64__)
    int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)a), vget_low_s8((int8x16_t)b));
    int16x8_t high = vmull_high_s8((int8x16_t)a, (int8x16_t)b);
    return (ivec)vpadalq_s16((int32x4_t)sums, vpaddq_s16(low, high));
#elif LANES == 16
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#else
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#endif
}
#endif

#if HAS_INT8_BLOCKS
/* SMMLA multiplies eight bytes of two rows by those of two outputs. Two rows' sums of four outputs are blocks then:
 * both rows' sums of outputs 0 and 1, and of outputs 2 and 3. */

/* Turn two rows' sums into blocks, or blocks into sums. */
INLINE void swap_blocks(ivec *first, ivec *second) {
    int64x2_t a = (int64x2_t)*first, b = (int64x2_t)*second;
    *first = (ivec)vzip1q_s64(a, b), *second = (ivec)vzip2q_s64(a, b);
}

/* The next eight bytes of two rows. */
INLINE int8x16_t two_rows(const void *first, const void *second) {
    return vcombine_s8(vld1_s8(first), vld1_s8(second));
}

/* Add the products of two rows' eight bytes with those of four outputs: `low` has the first four bytes of each, `high` the
 * others. */
INLINE void dot_blocks(ivec *first, ivec *second, int8x16_t rows, ivec low, ivec high) {
    int32x4_t a = (int32x4_t)low, b = (int32x4_t)high;
    *first = (ivec)vmmlaq_s32((int32x4_t)*first, rows, (int8x16_t)vzip1q_s32(a, b));
    *second = (ivec)vmmlaq_s32((int32x4_t)*second, rows, (int8x16_t)vzip2q_s32(a, b));
}
#endif

#endif

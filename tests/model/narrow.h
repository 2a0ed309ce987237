/* For GCC's -include: AVX-512's products of bfloat16 and of bytes (VNNI) by the instructions of x86-64-v4, so that a CPU which
 * has neither runs the code that uses them. tests/model/test_tiles.py holds them to the instructions where there are any. */
#ifndef EMULATED_NARROW_H
#define EMULATED_NARROW_H

#include <immintrin.h>

static inline __m512 emulated_flush(__m512 x) { /* what is denormal to a zero of its sign */
    __mmask16 small = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0x1p-126f), _CMP_LT_OQ);
    __m512i bits = _mm512_castps_si512(x);
    return _mm512_castsi512_ps(_mm512_mask_and_epi32(bits, small, bits, _mm512_set1_epi32((int)0x80000000)));
}

/* VDPBF16PS: adds the product of the odd numbers of each pair, then that of the even ones. */
static inline __m512 emulated_dpbf16(__m512 sum, __m512bh a, __m512bh b) {
    const __m512i odd = _mm512_set1_epi32((int)0xffff0000);
    __m512i x = (__m512i)a, y = (__m512i)b;
    __m512 x1 = emulated_flush((__m512)_mm512_and_si512(x, odd)), y1 = emulated_flush((__m512)_mm512_and_si512(y, odd));
    __m512 x0 = emulated_flush((__m512)_mm512_slli_epi32(x, 16)), y0 = emulated_flush((__m512)_mm512_slli_epi32(y, 16));
    sum = emulated_flush(_mm512_fmadd_ps(x1, y1, emulated_flush(sum)));
    return emulated_flush(_mm512_fmadd_ps(x0, y0, sum));
}

/* VCVTNEPS2BF16: to nearest, ties to even; NaN stays NaN. */
static inline __m256i emulated_to_bf16(__m512 x) {
    __m512i bits = (__m512i)emulated_flush(x), tie = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(tie, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

/* VPDPBUSD: sums of 32 bits, which wrap; a has no sign. */
static inline __m512i emulated_dpbusd(__m512i sum, __m512i a, __m512i b) {
    const __m512i low = _mm512_set1_epi16(0x00ff);
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, low), _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
    __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
    return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
}

#ifndef __AVX512BF16__
#define __AVX512BF16__ 1
#define _mm512_dpbf16_ps emulated_dpbf16
#define _mm512_cvtneps_pbh emulated_to_bf16
#endif
#ifndef __AVX512VNNI__
#define __AVX512VNNI__ 1
#define _mm512_dpbusd_epi32 emulated_dpbusd
#endif
#endif

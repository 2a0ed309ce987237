/* Vectors of floats through the compiler's vector extensions: AVX-512, AVX2, NEON or plain code, whatever -march
 * gives.
 *
 * Invariant: every sum has one order, which depends on the number of its terms alone. A row's result is therefore
 * the same bit for bit whatever else is computed with it. */
#ifndef TRIPTYCH_VECTOR_H
#define TRIPTYCH_VECTOR_H

#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__x86_64__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
/* Marks a function that Python calls. All others are hidden (-fvisibility=hidden), so that no other library's
 * function of the same name can take their place. */
#define EXPORTED __attribute__((visibility("default")))

typedef uint16_t bf16;

/* How numbers are stored: IEEE float32, bfloat16, integers of 8 or 4 bits with scales. GROUPS: rows that are
 * multiplied with such integers in groups (groups.h). */
enum { F32 = 0, BF16 = 1, INT8 = 2, INT4 = 3, GROUPS = 4 };

/* LANES is the number of floats in a vector register: a wider vector would live in memory. */
#if defined(__AVX512F__)
#define LANES 16
#define REPEAT_LANES(x) {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}
#define LANE_INDICES {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif defined(__AVX__)
#define LANES 8
#define REPEAT_LANES(x) {x, x, x, x, x, x, x, x}
#define LANE_INDICES {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define LANES 4
#define REPEAT_LANES(x) {x, x, x, x}
#define LANE_INDICES {0, 1, 2, 3}
#endif

INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

/* vec: LANES floats; vec_u: the same at any address; ivec, uvec, svec: its bits as integers of 32 or 16 bits;
 * hvec_u: LANES bfloat16 at any address. */
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_u __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef int16_t svec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec_u __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE vec splat(float x) { return (vec)REPEAT_LANES(x); }
INLINE vec load(const float *p) { return *(const vec_u *)p; }
INLINE void store(float *p, vec v) { *(vec_u *)p = v; }

/* Store past the caches, which then need not read what was there before: at a multiple of the vector's size, for what is
 * not read soon. `stored_past` comes before other threads read it. */
INLINE void store_past(float *p, vec v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX__)
    _mm256_stream_ps(p, (__m256)v);
#elif defined(__x86_64__)
    _mm_stream_ps(p, (__m128)v);
#else
    store(p, v);
#endif
}

INLINE void stored_past(void) {
#ifdef __x86_64__
    _mm_sfence();
#endif
}

/* a * b + c with one rounding where the machine can; written out so that every kernel rounds alike. */
INLINE vec fma_vec(vec a, vec b, vec c) {
#ifdef __AVX512F__
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

/* Read LANES bfloat16 as floats. */
INLINE vec load_bf16(const bf16 *p) { return (vec)(__builtin_convertvector(*(const hvec_u *)p, uvec) << 16); }

/* Read LANES signed bytes as floats; intrinsics, because GCC 12 converts bytes one by one. */
INLINE vec load_int8(const int8_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#elif defined(__aarch64__)
    int32_t four;
    memcpy(&four, p, 4);
    int16x8_t wide = vmovl_s8((int8x8_t)vdup_n_s32(four));
    return (vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
#else
    int32_t wide[LANES];
    for (int i = 0; i < LANES; i++) wide[i] = p[i];
    ivec whole;
    memcpy(&whole, wide, sizeof whole);
    return __builtin_convertvector(whole, vec);
#endif
}

/* Write LANES integers as bytes; each must fit. */
INLINE void store_int8(int8_t *p, ivec v) {
#ifdef __AVX512F__
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__aarch64__)
    int16x4_t half = vmovn_s32((int32x4_t)v);
    int32_t four = vget_lane_s32((int32x2_t)vmovn_s16(vcombine_s16(half, half)), 0);
    memcpy(p, &four, 4);
#else
    for (int i = 0; i < LANES; i++) p[i] = (int8_t)v[i];
#endif
}

/* Round to the nearest integer, ties to even; for absolute values below 2^22. */
INLINE ivec round_vec(vec x) { return __builtin_convertvector(x + 12582912.0f - 12582912.0f, ivec); }
INLINE vec abs_vec(vec x) { return (vec)((ivec)x & 0x7fffffff); }

/* Write LANES floats as bfloat16, rounded to nearest, ties to even. */
INLINE void store_bf16(bf16 *p, vec v) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    bfloat16x4_t narrow = vcvt_bf16_f32((float32x4_t)v);
    memcpy(p, &narrow, sizeof narrow);
#else
    uvec bits = (uvec)v;
    bits += 0x7fff + ((bits >> 16) & 1);
    *(hvec_u *)p = __builtin_convertvector(bits >> 16, hvec_u);
#endif
}

INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float from_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Take lanes from a where the mask is all ones, from b elsewhere. */
INLINE vec select_vec(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }
/* The larger and the smaller of each pair of lanes; b where either is NaN. */
#ifdef __AVX512F__
INLINE vec max_vec(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec min_vec(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE vec max_vec(vec a, vec b) { return select_vec(a > b, a, b); }
INLINE vec min_vec(vec a, vec b) { return select_vec(a < b, a, b); }
#endif

/* Add up all lanes: the upper half onto the lower one until one lane is left, as _mm512_reduce_add_ps does. */
INLINE float reduce_add(vec v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    float x[LANES];
    store(x, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
#endif
}

/* The largest lane. */
INLINE float reduce_max(vec v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#else
    float x[LANES], best;
    store(x, v);
    best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
#endif
}

/* The largest absolute value of n floats, NaN if one of them is: without their signs, floats are ordered as their
 * bits are, NaN last. */
INLINE float max_abs(const float *x, int64_t n) {
    ivec most = {0};
    int32_t each[LANES], best = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        ivec size = (ivec)abs_vec(load(x + i)), above = size > most;
        most = (size & above) | (most & ~above);
    }
    memcpy(each, &most, sizeof each);
    for (int lane = 0; lane < LANES; lane++) best = each[lane] > best ? each[lane] : best;
    for (; i < n; i++) {
        float size = __builtin_fabsf(x[i]);
        int32_t bits;
        memcpy(&bits, &size, 4);
        best = bits > best ? bits : best;
    }
    float found;
    memcpy(&found, &best, 4);
    return found;
}

#ifdef __AVX512F__
/* Transpose 16 rows of 16 words of 32 bits, such as pairs of bf16. */
INLINE void transpose_words(__m512i *r) {
    __m512i s[16];
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* 4 x 4 within each lane of 128 bits */
        __m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]), b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        __m512i c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]), d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
        s[i] = _mm512_unpacklo_epi64(a, c), s[i + 1] = _mm512_unpackhi_epi64(a, c);
        s[i + 2] = _mm512_unpacklo_epi64(b, d), s[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* and the lanes */
        __m512i a = _mm512_shuffle_i32x4(s[i], s[i + 4], 0x88), b = _mm512_shuffle_i32x4(s[i], s[i + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(s[i + 8], s[i + 12], 0x88);
        __m512i d = _mm512_shuffle_i32x4(s[i + 8], s[i + 12], 0xdd);
        r[i] = _mm512_shuffle_i32x4(a, c, 0x88), r[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), r[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}
#endif

/* e^x to 2 ulp by range reduction and the polynomial of Cephes' expf. Exactly 0 below -87, so that masked scores add
 * nothing; NaN of NaN. */
INLINE vec exp_vec(vec x) {
    vec clamped = max_vec(splat(-87.0f), min_vec(splat(88.0f), x));
    vec n = clamped * 1.44269504088896341f + 12582912.0f;
    n -= 12582912.0f;
    vec r = fma_vec(n, splat(-0.693359375f), clamped);
    r = fma_vec(n, splat(2.12194440e-4f), r);
    vec y = splat(1.9875691500e-4f);
    y = fma_vec(y, r, splat(1.3981999507e-3f));
    y = fma_vec(y, r, splat(8.3334519073e-3f));
    y = fma_vec(y, r, splat(4.1665795894e-2f));
    y = fma_vec(y, r, splat(1.6666665459e-1f));
    y = fma_vec(y, r, splat(5.0000001201e-1f));
    y = fma_vec(y, r * r, r + 1.0f);
#ifdef __AVX512F__
    y = (vec)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    y *= (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
#endif
    return (vec)((ivec)y & ~(x < -87.0f));
}

/* tanh(x), absolute error below 2e-7. */
INLINE vec tanh_vec(vec x) { return 1.0f - 2.0f / (exp_vec(x + x) + 1.0f); }

/* cap * tanh(x / cap): x, held between -cap and cap (Gemma 2). */
INLINE vec softcap_vec(vec x, float cap) { return cap * tanh_vec(x / cap); }

/* erf(x), absolute error below 2e-7: erf(x) / x is a polynomial in 2 x^2 / 3.9^2 - 1, interpolated at Chebyshev's
 * nodes; beyond 3.9 it is 1 to within 4e-8. */
INLINE vec erf_vec(vec x) {
    static const float terms[] = {
        1.944994321e-3f, -1.153882477e-3f, 1.828000415e-3f,  -7.548484951e-3f, 1.368475705e-2f,
        -1.924535446e-2f, 2.906646766e-2f, -4.289200157e-2f, 5.792884529e-2f,  -7.378227264e-2f,
        9.066636860e-2f, -1.095340773e-1f, 1.346912831e-1f,  -1.810110509e-1f, 3.625839651e-1f};
    vec u = fma_vec(x * x, splat(0.13149243918f), splat(-1.0f)), y = splat(-8.173369570e-4f);
#pragma GCC unroll 15
    for (int i = 0; i < 15; i++) y = fma_vec(y, u, splat(terms[i]));
    vec one = (vec)(((ivec)x & (int32_t)0x80000000) | (ivec)splat(1.0f));
    return select_vec(abs_vec(x) < 3.9f, y * x, one);
}

/* What may follow a product. */
enum { NO_ACTIVATION = 0, RELU = 1, GELU = 2, GELU_TANH = 3, SILU = 4, TANH = 5, SOFTCAP = 6, CLAMPED_SILU = 7, RELU_SQUARED = 8, QUICK_GELU = 9 };

/* Apply an activation to each lane, other than SOFTCAP and CLAMPED_SILU, which have a parameter. */
INLINE vec activate(int kind, vec x) {
    switch (kind) {
    case RELU: return max_vec(splat(0.0f), x);
    case RELU_SQUARED: return max_vec(splat(0.0f), x) * max_vec(splat(0.0f), x);
    case GELU: return 0.5f * x * (1.0f + erf_vec(x * 0.70710678118654752f));
    case GELU_TANH: return 0.5f * x * (1.0f + tanh_vec(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case SILU: return x / (1.0f + exp_vec(-x));
    case QUICK_GELU: return x / (1.0f + exp_vec(-1.702f * x));
    case TANH: return tanh_vec(x);
    default: return x;
    }
}

#endif

/* Vectors of 16 floats through the compiler's vector extensions: AVX-512, AVX2, NEON or plain code, whatever -march gives.
 *
 * Every sum here has one order that depends on nothing but its own length, so a row's result is the same bit for bit
 * whatever else is computed beside it. */
#ifndef TRIPTYCH_VECTOR_H
#define TRIPTYCH_VECTOR_H

#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float v16 __attribute__((vector_size(64)));
typedef float v16u __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t bf16;
typedef int32_t i16v __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));
typedef uint16_t h16u __attribute__((vector_size(32), aligned(2), may_alias));

enum { F32 = 0, BF16 = 1, INT8 = 2 };

/* What one register holds. Wider vectors live in memory: loops that are to be fast keep their sums in these. */
#if defined(__AVX512F__)
#define WIDTH 16
#define ALL(x) {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}
#elif defined(__AVX__)
#define WIDTH 8
#define ALL(x) {x, x, x, x, x, x, x, x}
#else
#define WIDTH 4
#define ALL(x) {x, x, x, x}
#endif
#define PARTS (LANES / WIDTH)
typedef float part __attribute__((vector_size(4 * WIDTH)));
typedef float part_u __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t part_i __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t part_b __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t part_h __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
INLINE part splat_part(float x) { return (part)ALL(x); }
INLINE part load_part(const float *p) { return *(const part_u *)p; }
INLINE void store_part(float *p, part v) { *(part_u *)p = v; }
INLINE part fma_part(part a, part b, part c) {
#ifdef __AVX512F__
    return (part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

INLINE part load_part_bf16(const bf16 *p) { return (part)(__builtin_convertvector(*(const part_h *)p, part_b) << 16); }

/* GCC 12 converts bytes one by one unless it is told how. */
INLINE part load_part_int8(const int8_t *p) {
#if defined(__AVX512F__)
    return (part)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    int32_t wide[WIDTH];
    for (int i = 0; i < WIDTH; i++) wide[i] = p[i];
    part_i whole;
    memcpy(&whole, wide, sizeof whole);
    return __builtin_convertvector(whole, part);
#endif
}

INLINE v16 splat(float x) { return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE v16 load(const float *p) { return *(const v16u *)p; }
INLINE void store(float *p, v16 v) { *(v16u *)p = v; }
INLINE u16v as_bits(v16 v) { return (u16v)v; }

/* a * b + c with one rounding where the machine can; written out so that every kernel rounds alike. */
INLINE v16 fma16(v16 a, v16 b, v16 c) {
#ifdef __AVX512F__
    return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

/* Whole numbers that fit a byte. */
INLINE void store_int8(int8_t *p, i16v v) {
#ifdef __AVX512F__
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
    for (int i = 0; i < LANES; i++) p[i] = (int8_t)v[i];
#endif
}

/* Rounded to the nearest whole number, ties to even, for sizes below 2^22. */
INLINE i16v round16(v16 x) { return __builtin_convertvector(x + 12582912.0f - 12582912.0f, i16v); }
INLINE v16 size16(v16 x) { return (v16)((i16v)x & 0x7fffffff); }

INLINE void store_bf16(bf16 *p, v16 v) { /* to nearest, ties to even */
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
    u16v bits = as_bits(v);
    bits += 0x7fff + ((bits >> 16) & 1);
    *(h16u *)p = __builtin_convertvector(bits >> 16, h16u);
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

/* Lanes where the mask is all ones from a, the others from b. */
INLINE v16 choose(i16v mask, v16 a, v16 b) { return (v16)(((i16v)a & mask) | ((i16v)b & ~mask)); }
INLINE v16 max16(v16 a, v16 b) { return choose(a > b, a, b); }
INLINE v16 min16(v16 a, v16 b) { return choose(a < b, a, b); }

INLINE float sum16(v16 v) {
    float x[LANES];
    store(x, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

INLINE float largest16(v16 v) {
    float x[LANES], best;
    store(x, v);
    best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}

/* The largest size among n floats. */
INLINE float largest_size(const float *x, int64_t n) {
    v16 most = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) most = max16(most, size16(load(x + i)));
    float best = largest16(most);
    for (; i < n; i++) best = __builtin_fabsf(x[i]) > best ? __builtin_fabsf(x[i]) : best;
    return best;
}

/* e^x to 2 ulp; exactly 0 below -87, so that what is masked adds nothing. Range reduction and a polynomial (Cephes). */
INLINE v16 exp16(v16 x) {
    v16 clamped = max16(min16(x, splat(88.0f)), splat(-87.0f));
    v16 n = clamped * 1.44269504088896341f + 12582912.0f;
    n -= 12582912.0f;
    v16 r = fma16(n, splat(-0.693359375f), clamped);
    r = fma16(n, splat(2.12194440e-4f), r);
    v16 y = splat(1.9875691500e-4f);
    y = fma16(y, r, splat(1.3981999507e-3f));
    y = fma16(y, r, splat(8.3334519073e-3f));
    y = fma16(y, r, splat(4.1665795894e-2f));
    y = fma16(y, r, splat(1.6666665459e-1f));
    y = fma16(y, r, splat(5.0000001201e-1f));
    y = fma16(y, r * r, r + 1.0f);
    i16v power = (__builtin_convertvector(n, i16v) + 127) << 23;
    return (v16)((i16v)(y * (v16)power) & (x >= -87.0f));
}

INLINE v16 tanh16(v16 x) { return 1.0f - 2.0f / (exp16(x + x) + 1.0f); }

/* Abramowitz & Stegun 7.1.26: absolute error below 1.5e-7. */
INLINE v16 erf16(v16 x) {
    v16 positive = (v16)((i16v)x & 0x7fffffff);
    v16 t = 1.0f / (1.0f + 0.3275911f * positive);
    v16 y = splat(1.061405429f);
    y = fma16(y, t, splat(-1.453152027f));
    y = fma16(y, t, splat(1.421413741f));
    y = fma16(y, t, splat(-0.284496736f));
    y = fma16(y, t, splat(0.254829592f));
    y = 1.0f - y * t * exp16(-positive * positive);
    return (v16)(((i16v)y & 0x7fffffff) | ((i16v)x & (int32_t)0x80000000));
}

enum { NO_ACTIVATION = 0, RELU = 1, GELU = 2, GELU_TANH = 3, SILU = 4, TANH = 5 };

INLINE v16 activate(int kind, v16 x) {
    switch (kind) {
    case RELU: return max16(x, splat(0.0f));
    case GELU: return 0.5f * x * (1.0f + erf16(x * 0.70710678118654752f));
    case GELU_TANH: return 0.5f * x * (1.0f + tanh16(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case SILU: return x / (1.0f + exp16(-x));
    case TANH: return tanh16(x);
    default: return x;
    }
}

#endif

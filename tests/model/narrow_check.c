/* How many of `count` times 192 bytes give other bits in narrow.h's functions than by the instructions; NaN equals NaN. */
#include <string.h>

#include "narrow.h"

static __m512i part(const char *from, int number) { return _mm512_loadu_si512(from + 64 * number); }

static int differ(__m512 a, __m512 b) {
    __mmask16 numbers = ~(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) & _mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q));
    return (_mm512_cmpneq_epi32_mask((__m512i)a, (__m512i)b) & numbers) != 0;
}

long dots_differ(const char *from, long count) {
    long found = 0;
    for (; count--; from += 192) {
        __m512 sum = (__m512)part(from, 0);
        __m512bh a = (__m512bh)part(from, 1), b = (__m512bh)part(from, 2);
        found += differ(_mm512_dpbf16_ps(sum, a, b), emulated_dpbf16(sum, a, b));
    }
    return found;
}

long bytes_differ(const char *from, long count) {
    long found = 0;
    for (; count--; from += 192) {
        __m512i sum = part(from, 0), a = part(from, 1), b = part(from, 2);
        found += _mm512_cmpneq_epi32_mask(_mm512_dpbusd_epi32(sum, a, b), emulated_dpbusd(sum, a, b)) != 0;
    }
    return found;
}

long roundings_differ(const char *from, long count) {
    long found = 0;
    for (; count--; from += 192) {
        __m256i ours = (__m256i)_mm512_cvtneps_pbh((__m512)part(from, 0)), theirs = emulated_to_bf16((__m512)part(from, 0));
        found += memcmp(&ours, &theirs, sizeof ours) != 0;
    }
    return found;
}

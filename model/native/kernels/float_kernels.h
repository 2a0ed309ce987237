/* Sums of a few rows times a few panels, in registers: what products and what adapters add to them share. */
#ifndef TRIPTYCH_FLOAT_KERNELS_H
#define TRIPTYCH_FLOAT_KERNELS_H

#include "matrix.h"

#ifdef __AVX512F__
#define KERNEL_PANELS 3 /* 8 x 3 accumulators of the 32 registers */
#define KERNEL_ROWS 8
#else
#define KERNEL_PANELS 1 /* 6 x 1 accumulators of two AVX2 or four NEON registers each */
#define KERNEL_ROWS 6
#endif
#define CACHE_LINE 64         /* bytes; also what a step in k takes of a panel */
#define PREFETCH_BYTES (32 * CACHE_LINE)

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif

/* Sums of `rows` rows times `vecs` registers' worth of outputs. */
typedef vec Accumulators[KERNEL_ROWS][KERNEL_PANELS * PANEL_VECS];

/* How far register j's weights are from the first's, in elements: panels are `panel` elements apart, and `step`
 * elements of each output lie together. */
INLINE int64_t weight_offset(int j, int64_t panel, int step) {
    return j / PANEL_VECS * panel + j % PANEL_VECS * LANES * step;
}

#define MOST_AHEAD 32            /* pieces that a kernel asks for */
#define MOST_PARTS KERNEL_PANELS /* of the next weights: a kernel asks for a line of them a step then */

/* Pieces of memory that are read soon. A kernel asks for some lines of them with each line of its own weights. */
typedef struct {
    struct {
        const char *at, *end;
    } pieces[MOST_AHEAD];
    int count, lines;
} Ahead;

/* The weights that a thread multiplies after those at hand: a slice of each of some panels. */
typedef struct {
    const char *at;             /* null: there are none */
    int64_t bytes, panel_bytes; /* of a slice; from one to the next */
    int64_t panels;
} NextPanels;

/* Add part `part` of `parts` of the next weights to what a kernel of `steps` steps asks for. */
INLINE void add_weights_ahead(const NextPanels *next, int64_t part, int64_t parts, int64_t steps, Ahead *ahead) {
    int64_t all = next->panels * next->bytes / CACHE_LINE;
    int64_t first = all * part / parts * CACHE_LINE, last = all * (part + 1) / parts * CACHE_LINE;
    for (int64_t i = first / next->bytes; i * next->bytes < last && ahead->count < MOST_AHEAD; i++, ahead->count++) {
        const char *slice = next->at + i * next->panel_bytes;
        ahead->pieces[ahead->count].at = slice + max_i64(0, first - i * next->bytes);
        ahead->pieces[ahead->count].end = slice + min_i64(next->bytes, last - i * next->bytes);
    }
    ahead->lines += (int)(((last - first) / CACHE_LINE + steps - 1) / steps);
}

/* How a thread takes all rows of a product past the weights at hand, block by block. */
typedef struct {
    int64_t rows, block_rows;
    int64_t steps; /* in k, of a kernel */
    int cold;      /* whether the weights may be in no cache yet, so that the first block asks for them */
    NextPanels next;
} RowPass;

/* How many blocks take a kernel longer than memory takes for the weights: all but small last ones. */
INLINE int64_t full_blocks(int64_t rows, int64_t block_rows) { return (rows + block_rows / 2 - 1) / block_rows; }

/* Whether a block may ask memory for anything; a call for each block of a long prompt to find that out takes 0.3 % of it. */
INLINE int may_ask(const RowPass *pass, int64_t block) {
    return block == 1 || block >= full_blocks(pass->rows, pass->block_rows) - MOST_PARTS;
}

/* Where a kernel's weights lie, in bytes, and what else it asks memory for. */
typedef struct {
    const char *end;     /* of what is read of the first panel */
    int64_t panel_bytes; /* from one panel to the next */
    int cold;            /* whether the weights may be in no cache yet */
    const Ahead *ahead;  /* of weights that are in a cache; null: nothing */
    const char *at, *piece_end;
    int next; /* piece */
} WeightStream;

/* Ask memory for what is read soon, for the first cache: what is asked for in the second alone comes late on Zen 5.
 * After the last piece its end is asked for again, which costs less than to know that nothing is left. */
INLINE void prefetch_ahead(WeightStream *stream) {
    const Ahead *ahead = stream->ahead;
    if (!ahead) return;
    if (__builtin_expect(stream->at >= stream->piece_end, 0)) {
        if (stream->next < ahead->count) {
            stream->at = ahead->pieces[stream->next].at;
            stream->piece_end = ahead->pieces[stream->next++].end;
        } else {
            stream->at = stream->piece_end - CACHE_LINE;
        }
    }
    __builtin_prefetch(stream->at, 0, 3);
    for (int i = 1; i < ahead->lines; i++) __builtin_prefetch(stream->at + i * CACHE_LINE, 0, 3);
    stream->at += ahead->lines * CACHE_LINE;
}

/* Ask memory for weights a little before they are needed: those of the kernel's panels, and towards their end those
 * of the panels that follow. They are kept in caches: the third may hold all weights until the next step. */
INLINE void prefetch_weights(int panels, const void *weights, WeightStream *stream) {
    if (!stream->cold) {
        prefetch_ahead(stream);
        return;
    }
    const char *line = (const char *)weights + PREFETCH_BYTES;
    if (line >= stream->end) line += (panels - 1) * stream->panel_bytes;
#pragma GCC unroll 4
    for (int j = 0; j < panels; j++, line += stream->panel_bytes) __builtin_prefetch(line, 0, 3);
}

/* kernel_f32, kernel_bf16, and kernel_int8 of gemm.c: add the products of rows a and weights b over k in [0, count) to `acc`.
 * `rows` and `vecs` are constants, so that loops over them unroll completely; panels are `panel` elements apart. */
INLINE void kernel_f32(int rows, int vecs, const float *const *a, const float *b, int64_t panel, int64_t count,
                      WeightStream *stream, Accumulators acc) {
    for (int64_t k = 0; k < count; k++, b += PANEL_WIDTH) {
        prefetch_weights(vecs / PANEL_VECS, b, stream);
        vec w[KERNEL_PANELS * PANEL_VECS];
#pragma GCC unroll 4
        for (int j = 0; j < vecs; j++) w[j] = load(b + weight_offset(j, panel, 1));
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            vec x = splat(a[i][k]);
#pragma GCC unroll 4
            for (int j = 0; j < vecs; j++) acc[i][j] = fma_vec(x, w[j], acc[i][j]);
        }
    }
}

#if HAS_BF16_DOT
/* sums + the dot product of each pair of w's bf16 with the pair in x. */
INLINE vec dot_bf16(vec sums, uvec w, int32_t x) {
#ifdef __AVX512BF16__
    return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(x), (__m512bh)w);
#else
    return (vec)vbfdotq_f32((float32x4_t)sums, (bfloat16x8_t)vdupq_n_s32(x), (bfloat16x8_t)w);
#endif
}
#endif

INLINE void kernel_bf16(int rows, int vecs, const void *const *a, const bf16 *b, int64_t panel, int64_t count,
                      WeightStream *stream, Accumulators acc) {
    for (int64_t k = 0; k < count; k += 2, b += 2 * PANEL_WIDTH) {
        prefetch_weights(vecs / PANEL_VECS, b, stream);
        uvec w[KERNEL_PANELS * PANEL_VECS];
#pragma GCC unroll 4
        for (int j = 0; j < vecs; j++) memcpy(w + j, b + weight_offset(j, panel, 2), sizeof *w);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
#if HAS_BF16_DOT
            int32_t pair;
            memcpy(&pair, (const bf16 *)a[i] + k, 4);
#pragma GCC unroll 4
            for (int j = 0; j < vecs; j++) acc[i][j] = dot_bf16(acc[i][j], w[j], pair);
#else
            const float *row = a[i];
#pragma GCC unroll 4
            for (int j = 0; j < vecs; j++) {
                acc[i][j] = fma_vec(splat(row[k]), (vec)(w[j] << 16), acc[i][j]);
                if (k + 1 < count) acc[i][j] = fma_vec(splat(row[k + 1]), (vec)(w[j] & 0xffff0000u), acc[i][j]);
            }
#endif
        }
    }
}

#endif

/* Eight tile registers of up to 16 rows of 64 bytes: AMX's, or plain C that computes the same where EMULATED_TILES
 * is defined. amx.c multiplies with them.
 *
 * Tile numbers must be literals: they are part of the instructions. Between `tiles_begin` and `tiles_end` the
 * calling thread's tiles have the rows that it asked for; at other times they hold nothing, so that the system has
 * nothing to save. */
#ifndef TRIPTYCH_AMX_H
#define TRIPTYCH_AMX_H

#include "matrix.h"

#define TILE_ROWS 16
#define TILE_BYTES 64 /* of a row: 32 bf16 or 64 int8 of an operand, 16 sums */

#if !defined(__AVX512BF16__) || !defined(__AVX512VNNI__) /* operands would be in a form that tiles do not read */
#define HAS_TILES 0
#elif defined(EMULATED_TILES) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

#if HAS_TILES

/* Multiply one or more rows of BF16 or INT8 by panels [first, last). */
void amx_gemm(const Product *product, int64_t rows, int64_t first, int64_t last);
/* The same of a matrix with groups, whose operands are GROUPS. */
void amx_multiply_groups(const Product *product, int64_t rows, int64_t first, int64_t last);

/* Stand between what is stored by C and the loads of tiles that read it: GCC's do not say that they read memory, so
 * that it could store later. */
#define STORED_FOR_TILES() __asm__ volatile("" ::: "memory")

/* What the instruction LDTILECFG reads. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

/* Tiles 0 and 1 (sums) and 4 (operand) get `first` rows, 2 and 3 (sums) and 5 (operand) `second`; 6 and 7 (weights)
 * all 16. */
INLINE TileShapes shapes_of(int first, int second) {
    TileShapes s = {.palette = 1};
    const int rows[8] = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS};
    for (int tile = 0; tile < 8; tile++) s.row_bytes[tile] = TILE_BYTES, s.rows[tile] = (uint8_t)rows[tile];
    return s;
}

#ifndef EMULATED_TILES

#include <sys/syscall.h>
#include <unistd.h>

/* Bytes of an operand that fit, with two panels and the next two, into the second-level cache (2 MiB on CPUs with
 * tiles), and rows that are multiplied with the same weights though only a part of each fits. */
#define CACHED_ROW_BYTES 1310720
#define PART_ROWS 256
#define REQUEST_FEATURE 0x1023   /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18             /* XFEATURE_XTILEDATA */

/* Whether the CPU has tiles and the system keeps their state (XCR0). */
INLINE int cpu_has_tiles(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
           __builtin_cpu_supports("amx-int8");
}

/* Ask Linux for the use of tiles, for the whole process, its future threads included; returns whether it permits it. */
INLINE int tiles_permitted(void) { return syscall(SYS_arch_prctl, REQUEST_FEATURE, TILE_DATA) == 0; }

INLINE void tiles_begin(TileShapes asked) {
    TileShapes shapes __attribute__((aligned(64))) = asked;
    STORED_FOR_TILES();
    _tile_loadconfig(&shapes);
}
INLINE void tiles_end(void) { _tile_release(); }

#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_DOT_BF16(sums, a, b) _tile_dpbf16ps(sums, a, b)
#define TILE_DOT_INT8(sums, a, b) _tile_dpbusd(sums, a, b) /* a unsigned, b signed */
#define TILE_DOT_SIGNED(sums, a, b) _tile_dpbssd(sums, a, b)

#else

#define CACHED_ROW_BYTES 2048 /* so that tests with small products take rows and k in parts too */
#define PART_ROWS 64

INLINE int cpu_has_tiles(void) { return 1; }
INLINE int tiles_permitted(void) { return 1; }

static _Thread_local struct {
    TileShapes shapes; /* palette 0: none */
    uint8_t data[8][TILE_ROWS][TILE_BYTES];
} emulated;

static void tiles_begin(TileShapes asked) {
    memset(&emulated, 0, sizeof emulated);
    emulated.shapes = asked;
}
static void tiles_end(void) { memset(&emulated, 0, sizeof emulated); }

/* The instructions fault without a configuration, and on operands whose shapes do not fit. */
static void fault_unless(int fits) {
    if (!emulated.shapes.palette || !fits) __builtin_trap();
}

static void emulated_zero(int tile) {
    fault_unless(1);
    memset(emulated.data[tile], 0, sizeof emulated.data[tile]);
}

static void emulated_load(int tile, const void *from, int64_t stride) {
    emulated_zero(tile);
    for (int row = 0; row < emulated.shapes.rows[tile]; row++)
        memcpy(emulated.data[tile][row], (const char *)from + row * stride, emulated.shapes.row_bytes[tile]);
}

static void emulated_store(int tile, void *to, int64_t stride) {
    fault_unless(1);
    for (int row = 0; row < emulated.shapes.rows[tile]; row++)
        memcpy((char *)to + row * stride, emulated.data[tile][row], emulated.shapes.row_bytes[tile]);
}

static void shapes_must_fit(int sums, int a, int b) {
    const TileShapes *s = &emulated.shapes;
    fault_unless(sums != a && sums != b && a != b && s->rows[sums] == s->rows[a] && s->row_bytes[a] == 4 * s->rows[b] &&
                 s->row_bytes[sums] == s->row_bytes[b]);
}

/* Zero for a denormal number, with its sign. */
static float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }

/* TDPBF16PS as Intel's manual describes it: the even and the odd products of a row are summed apart, from zero, by
 * fused multiply-adds to nearest even, then added to each other and to the sum; denormal numbers count as zero. */
static void emulated_dot_bf16(int sums, int a, int b) {
    shapes_must_fit(sums, a, b);
    for (int m = 0; m < emulated.shapes.rows[sums]; m++)
        for (int n = 0; n < emulated.shapes.row_bytes[sums] / 4; n++) {
            float apart[2] = {0.0f, 0.0f}, sum;
            for (int k = 0; k < emulated.shapes.row_bytes[a] / 4; k++)
                for (int odd = 0; odd < 2; odd++) {
                    bf16 x, w;
                    memcpy(&x, emulated.data[a][m] + 4 * k + 2 * odd, 2);
                    memcpy(&w, emulated.data[b][k] + 4 * n + 2 * odd, 2);
                    apart[odd] = flushed(__builtin_fmaf(flushed(from_bf16(x)), flushed(from_bf16(w)), apart[odd]));
                }
            memcpy(&sum, emulated.data[sums][m] + 4 * n, 4);
            sum = flushed(flushed(sum) + flushed(apart[0] + apart[1]));
            memcpy(emulated.data[sums][m] + 4 * n, &sum, 4);
        }
}

/* TDPBUSD and, if a is signed too, TDPBSSD: sums of 32 bits, which wrap around. */
INLINE void emulated_dot_int8(int is_signed, int sums, int a, int b) {
    shapes_must_fit(sums, a, b);
    for (int m = 0; m < emulated.shapes.rows[sums]; m++)
        for (int n = 0; n < emulated.shapes.row_bytes[sums] / 4; n++) {
            uint32_t sum;
            memcpy(&sum, emulated.data[sums][m] + 4 * n, 4);
            for (int k = 0; k < emulated.shapes.row_bytes[a]; k++) {
                int x = is_signed ? (int8_t)emulated.data[a][m][k] : emulated.data[a][m][k];
                sum += (uint32_t)(x * (int8_t)emulated.data[b][k / 4][4 * n + k % 4]);
            }
            memcpy(emulated.data[sums][m] + 4 * n, &sum, 4);
        }
}

#define TILE_ZERO(tile) emulated_zero(tile)
#define TILE_LOAD(tile, from, stride) emulated_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulated_store(tile, to, stride)
#define TILE_DOT_BF16(sums, a, b) emulated_dot_bf16(sums, a, b)
#define TILE_DOT_INT8(sums, a, b) emulated_dot_int8(0, sums, a, b)
#define TILE_DOT_SIGNED(sums, a, b) emulated_dot_int8(1, sums, a, b)

#endif
#endif
#endif

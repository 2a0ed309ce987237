/* Calls every entry point of the native library with buffers of exactly the sizes that docs/kernels.md promises, for
 * sanitizers.
 *
 * Compiled together with the kernels (tests/model/test_check_native.py). Scratch and outputs are filled with NaN, so
 * that reading what was never written shows as a result that is not finite. OpenMP's regions are run by the pthreads
 * below: sanitizers know what those synchronise, and nothing of libgomp. */
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>

#include "low_rank.h"

int64_t scratch_bytes(const Stack *stack, const Step *step, int64_t threads);
void run_stack(const Stack *stack, const Step *step, float *x, char *memory, int64_t threads);
int64_t linear_scratch_bytes(const PackedMatrix *matrix, int64_t rows, int64_t threads);
void run_linear(const PackedMatrix *matrix, const float *x, int64_t rows, float *out, float softcap, char *memory,
                int64_t threads);
int64_t attention_scratch_bytes(const AttentionShape *shape, const Segments *segments, int64_t threads);
void run_attention(const Attention *attention, const float *keys, const float *values, int64_t rows, char *memory,
                   int64_t threads);
void write_pages(const AttentionShape *shape, const KVPages *pages, const int64_t *slots, const float *rows,
                 int64_t count, int64_t threads);
void top_k(const float *x, int64_t rows, int64_t size, int64_t count, float *values, int64_t *tokens, float *log_sums,
           int64_t threads);
void pack_rows(const PackedMatrix *matrix, const void *from, int64_t kind, int64_t stride, int64_t first, int64_t count,
               int64_t threads);
void unpack_rows(const PackedMatrix *matrix, const int64_t *ids, int64_t count, float *to, int64_t threads);
void quantise_rows(const PackedMatrix *matrix, const void *from, int64_t kind, int64_t stride, int64_t count,
                   const float *weights, int8_t *integers, float *scales, int64_t threads);
int64_t time_warping_bytes(int64_t rows, int64_t columns);
void time_warping(const float *costs, int64_t rows, int64_t columns, int64_t *starts, char *memory);
int64_t structure_sizes(int64_t *sizes, int64_t count);
int64_t features(void);
int64_t start_tiles(void);
void bind_threads(const int64_t *chosen, int64_t count);

/* ---- OpenMP ---- */

typedef struct {
    void (*work)(void *);
    void *data;
    int thread, threads;
} Region;

static pthread_barrier_t barrier; /* of the region that runs */

static _Thread_local Region current = {.threads = 1};

int omp_get_thread_num(void) { return current.thread; }
int omp_get_num_threads(void) { return current.threads; }

void GOMP_barrier(void) {
    if (current.threads > 1) pthread_barrier_wait(&barrier);
}

static void run_region(const Region *region) {
    current = *region;
    current.work(current.data);
    current = (Region){.threads = 1};
}

enum { MOST_THREADS = 64 };

/* Threads that wait for the next region, as libgomp's do: qemu-user frees little of a thread that has ended. */
static struct {
    Region region;
    sem_t begin, end;
} workers[MOST_THREADS];

static void *run_regions(void *worker) {
    for (long i = (long)worker;;) {
        sem_wait(&workers[i].begin);
        run_region(&workers[i].region);
        sem_post(&workers[i].end);
    }
    return NULL;
}

static void start_worker(long i) {
    pthread_t thread;
    sem_init(&workers[i].begin, 0, 0);
    sem_init(&workers[i].end, 0, 0);
    if (pthread_create(&thread, NULL, run_regions, (void *)i) || pthread_detach(thread)) abort();
}

void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags) {
    static unsigned started = 1; /* the calling thread is the first */
    (void)flags;
    if (threads > MOST_THREADS || current.threads > 1) abort(); /* no region is within another */
    for (; started < threads; started++) start_worker(started);
    if (threads > 1) pthread_barrier_init(&barrier, NULL, threads);
    for (unsigned i = 1; i < threads; i++) {
        workers[i].region = (Region){work, data, (int)i, (int)threads};
        sem_post(&workers[i].begin);
    }
    run_region(&(Region){work, data, 0, (int)threads});
    for (unsigned i = 1; i < threads; i++) sem_wait(&workers[i].end);
    if (threads > 1) pthread_barrier_destroy(&barrier);
}

/* ---- buffers that are freed all at once ---- */

static void *kept[100000];
static int kept_count;

static void *room(int64_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    memset(memory, 0xff, bytes); /* NaN, or integers that are out of range */
    return kept[kept_count++] = memory;
}

static void free_all(void) {
    while (kept_count) free(kept[--kept_count]);
}

static uint64_t state = 1;

static float drawn(void) { /* between -1 and 1 */
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(state >> 32) * 0x1p-31f;
}

static float *floats(int64_t count) {
    float *x = room(count * 4);
    for (int64_t i = 0; i < count; i++) x[i] = drawn();
    return x;
}

static void *numbers(int64_t kind, int64_t count) {
    float *wide = floats(count);
    if (kind == F32) return wide;
    void *narrow = room(count * element_bytes(kind));
    for (int64_t i = 0; i < count; i++) {
        if (kind == BF16) ((bf16 *)narrow)[i] = to_bf16(wide[i]);
        else ((int8_t *)narrow)[i] = (int8_t)(wide[i] * 127.0f);
    }
    return narrow;
}

static int failures;

static void must_be_finite(const char *what, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!__builtin_isfinite(x[i])) {
            printf("%s: number %ld of %ld is %f\n", what, (long)i, (long)count, x[i]);
            failures++;
            return;
        }
}

/* ---- products ---- */

static PackedMatrix packed_in(int64_t dtype, int64_t group, int64_t n, int64_t k, int biased, int64_t tiles) {
    int64_t padded = round_up(n, PANEL_WIDTH), bytes = padded * padded_k(dtype, k) * element_bytes(dtype);
    int64_t kind = dtype == INT8 && n % 3 == 0 ? INT8 : dtype == BF16 || n % 2 ? BF16 : F32;
    PackedMatrix m = {.dtype = dtype, .n = n, .k = k, .tiles = tiles, .group = group};
    if (group) bytes = padded / PANEL_WIDTH * grouped_panel_bytes(&m);
    m.data = memset(room(bytes), 0, bytes);
    if (biased) m.bias = floats(padded);
    if (group) {
        int64_t scales = padded * group_count(&m);
        m.scale = kind == INT8 ? floats(scales) : memset(room(scales * 4), 0, scales * 4);
        if (n % 2) m.offset = floats(scales);
    } else if (dtype == INT8) {
        m.scale = kind == INT8 ? floats(padded) : memset(room(padded * 4), 0, padded * 4);
        m.row_sums = memset(room(padded * 4), 0, padded * 4);
    }
    for (int64_t first = 0, count; first < n; first += count) { /* in pieces, from rows that are further apart than k */
        count = min_i64(n - first, 1 + first % 21);
        pack_rows(&m, numbers(kind, (count - 1) * (k + 3) + k), kind, k + 3, first, count, 1 + first % 3);
    }
    return m;
}

static PackedMatrix packed(int64_t dtype, int64_t n, int64_t k, int biased, int64_t tiles) {
    return packed_in(dtype, dtype == INT4 ? 64 : 0, n, k, biased, tiles);
}

static void check_products(int64_t tiles, int64_t threads) {
    static const int64_t shapes[][2] = {{1, 1}, {16, 16}, {7, 5}, {33, 70}, {100, 37}, {48, 64}, {17, 2}, {40, 1500}};
    static const int64_t counts[] = {0, 1, 2, 3, 5, 8, 13, 33, 40};
    for (unsigned shape = 0; shape < sizeof shapes / sizeof *shapes; shape++)
        for (int64_t form = F32; form < INT4 + 2 * 3; form++) { /* then INT4 and INT8 in groups of 32, 64 and 128 */
            int64_t dtype = form < INT4 ? form : form % 2 ? INT4 : INT8;
            int64_t group = form < INT4 ? 0 : 32 << (form - INT4) / 2;
            PackedMatrix m = packed_in(dtype, group, shapes[shape][0], shapes[shape][1], shape % 2, tiles);
            for (unsigned i = 0; i < sizeof counts / sizeof *counts; i++) {
                int64_t rows = counts[i], bytes = linear_scratch_bytes(&m, rows, threads);
                float *out = room(rows * m.n * 4);
                run_linear(&m, floats(rows * m.k), rows, out, i % 2 ? 5.0f : 0.0f, room(bytes), threads);
                must_be_finite("run_linear", out, rows * m.n);
            }
            int64_t *ids = room(4 * sizeof *ids), some[] = {m.n - 1, 0, -1, m.n};
            float *found = room(4 * m.k * sizeof *found);
            unpack_rows(&m, memcpy(ids, some, sizeof some), 4, found, threads);
            must_be_finite("unpack_rows", found, 4 * m.k);
            free_all();
        }
}

/* Whole rows in INT8, then groups of 32, 64 and 128 in both kinds of integers. */
static void check_quantising(int64_t threads) {
    static const int64_t shapes[][2] = {{1, 1}, {5, 70}, {17, 200}};
    for (unsigned shape = 0; shape < sizeof shapes / sizeof *shapes; shape++)
        for (int64_t form = 0; form < 7; form++)
            for (int64_t kind = F32; kind <= BF16; kind++) {
                int64_t n = shapes[shape][0], k = shapes[shape][1], stride = k + 3, dtype = form % 2 ? INT4 : INT8;
                PackedMatrix m = {.dtype = dtype, .n = n, .k = k, .group = form ? 32 << (form - 1) / 2 : 0};
                int64_t groups = m.group ? (k + m.group - 1) / m.group : 1;
                float *scales = room(n * groups * 4), *weights = dtype == INT4 && shape ? floats(k) : NULL;
                for (int64_t i = 0; weights && i < k; i++) weights[i] *= weights[i];
                quantise_rows(&m, numbers(kind, (n - 1) * stride + k), kind, stride, n, weights, room(n * k), scales,
                              threads);
                must_be_finite("quantise_rows", scales, n * groups);
                free_all();
            }
}

/* ---- attention ---- */

static KVPages pages_of(int64_t kind, int64_t rows, int64_t heads, int64_t dim) {
    KVPages p = {.kind = kind, .keys = numbers(kind, rows * heads * dim), .values = numbers(kind, rows * heads * dim)};
    p.key_stride = p.value_stride = heads * dim;
    if (kind == INT8) p.key_scales = floats(rows * heads), p.value_scales = floats(rows * heads);
    return p;
}

/* Segments with `sizes` rows and keys; their last block is the last of the pool, and rows are written to slots. */
static Segments segments_of(const int64_t (*sizes)[2], int64_t count, int64_t block_size, int causal) {
    int64_t *starts = room((count + 1) * 8), *lens = room(count * 8), width = 1, rows = 0;
    for (int64_t i = 0; i < count; i++) {
        starts[i] = rows, lens[i] = sizes[i][1], rows += sizes[i][0];
        if (block_size) width = max_i64(width, round_up(lens[i], block_size) / block_size);
    }
    starts[count] = rows;
    Segments s = {.segments = count, .causal = causal, .q_starts = starts, .k_starts = starts, .kv_lens = lens};
    if (!block_size) return s;
    int64_t *tables = room(count * width * 8), *slots = room(rows * 8);
    for (int64_t i = 0; i < count * width; i++) tables[i] = count * width - 1 - i;
    for (int64_t i = 0; i < count; i++)
        for (int64_t row = 0; row < sizes[i][0]; row++) {
            int64_t at = lens[i] - sizes[i][0] + row;
            slots[starts[i] + row] = tables[i * width + at / block_size] * block_size + at % block_size;
        }
    s.block_size = block_size, s.table_width = width, s.tables = tables, s.slots = slots;
    return s;
}

static int64_t pool_rows(const Segments *s) { return s->segments * s->table_width * s->block_size; }

static const int64_t MIXED[][2] = {{1, 70}, {37, 37}, {1, 1}, {70, 133}, {1, 16}, {5, 33}, {1, 300}};
enum { MIXED_COUNT = sizeof MIXED / sizeof *MIXED, LONGEST = 300 };

static ScoreBias bias_of(int64_t heads, int64_t longest) {
    int64_t width = 2 * (longest + 32); /* what ScoreBias says may be read */
    return (ScoreBias){floats(heads * width), width};
}

static void check_attention(int64_t tiles, int64_t threads) {
    static const int64_t dims[] = {1, 5, 8, 20, 32, 64, 80, 128};
    for (unsigned i = 0; i < sizeof dims / sizeof *dims; i++)
        for (int64_t kind = F32; kind <= INT8; kind++)
            for (int64_t paged = 0; paged < 3; paged++) {
                int64_t dim = dims[i], block_size = paged == 2 ? 16 : 3 * paged, rows;
                AttentionShape shape = {.heads = 6, .kv_heads = i % 2 ? 2 : 1, .dim = dim, .scale = 0.3f};
                if ((i + kind) % 2) shape.sinks = floats(shape.heads);
                shape.window = (i + paged) % 2 ? 20 : 0, shape.softcap = kind == BF16 ? 2.0f : 0.0f;
                if (!paged && kind == F32) shape.kv_heads = 6;
                Segments s = segments_of(MIXED, MIXED_COUNT, block_size, paged || i % 2);
                rows = s.q_starts[MIXED_COUNT];
                if (!paged) s = segments_of((const int64_t[][2]){{70, 70}, {1, 1}, {33, 33}}, 3, 0, i % 2), rows = 104;
                KVPages pages = pages_of(kind, paged ? pool_rows(&s) : rows, shape.kv_heads, dim);
                ScoreBias bias = bias_of(shape.heads, paged ? LONGEST : 70);
                Attention a = {&shape, &s, &pages, i % 3 ? NULL : &bias, NULL, shape.heads * dim, NULL};
                a.form = tiles ? ATTEND_IN_TILES : i % 2 ? ATTEND_BY_VECTORS : ATTEND_IN_FLOATS;
                a.queries = floats(rows * shape.heads * dim), a.out = room(rows * shape.heads * dim * 4);
                int64_t kv = rows * shape.kv_heads * dim;
                char *memory = room(attention_scratch_bytes(&shape, &s, threads));
                if (paged) write_pages(&shape, &pages, s.slots, floats(2 * kv), rows, threads);
                run_attention(&a, floats(kv), floats(kv), rows, memory, threads);
                must_be_finite("run_attention", a.out, rows * shape.heads * dim);
                free_all();
            }
}

/* Rows that see the same keys, as beams of one source do, and a prompt of many queries for each packed key. */
static void check_shared_keys(int64_t tiles, int64_t threads) {
    static const int64_t beams[][2] = {{1, 90}, {1, 90}, {1, 90}, {1, 20}, {1, 90}}, prompt[][2] = {{1030, 1030}};
    for (int64_t kind = F32; kind <= INT8; kind++)
        for (int64_t causal = 0; causal < 2; causal++) {
            AttentionShape shape = {.heads = 8, .kv_heads = 2 - causal, .dim = 20, .window = 70 * causal};
            Segments s = causal ? segments_of(prompt, 1, 16, 1) : segments_of(beams, 5, 16, 0);
            shape.scale = 0.3f;
            int64_t rows = s.q_starts[s.segments], width = shape.heads * shape.dim;
            for (int64_t i = 1; i < 3 && !causal; i++)
                memcpy((int64_t *)s.tables + i * s.table_width, s.tables, s.table_width * sizeof *s.tables);
            s.slots = NULL; /* keys are there already */
            KVPages pages = pages_of(kind, pool_rows(&s), shape.kv_heads, shape.dim);
            Attention a = {.shape = &shape, .segments = &s, .pages = &pages, .query_stride = width};
            a.form = tiles ? ATTEND_IN_TILES : ATTEND_BY_VECTORS;
            a.queries = floats(rows * width), a.out = room(rows * width * 4);
            run_attention(&a, NULL, NULL, rows, room(attention_scratch_bytes(&shape, &s, threads)), threads);
            must_be_finite("run_attention", a.out, rows * width);
            free_all();
        }
}

/* ---- stacks ---- */

static Norm norm_of(int64_t kind, int64_t size) {
    Norm norm = {.kind = kind, .eps = 1e-5f, .weight = floats(size)};
    if (kind == LAYER_NORM) norm.bias = floats(size);
    return norm;
}

/* The norms of layer `number`: all combinations of slots come up. */
static SublayerNorms norms_of(int64_t number, int64_t hidden) {
    int64_t kind = number % 2 ? LAYER_NORM : RMS_NORM;
    SublayerNorms norms = {.pre = norm_of(kind, hidden)};
    if (number % 3) norms.output = norm_of(kind, hidden);
    if (number % 4 == 3) norms.post = norm_of(kind, hidden);
    return norms;
}

static AttentionLayer attention_layer(int64_t number, int64_t dtype, int64_t hidden, int64_t tiles, int cross,
                                      int gated) {
    static const int64_t shapes[][3] = {{4, 2, 8}, {2, 2, 33}, {6, 1, 20}, {3, 3, 64}};
    const int64_t *shape = shapes[(number + cross) % 4];
    int64_t heads = shape[0], kv_heads = shape[1], dim = shape[2];
    AttentionLayer layer = {.norms = norms_of(number, hidden), .rotary = -1, .score_bias = -1, .relative = -1};
    layer.shape = (AttentionShape){heads, kv_heads, dim, 0, 0.3f, number % 2 ? 2.0f : 0.0f, NULL};
    layer.output_gate = gated && !cross;
    int64_t input = heads + (cross ? 0 : 2 * kv_heads);
    if (number == 5) layer.keys_as_values = 1, layer.v_norm = norm_of(RMS_NORM, dim), input -= kv_heads;
    if (layer.output_gate) input += heads;
    layer.input = packed(dtype, input * dim, hidden, number % 2, tiles);
    layer.output = packed(dtype, hidden, heads * dim, 1, tiles);
    layer.norm_span = number == 1 ? OWN_GAINS : number == 3 ? ALL_HEADS : EACH_HEAD;
    if (number % 2) layer.q_norm = norm_of(RMS_NORM, layer.norm_span == EACH_HEAD ? dim : heads * dim);
    if (number % 2 && !cross) layer.k_norm = norm_of(RMS_NORM, layer.norm_span == EACH_HEAD ? dim : kv_heads * dim);
    if (!cross) layer.rotary = number % 3 < 2 ? number % 3 : number == 5 ? 0 : -1;
    if (number % 2 == 0 && !cross) layer.score_bias = number;
    return layer;
}

/* A recurrence of odd sizes. */
static DeltaLayer recurrence(int64_t dtype, int64_t hidden, int64_t tiles) {
    DeltaLayer layer = {.norms = norms_of(2, hidden), .key_heads = 2, .value_heads = 4, .key_dim = 13, .scale = 1.0f};
    layer.value_dim = 4 * LANES + 5, layer.kernel = 3;
    int64_t values = layer.value_heads * layer.value_dim, channels = 2 * layer.key_heads * layer.key_dim + values;
    layer.input = packed(dtype, channels + values, hidden, 0, tiles);
    layer.gates = packed(F32, 2 * layer.value_heads, hidden, 0, 0);
    layer.output = packed(dtype, hidden, values, 0, tiles);
    layer.taps = floats(layer.kernel * channels), layer.norm = norm_of(RMS_NORM, layer.value_dim);
    float *decay = floats(layer.value_heads);
    for (int64_t i = 0; i < layer.value_heads; i++) decay[i] *= decay[i];
    layer.decay = decay, layer.dt_bias = floats(layer.value_heads);
    return layer;
}

enum { LAYERS = 6, EXPERTS = 5, VECTOR = 21 };

typedef struct {
    Stack stack;
    Layer layers[LAYERS];
    const Layer *order[LAYERS];
    ScoreBias biases[LAYERS];
    RelativePositions relative[LAYERS];
    Expert experts[LAYERS][EXPERTS + 1];
    ExpertsLayer mixtures[LAYERS];
    DeltaLayer delta;
    float scale;
} Model;

/* Both kinds of scores, or one of them, in the kind of an encoder's products. */
static RelativePositions relative_of(int64_t number, const AttentionShape *shape, int64_t dtype, int64_t tiles) {
    RelativePositions found = {.reach = round_up(LONGEST, 32)};
    int64_t rows = shape->heads * 2 * found.reach, kind = shape->dim % 2 || dtype == F32 ? F32 : BF16;
    if (number != 1) found.keys = packed(kind, rows, shape->dim, 0, tiles);
    if (number != 3) found.queries = packed(kind, rows, shape->dim, 0, tiles);
    return found;
}

/* Experts of odd sizes in place of a layer's own matrices, then one for all rows, which in layer 1 has a gate;
 * layer 5 has them in addition to its MLP. */
static void make_experts(Model *m, int64_t number, int64_t dtype, int64_t tiles) {
    MLPLayer *mlp = &m->layers[number].mlp;
    int64_t hidden = m->stack.hidden, columns = 1 + mlp->gated;
    for (int64_t i = 0; i <= EXPERTS; i++) {
        int64_t inner = i < EXPERTS ? 21 + 12 * number : 50;
        m->experts[number][i].up = packed(i < EXPERTS || number > 1 ? dtype : BF16, inner * columns, hidden, 1, tiles);
        m->experts[number][i].down = packed(dtype, hidden, inner, number % 2, tiles);
    }
    ExpertsLayer *layer = m->mixtures + number;
    *layer = (ExpertsLayer){.count = EXPERTS, .active = number + 1, .of_chosen = number % 2, .has_shared = 1};
    layer->experts = m->experts[number], layer->router = packed(F32, EXPERTS, hidden, number % 2, 0);
    if (number == 1) layer->shared_gate = packed(F32, 1, hidden, 0, 0), mlp->activation = CLAMPED_SILU;
    mlp->experts = layer, mlp->limit = 7.0f, mlp->gain = 1.702f, mlp->scale = 0.5f;
    if (number != 5) {
        mlp->up = mlp->down = (PackedMatrix){0};
        return;
    }
    layer->active = 2, layer->has_shared = 0, layer->scales = floats(EXPERTS);
    layer->router_norm = norm_of(RMS_NORM, hidden);
    layer->norms = layer->mlp_norms = norms_of(1, hidden), mlp->norms.output = norm_of(RMS_NORM, hidden);
}

/* What layers have in Gemma 4: vectors, a scale, and, in layer 4 of a decoder, keys that layer 0 has written. */
static void make_last(Model *m, int64_t number, int64_t dtype, int64_t tiles, int decoder) {
    Layer *layer = m->layers + number;
    AttentionLayer *self = &layer->self;
    int64_t hidden = m->stack.hidden;
    layer->has_vectors = 1, layer->vectors = (MLPLayer){.activation = GELU_TANH};
    layer->vectors.up = packed(dtype, VECTOR, hidden, 0, tiles);
    layer->vectors.down = packed(dtype, hidden, VECTOR, 0, tiles);
    layer->vectors.norms.output = norm_of(RMS_NORM, hidden), layer->scale = &m->scale, m->scale = 0.7f;
    if (!decoder || number != 4) return;
    self->reads_keys = 1, self->input = packed(dtype, self->shape.heads * self->shape.dim, hidden, 0, tiles);
}

static void make_model(Model *m, int64_t dtype, int64_t hidden, int64_t tiles, int decoder) {
    m->stack = (Stack){.hidden = hidden, .num_layers = LAYERS, .layers = m->order, .dtype = dtype == F32 ? F32 : BF16};
    m->stack.tiles = tiles, m->stack.final = norm_of(LAYER_NORM, hidden);
    for (int64_t i = 0; i < LAYERS; i++) {
        int64_t inner = 30 + 17 * i, gated = i % 2;
        Layer *layer = m->layers + i;
        *layer = (Layer){.self = attention_layer(i, dtype, hidden, tiles, 0, decoder && i == 1), .parallel = i == 2};
        if (decoder) layer->self.segments = i % 2, layer->self.shape.window = i % 2 ? 20 : 0;
        if (decoder && i % 2 == 0) {
            layer->has_cross = 1, layer->cross = attention_layer(i, dtype, hidden, tiles, 1, 0);
            layer->cross.segments = 2;
        }
        layer->mlp = (MLPLayer){.norms = norms_of(i + 1, hidden), .gated = gated, .activation = 1 + i % 3};
        layer->mlp.up = packed(dtype, inner * (1 + gated), hidden, 1, tiles);
        layer->mlp.down = packed(dtype, hidden, inner, 1, tiles);
        if (i == 1 || i == 2 || i == 5) make_experts(m, i, dtype, tiles);
        if (i >= 4) make_last(m, i, dtype, tiles, decoder);
        m->order[i] = layer, m->biases[i] = bias_of(layer->self.shape.heads, LONGEST);
        if (decoder && i == 2) m->biases[i] = (ScoreBias){.slopes = floats(layer->self.shape.heads)};
    }
}

/* The second matrix of a part, whose ranks are rounded up as vectors or tiles read them. */
static PackedMatrix rank_matrix(int64_t dtype, int64_t n, int64_t rank, int64_t tiles) {
    if (dtype != BF16 || tiles) return packed(dtype, n, rank, 0, tiles);
    PackedMatrix m = {.dtype = dtype, .n = n, .k = rank};
    int64_t count = round_up(n, PANEL_WIDTH) * round_up(rank, 2);
    m.data = memcpy(room(count * 2), numbers(dtype, count), count * 2);
    return m;
}

/* What an adapter adds to the projection of a matrix, in two parts; the last outputs of one are left alone. */
static Addition addition(const Stack *stack, const PackedMatrix *matrix, int64_t rank) {
    int64_t half = matrix->n / 2 / PANEL_WIDTH * PANEL_WIDTH, sizes[] = {half ? half : 1, matrix->n - half - 1};
    int64_t each = round_up(rank, stack->tiles ? 32 : 2);
    LowRank *parts = room(2 * sizeof *parts);
    for (int64_t i = 0; i < 2; i++) {
        parts[i].up = rank_matrix(stack->dtype, sizes[i], rank, stack->tiles);
        parts[i].first_output = i * half, parts[i].first_rank = i * each, parts[i].scale = 0.5f;
    }
    return (Addition){packed(stack->dtype, 2 * each, matrix->k, 0, stack->tiles), 2, parts};
}

/* An adapter of all projections that may have one. */
static const Addition *adapter(const Model *m, int64_t rank) {
    Addition *found = memset(room(LAYERS * ADAPTED * sizeof *found), 0, LAYERS * ADAPTED * sizeof *found);
    for (int64_t i = 0; i < LAYERS; i++) {
        const Layer *layer = m->order[i];
        Addition *of = found + i * ADAPTED;
        of[ATTENTION_INPUT] = addition(&m->stack, &layer->self.input, rank);
        of[ATTENTION_OUTPUT] = addition(&m->stack, &layer->self.output, rank);
        if (layer->has_cross) of[CROSS_INPUT] = addition(&m->stack, &layer->cross.input, rank);
        if (layer->has_cross) of[CROSS_OUTPUT] = addition(&m->stack, &layer->cross.output, rank);
        if (layer->mlp.experts) continue;
        of[MLP_UP] = addition(&m->stack, &layer->mlp.up, rank);
        of[MLP_DOWN] = addition(&m->stack, &layer->mlp.down, rank);
    }
    return found;
}

static void run_model(const Model *m, Step step, int64_t threads) {
    RotaryTable *rotary = room(2 * sizeof *rotary);
    rotary[0] = (RotaryTable){floats(step.rows * 8), floats(step.rows * 8), 8, 0, floats(step.rows)};
    rotary[1] = (RotaryTable){floats(step.rows * 4), floats(step.rows * 4), 4, 1, NULL};
    step.rotary = rotary, step.score_biases = m->biases, step.relative = m->relative;
    step.vectors = floats(step.rows * LAYERS * VECTOR);
    float **queries = step.pages ? memset(room(LAYERS * sizeof *queries), 0, LAYERS * sizeof *queries) : NULL;
    int64_t width = m->layers[2].cross.shape.heads * m->layers[2].cross.shape.dim;
    if (queries) queries[2] = room(step.rows * width * 4), step.cross_queries = queries;
    float *x = floats(step.rows * m->stack.hidden);
    if (step.rows > 2) { /* rows of one adapter, of another, and of none */
        AdapterRun *runs = room(2 * sizeof *runs);
        runs[0] = (AdapterRun){1, step.rows / 2, adapter(m, 5)};
        runs[1] = (AdapterRun){step.rows / 2, step.rows - 1, adapter(m, 33)};
        step.num_runs = 2, step.runs = runs, step.rank_width = 2 * 64;
    }
    for (int64_t half = 0; half < 2; half++) { /* a step that pauses between two layers */
        step.first_layer = half * LAYERS / 2, step.last_layer = (half + 1) * LAYERS / 2;
        run_stack(&m->stack, &step, x, room(scratch_bytes(&m->stack, &step, threads)), threads);
    }
    must_be_finite("run_stack", x, step.rows * m->stack.hidden);
    if (queries) must_be_finite("cross_queries", queries[2], step.rows * width);
}

/* The same step with a recurrence in layer 3, which writes states after tokens of some segments and begins others with
 * zeros; and again without writing states. */
static void run_recurrent(Model *m, Step step, int64_t dtype, int64_t tiles, int64_t threads) {
    int64_t count = step.segments->segments, spans = 0;
    m->delta = recurrence(dtype, m->stack.hidden, tiles), m->layers[3].delta = &m->delta;
    StateSpan *all = room(2 * count * sizeof *all);
    const int64_t *starts = step.segments->q_starts;
    for (int64_t i = 0; i < count; i++) {
        int64_t middle = (starts[i] + starts[i + 1]) / 2, source = i % 3 ? 3 * i : -1;
        if (middle > starts[i]) all[spans++] = (StateSpan){starts[i], middle, source, 3 * i + 1}, source = 3 * i + 1;
        else middle = starts[i];
        all[spans++] = (StateSpan){middle, starts[i + 1], source, i % 4 == 3 ? -1 : 3 * i + 2};
    }
    int64_t channels = 2 * m->delta.key_heads * m->delta.key_dim + m->delta.value_heads * m->delta.value_dim;
    LayerStates *states = room(LAYERS * sizeof *states);
    memset(states, 0, LAYERS * sizeof *states);
    states[3].recurrent = floats(3 * count * m->delta.value_heads * m->delta.key_dim * m->delta.value_dim);
    states[3].channels = floats(3 * count * (m->delta.kernel - 1) * channels);
    step.spans = all, step.num_spans = spans, step.states = states;
    run_model(m, step, threads);
    for (int64_t i = 0; i < count; i++) all[i] = (StateSpan){starts[i], starts[i + 1], -1, -1};
    step.num_spans = count, step.states = NULL;
    run_model(m, step, threads);
}

static void run_decoder(const int64_t (*sizes)[2], int64_t count, int64_t dtype, int64_t kind, int64_t tiles,
                        int64_t threads) {
    Model m;
    make_model(&m, dtype, 36 + 4 * dtype, tiles, 1);
    int64_t (*sources)[2] = room(count * sizeof *sources);
    for (int64_t i = 0; i < count; i++) sources[i][0] = sizes[i][0], sources[i][1] = 1 + 19 * i * i % 65;
    Segments *segments = room(3 * sizeof *segments);
    segments[0] = segments_of(sizes, count, 4, 1), segments[1] = segments_of(sizes, count, 16, 1);
    segments[2] = segments_of((const int64_t (*)[2])sources, count, 4, 0);
    segments[2].slots = NULL; /* what is read there has been written */
    KVPages *pages = room(LAYERS * sizeof *pages);
    for (int i = 0; i < LAYERS; i++) {
        const Layer *layer = m.layers + i;
        int64_t heads = max_i64(layer->self.shape.kv_heads * layer->self.shape.dim, 1), rows = 0;
        if (layer->has_cross) heads = max_i64(heads, layer->cross.shape.kv_heads * layer->cross.shape.dim);
        for (int j = 0; j < 3; j++) rows = max_i64(rows, pool_rows(segments + j));
        pages[i] = pages_of(kind, rows, heads, 1); /* the wider of both; a scale for each number is more than enough */
    }
    pages[4] = pages[0]; /* whose keys it reads */
    Step step = {.rows = segments[0].q_starts[count], .num_segments = 3, .segments = segments, .pages = pages};
    run_model(&m, step, threads);
    run_recurrent(&m, step, dtype, tiles, threads);
    free_all();
}

/* A step of prompts and tokens, and one of a few tokens. */
static void check_decoder(int64_t dtype, int64_t kind, int64_t tiles, int64_t threads) {
    run_decoder(MIXED, MIXED_COUNT, dtype, kind, tiles, threads);
    run_decoder((const int64_t[][2]){{1, 70}, {1, 1}, {1, 133}}, 3, dtype, kind, tiles, threads);
}

static void check_encoder(int64_t dtype, int64_t tiles, int64_t threads, int64_t count) {
    int64_t (*sizes)[2] = room(count * sizeof *sizes);
    for (int64_t i = 0; i < count; i++) /* some are empty */
        sizes[i][0] = sizes[i][1] = count < 10 ? 37 * i * i % 300 : 13 * i % 40;
    Model m;
    make_model(&m, dtype, 36 + 4 * dtype, tiles, 0);
    Segments *segments = room(sizeof *segments);
    *segments = segments_of((const int64_t (*)[2])sizes, count, 0, 0);
    Step step = {.rows = segments->q_starts[count], .num_segments = 1, .segments = segments};
    run_model(&m, step, threads);
    for (int64_t i = 0; i < LAYERS; i++) {
        m.layers[i].self.relative = i;
        m.relative[i] = relative_of(i, &m.layers[i].self.shape, dtype, tiles);
    }
    run_model(&m, step, threads);
    for (int64_t i = 0; i < LAYERS; i++) m.layers[i].self.relative = -1;
    m.layers[1].self.shape.window = 20; /* one layer that does not see all */
    run_model(&m, step, threads);
    segments->causal = 1;
    run_model(&m, step, threads);
    free_all();
}

/* ---- the rest ---- */

static void check_top_k(int64_t threads) {
    static const int64_t sizes[] = {1, 7, 16, 127, 128, 129, 1000};
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int64_t rows = 5, size = sizes[i], count = size < 40 ? size : 40, *tokens = room(rows * count * 8);
        float *values = room(rows * count * 4), *sums = room(rows * 4);
        top_k(floats(rows * size), rows, size, count, values, tokens, sums, threads);
        must_be_finite("top_k", values, rows * count), must_be_finite("logsumexp", sums, rows);
        free_all();
    }
}

static void check_time_warping(void) {
    static const int64_t shapes[][2] = {{1, 1}, {1, 9}, {9, 1}, {7, 30}, {40, 33}};
    for (unsigned i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int64_t rows = shapes[i][0], columns = shapes[i][1], *starts = room(rows * 8);
        time_warping(floats(rows * columns), rows, columns, starts, room(time_warping_bytes(rows, columns)));
        for (int64_t row = 0; row < rows; row++)
            if (starts[row] < (row ? starts[row - 1] : 0) || starts[row] >= columns) failures++;
        free_all();
    }
}

static void check_sizes(void) {
    int64_t count = structure_sizes(NULL, 0), *sizes = room(count * 8), *few = room(16);
    if (structure_sizes(sizes, count) != count || structure_sizes(few, 2) != count || few[1] != sizes[1]) failures++;
    free_all();
}

int main(int argc, char **argv) {
    int64_t usable = start_tiles() == 1, threads = argc > 1 ? atoi(argv[1]) : 1;
    printf("features %ld, tiles %ld, %ld threads\n", (long)features(), (long)usable, (long)threads);
    bind_threads((const int64_t[]){0, 0, 4095}, 3); /* the last one does not exist */
    check_sizes();
    check_top_k(threads);
    check_time_warping();
    check_quantising(threads);
    for (int64_t tiles = 0; tiles <= usable; tiles++) {
        check_products(tiles, threads);
        check_attention(tiles, threads);
        check_shared_keys(tiles, threads);
        for (int64_t dtype = F32; dtype <= INT4; dtype++) {
            for (int64_t kind = F32; kind <= INT8; kind++) check_decoder(dtype, kind, tiles, threads);
            check_encoder(dtype, tiles, threads, 5);
            check_encoder(dtype, tiles, threads, 60 * threads);
        }
    }
    printf(failures ? "%d results are wrong\n" : "all results are finite\n", failures);
    return failures != 0;
}

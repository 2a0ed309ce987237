/* Stands in for NVIDIA's libcuda.so.1 in tests of launches: it loads nothing, and keeps what was last launched.
   It has the functions of the CUDA driver API that Triton's driver.c calls. */
#include <stddef.h>
#include <string.h>

typedef unsigned long long u64;
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned num_attributes;
} Launch; /* CUlaunchConfig */

unsigned last_grid[3], last_threads, last_shared;
void *last_function, *last_stream;
u64 last_values[64];
int sizes[64], count, launches; /* bytes of each argument of the next launch: set by the test */

int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)1, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = 232448, 0; }
int cuPointerGetAttribute(void *value, int attribute, u64 pointer) { return *(u64 *)value = pointer, 0; }
int cuGetErrorString(int error, const char **text) { return *text = "stub", 0; }
int cuModuleLoadData(void **module, const void *image) { return *module = (void *)1, 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { return *value = attribute ? 16 : 1024, 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuCtxGetLimit(size_t *value, int limit) { return *value = 0, 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }

int cuModuleGetFunction(void **function, void *module, const char *name) {
    static char functions[4096];
    static int used;
    return *function = &functions[used++], 0; /* each its own */
}

int cuLaunchKernelEx(const Launch *launch, void *function, void **values, void **extra) {
    memcpy(last_grid, launch->grid, sizeof last_grid);
    last_threads = launch->block[0], last_shared = launch->shared;
    last_function = function, last_stream = launch->stream, launches++;
    memset(last_values, 0, sizeof last_values);
    for (int at = 0; at < count; at++) memcpy(&last_values[at], values[at], sizes[at]);
    return 0;
}

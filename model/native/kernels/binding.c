/* Binds the threads of parallel regions to CPUs. The first thread is the caller's and stays where it may run: what it
 * starts later would be bound with it. */
#define _GNU_SOURCE /* sched_setaffinity */
#include <sched.h>

#include "binding.h"

#define MOST_BOUND 1024

static int cpus[MOST_BOUND], bound_count; /* written before the first region */
static __thread int is_bound;

EXPORTED void bind_threads(const int64_t *chosen, int64_t count) {
    bound_count = 0;
    for (int64_t i = 0; i < count && i < MOST_BOUND; i++) cpus[bound_count++] = (int)chosen[i];
}

void bind_thread(int thread) {
    if (is_bound || thread < 1 || thread >= bound_count) return;
    cpu_set_t own;
    CPU_ZERO(&own);
    if (cpus[thread] < CPU_SETSIZE) CPU_SET(cpus[thread], &own), sched_setaffinity(0, sizeof own, &own);
    is_bound = 1;
}

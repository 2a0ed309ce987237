/* A barrier for the threads of a region, which wait by spinning only for those that run beside them.
 *
 * On a busy machine the system may put two of them on one CPU. Who spins there keeps the other from arriving: a step
 * meets a hundred times, and took several times as long as on one thread. OpenMP's barrier cannot know; this one asks
 * on which CPUs they were last seen, and sleeps at once where it shares one. */
#ifndef TRIPTYCH_BARRIER_H
#define TRIPTYCH_BARRIER_H

#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 2000 /* some 50 us: longer than two threads' shares of a product differ */
#define SEEN 128   /* threads whose CPU is known; others count as running beside */

typedef struct {
    _Atomic uint32_t round; /* what sleepers wait on */
    _Atomic int32_t arrived, sleepers;
    _Atomic int32_t cpu[SEEN]; /* of each thread, plus 1; 0: not seen yet */
} Meeting;

static int shares_cpu(Meeting *m, int part, int parts) {
    int known = parts < SEEN ? parts : SEEN, own = sched_getcpu() + 1;
    if (part < SEEN && atomic_load_explicit(&m->cpu[part], memory_order_relaxed) != own)
        atomic_store_explicit(&m->cpu[part], own, memory_order_relaxed);
    for (int other = 0; other < known; other++)
        if (other != part && atomic_load_explicit(&m->cpu[other], memory_order_relaxed) == own) return 1;
    return 0;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Returns when all `parts` threads have called it; what they wrote before is seen after. */
static void meet(Meeting *m, int part, int parts) {
    if (parts == 1) return;
    int shared = shares_cpu(m, part, parts);
    uint32_t round = atomic_load(&m->round);
    if (atomic_fetch_add(&m->arrived, 1) + 1 == parts) {
        atomic_store(&m->arrived, 0);
        atomic_store(&m->round, round + 1);
        if (atomic_load(&m->sleepers)) syscall(SYS_futex, &m->round, FUTEX_WAKE_PRIVATE, parts, NULL, NULL, 0);
        return;
    }
    for (int spins = shared ? 0 : SPINS; spins; spins--) {
        if (atomic_load(&m->round) != round) return;
        relax();
    }
    atomic_fetch_add(&m->sleepers, 1);
    while (atomic_load(&m->round) == round)
        syscall(SYS_futex, &m->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0); /* returns if it is another by now */
    atomic_fetch_sub(&m->sleepers, 1);
}

#endif

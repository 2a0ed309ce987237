/* A barrier for the threads of a parallel region. A thread spins only while the others run on CPUs of their own.
 *
 * On a busy machine the system may put two threads on one CPU. A thread that spins there keeps the other from arriving:
 * a step, which has a hundred barriers, took several times as long as on one thread. OpenMP's barrier does not know
 * this. This one looks at the CPUs on which the threads last ran, and sleeps at once if it shares one. */
#ifndef TRIPTYCH_BARRIER_H
#define TRIPTYCH_BARRIER_H

#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define BARRIER_SPINS 2000 /* some 50 us: threads finish their parts of a product within less */
#define TRACKED_THREADS 128 /* threads whose CPU is known; others count as having their own */

/* Zero-initialised by the thread that starts the region, and shared by its threads. */
typedef struct {
    _Atomic uint32_t round; /* how often all have arrived; sleepers wait on it */
    _Atomic int32_t arrived, sleepers;
    _Atomic int32_t cpu[TRACKED_THREADS]; /* of each thread, plus 1; 0: not seen yet */
} Barrier;

/* Note this thread's CPU; returns whether another was last seen on it. */
static int shares_cpu(Barrier *barrier, int thread, int threads) {
    int known = threads < TRACKED_THREADS ? threads : TRACKED_THREADS, own = sched_getcpu() + 1;
    if (thread < TRACKED_THREADS && atomic_load_explicit(&barrier->cpu[thread], memory_order_relaxed) != own)
        atomic_store_explicit(&barrier->cpu[thread], own, memory_order_relaxed);
    for (int other = 0; other < known; other++)
        if (other != thread && atomic_load_explicit(&barrier->cpu[other], memory_order_relaxed) == own) return 1;
    return 0;
}

/* Tell the CPU that this is a spin loop. */
static inline void spin_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Return when all `threads` threads have called it; what they wrote before is visible after. */
static void barrier_wait(Barrier *barrier, int thread, int threads) {
    if (threads == 1) return;
    int shared = shares_cpu(barrier, thread, threads);
    uint32_t round = atomic_load(&barrier->round);
    if (atomic_fetch_add(&barrier->arrived, 1) + 1 == threads) {
        atomic_store(&barrier->arrived, 0);
        atomic_store(&barrier->round, round + 1);
        if (atomic_load(&barrier->sleepers))
            syscall(SYS_futex, &barrier->round, FUTEX_WAKE_PRIVATE, threads, NULL, NULL, 0);
        return;
    }
    for (int spins = shared ? 0 : BARRIER_SPINS; spins; spins--) {
        if (atomic_load(&barrier->round) != round) return;
        spin_pause();
    }
    atomic_fetch_add(&barrier->sleepers, 1);
    while (atomic_load(&barrier->round) == round) /* the call returns at once if it has changed by now */
        syscall(SYS_futex, &barrier->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
    atomic_fetch_sub(&barrier->sleepers, 1);
}

#endif

/* Scratch memory, laid out by the functions that use it.
 *
 * Each part of the library has one function that takes its buffers from a Scratch. With a base it places them;
 * without one it only counts, which is how the sizes that callers must provide are found: sizes and places cannot
 * disagree. Under AddressSanitizer a poisoned gap follows each buffer. */
#ifndef TRIPTYCH_SCRATCH_H
#define TRIPTYCH_SCRATCH_H

#include <stddef.h>
#include <stdint.h>

#define SCRATCH_ALIGNMENT 64 /* bytes: of each buffer, a cache line and the widest vector */

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define SCRATCH_GAP SCRATCH_ALIGNMENT
#else
#define SCRATCH_GAP 0
#endif

/* A piece of memory that is handed out from its beginning; the caller of the library owns it. */
typedef struct {
    char *base; /* null: buffers are only counted */
    int64_t used;
} Scratch;

/* The next buffer of `bytes` bytes, of undefined contents; null while counting. */
static inline void *scratch_take(Scratch *scratch, int64_t bytes) {
    char *buffer = scratch->base ? scratch->base + scratch->used : NULL;
    int64_t whole = (bytes + SCRATCH_ALIGNMENT - 1) / SCRATCH_ALIGNMENT * SCRATCH_ALIGNMENT + SCRATCH_GAP;
#ifdef __SANITIZE_ADDRESS__
    if (buffer) { /* what lay here before may have had its gaps elsewhere */
        __asan_unpoison_memory_region(buffer, bytes);
        __asan_poison_memory_region(buffer + bytes, whole - bytes);
    }
#endif
    scratch->used += whole;
    return buffer;
}

/* What a caller gives, from its first aligned address on. */
static inline void *scratch_aligned(void *memory) {
    return (void *)(((uintptr_t)memory + SCRATCH_ALIGNMENT - 1) / SCRATCH_ALIGNMENT * SCRATCH_ALIGNMENT);
}

#endif

/* Puts every buffer of posix_memalign, which torch uses for all tensors, next to a protected page: the page after its
 * end, or with GUARD_PAGES=begin the page before it. For LD_PRELOAD.
 *
 * A buffer is aligned as asked for, so up to 63 bytes may lie between its end and the page; these, and the rest of
 * its pages on the other side, hold a pattern that is compared when the buffer is freed. Contents begin as NaN. Freed
 * addresses are never used again, so that a late access fails too. Linux with glibc. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

extern void __libc_free(void *);
extern void *__libc_realloc(void *, size_t);

enum { PAGE = 4096, PATTERN = 0xA5 };
static const size_t REGION = (size_t)1 << 40;

typedef struct {
    char *pages;
    size_t room, size;
} Buffer;

static char *region;
static Buffer *buffers; /* by the page of a buffer's first byte */
static atomic_size_t next = PAGE;
static int at_begin;

__attribute__((constructor)) static void start(void) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    const char *place = getenv("GUARD_PAGES");
    at_begin = place && !strcmp(place, "begin");
    char *memory = mmap(NULL, REGION, PROT_NONE, flags, -1, 0);
    buffers = mmap(NULL, REGION / PAGE * sizeof(Buffer), PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED || buffers == MAP_FAILED) abort();
    region = memory;
}

static size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

static void fail(const char *what, size_t size) {
    fprintf(stderr, "guard pages: %s a buffer of %zu bytes\n", what, size);
    abort();
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (!region) start();
    size_t room = rounded(size ? size : 1, PAGE), at = atomic_fetch_add(&next, room + PAGE);
    if (at + room + PAGE > REGION) fail("no addresses are left for", size);
    char *pages = region + at;
    if (alignment > PAGE || mprotect(pages, room, PROT_READ | PROT_WRITE)) fail("no memory for", size);
    char *found = at_begin ? pages : pages + room - rounded(size, alignment);
    memset(pages, PATTERN, room);
    memset(found, 0xFF, size);
    buffers[(found - region) / PAGE] = (Buffer){pages, room, size};
    *out = found;
    return 0;
}

static int is_ours(const char *p) { return region && p >= region && p < region + REGION; }

static void check(const char *from, const char *to, const char *what, size_t size) {
    for (; from < to; from++)
        if (*(const unsigned char *)from != PATTERN) fail(what, size);
}

void free(void *memory) {
    char *p = memory;
    if (!is_ours(p)) {
        __libc_free(p);
        return;
    }
    Buffer *buffer = &buffers[(p - region) / PAGE];
    check(buffer->pages, p, "something wrote in front of", buffer->size);
    check(p + buffer->size, buffer->pages + buffer->room, "something wrote behind", buffer->size);
    madvise(buffer->pages, buffer->room, MADV_DONTNEED);
    if (mprotect(buffer->pages, buffer->room, PROT_NONE)) fail("the kernel keeps", buffer->size);
}

void *realloc(void *memory, size_t size) {
    if (is_ours(memory)) fail("something resized", size);
    return __libc_realloc(memory, size);
}

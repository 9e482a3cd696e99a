/* Bytes that torch's CPU allocator holds, counted from outside torch: what libc10 asks posix_memalign for, until it is
   freed. Scratch memory of oneDNN and MKL, which ask by themselves, is not in it. Preloaded (LD_PRELOAD); read through
   lt_now, lt_peak and lt_reset. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS (1 << 22)
#define GONE ((void *)1)

extern void __libc_free(void *);
extern void *__libc_memalign(size_t, size_t);
extern void *__libc_calloc(size_t, size_t);

static struct { void *at; size_t bytes; } *table;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long now, peak;

/* Return whether a place in code is torch's allocator; the places seen so far are remembered. */
static int is_torchs(void *place) {
    static struct { void *place; int torchs; } seen[64];
    static int n_seen;
    for (int i = 0; i < n_seen; i++)
        if (seen[i].place == place) return seen[i].torchs;
    Dl_info info;
    int torchs = dladdr(place, &info) && info.dli_fname && strstr(info.dli_fname, "libc10") != NULL;
    if (n_seen < 64) {
        seen[n_seen].place = place;
        seen[n_seen].torchs = torchs;
        n_seen++;
    }
    return torchs;
}

static size_t slot_of(void *at) { return (((uintptr_t)at >> 6) * 11400714819323198485ull) >> 42; }

int posix_memalign(void **out, size_t alignment, size_t bytes) {
    void *at = __libc_memalign(alignment, bytes);
    if (!at) return ENOMEM;
    *out = at;
    pthread_mutex_lock(&lock);
    if (is_torchs(__builtin_return_address(0))) {
        if (!table) table = __libc_calloc(SLOTS, sizeof *table);
        size_t slot = slot_of(at);
        while (table[slot].at && table[slot].at != GONE) slot = (slot + 1) & (SLOTS - 1);
        table[slot].at = at;
        table[slot].bytes = bytes;
        now += bytes;
        if (now > peak) peak = now;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

void free(void *at) {
    if (at && !((uintptr_t)at & 63) && table) {
        pthread_mutex_lock(&lock);
        size_t slot = slot_of(at);
        while (table[slot].at && table[slot].at != at) slot = (slot + 1) & (SLOTS - 1);
        if (table[slot].at == at) {
            now -= table[slot].bytes;
            table[slot].at = GONE;
        }
        pthread_mutex_unlock(&lock);
    }
    __libc_free(at);
}

long lt_now(void) { return now; }
long lt_peak(void) { return peak; }
void lt_reset(void) {
    pthread_mutex_lock(&lock);
    peak = now;
    pthread_mutex_unlock(&lock);
}

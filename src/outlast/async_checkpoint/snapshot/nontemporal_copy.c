/* Copies memory without disturbing the caches.
 *
 * A snapshot is copied once and not read again by the processor that copied it. An ordinary
 * store first reads the line that it is about to overwrite, and then evicts what
 * training has in the caches. Stores that bypass the caches (non-temporal ones) do neither: a third
 * less traffic on the memory bus. C libraries have such a copy too, but use it only for single
 * calls of more than about the size of the last cache: 114 MiB on the machine this was measured on,
 * where few tensors are as large.
 *
 * Four pages are copied at a time, a line of each in turn: memory is then read from several of its
 * banks at once (measured here: 1.1 times as fast as one page after another).
 *
 * Built with the package where there is a C compiler for x86-64; `nontemporal_copy.py` loads it,
 * and uses `memmove` where it is missing. It needs only SSE2, which every x86-64 processor has.
 */

#include <emmintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LINE = 64, PAGE = 4096, PAGES = 4, LARGE = 128 << 10, AHEAD = 2 * LINE };

static inline void copy_line(char *to, const char *from)
{
    const __m128i a = _mm_loadu_si128((const __m128i *)from);
    const __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
    const __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
    const __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)(to + 16), b);
    _mm_stream_si128((__m128i *)(to + 32), c);
    _mm_stream_si128((__m128i *)(to + 48), d);
}

/* Copies `size` bytes between places that do not overlap. When it returns, other threads
 * see all of it before anything that this thread stores later. */
void outlast_nontemporal_copy(void *to, const void *from, size_t size)
{
    char *d = to;
    const char *s = from;
    if (size < LARGE) { /* may well be read again soon, and costs little */
        memcpy(d, s, size);
        return;
    }
    const size_t head = (LINE - ((uintptr_t)d % LINE)) % LINE; /* these stores need whole lines */
    memcpy(d, s, head);
    d += head, s += head, size -= head;
    for (; size >= PAGES * PAGE; d += PAGES * PAGE, s += PAGES * PAGE, size -= PAGES * PAGE)
        for (size_t at = 0; at < PAGE; at += LINE)
            for (size_t page = 0; page < PAGES * PAGE; page += PAGE) {
                /* Only a hint: an address past the end does no harm. */
                _mm_prefetch(s + page + at + AHEAD, _MM_HINT_T0);
                copy_line(d + page + at, s + page + at);
            }
    _mm_sfence(); /* non-temporal stores are weakly ordered */
    memcpy(d, s, size);
}

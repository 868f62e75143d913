/* A preloaded library that moves the wall clock of its processes, or changes the rate of the others.
 *
 * The file named by WALL_CLOCK_FILE holds how many seconds the clock is ahead, as a 64-bit integer in
 * the machine's byte order; a change takes effect at once. Deadlines by this clock are moved back
 * when a wait begins.
 *
 * With MONOTONIC_RATE, the monotonic and the boot-time clock run at this rate from MONOTONIC_BASE
 * seconds on. CLOCK_MONOTONIC_RAW stays true. A wait for a span (of epoll, say) stays a true one.
 *
 * libfaketime does this too, but its clock_nanosleep (0.9.10, of Debian 12) fails for the monotonic
 * clock with EINVAL unless it fakes that one as well, so that Python's time.sleep fails.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t none;
static volatile int64_t *ahead = &none;
static long double rate = 1, base_ns = 0;

__attribute__((constructor)) static void open_file(void) {
    const char *rate_text = getenv("MONOTONIC_RATE"), *base_text = getenv("MONOTONIC_BASE");
    if (rate_text && base_text) {
        rate = strtold(rate_text, NULL);
        base_ns = strtold(base_text, NULL) * 1e9L;
    }
    const char *path = getenv("WALL_CLOCK_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED)
        ahead = page;
    close(file);
}

static int is_wall(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
}

static int has_rate(clockid_t clock) {
    return rate != 1 && (clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_COARSE ||
                         clock == CLOCK_BOOTTIME);
}

/* The time at which a clock shows `at` if it runs `factor` times as fast from the base on. */
static struct timespec scaled(const struct timespec *at, long double factor) {
    int64_t ns = (int64_t)(base_ns + (at->tv_sec * 1e9L + at->tv_nsec - base_ns) * factor);
    return (struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
}

static struct timespec real(clockid_t clock, const struct timespec *deadline) {
    struct timespec moved = *deadline;
    if (is_wall(clock))
        moved.tv_sec -= *ahead;
    else if (has_rate(clock))
        moved = scaled(deadline, 1 / rate);
    return moved;
}

/* On x86-64, an older version of pthread_cond_timedwait exists beside this one. */
static void *next(const char *name) {
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*system_gettime)(clockid_t, struct timespec *);
    if (!system_gettime)
        system_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = system_gettime(clock, now);
    if (!failed && is_wall(clock))
        now->tv_sec += *ahead;
    else if (!failed && has_rate(clock))
        *now = scaled(now, rate);
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone; /* Linux fills in zeros, and nothing asks for them */
    struct timespec precise;
    int failed = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result)
        *result = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *now, int base) {
    return base == TIME_UTC && clock_gettime(CLOCK_REALTIME, now) == 0 ? base : 0;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    static int (*system_wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!system_wait)
        system_wait = next("pthread_cond_timedwait");
    /* The condition may use the monotonic clock, which is days ahead of its zero, not decades. */
    int wall = deadline->tv_sec > 1000000000;
    struct timespec moved = real(wall ? CLOCK_REALTIME : CLOCK_MONOTONIC, deadline);
    return system_wait(condition, mutex, &moved);
}

int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           clockid_t clock, const struct timespec *restrict deadline) {
    static int (*system_wait)(pthread_cond_t *, pthread_mutex_t *, clockid_t,
                              const struct timespec *);
    if (!system_wait)
        system_wait = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    struct timespec moved = real(clock, deadline);
    return system_wait(condition, mutex, clock, &moved);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex,
                            const struct timespec *restrict deadline) {
    static int (*system_lock)(pthread_mutex_t *, const struct timespec *);
    if (!system_lock)
        system_lock = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    struct timespec moved = real(CLOCK_REALTIME, deadline);
    return system_lock(mutex, &moved);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    static int (*system_wait)(sem_t *, const struct timespec *);
    if (!system_wait)
        system_wait = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec moved = real(CLOCK_REALTIME, deadline);
    return system_wait(semaphore, &moved);
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock,
                  const struct timespec *restrict deadline) {
    static int (*system_wait)(sem_t *, clockid_t, const struct timespec *);
    if (!system_wait)
        system_wait = dlsym(RTLD_NEXT, "sem_clockwait");
    struct timespec moved = real(clock, deadline);
    return system_wait(semaphore, clock, &moved);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *span,
                    struct timespec *left) {
    static int (*system_sleep)(clockid_t, int, const struct timespec *, struct timespec *);
    if (!system_sleep)
        system_sleep = dlsym(RTLD_NEXT, "clock_nanosleep");
    struct timespec moved = flags & TIMER_ABSTIME ? real(clock, span) : *span;
    return system_sleep(clock, flags, &moved, left);
}

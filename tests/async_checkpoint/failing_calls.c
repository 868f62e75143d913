/* Makes calls of a process fail, or kills it there: a library for LD_PRELOAD; see failing_calls.py.
   The plan is read at every call: "call path error how times" in one line. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int count;

/* How the call fails: 0 not at all, 'e' error, 'd' done but error, 'b' killed before, 'a' after. */
static char decide(const char *call, const char *path, int *error) {
    char wanted[32], ending[PATH_MAX], how;
    int number, first, last;
    FILE *plan = fopen(getenv("FAILING_CALLS"), "re");
    if (plan == NULL) return 0;
    int found = fscanf(plan, "%31s %4095s %d %c %d %d", wanted, ending, &number, &how, &first, &last);
    fclose(plan);
    if (found != 6 || (strcmp(wanted, call) && strcmp(wanted, "any"))) return 0;
    size_t size = strlen(path), end = strlen(ending);
    if (strcmp(ending, "*") && (size < end || strcmp(path + size - end, ending))) return 0;
    count++;
    *error = number;
    return count >= first && count <= last ? how : 0;
}

#define CARRY_OUT(name, path, real)                        \
    int error, saved;                                      \
    char how = decide(name, path, &error);                 \
    if (how == 'b') raise(SIGKILL);                        \
    if (how == 'e') { errno = error; return -1; }          \
    int result = real;                                     \
    saved = errno;                                         \
    if (how == 'a') raise(SIGKILL);                        \
    if (how == 'd' && !result) { errno = error; return -1; } \
    errno = saved;                                         \
    return result;

#define REAL(name) dlsym(RTLD_NEXT, name)

int rename(const char *from, const char *to) {
    int (*real)(const char *, const char *) = REAL("rename");
    CARRY_OUT("rename", to, real(from, to))
}

int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    int (*real)(int, const char *, int, const char *, unsigned) = REAL("renameat2");
    CARRY_OUT("renameat2", to, real(a, from, b, to, flags))
}

static void path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    path[size > 0 ? size : 0] = 0;
}

int fsync(int fd) {
    int (*real)(int) = REAL("fsync");
    char path[PATH_MAX];
    path_of(fd, path);
    CARRY_OUT("fsync", path, real(fd))
}

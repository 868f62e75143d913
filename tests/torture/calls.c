/* Records the file-system calls of processes, and makes one of them fail: a library for LD_PRELOAD.

   Every call that concerns a file below `root` is carried out with one lock held, across all
   processes, and recorded with its data: so the record is the true order of the calls. The lock, the
   plan of failures and the record are in one shared mapping (the file named by TORTURE_CONTROL; see
   calls.py for its layout). No descriptor stays open.

   A call in a class of `classes` is counted; number `k` fails as `mode` says. Calls of glibc itself
   (fopen, fwrite) are not seen: `test_calls.py` compares a record with what the kernel was asked. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CHANGE = 1, READ = 2, CLOSE = 4 };
enum { NEVER, ONCE, KIND_FOR_GOOD, ALL_FOR_GOOD, DONE_BUT_ERROR, SHORT };

struct control {
    uint32_t active, records, mode, error, classes, overflow;
    uint64_t count, k, fired, used, capacity;
    char kind[16];
    char root[512];
    pthread_mutex_t lock;
    char padding[256];
    char record[];
};

struct entry {
    uint32_t total, pid, tid;
    int32_t error;
    int64_t result;
    uint64_t inode;
    int64_t offset;
    uint64_t size, number;
    uint32_t flags, failed, path_bytes, other_bytes, data_bytes;
    char kind[16];
};

static struct control *control;
static size_t root_bytes;

struct call {
    int ours, action, directory;
    const char *kind;
    char path[PATH_MAX], other[PATH_MAX];
    uint64_t inode, number;
};

static __thread struct call call;

__attribute__((constructor)) static void attach(void) {
    const char *name = getenv("TORTURE_CONTROL");
    if (control || !name) return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC, 0);
    struct stat found;
    if (fd < 0 || syscall(SYS_fstat, fd, &found) < 0) abort();
    void *at = mmap(NULL, (size_t)found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) abort();
    syscall(SYS_close, fd);
    control = at;
    root_bytes = strlen(control->root);
}

/* Called once, before any other process attaches. */
int torture_init(void) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    return pthread_mutex_init(&control->lock, &attributes);
}

static int is_active(void) { return control && __atomic_load_n(&control->active, __ATOMIC_ACQUIRE); }

static void lock(void) {
    if (pthread_mutex_lock(&control->lock) == EOWNERDEAD) pthread_mutex_consistent(&control->lock);
}

static int below_root(const char *path) {
    size_t n = root_bytes ? root_bytes : (root_bytes = strlen(control->root));
    return strncmp(path, control->root, n) == 0 && (path[n] == '/' || path[n] == 0);
}

static int of_descriptor(int fd, char *path) {
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long n = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = 0;
    return n > 0;
}

static void absolute(int directory, const char *path, char *found) {
    if (path[0] == '/') {
        snprintf(found, PATH_MAX, "%s", path);
        return;
    }
    char base[PATH_MAX];
    if (directory == AT_FDCWD) {
        if (syscall(SYS_getcwd, base, sizeof base) < 0) base[0] = 0;
    } else {
        of_descriptor(directory, base);
    }
    if (snprintf(found, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) found[0] = 0;
}

static void append(struct call *call, int64_t result, int error, int64_t offset, uint64_t size,
                   uint32_t flags, const struct iovec *data, int pieces, size_t length) {
    struct entry entry = {0};
    entry.pid = (uint32_t)getpid();
    entry.tid = (uint32_t)syscall(SYS_gettid);
    entry.error = result < 0 ? error : 0;
    entry.result = result;
    entry.inode = call->inode;
    entry.offset = offset;
    entry.size = size;
    entry.number = call->number;
    entry.flags = flags;
    entry.failed = (uint32_t)call->action;
    entry.path_bytes = (uint32_t)strlen(call->path);
    entry.other_bytes = (uint32_t)strlen(call->other);
    entry.data_bytes = (uint32_t)length;
    strncpy(entry.kind, call->kind, sizeof entry.kind - 1);
    size_t total = sizeof entry + entry.path_bytes + entry.other_bytes + length;
    total = (total + 7) / 8 * 8;
    entry.total = (uint32_t)total;
    if (control->used + total > control->capacity) {
        control->overflow = 1;
        return;
    }
    char *at = control->record + control->used;
    memcpy(at, &entry, sizeof entry), at += sizeof entry;
    memcpy(at, call->path, entry.path_bytes), at += entry.path_bytes;
    memcpy(at, call->other, entry.other_bytes), at += entry.other_bytes;
    for (int i = 0; i < pieces && length; i++) {
        size_t n = data[i].iov_len < length ? data[i].iov_len : length;
        memcpy(at, data[i].iov_base, n), at += n, length -= n;
    }
    control->used += total;
}

/* A note of the program among the calls, such as "committed 3". */
void torture_note(const char *text) {
    if (!is_active()) return;
    memset(&call, 0, sizeof call);
    call.kind = "note";
    snprintf(call.path, sizeof call.path, "%s", text);
    lock();
    append(&call, 0, 0, 0, 0, 0, NULL, 0, 0);
    pthread_mutex_unlock(&control->lock);
}

/* Whether the call is one of ours; then the lock is held until `end`. */
static int begin(struct call *call, const char *kind, int class) {
    call->kind = kind;
    call->action = NEVER;
    call->inode = 0;
    if (!below_root(call->path) && !(call->other[0] && below_root(call->other))) return 0;
    lock();
    call->number = 0;
    if (class & (int)control->classes) {
        call->number = ++control->count;
        uint32_t mode = control->mode;
        if (control->count == control->k) {
            strncpy(control->kind, kind, sizeof control->kind - 1);
            if (mode != NEVER) call->action = (int)mode;
        } else if (control->k && control->count > control->k) {
            if (mode == ALL_FOR_GOOD ||
                (mode == KIND_FOR_GOOD && strncmp(control->kind, kind, sizeof control->kind) == 0))
                call->action = (int)mode;
        }
        if (call->action) control->fired++;
    }
    return call->ours = 1;
}

static int fails(const struct call *call) {
    return call->action == ONCE || call->action == KIND_FOR_GOOD || call->action == ALL_FOR_GOOD;
}

static void end(struct call *call, int64_t result, int error, int64_t offset, uint64_t size,
                uint32_t flags, const struct iovec *data, int pieces, size_t length) {
    if (control->records || call->action)
        append(call, result, error, offset, size, flags, data, pieces, length);
    pthread_mutex_unlock(&control->lock);
}

static void inode_of(struct call *call, int fd) {
    struct stat found;
    if (fd >= 0 && syscall(SYS_fstat, fd, &found) == 0) {
        call->inode = found.st_ino;
        call->directory = S_ISDIR(found.st_mode);
    }
}

static void inode_at(struct call *call) {
    struct stat found;
    if (syscall(SYS_newfstatat, AT_FDCWD, call->path, &found, AT_SYMLINK_NOFOLLOW) == 0)
        call->inode = found.st_ino;
}

#define NEXT(name) \
    static __typeof__(name) *next; \
    if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* Carries out EXPRESSION as planned; `result` and errno are what the caller gets. */
#define CARRY_OUT(EXPRESSION) \
    int planned = (int)control->error; \
    if (fails(&call)) { \
        result = -1; \
        errno = planned; \
    } else { \
        result = EXPRESSION; \
        if (call.action == DONE_BUT_ERROR && result >= 0) { \
            result = -1; \
            errno = planned; \
        } \
    } \
    int error = errno; \
    int done = !fails(&call) && (result >= 0 || call.action == DONE_BUT_ERROR)

/* `found`: whether the descriptor has a name. */
#define NAME_OF(fd) \
    call.other[0] = call.path[0] = 0; \
    int found = is_active() && of_descriptor(fd, call.path)

/* ------------------------------------------------------------------------------------ open */

static int carry_out_open(const char *name, int directory, const char *path, int flags, mode_t mode,
                          int *ours) {
    call.other[0] = 0;
    absolute(directory, path, call.path);
    int writes = (flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) != 0;
    if (!(*ours = begin(&call, name, writes ? CHANGE : READ))) return -1;
    long result;
    CARRY_OUT(syscall(SYS_openat, AT_FDCWD, call.path, flags, mode));
    if (done && result >= 0) inode_of(&call, (int)result);
    if (done && result < 0) inode_at(&call);
    end(&call, done ? 0 : -1, error, 0, 0, (uint32_t)flags, NULL, 0, 0);
    errno = error;
    return (int)result;
}

#define OPEN(name, PARAMETERS, DIRECTORY, ARGUMENTS) \
    int name PARAMETERS { \
        NEXT(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        if (is_active()) { \
            int ours, fd = carry_out_open("open", DIRECTORY, path, flags, mode, &ours); \
            if (ours) return fd; \
        } \
        return next ARGUMENTS; \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPEN(openat, (int directory, const char *path, int flags, ...), directory,
     (directory, path, flags, mode))
OPEN(openat64, (int directory, const char *path, int flags, ...), directory,
     (directory, path, flags, mode))

/* ----------------------------------------------------------------------------------- write */

static size_t bytes_of(const struct iovec *data, int pieces) {
    size_t n = 0;
    for (int i = 0; i < pieces; i++) n += data[i].iov_len;
    return n;
}

static ssize_t carry_out_write(const char *kind, int fd, const struct iovec *data, int pieces,
                               int64_t offset, int *ours) {
    NAME_OF(fd);
    if (!(*ours = found && begin(&call, kind, CHANGE))) return -1;
    inode_of(&call, fd);
    int64_t at = offset;
    if (at < 0) {
        struct stat file;
        long flags = syscall(SYS_fcntl, fd, F_GETFL);
        at = syscall(SYS_lseek, fd, 0, SEEK_CUR);
        if ((flags & O_APPEND) && syscall(SYS_fstat, fd, &file) == 0) at = file.st_size;
    }
    struct iovec first = data[0];
    if (call.action == SHORT && bytes_of(data, pieces) > 1) {
        first.iov_len = first.iov_len > 8192 ? first.iov_len / 2 / 4096 * 4096 : (first.iov_len + 1) / 2;
        data = &first, pieces = 1;
    }
    ssize_t result;
    CARRY_OUT(offset < 0 ? syscall(SYS_writev, fd, data, pieces)
                         : syscall(SYS_pwritev, fd, data, pieces, offset, 0));
    size_t length = !done ? 0 : result >= 0 ? (size_t)result : bytes_of(data, pieces);
    end(&call, done ? (int64_t)length : -1, error, at, length, 0, data, pieces, length);
    errno = error;
    return result;
}


/* `CALL` returns what `next` would, if the call is ours. */
#define OURS_OR_NEXT(type, CALL, ARGUMENTS) \
    if (is_active()) { \
        int ours; \
        type result = CALL; \
        if (ours) return result; \
    } \
    return next ARGUMENTS

#define WRITE(name) \
    ssize_t name(int fd, const void *buffer, size_t size) { \
        NEXT(name); \
        struct iovec data = {(void *)buffer, size}; \
        OURS_OR_NEXT(ssize_t, carry_out_write("write", fd, &data, 1, -1, &ours), (fd, buffer, size)); \
    }
WRITE(write)

#define PWRITE(name) \
    ssize_t name(int fd, const void *buffer, size_t size, off_t at) { \
        NEXT(name); \
        struct iovec data = {(void *)buffer, size}; \
        OURS_OR_NEXT(ssize_t, carry_out_write("pwrite", fd, &data, 1, at, &ours), (fd, buffer, size, at)); \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

ssize_t writev(int fd, const struct iovec *data, int pieces) {
    NEXT(writev);
    OURS_OR_NEXT(ssize_t, carry_out_write("write", fd, data, pieces, -1, &ours), (fd, data, pieces));
}

#define PWRITEV(name) \
    ssize_t name(int fd, const struct iovec *data, int pieces, off_t at) { \
        NEXT(name); \
        OURS_OR_NEXT(ssize_t, carry_out_write("pwrite", fd, data, pieces, at, &ours), (fd, data, pieces, at)); \
    }
PWRITEV(pwritev)
PWRITEV(pwritev64)

#define PWRITEV2(name) \
    ssize_t name(int fd, const struct iovec *data, int pieces, off_t at, int flags) { \
        NEXT(name); \
        OURS_OR_NEXT(ssize_t, carry_out_write("pwrite", fd, data, pieces, at, &ours), \
                     (fd, data, pieces, at, flags)); \
    }
PWRITEV2(pwritev2)
PWRITEV2(pwritev64v2)

/* ----------------------------------------------------------------- other calls on descriptors */

/* A call on a descriptor: CALL is made by the kernel. */
#define ON_DESCRIPTOR(type, KIND, CLASS, CALL, OFFSET, SIZE, FLAGS) \
    if (is_active()) { \
        NAME_OF(fd); \
        if (found && begin(&call, KIND, CLASS)) { \
            inode_of(&call, fd); \
            long result; \
            CARRY_OUT(CALL); \
            end(&call, done ? 0 : -1, error, OFFSET, SIZE, FLAGS, NULL, 0, 0); \
            errno = error; \
            return (type)result; \
        } \
    }

#define SYNC(name, NUMBER) \
    int name(int fd) { \
        NEXT(name); \
        ON_DESCRIPTOR(int, "fsync", CHANGE, syscall(NUMBER, fd), 0, 0, (uint32_t)call.directory) \
        return next(fd); \
    }
SYNC(fsync, SYS_fsync)
SYNC(fdatasync, SYS_fdatasync)

int close(int fd) {
    NEXT(close);
    /* A close that fails has closed all the same, as on Linux. */
    if (is_active()) {
        NAME_OF(fd);
        if (found && begin(&call, "close", CLOSE)) {
            inode_of(&call, fd);
            long result = syscall(SYS_close, fd);
            int error = errno;
            if (call.action && call.action != SHORT) result = -1, error = (int)control->error;
            end(&call, result, error, 0, 0, 0, NULL, 0, 0);
            errno = error;
            return (int)result;
        }
    }
    return next(fd);
}

#define TRUNCATE(name) \
    int name(int fd, off_t size) { \
        NEXT(name); \
        ON_DESCRIPTOR(int, "truncate", CHANGE, syscall(SYS_ftruncate, fd, size), 0, (uint64_t)size, 0) \
        return next(fd, size); \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define FALLOCATE(name) \
    int name(int fd, int mode, off_t at, off_t size) { \
        NEXT(name); \
        ON_DESCRIPTOR(int, "fallocate", CHANGE, syscall(SYS_fallocate, fd, mode, at, size), at, \
                      (uint64_t)size, (uint32_t)mode) \
        return next(fd, mode, at, size); \
    }
FALLOCATE(fallocate)
FALLOCATE(fallocate64)

#define POSIX_FALLOCATE(name) \
    int name(int fd, off_t at, off_t size) { \
        NEXT(name); \
        int before = errno, result = -1; \
        if (is_active()) { \
            errno = 0; \
            result = fallocate(fd, 0, at, size) < 0 ? errno : 0; \
            errno = before; \
            return result; \
        } \
        return next(fd, at, size); \
    }
POSIX_FALLOCATE(posix_fallocate)
POSIX_FALLOCATE(posix_fallocate64)

/* ----------------------------------------------------------------------------------- names */

/* A call on one or two names: the paths are absolute, so the kernel gets them without folders. */
#define ON_NAMES(KIND, CLASS, D1, P1, D2, P2, CALL, FLAGS) \
    if (is_active()) { \
        absolute(D1, P1, call.path); \
        call.other[0] = 0; \
        if (P2) absolute(D2, P2, call.other); \
        if (begin(&call, KIND, CLASS)) { \
            long result; \
            CARRY_OUT(CALL); \
            if (done) inode_at(&call); \
            end(&call, done ? 0 : -1, error, 0, 0, FLAGS, NULL, 0, 0); \
            errno = error; \
            return (int)result; \
        } \
    }
#define NO ((const char *)0)

int rename(const char *from, const char *to) {
    NEXT(rename);
    ON_NAMES("rename", CHANGE, AT_FDCWD, from, AT_FDCWD, to, syscall(SYS_rename, call.path, call.other), 0)
    return next(from, to);
}
int renameat(int a, const char *from, int b, const char *to) {
    NEXT(renameat);
    ON_NAMES("rename", CHANGE, a, from, b, to, syscall(SYS_rename, call.path, call.other), 0)
    return next(a, from, b, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    NEXT(renameat2);
    ON_NAMES("rename", CHANGE, a, from, b, to,
             syscall(SYS_renameat2, AT_FDCWD, call.path, AT_FDCWD, call.other, flags), flags)
    return next(a, from, b, to, flags);
}
int link(const char *from, const char *to) {
    NEXT(link);
    ON_NAMES("link", CHANGE, AT_FDCWD, from, AT_FDCWD, to, syscall(SYS_link, call.path, call.other), 0)
    return next(from, to);
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
    NEXT(linkat);
    ON_NAMES("link", CHANGE, a, from, b, to, syscall(SYS_link, call.path, call.other), 0)
    return next(a, from, b, to, flags);
}
int symlink(const char *content, const char *path) {
    NEXT(symlink);
    ON_NAMES("symlink", CHANGE, AT_FDCWD, path, 0, NO, syscall(SYS_symlink, content, call.path), 0)
    return next(content, path);
}
int unlink(const char *path) {
    NEXT(unlink);
    ON_NAMES("unlink", CHANGE, AT_FDCWD, path, 0, NO, syscall(SYS_unlink, call.path), 0)
    return next(path);
}
int unlinkat(int directory, const char *path, int flags) {
    NEXT(unlinkat);
    ON_NAMES(flags & AT_REMOVEDIR ? "rmdir" : "unlink", CHANGE, directory, path, 0, NO,
             syscall(SYS_unlinkat, AT_FDCWD, call.path, flags), 0)
    return next(directory, path, flags);
}
int rmdir(const char *path) {
    NEXT(rmdir);
    ON_NAMES("rmdir", CHANGE, AT_FDCWD, path, 0, NO, syscall(SYS_rmdir, call.path), 0)
    return next(path);
}
int mkdir(const char *path, mode_t mode) {
    NEXT(mkdir);
    ON_NAMES("mkdir", CHANGE, AT_FDCWD, path, 0, NO, syscall(SYS_mkdir, call.path, mode), 0)
    return next(path, mode);
}
int mkdirat(int directory, const char *path, mode_t mode) {
    NEXT(mkdirat);
    ON_NAMES("mkdir", CHANGE, directory, path, 0, NO, syscall(SYS_mkdir, call.path, mode), 0)
    return next(directory, path, mode);
}

/* -------------------------------------------------------------------- what the model has not */

/* Recorded so that the model refuses the record: see disk.py. */
void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    NEXT(mmap);
    if (is_active() && fd >= 0 && (flags & MAP_SHARED) && (protection & PROT_WRITE)) {
        NAME_OF(fd);
        if (found && begin(&call, "mmap", CHANGE)) end(&call, 0, 0, 0, 0, 0, NULL, 0, 0);
    }
    return next(at, size, protection, flags, fd, offset);
}

ssize_t copy_file_range(int a, off64_t *x, int b, off64_t *y, size_t n, unsigned flags) {
    NEXT(copy_file_range);
    NAME_OF(b);
    if (found && begin(&call, "copy_file_range", CHANGE)) end(&call, 0, 0, 0, 0, 0, NULL, 0, 0);
    return next(a, x, b, y, n, flags);
}

/* A write: what was sent is read back. */
static ssize_t carry_out_sendfile(int out, int in, off_t *offset, size_t size, int *ours) {
    NAME_OF(out);
    if (!(*ours = found && begin(&call, "write", CHANGE))) return -1;
    inode_of(&call, out);
    int64_t at = syscall(SYS_lseek, out, 0, SEEK_CUR);
    ssize_t result;
    CARRY_OUT(syscall(SYS_sendfile, out, in, offset, size));
    size_t length = done ? (size_t)(syscall(SYS_lseek, out, 0, SEEK_CUR) - at) : 0;
    struct iovec sent = {length ? malloc(length) : NULL, length};
    if (length) {
        char name[40];
        snprintf(name, sizeof name, "/proc/self/fd/%d", out);
        int again = (int)syscall(SYS_openat, AT_FDCWD, name, O_RDONLY | O_CLOEXEC, 0);
        if (syscall(SYS_preadv, again, &sent, 1, at, 0) != (long)length) abort();
        syscall(SYS_close, again);
    }
    end(&call, done ? (int64_t)length : -1, error, at, length, 0, &sent, 1, length);
    free(sent.iov_base);
    errno = error;
    return result;
}

#define SENDFILE(name) \
    ssize_t name(int out, int in, off_t *offset, size_t size) { \
        NEXT(name); \
        OURS_OR_NEXT(ssize_t, carry_out_sendfile(out, in, offset, size, &ours), \
                     (out, in, offset, size)); \
    }
SENDFILE(sendfile)
SENDFILE(sendfile64)

/* ----------------------------------------------------------------------------------- reads */

static ssize_t carry_out_read(const char *kind, int fd, const struct iovec *data, int pieces,
                              int64_t offset, int *ours) {
    NAME_OF(fd);
    if (!(*ours = found && begin(&call, kind, READ))) return -1;
    inode_of(&call, fd);
    struct iovec first = data[0];
    if (call.action == SHORT && first.iov_len > 1) {
        first.iov_len = (first.iov_len + 1) / 2;
        data = &first, pieces = 1;
    }
    ssize_t result;
    CARRY_OUT(offset < 0 ? syscall(SYS_readv, fd, data, pieces)
                         : syscall(SYS_preadv, fd, data, pieces, offset, 0));
    end(&call, done ? 0 : -1, error, offset, 0, 0, NULL, 0, 0);
    errno = error;
    return result;
}

ssize_t read(int fd, void *buffer, size_t size) {
    NEXT(read);
    struct iovec data = {buffer, size};
    OURS_OR_NEXT(ssize_t, carry_out_read("read", fd, &data, 1, -1, &ours), (fd, buffer, size));
}

#define PREAD(name) \
    ssize_t name(int fd, void *buffer, size_t size, off_t at) { \
        NEXT(name); \
        struct iovec data = {buffer, size}; \
        OURS_OR_NEXT(ssize_t, carry_out_read("pread", fd, &data, 1, at, &ours), (fd, buffer, size, at)); \
    }
PREAD(pread)
PREAD(pread64)

#define PREADV(name) \
    ssize_t name(int fd, const struct iovec *data, int pieces, off_t at) { \
        NEXT(name); \
        OURS_OR_NEXT(ssize_t, carry_out_read("pread", fd, data, pieces, at, &ours), (fd, data, pieces, at)); \
    }
PREADV(preadv)
PREADV(preadv64)

#define PREADV2(name) \
    ssize_t name(int fd, const struct iovec *data, int pieces, off_t at, int flags) { \
        NEXT(name); \
        OURS_OR_NEXT(ssize_t, carry_out_read("pread", fd, data, pieces, at, &ours), \
                     (fd, data, pieces, at, flags)); \
    }
PREADV2(preadv2)
PREADV2(preadv64v2)

#define STAT(name, FLAGS, type) \
    int name(const char *path, struct type *found) { \
        NEXT(name); \
        ON_NAMES("stat", READ, AT_FDCWD, path, 0, NO, \
                 syscall(SYS_newfstatat, AT_FDCWD, call.path, found, FLAGS), 0) \
        return next(path, found); \
    }
STAT(stat, 0, stat)
STAT(stat64, 0, stat64)
STAT(lstat, AT_SYMLINK_NOFOLLOW, stat)
STAT(lstat64, AT_SYMLINK_NOFOLLOW, stat64)

#define FSTATAT(name, type) \
    int name(int directory, const char *path, struct type *found, int flags) { \
        NEXT(name); \
        if (!(flags & AT_EMPTY_PATH)) { \
            ON_NAMES("stat", READ, directory, path, 0, NO, \
                     syscall(SYS_newfstatat, AT_FDCWD, call.path, found, flags), 0) \
        } \
        return next(directory, path, found, flags); \
    }
FSTATAT(fstatat, stat)
FSTATAT(fstatat64, stat64)

#define FSTAT(name, type) \
    int name(int fd, struct type *into) { \
        NEXT(name); \
        ON_DESCRIPTOR(int, "fstat", READ, syscall(SYS_fstat, fd, into), 0, 0, 0) \
        return next(fd, into); \
    }
FSTAT(fstat, stat)
FSTAT(fstat64, stat64)

DIR *opendir(const char *path) {
    NEXT(opendir);
    if (is_active()) {
        absolute(AT_FDCWD, path, call.path);
        call.other[0] = 0;
        if (begin(&call, "opendir", READ)) {
            DIR *found = NULL;
            int error = (int)control->error;
            if (!fails(&call)) {
                found = next(path);
                error = errno;
            }
            end(&call, found ? 0 : -1, error, 0, 0, 0, NULL, 0, 0);
            errno = error;
            return found;
        }
    }
    return next(path);
}

#define READDIR(name, type) \
    struct type *name(DIR *folder) { \
        NEXT(name); \
        if (is_active()) { \
            int fd = dirfd(folder); \
            NAME_OF(fd); \
            if (found && begin(&call, "readdir", READ)) { \
                struct type *entry = NULL; \
                int error = (int)control->error; \
                if (!fails(&call)) { \
                    error = errno; \
                    entry = next(folder); \
                    if (errno != error) error = errno; \
                } \
                end(&call, 0, error, 0, 0, 0, NULL, 0, 0); \
                errno = error; \
                return entry; \
            } \
        } \
        return next(folder); \
    }
READDIR(readdir, dirent)
READDIR(readdir64, dirent64)

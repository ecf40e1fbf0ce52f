/* Preloaded into the processes of a case: calls of the system on chosen files fail, are short, or are recorded.
 *
 * FAULT="<operation> <nth> <errno or 0: short> <1: from then on, 0: once> <part of the path>" is looked up in each call,
 * so a process may set it for itself at any time. FAULT_RECORD=<file> with FAULT_MATCH=<part of the path>: the order of
 * what changes files, with the bytes, is written to that file; powercut.py reads it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_int seen;

static const char *path_of(int fd, char *room) {
    char name[40];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, room, 4095);
    room[length < 0 ? 0 : length] = 0;
    return room;
}

static const char *path_at(int folder, const char *name, char *room) {
    if (name[0] == '/') return name;
    char base[4096];
    if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) base[0] = 0; }
    else path_of(folder, base);
    snprintf(room, 8192, "%s/%s", base, name);
    return room;
}

/* -1: leave the call alone; 0: make it short; else the errno with which it fails. */
static int fault(const char *operation, const char *path) {
    const char *given = getenv("FAULT");
    char wanted[16], match[256];
    int nth, code, persists;
    if (!given || sscanf(given, "%15s %d %d %d %255s", wanted, &nth, &code, &persists, match) != 5) return -1;
    if (strcmp(operation, wanted) || !strstr(path, match)) return -1;
    int number = atomic_fetch_add(&seen, 1) + 1;
    return number == nth || (persists && number > nth) ? code : -1;
}

static int fault_of(const char *operation, int fd) {
    char room[4096];
    return getenv("FAULT") ? fault(operation, path_of(fd, room)) : -1;
}

#define FAIL_IF(code) do { int failed = (code); if (failed > 0) { errno = failed; return -1; } } while (0)

/* ---- recording -------------------------------------------------------------------------------------------------- */

static int recorded(const char *path) {
    const char *match = getenv("FAULT_MATCH");
    return getenv("FAULT_RECORD") && match && strstr(path, match) != NULL;
}

static void record(const char *what, const char *path, const char *other, long offset, const struct iovec *v, long length) {
    char line[9000];
    int kept = errno, count = 1;
    struct iovec parts[65] = {{line, 0}};
    for (long left = v ? length : 0; left > 0 && count < 65; v++, count++) {
        parts[count] = (struct iovec){v->iov_base, (long)v->iov_len < left ? v->iov_len : (size_t)left};
        left -= (long)parts[count].iov_len;
    }
    long bytes = count > 1 ? length : 0;
    parts[0].iov_len = (size_t)snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%ld\n", what, path, other, offset, bytes);
    long log = syscall(SYS_openat, AT_FDCWD, getenv("FAULT_RECORD"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    syscall(SYS_writev, log, parts, count);  /* one call: processes do not interleave */
    syscall(SYS_close, log);
    errno = kept;
}

static void record_fd(const char *what, int fd, long offset, const struct iovec *parts, long length) {
    char room[4096];
    if (getenv("FAULT_RECORD") && recorded(path_of(fd, room))) record(what, room, "", offset, parts, length);
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

static int opening(int folder, const char *name, int flags, mode_t mode) {
    char room[8192];
    const char *path = path_at(folder, name, room);
    FAIL_IF(fault("open", path));
    struct stat before;
    int made = (flags & O_CREAT) && recorded(path) && stat(path, &before) != 0;
    int fd = (int)syscall(SYS_openat, folder, name, flags, mode);
    if (fd >= 0 && recorded(path)) {
        if (made) record("create", path, "", 0, NULL, 0);
        else if (flags & O_TRUNC) record("truncate", path, "", 0, NULL, 0);
    }
    return fd;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *name, int flags, ...) { MODE(flags) return opening(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return opening(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(flags) return opening(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(flags) return opening(folder, name, flags, mode); }

/* ---- moving bytes ----------------------------------------------------------------------------------------------- */

static ssize_t moving(int writes, int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    int found = fault_of(writes ? "write" : "read", fd);
    FAIL_IF(found);
    struct iovec first = parts[0];
    if (found == 0 && first.iov_len > 4096) { first.iov_len /= 2; parts = &first; count = 1; }
    long at = offset;
    if (writes && offset < 0 && getenv("FAULT_RECORD")) at = lseek(fd, 0, SEEK_CUR);
    ssize_t moved;
    if (offset < 0) moved = syscall(writes ? SYS_writev : SYS_readv, fd, parts, count);
    else moved = syscall(writes ? SYS_pwritev2 : SYS_preadv2, fd, parts, count, offset, (long)0, flags);
    if (writes && moved > 0) record_fd("write", fd, at, parts, moved);
    return moved;
}

#define ONE struct iovec part = {(void *)data, length}
ssize_t write(int fd, const void *data, size_t length) { ONE; return moving(1, fd, &part, 1, -1, 0); }
ssize_t pwrite(int fd, const void *data, size_t length, off_t at) { ONE; return moving(1, fd, &part, 1, at, 0); }
ssize_t pwrite64(int fd, const void *data, size_t length, off64_t at) { ONE; return moving(1, fd, &part, 1, at, 0); }
ssize_t pwritev(int fd, const struct iovec *v, int n, off_t at) { return moving(1, fd, v, n, at, 0); }
ssize_t pwritev64(int fd, const struct iovec *v, int n, off64_t at) { return moving(1, fd, v, n, at, 0); }
ssize_t pwritev2(int fd, const struct iovec *v, int n, off_t at, int f) { return moving(1, fd, v, n, at, f); }
ssize_t pwritev64v2(int fd, const struct iovec *v, int n, off64_t at, int f) { return moving(1, fd, v, n, at, f); }
ssize_t read(int fd, void *data, size_t length) { ONE; return moving(0, fd, &part, 1, -1, 0); }
ssize_t pread(int fd, void *data, size_t length, off_t at) { ONE; return moving(0, fd, &part, 1, at, 0); }
ssize_t pread64(int fd, void *data, size_t length, off64_t at) { ONE; return moving(0, fd, &part, 1, at, 0); }
ssize_t preadv(int fd, const struct iovec *v, int n, off_t at) { return moving(0, fd, v, n, at, 0); }
ssize_t preadv64(int fd, const struct iovec *v, int n, off64_t at) { return moving(0, fd, v, n, at, 0); }
ssize_t preadv2(int fd, const struct iovec *v, int n, off_t at, int f) { return moving(0, fd, v, n, at, f); }
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off64_t at, int f) { return moving(0, fd, v, n, at, f); }

int ftruncate(int fd, off_t size) {
    int done = (int)syscall(SYS_ftruncate, fd, size);
    if (!done) record_fd("truncate", fd, size, NULL, 0);
    return done;
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }

static int syncing(long number, int fd) {
    FAIL_IF(fault_of("fsync", fd));
    int done = (int)syscall(number, fd);
    if (!done && getenv("FAULT_RECORD")) {  /* with the bytes: streams of C and C++ write without these functions */
        static _Thread_local char bytes[1 << 20];
        struct iovec all = {bytes, sizeof bytes};
        long length = syscall(SYS_pread64, fd, bytes, sizeof bytes, (long)0);
        record_fd("sync", fd, 0, &all, length < 0 ? 0 : length);
    }
    return done;
}
int fsync(int fd) { return syncing(SYS_fsync, fd); }
int fdatasync(int fd) { return syncing(SYS_fdatasync, fd); }

/* ---- names ------------------------------------------------------------------------------------------------------ */

static int renaming(int from, const char *old, int to, const char *new, unsigned flags) {
    char one[8192], two[8192];
    const char *source = path_at(from, old, one), *target = path_at(to, new, two);
    FAIL_IF(fault("rename", source));
    int done = (int)syscall(SYS_renameat2, from, old, to, new, flags);
    if (!done && recorded(source)) record(flags & 2 ? "exchange" : "rename", source, target, 0, NULL, 0);
    return done;
}
int rename(const char *old, const char *new) { return renaming(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renaming(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned f) { return renaming(from, old, to, new, f); }

static int changing(const char *what, int folder, const char *name, int flags, mode_t mode) {
    char room[8192];
    const char *path = path_at(folder, name, room);
    FAIL_IF(fault(what, path));
    int made = strcmp(what, "mkdir") == 0;
    int done = (int)(made ? syscall(SYS_mkdirat, folder, name, mode) : syscall(SYS_unlinkat, folder, name, flags));
    if (!done && recorded(path)) record(what, path, "", 0, NULL, 0);
    return done;
}
int mkdir(const char *name, mode_t mode) { return changing("mkdir", AT_FDCWD, name, 0, mode); }
int mkdirat(int folder, const char *name, mode_t mode) { return changing("mkdir", folder, name, 0, mode); }
int unlink(const char *name) { return changing("remove", AT_FDCWD, name, 0, 0); }
int unlinkat(int folder, const char *name, int flags) { return changing("remove", folder, name, flags, 0); }
int rmdir(const char *name) { return changing("remove", AT_FDCWD, name, AT_REMOVEDIR, 0); }

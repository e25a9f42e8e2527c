/* A disk that is full, slow, or fails to sync: preloaded into PostgreSQL, told what to do by a shared page.

   The page: byte 0, the disk is full; byte 1, syncs fail; bytes 4 to 7, microseconds that a sync takes. Writes
   within a file's present size succeed on a full disk, as they do on a real one. Bytes 8 to 15 count what was
   made to fail or wait. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct page {
    volatile uint8_t full, failing, unused[2];
    volatile uint32_t delay;
    volatile uint64_t hit;
};

static struct page *page;

/* Looked up before the program runs: dlsym may allocate, and PostgreSQL writes from signal handlers. */
#define REAL(name) real_##name
#define LOOK_UP(name) real_##name = (__typeof__(real_##name))dlsym(RTLD_NEXT, #name)
static __typeof__(&write) REAL(write);
static __typeof__(&pwrite) REAL(pwrite);
static __typeof__(&pwrite64) REAL(pwrite64);
static __typeof__(&pwritev) REAL(pwritev);
static __typeof__(&pwritev64) REAL(pwritev64);
static __typeof__(&posix_fallocate) REAL(posix_fallocate);
static __typeof__(&posix_fallocate64) REAL(posix_fallocate64);
static __typeof__(&fsync) REAL(fsync);
static __typeof__(&fdatasync) REAL(fdatasync);

__attribute__((constructor)) static void begin(void) {
    LOOK_UP(write);
    LOOK_UP(pwrite);
    LOOK_UP(pwrite64);
    LOOK_UP(pwritev);
    LOOK_UP(pwritev64);
    LOOK_UP(posix_fallocate);
    LOOK_UP(posix_fallocate64);
    LOOK_UP(fsync);
    LOOK_UP(fdatasync);
    const char *path = getenv("DISK_FAULTS");
    int fd = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED) page = at;
}

static int hit(int error) {
    __atomic_add_fetch(&page->hit, 1, __ATOMIC_RELAXED);
    errno = error;
    return -1;
}

static int no_room(int fd, off_t end) {
    struct stat found;
    return page != NULL && page->full && fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && end > found.st_size;
}

static size_t total(const struct iovec *parts, int count) {
    size_t sum = 0;
    for (int i = 0; i < count; i++) sum += parts[i].iov_len;
    return sum;
}

ssize_t write(int fd, const void *bytes, size_t count) {
    if (page != NULL && page->full && no_room(fd, lseek(fd, 0, SEEK_CUR) + (off_t)count)) return hit(ENOSPC);
    return REAL(write)(fd, bytes, count);
}

ssize_t pwrite(int fd, const void *bytes, size_t count, off_t at) {
    return no_room(fd, at + (off_t)count) ? hit(ENOSPC) : REAL(pwrite)(fd, bytes, count, at);
}

ssize_t pwrite64(int fd, const void *bytes, size_t count, off64_t at) {
    return no_room(fd, at + (off_t)count) ? hit(ENOSPC) : REAL(pwrite64)(fd, bytes, count, at);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    return no_room(fd, at + (off_t)total(parts, count)) ? hit(ENOSPC) : REAL(pwritev)(fd, parts, count, at);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) {
    return no_room(fd, at + (off_t)total(parts, count)) ? hit(ENOSPC) : REAL(pwritev64)(fd, parts, count, at);
}

int posix_fallocate(int fd, off_t at, off_t count) {
    return no_room(fd, at + count) ? (hit(ENOSPC), ENOSPC) : REAL(posix_fallocate)(fd, at, count);
}

int posix_fallocate64(int fd, off64_t at, off64_t count) {
    return no_room(fd, at + count) ? (hit(ENOSPC), ENOSPC) : REAL(posix_fallocate64)(fd, at, count);
}

static int before_sync(void) {
    if (page == NULL) return 0;
    if (page->delay) {
        __atomic_add_fetch(&page->hit, 1, __ATOMIC_RELAXED);
        usleep(page->delay);
    }
    return page->failing ? hit(EIO) : 0;
}

int fsync(int fd) { return before_sync() ? -1 : REAL(fsync)(fd); }

int fdatasync(int fd) { return before_sync() ? -1 : REAL(fdatasync)(fd); }

/* A clock that jumps: the time of day of a process and its children, moved by the seconds in a file.

   LD_PRELOAD=clock.so RELAX_HPC_CLOCK=FILE program     FILE: 8 bytes, a signed number of seconds; it is mapped, so a change is seen at once

   The monotonic clock, times of files and the kernel's own waits are left as they are. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *moved_s;

__attribute__((constructor)) static void map_file(void) {
    const char *path = getenv("RELAX_HPC_CLOCK");
    int handle = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (handle < 0) return;
    void *found = mmap(NULL, sizeof *moved_s, PROT_READ, MAP_SHARED, handle, 0);
    if (found != MAP_FAILED) moved_s = found;
    close(handle);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && moved_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *moved_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out) *out = exact.tv_sec;
    return exact.tv_sec;
}

/* A caller computes its deadline by the moved clock, and the kernel compares it with its own: translate it. */
int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    struct timespec real = *deadline;
    if (moved_s) real.tv_sec -= *moved_s;
    return sem_clockwait(semaphore, CLOCK_REALTIME, &real);
}

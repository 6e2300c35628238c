/* A clock that is off: preloaded, it adds the seconds of SOAK_CLOCK_OFF to what a process reads as the time of day.
   The kernel's own times, such as those of files, stay right, as those of a file server do. Waits until a time of day
   are the kernel's too, so what is waited for is put right. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long off;

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("SOAK_CLOCK_OFF");
    off = text ? atol(text) : 0;
}

void soak_clock_set(long seconds) { off = seconds; }

int clock_gettime(clockid_t id, struct timespec *now) {
    int code = syscall(SYS_clock_gettime, id, now);
    if (code == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += off;
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec real;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &real);
    now->tv_sec = real.tv_sec;
    now->tv_usec = real.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into) {
    struct timespec real;
    clock_gettime(CLOCK_REALTIME, &real);
    if (into) *into = real.tv_sec;
    return real.tv_sec;
}

/* Of a monotonic clock, it is a time since the machine was booted: less than 30 years. */
static struct timespec right(const struct timespec *until) {
    struct timespec real = *until;
    if (real.tv_sec > 1000000000) real.tv_sec -= off;
    return real;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*own)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec real = right(until);
    if (!own) *(void **)&own = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!own) *(void **)&own = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    return own(condition, mutex, &real);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*own)(sem_t *, const struct timespec *);
    struct timespec real = right(until);
    if (!own) *(void **)&own = dlsym(RTLD_NEXT, "sem_timedwait");
    return own(semaphore, &real);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    static int (*own)(pthread_mutex_t *, const struct timespec *);
    struct timespec real = right(until);
    if (!own) *(void **)&own = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    return own(mutex, &real);
}

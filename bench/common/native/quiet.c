/* How much longer a core takes to read 1,000 cache lines, each of another page, after a pause of
 * 1 ms than without one: the worst of all cores. On a machine of one's own 1 to 2; where others
 * share the host's cores they take the caches meanwhile, 5 to 20. Arithmetic alone would show
 * nothing of that. Takes some 0.1 s a core. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define LINES 1000
#define PAGE 4096
#define TIMES 61

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_us(const char *pages, int pause_us) {
    static volatile long sum;
    double took_us[TIMES];
    for (int n = 0; n < TIMES; n++) {
        if (pause_us) usleep(pause_us);
        double begun_us = now_us();
        for (int i = 0; i < LINES; i++) sum += pages[i * PAGE + i % 64 * 64];
        took_us[n] = now_us() - begun_us;
    }
    qsort(took_us, TIMES, sizeof *took_us, ascending);
    return took_us[TIMES / 2];
}

int main(void) {
    char *pages = aligned_alloc(PAGE, (size_t)LINES * PAGE);
    if (!pages) return 1;
    for (long i = 0; i < (long)LINES * PAGE; i++) pages[i] = (char)i;
    double worst = 0;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    for (long core = 0; core < cores; core++) {
        cpu_set_t here;
        CPU_ZERO(&here);
        CPU_SET(core, &here);
        if (sched_setaffinity(0, sizeof here, &here)) continue;
        double steady_us = median_us(pages, 0), paused_us = median_us(pages, 1000);
        if (paused_us / steady_us > worst) worst = paused_us / steady_us;
    }
    printf("%.2f\n", worst);
    return 0;
}

// Reads one large buffer with every thread, several times; prints the best rate in GB/s.
// usage: read_bandwidth THREADS BYTES PASSES
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uint64_t wide __attribute__((vector_size(64)));

enum { kMaxThreads = 256, kStreams = 4 };

static pthread_barrier_t turn;
static int num_passes;

struct part {
    const wide* data;
    size_t count;  // of `wide`, a multiple of kStreams
    uint64_t sum;
    double* start_s;  // of each pass
    double* end_s;
};

// Four streams per thread: one alone leaves line-fill buffers unused.
static uint64_t read_all(const wide* data, size_t count) {
    wide sums[kStreams];
    memset(sums, 0, sizeof sums);
    const size_t stride = count / kStreams;
    for (size_t i = 0; i < stride; ++i)
        for (int s = 0; s < kStreams; ++s) sums[s] += data[s * stride + i];
    uint64_t total = 0;
    for (int s = 0; s < kStreams; ++s)
        for (int lane = 0; lane < 8; ++lane) total += sums[s][lane];
    return total;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// Each thread notes its own times: one that only watched could be woken late and see a pass too short.
static void* work(void* argument) {
    struct part* part = argument;
    for (int pass = 0; pass < num_passes; ++pass) {
        pthread_barrier_wait(&turn);
        part->start_s[pass] = now_s();
        part->sum += read_all(part->data, part->count);
        part->end_s[pass] = now_s();
    }
    return NULL;
}

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    const int num_threads = atoi(argv[1]);
    const size_t wanted = strtoull(argv[2], NULL, 10);
    num_passes = atoi(argv[3]);
    if (num_threads < 1 || num_threads > kMaxThreads || num_passes < 1) return 2;
    const size_t each = wanted / (size_t)num_threads / (sizeof(wide) * kStreams) * kStreams;
    const size_t bytes = each * (size_t)num_threads * sizeof(wide);
    wide* data = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (data == NULL || bytes == 0) return 3;
    memset(data, 1, bytes);
    pthread_barrier_init(&turn, NULL, (unsigned)num_threads);
    struct part parts[kMaxThreads];
    pthread_t threads[kMaxThreads];
    double* times = calloc((size_t)num_threads * (size_t)num_passes * 2, sizeof(double));
    if (times == NULL) return 3;
    for (int i = 0; i < num_threads; ++i) {
        double* own = times + (size_t)i * (size_t)num_passes * 2;
        parts[i] = (struct part){data + each * (size_t)i, each, 0, own, own + num_passes};
        if (pthread_create(&threads[i], NULL, work, &parts[i]) != 0) return 3;
    }
    uint64_t sum = 0;
    for (int i = 0; i < num_threads; ++i) {
        pthread_join(threads[i], NULL);
        sum += parts[i].sum;
    }
    double best_s = 1e30;
    for (int pass = 0; pass < num_passes; ++pass) {
        double start = 1e300, end = 0;
        for (int i = 0; i < num_threads; ++i) {
            if (parts[i].start_s[pass] < start) start = parts[i].start_s[pass];
            if (parts[i].end_s[pass] > end) end = parts[i].end_s[pass];
        }
        if (end - start < best_s) best_s = end - start;
    }
    // The sum is printed so that no compiler may leave the reads out.
    printf("%.3f %llu\n", (double)bytes / best_s * 1e-9, (unsigned long long)sum);
    return 0;
}

// Threads that take the items of one job after another. Knows nothing of what an item computes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace thermocline {

class ThreadPool {
public:
    // `threads` counts the caller of run, who works too.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // Calls body(context, item) once for every item in [0, items); returns when all are done.
    void run(int64_t items, void (*body)(void* context, int64_t item), void* context);
    int threads() const { return static_cast<int>(workers_.size()) + 1; }

private:
    struct Job {
        void (*body)(void*, int64_t) = nullptr;
        void* context = nullptr;
        int64_t items = 0;
    };
    void work();

    std::mutex turn_;  // one job at a time
    std::mutex lock_;
    std::condition_variable wake_, done_;
    Job job_;
    std::atomic<int64_t> next_{0};
    int64_t round_ = 0;
    int busy_ = 0;
    bool closing_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace thermocline

// The process's compute threads. A job is split into items; the calling thread works too.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace thermocline {

// What one thread did for one job: nanoseconds of CLOCK_MONOTONIC, and the mark that was set then.
struct PoolSpan {
    int64_t begin, end, mark;
};

class ThreadPool {
   public:
    // `threads` counts the caller of run(): one thread more or less is started here, none for 1.
    // With `pin`, worker i is bound to the i-th processor that this process may use.
    explicit ThreadPool(int threads, bool pin = false);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const;

    // Calls body(context, item) once for every item in [0, items) and returns when all calls have.
    // Items are taken in ascending order by whichever thread is free. May be called from several
    // threads at once; the calls then run one after the other.
    void run(int64_t items, void (*body)(void* context, int64_t item), void* context);

    // The same with a callable.
    template <typename Body>
    void for_each(int64_t items, Body&& body) {
        using Plain = std::remove_reference_t<Body>;
        run(items, [](void* context, int64_t item) { (*static_cast<Plain*>(context))(item); }, &body);
    }

    // How long thread `index` (0 is whoever called run) has worked on jobs so far, the present one included. Never
    // waits for a job, and may be called from any thread.
    int64_t busy_ns(int index) const;

    // Forgets what was noted, and marks with 0. From now on each thread notes when it worked on a job, up to
    // `capacity` jobs (the same in every call) between two calls of `take`. Never what it waited.
    void start_timeline(int64_t capacity);
    // What the jobs from here on are called.
    void mark(int64_t mark);
    // Moves what thread `index` (0 is whoever called run) noted to `out`, which has room for `capacity`, and
    // returns how many that were.
    int64_t take(int index, PoolSpan* out);

   private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace thermocline

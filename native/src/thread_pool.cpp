#include "thermocline/thread_pool.h"

namespace thermocline {

ThreadPool::ThreadPool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
    {
        const std::lock_guard held(lock_);
        closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int64_t items, void (*body)(void* context, int64_t item), void* context) {
    if (items <= 1 || workers_.empty()) {
        for (int64_t i = 0; i < items; ++i) body(context, i);
        return;
    }
    const std::lock_guard one(turn_);
    {
        const std::lock_guard held(lock_);
        job_ = {body, context, items};
        next_ = 0;
        busy_ = static_cast<int>(workers_.size());
        ++round_;
    }
    wake_.notify_all();
    for (int64_t i; (i = next_++) < items;) body(context, i);
    std::unique_lock held(lock_);
    done_.wait(held, [this] { return busy_ == 0; });
}

void ThreadPool::work() {
    std::unique_lock held(lock_);
    for (int64_t seen = 0;;) {
        wake_.wait(held, [&] { return closing_ || round_ != seen; });
        if (closing_) return;
        seen = round_;
        const Job job = job_;
        held.unlock();
        for (int64_t i; (i = next_++) < job.items;) job.body(job.context, i);
        held.lock();
        if (--busy_ == 0) done_.notify_one();
    }
}

}  // namespace thermocline

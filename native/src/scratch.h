// Memory for what a job needs on the way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace thermocline {

// Memory that a thread keeps and enlarges; what it held before is forgotten. Always a thread's own, until that ends.
class Scratch {
   public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    // Gives back what this thread keeps in all of them. Not while one is in use.
    static void give_back() {
        for (Scratch* scratch : kept()) {
            scratch->memory_.reset();
            scratch->size_ = 0;
        }
        kept().clear();
    }

    template <typename T>
    T* get(int64_t count) {
        const auto bytes = static_cast<size_t>(count) * sizeof(T);
        if (bytes > size_) {
            const size_t wanted = std::max<size_t>((bytes + 4095) / 4096 * 4096, size_ + size_ / 2);
            if (size_ == 0) kept().push_back(this);
            memory_.reset(::operator new(wanted, std::align_val_t{64}));
            size_ = wanted;
        }
        return static_cast<T*>(memory_.get());
    }

   private:
    struct Free {
        void operator()(void* p) const { ::operator delete(p, std::align_val_t{64}); }
    };
    // Those of this thread that hold something.
    static std::vector<Scratch*>& kept() {
        thread_local std::vector<Scratch*> found;
        return found;
    }
    std::unique_ptr<void, Free> memory_;
    size_t size_ = 0;
};

}  // namespace thermocline

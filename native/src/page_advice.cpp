// Brings pages of a mapped file into memory and lets them go.
#include "thermocline/page_advice.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <limits>

namespace thermocline {

namespace {

// Older headers lack them; an older kernel answers EINVAL.
constexpr int kPageOut = 21, kPopulateRead = 22;
constexpr int64_t kHugeBytes = int64_t{2} << 20;

struct Pages {
    int64_t from, length;

    // Gives advice; returns the bytes, or -errno. may_be_unknown: an older kernel does nothing, and that is fine.
    [[nodiscard]] int64_t advise(int advice, bool may_be_unknown = false) const {
        if (length == 0 || madvise(reinterpret_cast<void*>(from), static_cast<size_t>(length), advice) == 0) return length;
        return errno == EINVAL && may_be_unknown ? length : -errno;
    }
};

int64_t page_bytes() { return sysconf(_SC_PAGESIZE); }

Pages pages_inside(const uint8_t* base, int64_t start, int64_t end) {
    const int64_t page = page_bytes(), address = reinterpret_cast<int64_t>(base);
    const int64_t from = (address + start + page - 1) / page * page;
    return {from, std::max((address + end) / page * page - from, int64_t{0})};
}

Pages pages_around(const uint8_t* base, int64_t start, int64_t end) {
    const int64_t page = page_bytes(), address = reinterpret_cast<int64_t>(base);
    const int64_t from = (address + start) / page * page;
    const int64_t last = (address + end + page - 1) / page * page;
    return {from, last - from};
}

// How long compute will wait for the first use of pages that are in memory. In a virtual machine whose host took its free
// memory away, that comes back page by page, each at its first use: 2 s for a GB. Memory that was in use lately is there.
int64_t first_uses_ns(const Pages& pages) {
    constexpr int kUses = 8;
    const int64_t page = page_bytes(), step = pages.length / page / kUses * page;
    if (step == 0) return 0;
    std::array<int64_t, kUses> took;
    for (int i = 0; i < kUses; ++i) {
        const auto* at = reinterpret_cast<const volatile uint8_t*>(pages.from + i * step);
        const auto begin = std::chrono::steady_clock::now();
        (void)*at;
        took[static_cast<size_t>(i)] = (std::chrono::steady_clock::now() - begin) / std::chrono::nanoseconds(1);
    }
    std::nth_element(took.begin(), took.begin() + kUses / 2, took.end());  // one of them may have been interrupted
    constexpr int64_t kInCache = 500;
    return took[kUses / 2] <= kInCache ? 0 : took[kUses / 2] * (pages.length / page);
}

// Whether a piece is read in huge pages: while that saves more than first uses take, and now and then to see whether it would.
class HugePageTrials {
   public:
    bool is_due() { return left_.load(std::memory_order_relaxed) <= 0 || left_.fetch_sub(1, std::memory_order_relaxed) <= 0; }

    void note(int64_t bytes, int64_t lost_ns) {
        const int64_t gained = bytes / kBytesPerSavedNs - lost_ns;
        const int64_t saved = std::min(saved_.fetch_add(gained, std::memory_order_relaxed) + gained, kMostSaved);
        if (saved >= 0) {
            saved_.store(saved, std::memory_order_relaxed);
            if (saved >= kTrusted) pause_.store(kShortest, std::memory_order_relaxed);
        } else if (left_.load(std::memory_order_relaxed) <= 0) {
            const int64_t pause = pause_.load(std::memory_order_relaxed);
            saved_.store(0, std::memory_order_relaxed);
            pause_.store(std::min(2 * pause, kLongest), std::memory_order_relaxed);
            left_.store(pause, std::memory_order_relaxed);
        }
    }

    void give_up() { left_.store(std::numeric_limits<int64_t>::max(), std::memory_order_relaxed); }

   private:
    static constexpr int64_t kBytesPerSavedNs = 4;                   // 0.25 s of processor per GB (docs/LOG.md)
    static constexpr int64_t kTrusted = 5'000'000, kMostSaved = 20'000'000;  // ns
    static constexpr int64_t kShortest = 128, kLongest = 4096;               // pieces
    std::atomic<int64_t> left_{0}, pause_{kShortest}, saved_{kTrusted};
};

long waits_of_thread() {
    rusage used{};
    getrusage(RUSAGE_THREAD, &used);
    return used.ru_majflt;
}

}  // namespace

int64_t ask_for_pages(const uint8_t* base, int64_t start, int64_t end) {
    return pages_around(base, start, end).advise(MADV_WILLNEED);
}

int64_t fetch_pages(const uint8_t* base, int64_t start, int64_t end) {
    const Pages pages = pages_around(base, start, end);
    // First all requests at once, then the wait: populating alone asks for one small window after another.
    const int64_t asked = pages.advise(MADV_WILLNEED);
    return asked < 0 ? asked : pages.advise(kPopulateRead, true);
}

int64_t fetch_huge_pages(const uint8_t* base, int64_t start, int64_t end) {
    static HugePageTrials trials;
    if (!trials.is_due()) return fetch_pages(base, start, end);
    const Pages pages = pages_around(base, start, end);
    const long before = waits_of_thread();
    const int64_t done = pages.advise(kPopulateRead);
    if (done < 0) return done == -EINVAL ? fetch_pages(base, start, end) : done;
    // One wait for each huge page that the bytes touch, or two, if they come in pairs and by two threads.
    if (waits_of_thread() - before > 2 * (pages.length / kHugeBytes + 2))
        trials.give_up();
    else
        trials.note(pages.length, first_uses_ns(pages));
    return done;
}

int64_t allow_huge_pages(const uint8_t* base, int64_t start, int64_t end) {
    return pages_around(base, start, end).advise(MADV_HUGEPAGE);
}

int64_t release_pages(const uint8_t* base, int64_t start, int64_t end) {
    return pages_inside(base, start, end).advise(kPageOut, true);
}

int64_t unmap_pages(const uint8_t* base, int64_t start, int64_t end) {
    return pages_inside(base, start, end).advise(MADV_DONTNEED);
}

int64_t stop_read_ahead(const uint8_t* base, int64_t start, int64_t end) {
    return pages_around(base, start, end).advise(MADV_RANDOM);
}

int64_t resident_pages(const uint8_t* base, const int64_t* offsets, int64_t count) {
    const int64_t page = page_bytes();
    int64_t resident = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t from = (reinterpret_cast<int64_t>(base) + offsets[i]) / page * page;
        unsigned char state = 0;
        if (mincore(reinterpret_cast<void*>(from), 1, &state) != 0) return -errno;
        resident += state & 1;
    }
    return resident;
}

int64_t pages_read_at_once(const uint8_t* base, const int64_t* offsets, int64_t count) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
        const long before = waits_of_thread();
        const int64_t read = pages_around(base, offsets[i], offsets[i] + 1).advise(kPopulateRead);
        if (read < 0) return read;
        found += waits_of_thread() == before;
    }
    return found;
}

}  // namespace thermocline

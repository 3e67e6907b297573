// Keeps this process alive when a mapped file shrinks or its disk fails: pages that can not be read become zeros.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <mutex>

namespace thermocline {

// What became of a mapped file. Zeros were read where a page could not be.
enum class FileChange { kNone, kUnreadable, kResized, kRewritten };

// A mapping of a whole file. The first one of a process installs a handler of SIGBUS; faults elsewhere go to the handler
// that was there before. A library that installs one later (faulthandler too) must come before the first mapping.
class GuardedMap {
   public:
    // fd: of the mapped file; it is duplicated. Throws std::system_error.
    GuardedMap(const uint8_t* data, int64_t bytes, int fd);
    ~GuardedMap() { release(); }
    GuardedMap(const GuardedMap&) = delete;
    GuardedMap& operator=(const GuardedMap&) = delete;

    // What has happened since the guard was made; kNone once it is released. From any thread.
    [[nodiscard]] FileChange change();

    // Call when the mapping goes. More calls do nothing.
    void release();

   private:
    struct ::stat first_{};
    std::mutex mutex_;
    struct Range* range_ = nullptr;
    int fd_ = -1;
};

}  // namespace thermocline

#include "thermocline/codebooks.h"

#include <atomic>
#include <cstring>
#include <new>

namespace thermocline {
namespace {

// The largest value keeps q of the unpacked form (unpack.h) within seven bits and its bytes from
// carrying into each other.
struct Slot {
    int64_t size;
    uint8_t largest;
    std::atomic<const uint8_t*> bytes{nullptr};
};

Slot g_iq2_xxs{256 * 8, 63}, g_iq2_xs{512 * 8, 63}, g_iq2_s{1024 * 8, 63};
Slot g_iq3_xxs{256 * 4, 63}, g_iq3_s{512 * 4, 15}, g_iq1{2048 * 8, 16};

Slot* find_slot(int type_id) {
    switch (type_id) {
        case 16: return &g_iq2_xxs;
        case 17: return &g_iq2_xs;
        case 18: return &g_iq3_xxs;
        case 19: return &g_iq1;
        case 21: return &g_iq3_s;
        case 22: return &g_iq2_s;
        case 29: return &g_iq1;
    }
    return nullptr;
}

}  // namespace

bool set_codebook(int type_id, const uint8_t* bytes, int64_t size) {
    Slot* slot = find_slot(type_id);
    if (slot == nullptr || size != slot->size) return false;
    for (int64_t i = 0; i < size; ++i)
        if (bytes[i] > slot->largest) return false;

    const uint8_t* present = slot->bytes.load(std::memory_order_acquire);
    if (present == nullptr) {
        constexpr std::align_val_t kLine{64};
        auto* copy = static_cast<uint8_t*>(::operator new(static_cast<size_t>(size), kLine));
        std::memcpy(copy, bytes, static_cast<size_t>(size));
        if (slot->bytes.compare_exchange_strong(present, copy, std::memory_order_acq_rel)) return true;
        ::operator delete(copy, kLine);
    }
    return std::memcmp(present, bytes, static_cast<size_t>(size)) == 0;
}

const uint8_t* codebook(int type_id) {
    const Slot* slot = find_slot(type_id);
    return slot == nullptr ? nullptr : slot->bytes.load(std::memory_order_acquire);
}

bool codebook_missing(int type_id) {
    const Slot* slot = find_slot(type_id);
    return slot != nullptr && slot->bytes.load(std::memory_order_acquire) == nullptr;
}

}  // namespace thermocline

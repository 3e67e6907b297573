#include "thermocline/handoff.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "monotonic.h"
#include "thermocline/relax.h"

namespace thermocline {
namespace {

// A side that waits only looks at first. Then it lets others have the processor, if they want it.
constexpr int64_t kLookNs = 50'000;

// Looks until `done`, which is given the nanoseconds since the beginning and says whether to stop.
template <typename Done>
void look(Done done) {
    const int64_t begin = now_ns();
    int64_t waited = 0;
    for (int spins = 1; !done(waited); ++spins) {
        relax();
        if ((spins & 31) != 0 && waited < kLookNs) continue;
        waited = now_ns() - begin;
        if (waited >= kLookNs) std::this_thread::yield();
    }
}

int64_t aligned(int64_t bytes) { return (bytes + HandoffLayout::kLine - 1) / HandoffLayout::kLine * HandoffLayout::kLine; }

// Waits for the device to set a flag. Anything but Done: the step was given up, by this call or before. A step that was
// given up is not computed further, so that flag is looked at first.
HandoffEnd await_device(HandoffPage& page, const std::atomic<uint32_t>& flag, uint32_t epoch, int64_t patience) {
    HandoffEnd end = HandoffEnd::Done;
    look([&](int64_t waited) {
        if (page.abort_flag().load(std::memory_order_acquire) == epoch) {
            end = HandoffEnd::Aborted;
            return true;
        }
        if (flag.load(std::memory_order_acquire) == epoch) return true;
        if (waited < patience) return false;
        end = HandoffEnd::Late;
        return true;
    });
    if (end == HandoffEnd::Late) abort_step(page, epoch);
    return end;
}

// Says that the CPU computes, for as long as it lives.
class Busy {
   public:
    Busy(HandoffPage& page, uint32_t epoch) : page_(page) { page.busy_flag().store(epoch, std::memory_order_release); }
    ~Busy() { page_.busy_flag().store(0, std::memory_order_release); }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    HandoffPage& page_;
};

}  // namespace

HandoffLayout::HandoffLayout(const HandoffShape& shape) {
    const int64_t pairs = shape.rows * shape.chosen;
    int64_t end = 4 * kLine;
    const auto take = [&](int64_t size) {
        const int64_t begin = end;
        end += aligned(size);
        return begin;
    };
    published = take(shape.layers * kLine);
    served = take(shape.layers * kLine);
    x = take(shape.rows * shape.hidden * 4);
    cold = take(pairs * 4);
    weights = take(pairs * 4);
    place = take(pairs * 4);
    out = take(pairs * shape.hidden * 4);
    ids = take(shape.layers * pairs * 4);
    routing = take(shape.layers * pairs * 4);
    bytes = (end + 4095) / 4096 * 4096;
}

HandoffPage::HandoffPage(const HandoffShape& shape)
    : shape_(shape),
      layout_(shape),
      memory_(static_cast<uint8_t*>(::operator new(static_cast<size_t>(layout_.bytes), std::align_val_t{4096}))) {
    std::memset(memory_.get(), 0, static_cast<size_t>(layout_.bytes));
}

int64_t publish(HandoffPage& page, int64_t layer, uint32_t epoch, const HandoffChoice& choice) {
    const HandoffShape& shape = page.shape();
    const int64_t pairs = choice.rows * shape.chosen;
    int64_t num_cold = 0;
    for (int64_t pair = 0; pair < pairs; ++pair) num_cold += choice.slots[pair] < 0;
    std::memcpy(page.ids(layer), choice.ids, static_cast<size_t>(pairs) * sizeof(int32_t));
    std::memcpy(page.routing(layer), choice.weights, static_cast<size_t>(pairs) * sizeof(float));
    if (num_cold > 0) {
        std::memcpy(page.x(), choice.x, static_cast<size_t>(choice.rows * shape.hidden) * sizeof(float));
        std::memcpy(page.weights(), choice.weights, static_cast<size_t>(pairs) * sizeof(float));
        for (int64_t pair = 0; pair < pairs; ++pair)
            page.cold()[pair] = choice.slots[pair] < 0 ? choice.ids[pair] : -1;
    }
    page.num_cold(layer) = static_cast<int32_t>(num_cold);
    page.published(layer).store(epoch, std::memory_order_release);
    return num_cold;
}

HandoffEnd wait_served(HandoffPage& page, int64_t layer, uint32_t epoch, const HandoffPatience& patience) {
    HandoffEnd end = HandoffEnd::Done;
    if (page.num_cold(layer) == 0) {
        return page.abort_flag().load(std::memory_order_acquire) == epoch ? HandoffEnd::Aborted : end;
    }
    look([&](int64_t waited) {
        if (page.served(layer).load(std::memory_order_acquire) == epoch) return true;
        if (page.abort_flag().load(std::memory_order_acquire) == epoch) {
            end = HandoffEnd::Aborted;
            return true;
        }
        const bool is_busy = page.busy_flag().load(std::memory_order_acquire) == epoch;
        if (waited < (is_busy ? patience.busy : patience.idle)) return false;
        // A CPU that is busy no more has served the layer, perhaps after the first look.
        if (page.served(layer).load(std::memory_order_acquire) != epoch) end = HandoffEnd::Late;
        return true;
    });
    if (end == HandoffEnd::Late) abort_step(page, epoch);
    return end;
}

namespace {

// Computes what was published of a layer, and says that it is served. False where the page makes no sense.
bool serve_layer(const Compute& compute, HandoffPage& page, int64_t layer, const ExpertStacks& experts, int64_t rows,
                 uint32_t epoch, ServedSpan& span) {
    const HandoffShape& shape = page.shape();
    const int64_t num_cold = page.num_cold(layer);
    span.begin = span.end = now_ns();
    if (num_cold == 0) {  // Nobody waits. But no flag keeps a number until numbers begin again.
        page.served(layer).store(epoch, std::memory_order_release);
        return true;
    }
    thread_local ExpertGroups pairs;
    const Busy busy(page, epoch);
    const bool is_good = pairs.sort(experts, rows, shape.chosen, page.cold(), page.weights());
    if (!is_good || pairs.pairs() != num_cold) return false;
    std::copy_n(pairs.pair_of(), rows * shape.chosen, page.place());
    expert_outputs(compute, Form::Decode, pairs.work(page.x(), rows, shape.hidden), page.out());
    span.end = now_ns();
    // Still busy: a device that has waited long must not find a CPU that neither computes nor has served.
    page.served(layer).store(epoch, std::memory_order_release);
    return true;
}

}  // namespace

HandoffEnd serve_step(const Compute& compute, HandoffPage& page, const ExpertStacks* layers, int64_t rows,
                      uint32_t epoch, const HandoffPatience& patience, ServedSpan* spans) {
    const int64_t num_layers = page.shape().layers;
    std::fill_n(spans, num_layers, ServedSpan{0, 0});
    const HandoffEnd begun = await_device(page, page.begun_flag(), epoch, patience.busy);
    if (begun != HandoffEnd::Done) return begun;
    try {
        for (int64_t layer = 0; layer < num_layers; ++layer) {
            if (layers[layer].count == 0) continue;
            const HandoffEnd end = await_device(page, page.published(layer), epoch, patience.idle);
            if (end != HandoffEnd::Done) return end;
            if (serve_layer(compute, page, layer, layers[layer], rows, epoch, spans[layer])) continue;
            abort_step(page, epoch);
            return HandoffEnd::BadPage;
        }
    } catch (...) {  // such as out of memory: the device does not wait for it
        abort_step(page, epoch);
        throw;
    }
    return HandoffEnd::Done;
}

HandoffEnd wait_ended(HandoffPage& page, uint32_t epoch, const HandoffPatience& patience) {
    return await_device(page, page.ended_flag(), epoch, patience.idle);
}

void abort_step(HandoffPage& page, uint32_t epoch) {
    // Whoever is late with a step that is over must not hide that the present one was given up. 0: none was so far.
    uint32_t latest = page.abort_flag().load(std::memory_order_relaxed);
    while (latest == 0 || static_cast<int32_t>(epoch - latest) > 0) {
        if (page.abort_flag().compare_exchange_weak(latest, epoch, std::memory_order_release, std::memory_order_relaxed))
            return;
    }
}

}  // namespace thermocline

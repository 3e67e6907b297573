// Cuts matrix products into items for the threads. The items never share an output element, and what an
// element is added up from does not depend on how the items are cut.
#include "thermocline/matmul.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "missing_pages.h"
#include "pair_scales.h"
#include "scratch.h"
#include "thermocline/unpack.h"

namespace thermocline {
namespace {

// Tokens that share one unpacking of a panel; their sums stay in the second-level cache.
constexpr int64_t kTokenRange = 256;

bool is_plain(int type_id) { return type_id == kF32 || type_id == kF16 || type_id == kBF16; }

// The products of the expert's inner activations keep more digits: these are spread more widely than a
// normalised input, and a scale per 16 holds the whole expert's error below one hundredth.
QuantForm form_of(int type_id, bool inner) {
    UnpackInfo info{};
    unpack_info(type_id, info);
    return {inner ? kGroupMin : info.group, info.offset, info.has_minimum, info.largest <= 127};
}

// One x, rounded in one form (or left alone for plain types).
struct Activations {
    bool plain = true;
    QuantForm form{};
    ActivationLayout layout{};
    const float* x = nullptr;
    int64_t cols = 0;
    std::unique_ptr<uint8_t[]> owned;
    uint8_t* base = nullptr;

    const uint8_t* token(int64_t t) const { return base + t * layout.row_bytes; }
};

class ActivationStore {
   public:
    // Rounds x [tokens, cols] as weights of this type want it; one that is there already is used again.
    const Activations& get(const Compute& compute, const float* x, int64_t tokens, int64_t cols, int type_id,
                           bool inner) {
        const bool plain = is_plain(type_id);
        const QuantForm form = plain ? QuantForm{} : form_of(type_id, inner);
        for (const auto& known : kept_)
            if (known->plain == plain && known->form == form && known->x == x) return *known;
        auto made = std::make_unique<Activations>();
        made->plain = plain;
        made->form = form;
        made->x = x;
        made->cols = cols;
        if (!plain) {
            made->layout = ActivationLayout::of(cols, form);
            made->base = buffer(kept_.size(), tokens * made->layout.row_bytes);
            quantize(compute, *made, tokens);
        }
        kept_.push_back(std::move(made));
        return *kept_.back();
    }

   private:
    // A decoded token's columns are cut, too, so that no thread waits for another's.
    static void quantize(const Compute& compute, const Activations& act, int64_t tokens) {
        constexpr int64_t kNumbers = 8192, kPiece = 1024;  // of an item, and of a piece of a token
        const int64_t run = std::max<int64_t>(1, kNumbers / act.cols);
        const bool is_cut = tokens < run * compute.pool.threads();
        const int64_t pieces = is_cut ? (act.cols + kPiece - 1) / kPiece : 1, together = is_cut ? 1 : run;
        compute.pool.for_each((tokens + together - 1) / together * pieces, [&](int64_t item) {
            const int64_t first = item / pieces * together, column = item % pieces * kPiece;
            const int64_t count = is_cut ? std::min(kPiece, act.cols - column) : act.cols;
            const auto& [row_bytes, scale, start, sum] = act.layout;
            const int64_t moved = column / act.form.group * 4 - column;  // of the numbers, from the piece's first byte
            const ActivationLayout layout{row_bytes, scale + moved, start + moved, sum + moved};
            for (int64_t t = first; t < std::min(tokens, first + together); ++t)
                compute.set.gemm->quantize(act.x + t * act.cols + column, count, act.form, layout,
                                           act.base + t * row_bytes + column);
        });
    }

    static uint8_t* buffer(size_t index, int64_t bytes) {
        thread_local std::vector<std::unique_ptr<Scratch>> buffers;
        while (buffers.size() <= index) buffers.push_back(std::make_unique<Scratch>());
        return buffers[index]->get<uint8_t>(bytes);
    }
    std::vector<std::unique_ptr<Activations>> kept_;
};

// Panels of an expert's down matrix that are multiplied one after another: of all experts' inner activations, which leave
// the second-level cache in between, half as many are read.
constexpr int64_t kPanelsOfSum = 2;

// Panels of down matrices that are asked for at a time, where they may be missing: some tens of kilobytes.
constexpr int64_t kPanelsAsked = 4;

// Of a panel and those that follow it, where it is the first of so many.
void ask_for_panels(const Weight& weight, int64_t panel) {
    if (panel % kPanelsAsked != 0) return;
    const int64_t row = panel * kPanelRows;
    ask_for(weight.row(row), std::min(kPanelsAsked * kPanelRows, weight.rows - row) * weight.row_bytes);
}

// Where a strip's 16 rows come from.
struct Strip {
    const Weight* weight = nullptr;
    int64_t row = 0;

    int rows() const {
        return weight ? static_cast<int>(std::clamp<int64_t>(weight->rows - row, 0, kStripRows)) : 0;
    }
};

struct Panel {
    Strip strips[kStrips];

    static Panel of(const Weight& weight, int64_t row) { return {{{&weight, row}, {&weight, row + kStripRows}}}; }
    static Panel of(const Weight& gate, const Weight& up, int64_t row) { return {{{&gate, row}, {&up, row}}}; }
};

struct ThreadScratch {
    Scratch panel, sums, bases[2];
};

ThreadScratch& scratch() {
    thread_local ThreadScratch mine;
    return mine;
}

// Where an item's tokens lie: those in `rows`, or from `first` on.
struct Tokens {
    const Activations* act;
    int64_t count;
    const uint8_t** bases;  // of quantised activations
    const float** xs;       // of plain ones; the same memory

    // Of an item that takes two kinds of activations, the second has `which` 1.
    Tokens(const Activations& of, const int32_t* rows, int64_t first, int64_t n, int which = 0)
        : act(&of), count(n), bases(scratch().bases[which].get<const uint8_t*>(n)),
          xs(reinterpret_cast<const float**>(bases)) {
        for (int64_t t = 0; t < n; ++t) {
            const int64_t row = rows ? rows[t] : first + t;
            if (of.plain)
                xs[t] = of.x + row * of.cols;
            else
                bases[t] = of.token(row);
        }
    }
};

// A strip's product with few tokens row by row; nothing where the set has no such form.
struct RowForm {
    RowsFn quantised = nullptr;
    PlainRowsFn plain = nullptr;

    RowForm() = default;
    RowForm(const GemmKernels& gemm, int type_id, const Tokens& of) {
        if (!of.act->plain) quantised = gemm.find_rows(type_id, of.act->form, of.count);
        else if (of.count == 1) plain = gemm.find_plain_rows(type_id);
    }
    explicit operator bool() const { return quantised || plain; }
};

// What probably comes after a panel, whose bytes are asked for meanwhile. The nearest cache holds what comes at once and no
// more, so that is only for jobs whose panels are all multiplied row by row.
struct Coming {
    Panel panel;
    bool nearest = false;

    // For a job of which no item has more tokens.
    static bool into_nearest(const Compute& compute, int64_t most_tokens) {
        return compute.set.asks_nearest && most_tokens <= 2;
    }
    // The strip that is asked for beside strip s of `now`.
    const Strip& strip(const Panel& now, int s) const {
        if (!nearest) return panel.strips[s];
        return s + 1 < kStrips && now.strips[s + 1].rows() > 0 ? now.strips[s + 1] : panel.strips[0];
    }
};

// sums[t][32] = the panel's rows times the tokens, row by row: where the set has that form for the types and so few
// tokens, and the strips are whole.
bool multiply_rows(const GemmKernels& gemm, const Panel& panel, const Tokens& of, const Coming& next, float* sums) {
    RowForm forms[kStrips];
    for (int s = 0; s < kStrips; ++s) {
        const Strip& strip = panel.strips[s];
        if (strip.rows() == kStripRows) forms[s] = RowForm(gemm, strip.weight->type_id, of);
        if (strip.rows() > 0 && !forms[s]) return false;
    }
    const bool both = forms[0].plain && forms[0].plain == forms[1].plain;  // at once, with more than the nearest cache holds
    PackSource sources[kStrips];
    for (int s = 0; s < kStrips; ++s) {
        if (!forms[s]) continue;
        const Strip& strip = panel.strips[s];
        const Weight& w = *strip.weight;
        const Strip& then = both ? next.panel.strips[s] : next.strip(panel, s);
        sources[s] = {w.row(strip.row), w.row_bytes, kStripRows, w.cols, {}};
        sources[s].ahead.nearest = next.nearest && !both;
        if (then.rows() == kStripRows) {
            sources[s].ahead.from = then.weight->row(then.row);
            sources[s].ahead.bytes = kStripRows * then.weight->row_bytes;
        }
    }
    if (both) {
        forms[0].plain(sources, kStrips, of.xs[0], sums);
        return true;
    }
    for (int s = 0; s < kStrips; ++s) {
        if (!forms[s]) continue;
        float* to = sums + s * kStripRows;
        if (forms[s].plain)
            forms[s].plain(sources + s, 1, of.xs[0], to);
        else
            forms[s].quantised(panel.strips[s].weight->type_id, of.act->form, sources[s], of.bases, of.act->layout, to);
    }
    return true;
}

// sums[t][32] = the panel's rows times the tokens. While it works it asks for the bytes of `next`, which will
// probably come after it.
void multiply_panel(const Compute& compute, const Panel& panel, const Tokens& of, const Coming& next, float* sums) {
    const GemmKernels& gemm = *compute.set.gemm;
    const Weight& weight = *panel.strips[0].weight;
    const Activations& act = *of.act;
    const int64_t tokens = of.count;
    if (multiply_rows(gemm, panel, of, next, sums)) return;
    const int64_t spans = (weight.cols + kSpan - 1) / kSpan;
    // Measured on a Zen 5: with 32 tokens and more up to 15 % faster by the nearest cache, with 4 to 16 up to 7 % slower.
    const bool nearest = compute.set.asks_nearest && tokens >= 24;
    auto& quant = *scratch().panel.get<QuantPanel>(
        (sizeof(FloatPanel) + sizeof(QuantPanel) - 1) / sizeof(QuantPanel));
    auto& plain = *reinterpret_cast<FloatPanel*>(&quant);
    // Divided once: a division takes as long as several products.
    int64_t span_bytes[kStrips];
    const uint8_t *ahead[kStrips] = {}, *end[kStrips] = {};
    int64_t share[kStrips] = {};  // of a span, in bytes
    for (int s = 0; s < kStrips; ++s) {
        FormatInfo info{};  // types of one form may differ in their blocks, and in the size of their weights
        format_info(panel.strips[s].weight->type_id, info);
        span_bytes[s] = kSpan / info.block_elements * info.block_bytes;
        UnpackInfo form{};
        if (unpack_info(panel.strips[s].weight->type_id, form)) quant.largest[s] = form.largest;
        const Strip& then = next.panel.strips[s];
        if (then.rows() == 0) continue;
        const int64_t bytes = then.rows() * then.weight->row_bytes;
        ahead[s] = then.weight->row(then.row);
        end[s] = ahead[s] + bytes;
        share[s] = (bytes / spans + 63) / 64 * 64;
    }
    for (int64_t span = 0; span < spans; ++span) {
        const int64_t column = span * kSpan, count = std::min<int64_t>(kSpan, weight.cols - column);
        Ahead asked[kStrips];
        for (int s = 0; s < kStrips; ++s) {
            const Strip& from = panel.strips[s];
            const Weight& w = *from.weight;
            asked[s] = {ahead[s], std::min<int64_t>(share[s], end[s] - ahead[s]), nearest};
            ahead[s] += asked[s].bytes;
            const PackSource source{w.row(from.row) + span * span_bytes[s], w.row_bytes, from.rows(), count, {}};
            if (act.plain)
                gemm.pack_float(w.type_id, source, s, plain);
            else
                gemm.pack(w.type_id, source, act.form.group, s, quant);
        }
        if (act.plain)
            gemm.multiply_float(plain, count, column, of.xs, tokens, span == 0, asked, sums);
        else
            gemm.multiply(quant, act.form, count, column, of.bases, act.layout, tokens, span == 0, asked, sums);
    }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Panels that one item takes, so that there are some 16 items per thread, and long enough runs to stream.
int64_t panels_per_item(const Compute& compute, int64_t panels) {
    return std::clamp<int64_t>(panels / (16 * compute.pool.threads()), 1, 32);
}

}  // namespace

void multiply_all(const Compute& compute, const float* x, int64_t tokens, const Product* products, int count) {
    if (tokens == 0) return;
    ActivationStore store;
    struct Part {
        const Product* product;
        const Activations* act;
        int64_t first_item, panels, run, ranges;
    };
    std::vector<Part> parts;
    int64_t items = 0;
    int64_t all_panels = 0;
    for (int p = 0; p < count; ++p) all_panels += ceil_div(products[p].weight.rows, kPanelRows);
    const int64_t run = panels_per_item(compute, all_panels);
    for (int p = 0; p < count; ++p) {
        const Weight& w = products[p].weight;
        const Activations& act = store.get(compute, x, tokens, w.cols, w.type_id, false);
        const int64_t panels = ceil_div(w.rows, kPanelRows), ranges = ceil_div(tokens, kTokenRange);
        parts.push_back({&products[p], &act, items, panels, run, ranges});
        items += ceil_div(panels, run) * ranges;
    }
    struct Place {
        const Part* part;
        int64_t start, end, first;  // panels [start, end), tokens from first
    };
    const auto place_of = [&](int64_t item) -> Place {
        size_t index = parts.size() - 1;
        while (parts[index].first_item > item) --index;
        const Part& part = parts[index];
        const int64_t local = item - part.first_item, start = local / part.ranges * part.run;
        return {&part, start, std::min(start + part.run, part.panels), local % part.ranges * kTokenRange};
    };
    const bool nearest = Coming::into_nearest(compute, tokens);
    compute.pool.for_each(items, [&](int64_t item) {
        const Place place = place_of(item);
        const Product& product = *place.part->product;
        const int64_t n = std::min(kTokenRange, tokens - place.first);
        const Tokens of(*place.part->act, nullptr, place.first, n);
        float* sums = scratch().sums.get<float>(n * kPanelRows);
        for (int64_t panel = place.start; panel < place.end; ++panel) {
            const int64_t row = panel * kPanelRows;
            Panel next;
            if (panel + 1 < place.end) {
                next = Panel::of(product.weight, row + kPanelRows);
            } else if (const int64_t likely = item + compute.pool.threads(); likely < items) {
                const Place then = place_of(likely);
                next = Panel::of(then.part->product->weight, then.start * kPanelRows);
            }
            multiply_panel(compute, Panel::of(product.weight, row), of, {next, nearest}, sums);
            const int64_t width = std::min<int64_t>(kPanelRows, product.weight.rows - row);
            const float scale = product.weight.scale;
            for (int64_t t = 0; t < n; ++t) {
                const int64_t at = (place.first + t) * product.out_stride + row;
                const float* from = sums + t * kPanelRows;
                for (int64_t i = 0; i < width; ++i) {
                    const float value = scale * from[i];
                    product.out[at + i] = product.add ? product.add[at + i] + value : value;
                }
            }
        }
    });
}

void multiply_heads(const Compute& compute, const StackedWeight& weights, int64_t heads, const float* x, int64_t tokens,
                    float* out, int64_t stride) {
    if (tokens == 0) return;
    ActivationStore store;
    const Activations& act = store.get(compute, x, tokens * heads, weights.first.cols, weights.first.type_id, false);
    const int64_t rows = weights.first.rows, panels = ceil_div(rows, kPanelRows);
    const int64_t ranges = ceil_div(tokens, kTokenRange), run = panels_per_item(compute, panels * heads);
    const int64_t pieces = ceil_div(panels, run);
    const int64_t items = heads * pieces * ranges;
    const auto head_of = [&](int64_t item) { return item / (pieces * ranges); };
    const auto start_of = [&](int64_t item) { return item / ranges % pieces * run; };
    const bool nearest = Coming::into_nearest(compute, tokens);
    compute.pool.for_each(items, [&](int64_t item) {
        const int64_t head = head_of(item), start = start_of(item);
        const int64_t first = item % ranges * kTokenRange, n = std::min(kTokenRange, tokens - first);
        const int64_t end = std::min(start + run, panels), likely = item + compute.pool.threads();
        const Weight weight = weights[head], after = weights[head_of(std::min(likely, items - 1))];
        std::vector<int32_t> places(static_cast<size_t>(n));
        for (int64_t t = 0; t < n; ++t) places[static_cast<size_t>(t)] = static_cast<int32_t>((first + t) * heads + head);
        const Tokens of(act, places.data(), 0, n);
        float* sums = scratch().sums.get<float>(n * kPanelRows);
        for (int64_t panel = start; panel < end; ++panel) {
            const int64_t row = panel * kPanelRows, width = std::min<int64_t>(kPanelRows, rows - row);
            Panel next;
            if (panel + 1 < end) next = Panel::of(weight, row + kPanelRows);
            else if (likely < items) next = Panel::of(after, start_of(likely) * kPanelRows);
            multiply_panel(compute, Panel::of(weight, row), of, {next, nearest}, sums);
            for (int64_t t = 0; t < n; ++t) {
                float* to = out + places[static_cast<size_t>(t)] * stride + row;
                for (int64_t i = 0; i < width; ++i) to[i] = weight.scale * sums[t * kPanelRows + i];
            }
        }
    });
}

namespace {

// sums[t][0 .. width) *= the weight's scale, for `tokens` rows that lie kPanelRows apart.
void apply_scale(const Weight& weight, int64_t tokens, int64_t width, float* sums) {
    if (weight.scale == 1.0f) return;
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < width; ++i) sums[t * kPanelRows + i] *= weight.scale;
}

// sums[t][0 .. width) += the matrix's bias from `row` on, if it has one.
void add_bias(const float* bias, int64_t row, int64_t tokens, int64_t width, float* sums) {
    if (bias == nullptr) return;
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < width; ++i) sums[t * kPanelRows + i] += bias[row + i];
}

// The rows that are multiplied together from `row` on: as many of gate and of up, or of up alone.
Panel inner_panel(const ExpertWeights& w, int64_t row) {
    return has_gate(w.activation) ? Panel::of(w.gate, w.up, row) : Panel::of(w.up, row);
}

int64_t most_tokens(const ExpertWork& work) {
    int64_t most = 0;
    for (int64_t g = 0; g < work.num_groups; ++g) most = std::max(most, work.groups[g].count);
    return most;
}

// h[pair][intermediate] = activation(gate, up) for every pair.
void expert_inner(const Compute& compute, const ExpertWork& work, float* inner, int64_t intermediate) {
    ActivationStore store;
    struct Item {
        const ExpertGroup* group;
        const Activations *gate, *up;
        int64_t strip, strips, first, count;
    };
    const ExpertActivation activation = work.groups[0].weights.activation;
    const SiluLimits limits = work.groups[0].weights.limits;
    const bool gated = has_gate(activation);
    const ExpertInnerFn unlimited = expert_inner_fn(*compute.set.dense, activation);
    const auto activate = [&](const float* gate, const float* up, int64_t count, float* out) {
        if (unlimited != nullptr)
            unlimited(gate, up, count, out);
        else
            compute.set.dense->limited_silu_multiply(gate, up, count, limits, out);
    };
    const int64_t height = gated ? kStripRows : kPanelRows, strips = ceil_div(intermediate, height);
    int64_t whole = 0;
    for (int64_t g = 0; g < work.num_groups; ++g) whole += strips * ceil_div(work.groups[g].count, kTokenRange);
    const int64_t run = panels_per_item(compute, whole);
    std::vector<Item> items;
    for (int64_t g = 0; g < work.num_groups; ++g) {
        const ExpertGroup& group = work.groups[g];
        const ExpertWeights& w = group.weights;
        const Activations& up = store.get(compute, work.x, work.tokens, work.hidden, w.up.type_id, false);
        const Activations& gate =
            gated ? store.get(compute, work.x, work.tokens, work.hidden, w.gate.type_id, false) : up;
        for (int64_t first = 0; first < group.count; first += kTokenRange)
            for (int64_t strip = 0; strip < strips; strip += run)
                items.push_back({&group, &gate, &up, strip, std::min(run, strips - strip), group.first + first,
                                 std::min(kTokenRange, group.count - first)});
    }
    const auto count = static_cast<int64_t>(items.size());
    const bool nearest = Coming::into_nearest(compute, most_tokens(work));
    compute.pool.for_each(count, [&](int64_t index) {
        const Item& item = items[static_cast<size_t>(index)];
        const ExpertWeights& w = item.group->weights;
        const int32_t* rows = work.rows + item.first;
        const Tokens gate_tokens(*item.gate, rows, 0, item.count);
        const Tokens up_tokens = item.gate == item.up ? gate_tokens : Tokens(*item.up, rows, 0, item.count, 1);
        float* sums = scratch().sums.get<float>(2 * item.count * kPanelRows);
        if (item.group->may_be_missing) {
            const int64_t row = item.strip * height, rows_here = std::min(item.strips * height, intermediate - row);
            if (gated) ask_for(w.gate.row(row), rows_here * w.gate.row_bytes);
            ask_for(w.up.row(row), rows_here * w.up.row_bytes);
        }
        for (int64_t strip = item.strip; strip < item.strip + item.strips; ++strip) {
            const int64_t row = strip * height;
            Panel next;
            if (strip + 1 < item.strip + item.strips) {
                next = inner_panel(w, row + height);
            } else if (const int64_t likely = index + compute.pool.threads(); likely < count) {
                const Item& then = items[static_cast<size_t>(likely)];
                next = inner_panel(then.group->weights, then.strip * height);
            }
            float* up_sums = gated ? sums + kStripRows : sums;
            if (item.gate == item.up) {
                multiply_panel(compute, inner_panel(w, row), gate_tokens, {next, nearest}, sums);
            } else {  // two types: each by itself, with nothing in its other strip
                float* others = sums + item.count * kPanelRows;
                up_sums = others + kStripRows;
                const Panel gate{{{&w.gate, row}, {&w.gate, w.gate.rows}}};
                const Panel up{{{&w.up, w.up.rows}, {&w.up, row}}};
                multiply_panel(compute, gate, gate_tokens, {}, sums);
                multiply_panel(compute, up, up_tokens, {}, others);
            }
            const int64_t width = std::min(height, intermediate - row);
            if (gated) {
                apply_scale(w.gate, item.count, width, sums);
                add_bias(w.gate_bias, row, item.count, width, sums);
            }
            apply_scale(w.up, item.count, width, up_sums);
            add_bias(w.up_bias, row, item.count, width, up_sums);
            for (int64_t t = 0; t < item.count; ++t)
                activate(sums + t * kPanelRows, up_sums + t * kPanelRows, width,
                         inner + (item.first + t) * intermediate + row);
        }
    });
}

// The inner activations of all experts, rounded per type of the down matrices.
struct Inner {
    ActivationStore store;
    std::vector<const Activations*> per_group;

    Inner(const Compute& compute, const ExpertWork& work) {
        thread_local Scratch memory;
        const int64_t intermediate = work.groups[0].weights.up.rows;
        float* inner = memory.get<float>(work.pairs * intermediate);
        expert_inner(compute, work, inner, intermediate);
        for (int64_t g = 0; g < work.num_groups; ++g)
            per_group.push_back(&store.get(compute, inner, work.pairs, intermediate,
                                           work.groups[g].weights.down.type_id, true));
    }
};

}  // namespace

void expert_outputs(const Compute& compute, const ExpertWork& work, float* out) {
    if (work.num_groups == 0) return;
    const PairScales scales(work);
    const Inner inner(compute, work);
    struct Item {
        int64_t group, row, first, count;
    };
    std::vector<Item> items;
    for (int64_t g = 0; g < work.num_groups; ++g)
        for (int64_t first = 0; first < work.groups[g].count; first += kTokenRange)
            for (int64_t row = 0; row < work.hidden; row += kPanelRows)
                items.push_back({g, row, work.groups[g].first + first,
                                 std::min(kTokenRange, work.groups[g].count - first)});
    compute.pool.for_each(static_cast<int64_t>(items.size()), [&](int64_t index) {
        const Item& item = items[static_cast<size_t>(index)];
        const int64_t width = std::min<int64_t>(kPanelRows, work.hidden - item.row);
        float* sums = scratch().sums.get<float>(item.count * kPanelRows);
        const Tokens of(*inner.per_group[static_cast<size_t>(item.group)], nullptr, item.first, item.count);
        const ExpertWeights& w = work.groups[item.group].weights;
        if (work.groups[item.group].may_be_missing) ask_for_panels(w.down, item.row / kPanelRows);
        multiply_panel(compute, Panel::of(w.down, item.row), of, {}, sums);
        add_bias(w.down_bias, item.row, item.count, width, sums);
        for (int64_t i = 0; i < item.count; ++i) {
            const int64_t pair = item.first + i;
            float* to = out + pair * work.hidden + item.row;
            for (int64_t n = 0; n < width; ++n) to[n] = scales[pair] * sums[i * kPanelRows + n];
        }
    });
}

void expert_sum(const Compute& compute, const ExpertWork& work, const int32_t* pair_of, int64_t slots,
                const float* residual, float* out) {
    if (work.num_groups == 0) return;
    const PairScales scales(work);
    const Inner inner(compute, work);
    const int64_t panels = ceil_div(work.hidden, kPanelRows);
    const bool nearest = Coming::into_nearest(compute, most_tokens(work));
    const int64_t run = std::clamp<int64_t>(panels / (8 * compute.pool.threads()), 1, kPanelsOfSum);
    compute.pool.for_each(ceil_div(panels, run), [&](int64_t item) {
        const int64_t start = item * run, end = std::min(start + run, panels);
        const int64_t likely = start + compute.pool.threads() * run;  // panel that probably comes after the last one
        float* sums = scratch().sums.get<float>(run * work.pairs * kPanelRows);  // panel by panel, all pairs' rows
        const auto sums_of = [&](int64_t panel) { return sums + (panel - start) * work.pairs * kPanelRows; };
        const auto width_of = [&](int64_t panel) { return std::min<int64_t>(kPanelRows, work.hidden - panel * kPanelRows); };
        for (int64_t g = 0; g < work.num_groups; ++g)
            for (int64_t panel = start; work.groups[g].may_be_missing && panel < end; ++panel)
                ask_for_panels(work.groups[g].weights.down, panel);
        for (int64_t g = 0; g < work.num_groups; ++g)
            for (int64_t panel = start; panel < end; ++panel) {
                const ExpertGroup& group = work.groups[g];
                const int64_t row = panel * kPanelRows;
                Panel next;
                if (panel + 1 < end)
                    next = Panel::of(group.weights.down, row + kPanelRows);
                else if (g + 1 < work.num_groups)
                    next = Panel::of(work.groups[g + 1].weights.down, start * kPanelRows);
                else if (likely < panels)
                    next = Panel::of(work.groups[0].weights.down, likely * kPanelRows);
                for (int64_t first = 0; first < group.count; first += kTokenRange) {
                    const int64_t pair = group.first + first, count = std::min(kTokenRange, group.count - first);
                    const Tokens of(*inner.per_group[static_cast<size_t>(g)], nullptr, pair, count);
                    float* to = sums_of(panel) + pair * kPanelRows;
                    multiply_panel(compute, Panel::of(group.weights.down, row), of, {next, nearest}, to);
                    add_bias(group.weights.down_bias, row, count, width_of(panel), to);
                }
            }
        for (int64_t t = 0; t < work.tokens; ++t)
            for (int64_t panel = start; panel < end; ++panel) {
                const int64_t at = t * work.hidden + panel * kPanelRows;
                compute.set.gemm->add_slots(sums_of(panel), kPanelRows, scales.data(), pair_of + t * slots, slots,
                                            residual + at, width_of(panel), out + at);
            }
    });
}

}  // namespace thermocline

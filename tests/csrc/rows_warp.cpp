// What a warp of a GPU does with rows, lane by lane on the host (simt/simt.h): random sequences of
// copies and sums, which leave behind what the host's warp leaves.
//
//     rows_warp FIRST_SEED END_SEED

#include "simt.h"
// after it
#include <random>

#include "core/row.h"
#include "exec/device/device_warp.h"
#include "exec/device/shared_memory.h"
#include "exec/host/fibers.h"
#include "exec/host/host_warp.h"
#include "programs.h"

namespace ep {
namespace {

constexpr size_t kRowBytes = 20480;
constexpr int kSources = 6, kOps = 10;

enum class Kind {
    Copy,
    Multicast,
    CopyEach,
    Stage,
    Drop,
    Sum,
    WeightedSum,
    Quantize,
    Publish,
    SumsOfLines
};

// Each writes rows of its own.
struct Op {
    Kind kind;
    uint32_t mask;
    size_t bytes;
    int source[32];
    float weight[32];
    ScaleFormat format;
};

struct Memory {
    Tensor<char> rows;

    explicit Memory(size_t count) : rows(count * kRowBytes) {}
    char* row(int number) const { return const_cast<char*>(&rows[number * kRowBytes]); }
};

// Sums as lines to some slots, the second half of them first, then the sum of these.
template <class W, class Weights>
void sum_lines(W& warp, const Op& op, const Memory& sources, const Memory& out, int number,
               const Weights& weights) {
    typename W::template PerLane<const char*> src;
    RowsToSum<W> slots;
    slots.mask = op.mask & 0xff;
    slots.tag = uint64_t{5} << LineTag::kShapeBits | 3;
    auto slot_of = [&](int lane) { return out.row(32 * number + 2 * lane); };
    warp.lanes(32, [&](int lane) {
        src[lane] = sources.row(op.source[lane]) + op.source[2] % 2 * sizeof(float);
        slots.slot[lane] = slot_of(lane % 8);
        slots.rank[lane] = 0;
    });
    const int lines = Line::count(op.bytes), half = lines / 2 / Line::kBlock * Line::kBlock;
    for_each_lane(slots.mask, [&](int lane) {
        const uint32_t rows = op.mask >> lane;
        for (const Lines part : {Lines{half, lines - half}, Lines{0, half}})
            warp.template send_sum<float>(slot_of(lane), src, weights, rows, op.bytes, part,
                                          slots.tag);
    });
    const bool here = warp.template receive_sum<float>(
        Wait::TaggedRow, slots, weights, out.row(32 * number + 20), op.bytes, {0, lines});
    if (!here) simt::die("lines are not there");
    // Behind a row's end its last line holds anything.
    const size_t end = op.bytes % Line::kPayload;
    for_each_lane(end ? slots.mask : 0, [&](int lane) {
        char* line = slot_of(lane) + (lines - 1) * static_cast<size_t>(Line::kBytes);
        warp.lanes(1, [&](int) { std::memset(line + end, 0, Line::kPayload - end); });
    });
}

template <class W>
void run_op(W& warp, const Op& op, const Memory& sources, const Memory& out, int number,
            uint64_t* flag) {
    typename W::template PerLane<void*> dst;
    typename W::template PerLane<const void*> src;
    typename W::template PerLane<float> weight;
    warp.lanes(32, [&](int lane) {
        dst[lane] = out.row(32 * number + lane);
        src[lane] = sources.row(op.source[lane]);
        weight[lane] = op.weight[lane];
    });
    char* first = out.row(32 * number);
    const char* source = sources.row(op.source[0]);
    switch (op.kind) {
        case Kind::Copy:
            return warp.template copy<CacheHint::Keep>(first, source, op.bytes);
        case Kind::Stage:
            warp.template stage<CacheHint::EvictFirst>(source, op.bytes);
            [[fallthrough]];
        case Kind::Multicast:
            return warp.template multicast<CacheHint::Keep>(dst, op.mask, source, op.bytes);
        case Kind::CopyEach:
            return warp.template copy_each<CacheHint::EvictFirst>(dst, src, op.mask, op.bytes);
        case Kind::Drop:
            warp.template stage<CacheHint::EvictFirst>(source, op.bytes);
            return warp.template multicast<CacheHint::Keep>(dst, 0, source, op.bytes);
        case Kind::Sum:
            return warp.template sum<float, CacheHint::EvictFirst>(first, src, Unweighted{},
                                                                   op.mask, op.bytes / 4);
        case Kind::WeightedSum:
            return warp.template sum<float, CacheHint::EvictFirst>(first, src, weight, op.mask,
                                                                   op.bytes / 4);
        case Kind::Quantize: {
            const size_t elements = op.bytes / sizeof(BFloat16);
            if (op.source[1] % 2) warp.template stage<CacheHint::EvictFirst>(source, op.bytes);
            return warp.quantize(dst, op.mask, source, elements, align_up(elements, 16), op.format);
        }
        case Kind::Publish:
            return warp.template publish<Scope::System>(flag, number);
        case Kind::SumsOfLines:
            return op.source[1] % 2 ? sum_lines(warp, op, sources, out, number, weight)
                                    : sum_lines(warp, op, sources, out, number, Unweighted{});
    }
}

void run_sequence(uint64_t seed) {
    std::mt19937_64 random(seed);
    auto pick = [&](int low, int high) {
        return low + static_cast<int>(random() % (high - low + 1));
    };
    Memory sources(kSources), ours(kOps * 32), expected(kOps * 32);
    for (size_t i = 0; i < kSources * kRowBytes / 4; ++i)
        reinterpret_cast<float*>(sources.row(0))[i] = static_cast<float>(pick(-999, 999)) / 7;
    std::vector<Op> ops(kOps);
    for (Op& op : ops) {
        op.kind = static_cast<Kind>(pick(0, 9));
        op.mask = static_cast<uint32_t>(random() & (pick(0, 1) ? random() & random() : ~0u)) | 1;
        op.bytes = std::array{16, 496, 1024, 3584, 4096, 7168, 7184, 14336, 20000}[pick(0, 8)];
        if (op.kind == Kind::Quantize) op.bytes += pick(0, 2) ? 0 : 2 * pick(1, 40);
        op.format = static_cast<ScaleFormat>(pick(1, 3));
        for (int lane = 0; lane < 32; ++lane) {
            op.source[lane] = pick(0, kSources - 1);
            op.weight[lane] = static_cast<float>(pick(-99, 99)) / 3;
        }
    }
    if (seed % 8 == 0) {  // the buffers are read to their end, where many weights come next
        ops[0].kind = Kind::Multicast;
        ops[1].kind = Kind::WeightedSum;
        ops[0].mask = ops[1].mask = ~0u;
        ops[0].bytes = sizeof(BulkBuffers::data);
        ops[1].bytes = 4096;
        // lines of as many weighted rows as there can be, of which no piece has room beside weights
        ops[2].kind = Kind::SumsOfLines;
        ops[2].mask = ~0u;
        ops[2].bytes = 4096;
        ops[2].source[1] = 1;  // weighted
        ops[2].source[2] = 0;  // aligned
    }
    uint64_t flag = 0;
    ControlBlock control{}, report{};
    FiberExecutor executor;
    const RankState state{0, &control, {&control}, std::chrono::seconds(1)};
    HostWarp host(executor, state, Role::Launch, 0);
    for (int i = 0; i < kOps; ++i) run_op(host, ops[i], sources, expected, i, &flag);
    uint64_t* abort_word = &control.abort;
    const DeviceRank rank{0, 1, 1'000'000'000, &control, &report, &abort_word};
    simt::run(1, 1, 32, random(), [&] {
        BulkBuffers& buffers = *reinterpret_cast<BulkBuffers*>(dynamic_shared_memory());
        buffers.init();
        DeviceWarp warp(rank, 1, Role::Launch, 0, buffers);
        for (int i = 0; i < kOps; ++i) run_op(warp, ops[i], sources, ours, i, &flag);
        warp.stage<CacheHint::EvictFirst>(sources.row(0),
                                          kRowBytes);  // for nothing, as before a failure
    });
    ptx::end_of_launch();
    if (ours.rows != expected.rows) simt::die("other rows");
}

// What the GPU's quotients become is what the host's become: of any block, and all that is in it
// and not far smaller than its largest.
void check_quotients() {
    auto bf16 = [](uint32_t bits) { return std::bit_cast<float>(bits << 16); };
    for (const uint32_t exponent : {0, 1, 60, 66, 67, 68, 75, 127, 254}) {
        for (uint32_t largest = exponent << 7; largest < (exponent + 1) << 7; ++largest) {
            const float scale = scale_of(bf16(largest), ScaleFormat::Fp32);
            const rows::Divider divided(scale);
            for (uint32_t bits = largest - std::min(largest, 20u << 7); bits <= largest; ++bits) {
                for (const uint32_t sign : {0u, 0x8000u}) {
                    const float x = bf16(bits | sign);
                    if (to_e4m3(divided(x)) != to_e4m3(x / scale)) simt::die("another quotient");
                }
            }
        }
    }
}

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    constexpr simt::Named kNamed[] = {
        {"quotients", ep::check_quotients, "a GPU's quotients become what the host's become"}};
    return simt::run_program(argc, argv, kNamed, "sequences", ep::run_sequence);
}

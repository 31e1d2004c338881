#include "tools/simulate/low_latency.h"

#include <algorithm>
#include <stdexcept>

#include "fabric/shared_memory.h"
#include "protocol/low_latency_combine.h"
#include "protocol/low_latency_dispatch.h"
#include "tools/simulate/low_latency_fabric.h"

namespace ep {
namespace {

// Tensors of one rank's calls, except the rows: the simulation needs only their addresses.
struct Share {
    std::vector<int32_t> layout;
    std::vector<char> weights;
    ControlBlock control{};
    uint64_t dispatch = 0, combine = 0;  // numbers of calls
};

}  // namespace

struct VirtualLowLatency::State {
    VirtualLowLatencySettings settings;
    int ranks, warps;
    RowFormat dispatch_format, combine_format;
    LowLatencyImages images;
    Segment memory;
    size_t rows, row_bytes;  // the most that a rank receives
    Segment received;        // rows, which are never read, then their weights
    VirtualCluster cluster;
    VirtualCards cards;
    std::vector<Share> shares;
    std::vector<VirtualLowLatencyFabric> fabrics;
    std::vector<LowLatencyDispatchArgs> dispatch;
    std::vector<LowLatencyCombineArgs> combine;
    uint64_t calls = 0;

    static LowLatencyHeap heap_of(const VirtualLowLatencySettings& s, size_t slot_bytes) {
        const bool staged = s.topology.nodes > 1 && !s.maps_rail;
        return {s.topology, s.num_experts, s.num_tokens,          s.topk,
                slot_bytes, staged,        staged ? s.num_sms : 1};
    }

    State(const Machine& machine, const VirtualLowLatencySettings& s)
        : settings(s),
          ranks(s.ranks()),
          warps(warps_of_blocks(s.num_sms)),
          dispatch_format(s.payload_bytes, s.scale_bytes, kWeightBytes, s.topk),
          combine_format(s.combine_bytes, 0, kWeightBytes, s.topk),
          images{
              s.simulated_nodes,
              heap_of(s, std::max(dispatch_format.slot_bytes(), combine_format.slot_bytes())),
              std::max(dispatch_format.payload(), combine_format.payload()),
          },
          memory(Segment::sparse(images.heap.bytes() * ranks)),
          rows(static_cast<size_t>(s.topology.world()) * s.num_tokens *
               images.heap.local_experts()),
          row_bytes(std::max(s.payload_bytes + s.scale_bytes, s.combine_bytes) + kWeightBytes),
          received(Segment::sparse(rows * row_bytes)),
          cluster(machine, heaps_in(memory.data(), images.heap.bytes(), ranks), images.heap.bytes(),
                  s.seed),
          cards(cluster),
          shares(ranks) {
        cluster.rows_have_bytes = false;
        constexpr int kNoLimit = 1 << 30;  // time is charged by the bytes of the row itself
        cluster.row = {kNoLimit, 0, kNoLimit, 0, 0};
        for (int rank = 0; rank < ranks; ++rank) {
            cluster.controls[rank] = &shares[rank].control;
            fabrics.emplace_back(cluster, cards, rank, images, !images.heap.staged);
        }
    }

    // Returns the arguments that a rank's dispatch and combine share.
    LowLatencyArgs args_of(int rank, const RowFormat& format) {
        Share& share = shares[rank];
        LowLatencyLayout layout(images.heap, settings.topk, warps, nullptr);
        share.layout.resize(layout.size());
        layout.data = share.layout.data();
        return {rank,
                images.heap,
                layout,
                format,
                settings.num_tokens,
                nullptr,
                static_cast<int64_t>(rows),
                nullptr,
                {}};
    }

    // Runs share(warp, fabric, args, team) on each warp of each rank.
    template <class Args, class ShareOf>
    VirtualPhase run(const std::vector<Args>& args, const OnProgress& on_progress,
                     ShareOf&& share) {
        constexpr Role kRole = role_of(Args::kKind, LowLatencyHalf::Send);
        cluster.call = ++calls;
        VirtualLaunch launch(cluster, cards, settings.num_sms);
        for (int rank = 0; rank < ranks; ++rank) {
            for_warps(settings.num_sms, [&](int block, int warp) {
                const Team team{warp * settings.num_sms + block, warps};
                launch.add(rank, block, [this, rank, team, share, &args](VirtualFiber& fiber) {
                    VirtualWarp one(cluster, fiber, kRole, team.warp);
                    share(one, fabrics[rank], args[rank], team);
                });
            });
        }
        const Pieces pieces(args.front().format);
        const uint64_t tokens = static_cast<uint64_t>(ranks) * settings.num_tokens;
        return launch.run(on_progress, tokens * settings.topk * pieces.count);
    }
};

VirtualLowLatency::VirtualLowLatency(const Machine& machine,
                                     const VirtualLowLatencySettings& settings,
                                     const std::vector<const int32_t*>& topk_idx)
    : state_(std::make_unique<State>(machine, settings)) {
    State& s = *state_;
    if (topk_idx.size() != static_cast<size_t>(s.ranks))
        throw std::invalid_argument("topk_idx: one of each simulated rank");
    for (int rank = 0; rank < s.ranks; ++rank) {
        Share& share = s.shares[rank];
        const size_t choices = static_cast<size_t>(settings.num_tokens) * settings.topk;
        share.weights.resize(choices * kWeightBytes);
        char* rows = s.received.data();
        char* row_weights = rows + s.rows * (s.row_bytes - kWeightBytes);
        LowLatencyDispatchArgs dispatch{};
        static_cast<LowLatencyArgs&>(dispatch) = s.args_of(rank, s.dispatch_format);
        dispatch.call = &share.dispatch;
        dispatch.topk_idx = topk_idx[rank];
        dispatch.index_bytes = sizeof(int32_t);
        dispatch.expert_alignment = 1;
        dispatch.expert_rows = static_cast<int64_t>(s.rows) / s.images.heap.local_experts();
        dispatch.x = dispatch.scales = rows;
        dispatch.weights = share.weights.data();
        dispatch.recv_x = dispatch.recv_scales = rows;
        dispatch.recv_weights = row_weights;
        dispatch.quantize = settings.quantizes ? ScaleFormat::Fp32 : ScaleFormat::None;
        s.dispatch.push_back(dispatch);
        LowLatencyCombineArgs combine{};
        static_cast<LowLatencyArgs&>(combine) = s.args_of(rank, s.combine_format);
        combine.call = &share.combine;
        combine.x = combine.y = rows;
        combine.values = row_weights;
        combine.y_values = share.weights.data();
        combine.sum_at_expert = settings.sums_at_expert;
        combine.row_weights = combine.token_weights = nullptr;
        s.combine.push_back(combine);
    }
}

VirtualLowLatency::~VirtualLowLatency() = default;

const ControlBlock& VirtualLowLatency::control(int rank) const {
    return state_->shares[rank].control;
}

VirtualPhase VirtualLowLatency::dispatch(const OnProgress& on_progress) {
    return state_->run(state_->dispatch, on_progress,
                       [](auto& warp, auto& fabric, const auto& args, const Team& team) {
                           with_row_kind(args.row_kind(), [&]<RowKind kRows>() {
                               low_latency_dispatch<LowLatencyLaunches::Both, kRows, false>(
                                   warp, next_call(fabric, args), team);
                           });
                       });
}

VirtualPhase VirtualLowLatency::combine(const OnProgress& on_progress) {
    if (!state_->shares.front().dispatch) throw std::logic_error("a dispatch comes first");
    return state_->run(state_->combine, on_progress,
                       [](auto& warp, auto& fabric, const auto& args, const Team& team) {
                           low_latency_combine<LowLatencyLaunches::Both, BFloat16, false>(
                               warp, next_call(fabric, args), team);
                       });
}

VirtualLowLatency::Arrivals VirtualLowLatency::of_dispatch() const {
    return count([](const int32_t*) { return 1; });
}
VirtualLowLatency::Arrivals VirtualLowLatency::of_combine() const {
    if (state_->settings.sums_at_expert) return of_dispatch();
    return count([topk = state_->settings.topk](const int32_t* dst_rows) {
        return std::count_if(dst_rows, dst_rows + topk, [](int32_t row) { return row >= 0; });
    });
}

// Sums rows(dst_rows) over the tokens that each simulated rank received from other ranks.
template <class Rows>
VirtualLowLatency::Arrivals VirtualLowLatency::count(Rows&& rows) const {
    Arrivals all;
    for (const LowLatencyDispatchArgs& args : state_->dispatch) {
        const LowLatencyLayout& layout = args.layout;
        for (int source = 0; source < layout.world; ++source) {
            if (source == args.rank) continue;
            uint64_t& of =
                state_->fabrics[args.rank].maps(source) ? all.over_links : all.over_network;
            for (int token = 0; token < args.num_tokens; ++token) {
                if (layout.present(source * layout.chunks + token / 32) >> token % 32 & 1)
                    of += rows(layout.dst_rows(source, token));
            }
        }
    }
    return all;
}

}  // namespace ep

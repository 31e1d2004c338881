#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "fabric/shared_memory.h"
#include "launch/host/group.inl"

namespace ep {

// Dispatch and combine between 2 x 2 ranks, every role a thread: what each rank gets is compared
// with what it must get.
template <class Warp>
int run_transfers(int rounds) {
    constexpr int kNodes = 2, kPerNode = 2, kWorld = kNodes * kPerNode, kExperts = 8, kTopk = 3,
                  kHidden = 5, kChannels = 2;
    const RowFormat format{kHidden * static_cast<int>(sizeof(float)), 0, sizeof(float), kTopk};
    // rings of two rows: every role has to wait for every other all the time
    const Heap heap{
        {kNodes, kPerNode}, kExperts, kChannels, 2 * format.slot_bytes(), 2 * format.slot_bytes()};
    std::vector<Segment> segments;
    std::vector<char*> heaps;
    std::vector<int> ranks;
    for (int rank = 0; rank < kWorld; ++rank) {
        segments.push_back(Segment::anonymous(heap.bytes()));
        heaps.push_back(segments.back().data());
        ranks.push_back(rank);
    }
    Schedule schedule;
    schedule.thread_per_role = true;
    HostGroup group(heap, ranks, heaps, schedule, std::chrono::seconds(60));

    struct Rank {
        std::vector<int32_t> ids, layout, positions, rail;
        std::vector<int64_t> tokens_per_expert;
        std::vector<float> x, weights, recv_x, recv_weights, y, y_weights;
    };
    int errors = 0;
    for (int round = 1; round <= rounds; ++round) {
        std::vector<Rank> data(kWorld);
        std::vector<NotifyArgs> notify;
        for (int rank = 0; rank < kWorld; ++rank) {
            Rank& d = data[rank];
            const int tokens = 7 + 3 * rank;
            for (int token = 0; token < tokens; ++token) {
                for (int k = 0; k < kTopk; ++k)
                    d.ids.push_back((token * 5 + rank + round + k * 3) % kExperts);
                for (int i = 0; i < kHidden; ++i)
                    d.x.push_back(static_cast<float>(rank * 1000 + token * 10 + i));
            }
            d.weights.assign(d.ids.begin(), d.ids.end());
            d.y.assign(d.x.size(), -1);
            d.y_weights.assign(d.ids.size(), -1);
            Layout layout{heap.topology, tokens, kTopk, kExperts, kChannels, nullptr};
            d.layout.assign(layout.size(), 0);
            layout.data = d.layout.data();
            d.tokens_per_expert.resize(heap.local_experts());
            notify.push_back({rank, heap, layout, d.ids.data(), 4, 1, 0,
                              static_cast<uint64_t>(round), d.tokens_per_expert.data()});
        }
        group.notify<Warp>(notify);
        std::vector<DispatchArgs> dispatch;
        std::vector<CombineArgs> combine;
        for (int rank = 0; rank < kWorld; ++rank) {
            Rank& d = data[rank];
            const Layout& layout = notify[rank].layout;
            const Layout::Totals& totals = layout.totals();
            d.positions.resize(static_cast<size_t>(totals.received_rows) * kTopk);
            d.rail.resize(static_cast<size_t>(totals.rail_rows) * kTopk);
            d.recv_x.resize(static_cast<size_t>(totals.expert_rows) * kHidden);
            d.recv_weights.resize(totals.expert_rows);
            TransferArgs args{rank,
                              heap,
                              layout,
                              format,
                              2ull * round - 1,
                              2,
                              1,
                              d.positions.data(),
                              d.rail.data(),
                              totals.received_rows,
                              totals.rail_rows,
                              totals.expert_rows};
            auto bytes = [](std::vector<float>& values) {
                return reinterpret_cast<char*>(values.data());
            };
            dispatch.push_back({args, bytes(d.x), nullptr, bytes(d.weights), bytes(d.recv_x),
                                nullptr, bytes(d.recv_weights)});
            args.call = 2ull * round;
            args.is_combine = true;
            combine.push_back(
                {args, bytes(d.recv_x), bytes(d.recv_weights), bytes(d.y), bytes(d.y_weights)});
        }
        group.dispatch<Warp>(dispatch);
        group.combine<Warp>(combine, DType::fp32);
        if (!group.finished())
            return std::fprintf(stderr, "round %d: aborted\n", round), EXIT_FAILURE;
        for (const Rank& d : data) {
            for (size_t i = 0; i < d.x.size(); ++i) errors += d.y[i] != kTopk * d.x[i];
            errors += d.y_weights != d.weights;
        }
    }
    if (errors) std::fprintf(stderr, "%d wrong values\n", errors);
    return errors ? EXIT_FAILURE : EXIT_SUCCESS;
}

}  // namespace ep

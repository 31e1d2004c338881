#pragma once

#include "protocol/combine_receiver.h"
#include "protocol/coordinators.h"
#include "protocol/dispatch.h"
#include "protocol/intra_rank.h"
#include "protocol/layout.h"
#include "protocol/notify.h"

namespace ep {

// The roles of one rank in each phase: add(role, channel, body) for each, and body(warp, fabric)
// runs it. `args` outlives the bodies.

template <class Add>
void add_notify_roles(const NotifyArgs& args, Add&& add) {
    add(Role::Notify, 0, [&args](auto& warp, auto& fabric) {
        mark_unknown(warp, args);
        for (int channel = 0; channel < args.layout.channels; ++channel) {
            if (const int bad = count_channel(warp, args, channel))
                args.layout.totals().bad_token = bad;
        }
        if (args.layout.totals().bad_token)
            return warp.fail(Outcome::BadInput, Wait::None, WaitCondition{});
        sum_channels(warp, args, 0, args.layout.num_experts);
        for (int channel = 0; channel < args.layout.channels; ++channel)
            index_channel(warp, args, channel);
        for (int role = 0; role < num_exchange_roles(args.heap.topology); ++role) {
            if (!run_exchange_role(warp, fabric, args, role)) return;
        }
    });
}

template <class Add>
void add_rail_roles(const TransferArgs& args, int channel, bool combine, Add&& add) {
    const int nodes = args.topology().nodes;
    if (nodes == 1) return;
    const RailCounts counts{args.layout, args.node(), combine};
    for (int first = 0; first < nodes; first += 32) {
        add(Role::SenderCoordinator, channel,
            [&args, counts, channel, first](auto& warp, auto& fabric) {
                sender_coordinator(warp, fabric, args, counts, channel, first);
            });
        add(Role::ForwarderCoordinator, channel,
            [&args, counts, channel, first](auto& warp, auto& fabric) {
                forwarder_coordinator(warp, fabric, args, counts, channel, first);
            });
    }
}

template <class Add>
void add_dispatch_roles(const DispatchArgs& args, Add&& add) {
    for (int c = 0; c < args.heap.channels; ++c) {
        for (int first = 0; first < args.other_nodes(); first += 32) {
            add(Role::RdmaSender, c, [&args, c, first](auto& warp, auto& fabric) {
                rdma_sender(warp, fabric, args, c, first);
            });
            add(Role::Forwarder, c, [&args, c, first](auto& warp, auto& fabric) {
                forwarder(warp, fabric, args, c, first);
            });
        }
        add_rail_roles(args, c, false, add);
        add(Role::NvlSender, c,
            [&args, c](auto& warp, auto& fabric) { nvl_sender(warp, fabric, args, c); });
        if (args.has_intra_rank_pass)
            add(Role::Launch, c, [&args, c](auto& warp, auto&) { write_own_rows(warp, args, c); });
        if (args.other_ranks()) {
            add(Role::Receiver, c, [&args, c](auto& warp, auto& fabric) {
                receiver(warp, fabric, args, c, 0, args.other_ranks());
            });
        }
    }
    add(Role::Launch, 0, [&args](auto& warp, auto&) { clear_unfilled(warp, args, 0, 1); });
}

// Once all of those are done.
template <class Add>
void add_intra_rank_pass(const DispatchArgs& args, Add&& add) {
    if (!args.has_intra_rank_pass) return;
    add(Role::Launch, 0,
        [&args](auto& warp, auto&) { copy_to_other_output_rows(warp, args, 0, 1); });
}

template <class T, class Add>
void add_combine_roles(const CombineArgs& args, int receivers, Add&& add) {
    for (int c = 0; c < args.heap.channels; ++c) {
        if (const int ranks = args.other_ranks()) {
            add(Role::CombineNvlSender, c, [&args, c, ranks](auto& warp, auto& fabric) {
                if (args.row_weights)
                    return combine_nvl_sender<T, true>(warp, fabric, args, c, 0, ranks);
                combine_nvl_sender<T, false>(warp, fabric, args, c, 0, ranks);
            });
        }
        for (int first = 0; first < args.other_nodes(); first += 32) {
            add(Role::CombineForwarder, c, [&args, c, first](auto& warp, auto& fabric) {
                combine_forwarder<T>(warp, fabric, args, c, first);
            });
        }
        add_rail_roles(args, c, true, add);
        for (int i = 0; args.sums && i < args.topology().world() * args.sum_warps; ++i) {
            const int rank = i / args.sum_warps, part = i % args.sum_warps;
            add(Role::Launch, c, [&args, c, rank, part](auto& warp, auto& fabric) {
                if (args.row_weights)
                    return sum_rows_of<T, true>(warp, fabric, args, c, rank, part);
                sum_rows_of<T, false>(warp, fabric, args, c, rank, part);
            });
        }
        for (int i = 0; i < receivers; ++i) {
            add(Role::CombineReceiver, c, [&args, c, i, receivers](auto& warp, auto& fabric) {
                if (args.row_weights)
                    return combine_receiver<T, true>(warp, fabric, args, c, i, receivers);
                combine_receiver<T, false>(warp, fabric, args, c, i, receivers);
            });
        }
    }
}

}  // namespace ep

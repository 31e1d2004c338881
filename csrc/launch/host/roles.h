#pragma once

#include "launch/run_role.h"
#include "protocol/intra_rank.h"
#include "protocol/layout.h"
#include "protocol/notify.h"

namespace ep {

// The roles of one rank in each phase, as the host runs them. Each function calls add(channel,
// body) for each role, and body(warp_of, fabric) runs it. `args` must outlive the bodies.

// Counts what a rank sends, which concerns no other rank, and finds invalid ids.
template <class Add>
void add_count_roles(const NotifyArgs& args, Add&& add) {
    add(0, [&args](auto&& warp_of, auto&) {
        auto warp = warp_of(Role::Notify);
        count_own_rows(warp, args, 0, 1, [] {});
        if (args.layout.totals().bad_token) return;
        for (int channel = 0; channel < args.layout.channels; ++channel)
            index_channel(warp, args, channel);
    });
}

template <class Add>
void add_exchange_roles(const NotifyArgs& args, Add&& add) {
    add(0, [&args](auto&& warp_of, auto& fabric) {
        auto warp = warp_of(Role::Notify);
        for (int role = 0; role < num_exchange_roles(args.heap); ++role) {
            if (!run_exchange_role(warp, fabric, args, role)) return;
        }
    });
}

// On the host a channel has one warp of each kind, or more if its 32 lanes are not enough.
template <class Roles>
Roles host_roles(const Topology& topology, int self_warps = 1) {
    return {topology.nodes, topology.world(), min_peer_warps(topology), min_rdma_warps(topology),
            self_warps};
}

// Calls f(number) for the warps of a channel. Roles between nodes come first: if all waits expire
// at once, they know best which rank is missing.
template <class Roles, class F>
void for_each_role(const Roles& roles, F&& f) {
    const int count = roles.warps(), within_node = roles.self_warps + roles.peer_warps;
    for (int i = 0; i < count; ++i) f((within_node + i) % count);
}

template <class Add>
void add_dispatch_roles(const DispatchArgs& args, Add&& add) {
    const auto roles = host_roles<DispatchRoles>(args.topology());
    for (int c = 0; c < args.heap.channels; ++c) {
        for_each_role(roles, [&](int number) {
            add(c, [&args, roles, c, number](auto&& warp_of, auto& fabric) {
                run_dispatch_role(warp_of, fabric, args, roles, c, number);
            });
        });
        if (!args.has_intra_rank_pass) continue;
        add(c, [&args, c](auto&& warp_of, auto&) {
            auto warp = warp_of(Role::Launch);
            write_own_rows(warp, args, c, args.heap.channels);
        });
    }
    add(0, [&args](auto&& warp_of, auto&) {
        auto warp = warp_of(Role::Launch);
        clear_unfilled(warp, args, 0, 1);
    });
}

// Adds the intra-rank pass, for a phase that runs when all roles of dispatch are done.
template <class Add>
void add_intra_rank_pass(const DispatchArgs& args, Add&& add) {
    if (!args.has_intra_rank_pass) return;
    add(0, [&args](auto&& warp_of, auto&) {
        auto warp = warp_of(Role::Launch);
        copy_to_other_output_rows(warp, args, 0, 1);
    });
}

template <class T, class Add>
void add_combine_roles(const CombineArgs& args, int receivers, Add&& add) {
    const auto roles = host_roles<CombineRoles>(args.topology(), receivers);
    for (int c = 0; c < args.heap.channels; ++c) {
        for_each_role(roles, [&](int number) {
            add(c, [&args, roles, c, number](auto&& warp_of, auto& fabric) {
                if (args.row_weights)
                    return run_combine_role<T, true>(warp_of, fabric, args, roles, c, number);
                run_combine_role<T, false>(warp_of, fabric, args, roles, c, number);
            });
        });
        for (int i = 0; args.sums && i < args.topology().world() * args.sum_warps; ++i) {
            const int rank = i / args.sum_warps, part = i % args.sum_warps;
            add(c, [&args, c, rank, part](auto&& warp_of, auto& fabric) {
                auto warp = warp_of(Role::Launch);
                if (args.row_weights)
                    return sum_rows_of<T, true>(warp, fabric, args, c, rank, part);
                sum_rows_of<T, false>(warp, fabric, args, c, rank, part);
            });
        }
    }
}

}  // namespace ep

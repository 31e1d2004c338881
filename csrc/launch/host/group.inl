#pragma once

#include <cstring>

#include "core/outputs.h"
#include "launch/host/group.h"
#include "protocol/combine.h"
#include "protocol/coordinators.h"
#include "protocol/dispatch.h"
#include "protocol/layout.h"
#include "protocol/notify.h"

namespace ep {

// body(warp, fabric) becomes a task of the rank at `index`.
template <class Warp, class Body>
RoleTask HostGroup::role(size_t index, Role role, int channel, Body body) {
    RankState* state = &states_[index];
    HostFabric* fabric = &fabrics_[index];
    return {state, [=](Executor& executor) {
                Warp warp(executor, *state, role, channel);
                body(warp, *fabric);
            }};
}

template <class Warp>
void HostGroup::notify(std::vector<NotifyArgs> args, const std::function<bool()>& interrupted) {
    std::vector<std::vector<RoleTask>> tasks(ranks_.size());
    for (size_t i = 0; i < ranks_.size(); ++i) {
        const NotifyArgs& a = args[i];
        states_[i].call = a.epoch;
        tasks[i].push_back(role<Warp>(i, Role::Notify, 0, [&a](Warp& warp, HostFabric& fabric) {
            mark_unknown(warp, a);
            for (int channel = 0; channel < a.layout.channels; ++channel) {
                if (const int bad = count_channel(warp, a, channel))
                    a.layout.totals().bad_token = bad;
            }
            if (a.layout.totals().bad_token)
                return warp.fail(Outcome::BadInput, Wait::None, Need{});
            sum_channels(warp, a, 0, a.layout.num_experts);
            for (int channel = 0; channel < a.layout.channels; ++channel)
                index_channel(warp, a, channel);
            for (int role = 0; role < num_exchange_roles(a.heap.topology); ++role) {
                if (!run_exchange_role(warp, fabric, a, role)) return;
            }
        }));
    }
    run(std::move(tasks), interrupted);
}

template <class Args>
void HostGroup::run_to_outputs(const std::vector<Args>& args,
                               std::vector<std::vector<RoleTask>> tasks_of_rank,
                               const std::function<bool()>& interrupted) {
    auto poison = [&] {
        for (const Args& a : args) {
            for (const Outputs::Part& part : outputs_of(a).parts) {
                if (part.bytes) std::memset(part.data, Outputs::kPoison, part.bytes);
            }
        }
    };
    try {
        run(std::move(tasks_of_rank), interrupted);
    } catch (...) {
        poison();
        throw;
    }
    if (!finished()) poison();
}

template <class Warp>
void HostGroup::add_rail_roles(std::vector<RoleTask>& tasks, size_t index, const TransferArgs& args,
                               int channel, bool combine) {
    const int nodes = heap_.topology.nodes;
    if (nodes == 1) return;
    const RailCounts counts{args.layout, args.node(), combine};
    for (int first = 0; first < nodes; first += 32) {
        tasks.push_back(role<Warp>(index, Role::SenderCoordinator, channel,
                                   [&args, counts, channel, first](Warp& warp, HostFabric& fabric) {
                                       sender_coordinator(warp, fabric, args, counts, channel,
                                                          first);
                                   }));
        tasks.push_back(role<Warp>(index, Role::ForwarderCoordinator, channel,
                                   [&args, counts, channel, first](Warp& warp, HostFabric& fabric) {
                                       forwarder_coordinator(warp, fabric, args, counts, channel,
                                                             first);
                                   }));
    }
}

template <class Warp>
void HostGroup::dispatch(std::vector<DispatchArgs> args, const std::function<bool()>& interrupted) {
    std::vector<std::vector<RoleTask>> tasks(ranks_.size());
    for (size_t i = 0; i < ranks_.size(); ++i) {
        const DispatchArgs& a = args[i];
        states_[i].call = a.call;
        for (int c = 0; c < heap_.channels; ++c) {
            auto add = [&](Role name, auto body) {
                tasks[i].push_back(role<Warp>(i, name, c, body));
            };
            for (int node = 0; node < heap_.topology.nodes; ++node) {
                if (node == a.node()) continue;
                add(Role::RdmaSender, [&a, c, node](Warp& warp, HostFabric& fabric) {
                    rdma_sender(warp, fabric, a, c, node);
                });
                add(Role::Forwarder, [&a, c, node](Warp& warp, HostFabric& fabric) {
                    forwarder(warp, fabric, a, c, node);
                });
            }
            add_rail_roles<Warp>(tasks[i], i, a, c, false);
            add(Role::NvlSender,
                [&a, c](Warp& warp, HostFabric& fabric) { nvl_sender(warp, fabric, a, c); });
            for (int first = 0; first < heap_.topology.world(); first += 32) {
                add(Role::Receiver, [&a, c, first](Warp& warp, HostFabric& fabric) {
                    receiver(warp, fabric, a, c, first);
                });
            }
        }
        tasks[i].push_back(role<Warp>(
            i, Role::Launch, 0, [&a](Warp& warp, HostFabric&) { clear_unfilled(warp, a, 0, 1); }));
    }
    run_to_outputs(args, std::move(tasks), interrupted);
}

template <class T, class Warp>
void HostGroup::add_combine_roles(std::vector<RoleTask>& tasks, size_t index,
                                  const CombineArgs& args, int channel) {
    auto add = [&](Role name, auto body) {
        tasks.push_back(role<Warp>(index, name, channel, body));
    };
    for (int first = 0; first < heap_.topology.world(); first += 32) {
        add(Role::CombineNvlSender, [&args, channel, first](Warp& warp, HostFabric& fabric) {
            if (args.row_weights)
                return combine_nvl_sender<T, true>(warp, fabric, args, channel, first);
            combine_nvl_sender<T, false>(warp, fabric, args, channel, first);
        });
    }
    for (int node = 0; node < heap_.topology.nodes; ++node) {
        if (node == args.node()) continue;
        add(Role::CombineForwarder, [&args, channel, node](Warp& warp, HostFabric& fabric) {
            combine_forwarder<T>(warp, fabric, args, channel, node);
        });
    }
    add_rail_roles<Warp>(tasks, index, args, channel, true);
    add(Role::CombineReceiver, [&args, channel](Warp& warp, HostFabric& fabric) {
        combine_receiver<T>(warp, fabric, args, channel);
    });
}

template <class Warp>
void HostGroup::combine(std::vector<CombineArgs> args, DType dtype,
                        const std::function<bool()>& interrupted) {
    std::vector<std::vector<RoleTask>> tasks(ranks_.size());
    for (size_t i = 0; i < ranks_.size(); ++i) {
        states_[i].call = args[i].call;
        for (int c = 0; c < heap_.channels; ++c) {
            with_type(dtype,
                      [&]<class T>() { add_combine_roles<T, Warp>(tasks[i], i, args[i], c); });
        }
    }
    run_to_outputs(args, std::move(tasks), interrupted);
}

}  // namespace ep

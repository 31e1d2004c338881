#pragma once

#include <cstring>

#include "core/outputs.h"
#include "launch/host/group.h"
#include "launch/host/roles.h"

namespace ep {

// Returns a function that makes a role a task of the rank at `index`.
template <class Warp>
auto HostGroup::adder(Tasks& tasks_of_rank, size_t index) {
    return [this, &tasks = tasks_of_rank[index], index](int channel, auto body) {
        tasks.push_back({&states_[index], [=, this](Executor& executor) {
                             auto warp_of = [&](Role role) {
                                 return Warp(executor, states_[index], role, channel);
                             };
                             std::visit([&](auto& fabric) { body(warp_of, fabric); },
                                        fabrics_[index]);
                         }});
    };
}

template <class Warp>
void HostGroup::notify(std::vector<NotifyArgs> args, const std::function<bool()>& interrupted) {
    Tasks counting(ranks_.size()), exchange(ranks_.size());
    for (size_t i = 0; i < ranks_.size(); ++i) {
        states_[i].call = args[i].epoch;
        add_count_roles(args[i], adder<Warp>(counting, i));
        add_exchange_roles(args[i], adder<Warp>(exchange, i));
    }
    run_roles(std::move(counting), interrupted);
    for (const NotifyArgs& a : args) {
        if (a.layout.totals().bad_token) return;
    }
    run(&Calls::notify, &Calls::notify, true, {std::move(exchange)}, interrupted);
}

template <class Args>
void HostGroup::run_to_outputs(Count enters, Count finishes, bool begins_call,
                               const std::vector<Args>& args, std::vector<Tasks> phases,
                               const std::function<bool()>& interrupted) {
    const auto poison = [&] {
        const bool by_stall = !states_.front().aborted();  // the other ranks' outputs are complete
        for (size_t i = 0; i < args.size(); ++i) {
            if (by_stall && !states_[i].unfinished) continue;
            for (const Outputs::Part& part : outputs_of(args[i]).parts) {
                if (part.bytes) std::memset(part.data, Outputs::kPoison, part.bytes);
            }
        }
    };
    try {
        run(enters, finishes, begins_call, std::move(phases), interrupted);
    } catch (...) {
        poison();
        throw;
    }
    if (!finished()) poison();
}

template <class Warp>
void HostGroup::dispatch(std::vector<DispatchArgs> args, const std::function<bool()>& interrupted) {
    Tasks roles(ranks_.size()), local(ranks_.size());
    for (size_t i = 0; i < ranks_.size(); ++i) {
        begin_transfer(states_[i], args[i]);
        add_dispatch_roles(args[i], adder<Warp>(roles, i));
        add_intra_rank_pass(args[i], adder<Warp>(local, i));
    }
    run_to_outputs(&Calls::transfer, &Calls::transfer, args.front().begins_call(), args,
                   {std::move(roles), std::move(local)}, interrupted);
}

template <class Warp>
void HostGroup::combine(std::vector<CombineArgs> args, DType dtype,
                        const std::function<bool()>& interrupted) {
    Tasks roles(ranks_.size());
    // A rank's fibers take turns, so several gain nothing. A seeded schedule uses as many as a GPU
    // does, to test their interleavings.
    const int receivers = schedule_.seed ? args.front().max_receivers() : 1;
    const int sum_warps = schedule_.seed ? CombineArgs::kMaxSumWarps : 1;
    for (size_t i = 0; i < ranks_.size(); ++i) {
        begin_transfer(states_[i], args[i]);
        args[i].sum_warps = sum_warps;
        with_type(dtype, [&]<class T>() {
            add_combine_roles<T>(args[i], receivers, adder<Warp>(roles, i));
        });
    }
    run_to_outputs(&Calls::transfer, &Calls::transfer, true, args, {std::move(roles)}, interrupted);
}

}  // namespace ep

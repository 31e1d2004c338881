#pragma once

#include "core/args.h"
#include "exec/device/device_warp.h"
#include "exec/device/shared_memory.h"
#include "launch/cuda/launch_params.h"
#include "launch/run_role.h"
#include "protocol/intra_rank.h"
#include "protocol/layout.h"
#include "protocol/notify.h"

// The normal mode's kernels, for any fabric. Blocks [i * blocks, (i + 1) * blocks) of a grid belong
// to the i-th rank of this process.
namespace ep::kernels {

EP_FN int warp_of_block() { return threadIdx.x / 32; }

// Indices of this warp's rank, of its block among that rank's blocks, and of the warp in them.
template <class L>
struct WarpPosition {
    int index;
    int block;
    int warp;
    int warps;
    EP_FN explicit WarpPosition(const L& params)
        : index(sizeof(params.args) > sizeof(params.args[0]) ? blockIdx.x / params.blocks_per_rank
                                                             : 0),
          block(blockIdx.x % params.blocks_per_rank),
          warp(block * (blockDim.x / 32) + warp_of_block()),
          warps(params.blocks_per_rank * (blockDim.x / 32)) {}
};

EP_FN BulkBuffers& bulk_buffers() {
    BulkBuffers& buffers = reinterpret_cast<BulkBuffers*>(dynamic_shared_memory())[warp_of_block()];
    if constexpr (Architecture::kHasCopyEngine) buffers.init();
    return buffers;
}

// Adds 1 to a counter in the rank's control block, which other ranks read. For one warp of a rank.
EP_FN void count_call(uint64_t& calls) {
    if (rows::lane_id() == 0) ptx::add_sys(&calls, 1);
    __syncwarp();
}

// Begins a new last call for Heap::waited_before. Called by one warp of a rank.
EP_FN void begin_call(const DeviceRank& rank, int world) {
    uint64_t* before = rank.waited + Heap::waited_bytes(world) / sizeof(uint64_t);
    for (int other = rows::lane_id(); other < world; other += 32)
        before[other] = ptx::load_relaxed_sys(rank.waited + other);
    __syncwarp();
}

// Notes the start of a dispatch or combine. A dispatch that fills tables begins no call: it belongs
// to that of its notify.
EP_FN void begin_transfer(const DeviceRank& rank, const TransferArgs& args) {
    if (rows::lane_id() == 0) {
        ControlBlock& control = *rank.control;
        const uint64_t call = ptx::load_relaxed_sys(&control.entered.transfer) + 1;
        ptx::store_relaxed_sys(&control.sends_in(Sends::Mode::Transfer, call),
                               Sends::word(args.kind(), call, args.format));
    }
    count_call(rank.control->entered.transfer);
    if (args.begins_call()) begin_call(rank, args.layout.world());
}

// ---- notify: each step needs the previous one to be finished on all channels

// A barrier of a rank's blocks, after which each sees what the others wrote before (acquire and
// release on the GPU). It ends because all blocks are on the GPU at once and nothing before it
// waits for another rank. One thread arrives for its whole block, to keep atomics on the word few.
EP_FN void meet(uint64_t* arrivals, uint64_t blocks) {
    __syncthreads();
    if (warp_of_block() == 0) {
        const bool first = rows::lane_id() == 0;
        uint64_t all = 0;
        if (first) all = (quotient(ptx::fetch_add_acq_rel_gpu(arrivals, 1), blocks) + 1) * blocks;
        while (!__shfl_sync(rows::kAllLanes, !first || ptx::load_acquire_gpu(arrivals) >= all, 0)) {
        }
    }
    __syncthreads();
}

// The first two steps, by all warps of a rank. Returns false on all warps if ids are invalid or an
// earlier launch failed. sends_rows: this launch sends rows before the counts are there, so the
// layout gets its epoch now: receivers recognise the call's rows by it.
template <class L>
EP_FN bool count_rows(const L& params, const WarpPosition<L>& position, DeviceWarp& warp,
                      const NotifyArgs& args, uint64_t* arrivals, bool sends_rows) {
    const DeviceRank& rank = params.ranks[position.index];
    const Layout& layout = args.layout;
    if (position.warp == 0) {
        warp.lanes(1, [&](int) {
            layout.totals() = {};
            if (sends_rows) layout.totals().epoch = args.layout_epoch();
        });
    }
    if (position.warp == position.warps - 1)
        begin_call(rank, layout.world());  // this warp has the least to do
    count_own_rows(warp, args, position.warp, position.warps,
                   [&] { meet(arrivals, params.blocks_per_rank); });
    const bool has_bad_token = layout.totals().bad_token, aborted = is_aborted(rank);
    if (has_bad_token) {
        if (position.warp == 0) {
            report_to_host(warp, args);
            warp.fail(Outcome::BadInput, Wait::None, WaitCondition{});
        }
        return false;
    }
    return !aborted;
}

// Runs the roles first, first + stride, ... of the exchange. The warp with the last role publishes
// to the other warps that the counts are there.
template <class F>
EP_FN void exchange_counts(const DeviceRank& rank, const Progress& progress, DeviceWarp& warp,
                           F& fabric, const NotifyArgs& args, int first, int stride) {
    const int roles = num_exchange_roles(args.heap);
    for (int role = first; role < roles; role += stride) {
        if (!run_exchange_role(warp, fabric, args, role)) return;
        if (role < roles - 1) continue;
        warp.template publish<Scope::Rank>(&progress.notifies(), args.epoch);
        count_call(rank.control->finished.notify);
    }
}

// Some warps exchange counts, for which they need only the sums, while the others number the rows.
template <class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    notify_kernel(const __grid_constant__ L params) {
    const WarpPosition<L> position(params);
    const DeviceRank& rank = params.ranks[position.index];
    const Progress& progress = params.progress[position.index];
    NotifyArgs args = params.args[position.index];
    args.epoch =
        progress.notifies() + 1;  // counted here, not by the host: a captured graph replays
    DeviceWarp warp(rank, args.epoch, Role::Notify, 0, bulk_buffers());
    if (!count_rows(params, position, warp, args, progress.arrivals_of_notify(), false)) return;
    if (position.warp == 0) count_call(rank.control->entered.notify);
    const int exchangers = notify_exchangers(position.warps, num_exchange_roles(args.heap));
    if (position.warp >= exchangers) {
        for (int channel = position.warp - exchangers; channel < args.layout.channels;
             channel += position.warps - exchangers)
            index_channel(warp, args, channel);
        return;
    }
    typename L::Fabric fabric(params.fabric, args.rank);
    exchange_counts(rank, progress, warp, fabric, args, position.warp, exchangers);
}

// ---- the end of dispatch and combine

// Fills an aborted call's outputs with Outputs::kPoison, which cannot pass for data.
EP_FN void poison(const Outputs& outputs) {
    for (const Outputs::Part& part : outputs.parts)
        rows::fill<Outputs::kPoison>(part.data, part.bytes);
}

// Called by every warp of a rank at the end of the call's last launch that writes outputs. Roles
// give up at different times, so the last warp to arrive finishes the call: all others have stopped
// writing. If the call was aborted, it fills the outputs with Outputs::kPoison.
template <class L>
EP_FN void end_call(const L& params, const WarpPosition<L>& position) {
    if (!params.ends_call || is_skipped(params.args[position.index])) return;
    uint64_t* arrivals = params.progress[position.index].warps_at_end();
    const bool first = rows::lane_id() == 0;
    __syncwarp();
    uint64_t before = 0;
    if (first) before = ptx::fetch_add_acq_rel_gpu(arrivals, 1);
    const bool last = first && before + 1 == static_cast<uint64_t>(position.warps);
    if (!__shfl_sync(rows::kAllLanes, last, 0)) return;
    __syncwarp();  // extends lane 0's acquire to the other lanes
    if (first) ptx::store_relaxed_gpu(arrivals, 0);
    const DeviceRank& rank = params.ranks[position.index];
    if (!is_aborted(rank)) return count_call(rank.control->finished.transfer);
    const Outputs outputs = outputs_of(params.args[position.index]);
    poison(outputs);
    if (outputs.epoch && first) *outputs.epoch = 0;
}

// ---- dispatch and combine

// Whether a warp of the launch has a role to run. A failed notify leaves no layout, but its handle
// may still be used after a reset of the buffer: then the call fails with NoLayout.
template <class L, class Args>
EP_FN bool begins(const L& params, const WarpPosition<L>& position, const Args& args, int number) {
    const DeviceRank& rank = params.ranks[position.index];
    const bool has_layout = args.layout.totals().epoch;  // both loads are in flight together
    if (is_aborted(rank) || number < 0) return false;
    if (number == 0) begin_transfer(rank, args);
    if (has_layout) return true;
    if (number == 0) {
        DeviceWarp warp(rank, args.call, Role::Launch, 0, bulk_buffers());
        warp.fail(Outcome::NoLayout, Wait::None, WaitCondition{});
    }
    return false;
}

template <class L>
EP_FN void run_dispatch(const L& params, const WarpPosition<L>& position) {
    const DispatchArgs& args = params.args[position.index];
    const DeviceRank& rank = params.ranks[position.index];
    const int warps = params.roles.warps();
    const int number = role_of_warp(warps * args.layout.channels, position.block,
                                    params.blocks_per_rank, warp_of_block());
    if (is_skipped(args) || !begins(params, position, args, number)) return;
    typename L::Fabric fabric(params.fabric, args.rank);
    BulkBuffers& buffers = bulk_buffers();
    const int channel = number / warps;
    auto warp_of = [&](Role role) { return DeviceWarp(rank, args.call, role, channel, buffers); };
    run_dispatch_role(warp_of, fabric, args, params.roles, channel, number % warps);
    if (has_intra_rank_pass(args)) return;
    DeviceWarp warp(rank, args.call, Role::Launch, 0, buffers);
    clear_unfilled(warp, args, number, warps * args.layout.channels);
}

template <class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    dispatch_kernel(const __grid_constant__ L params) {
    const WarpPosition<L> position(params);
    run_dispatch(params, position);
    end_call(params, position);
}

// Calls work(warp, args, position), unless the rank knows that the call has failed.
template <class L, class Work>
EP_FN void run_intra_rank_pass(const L& params, Work&& work) {
    const WarpPosition<L> position(params);
    const auto& args = params.args[position.index];
    const DeviceRank& rank = params.ranks[position.index];
    if (!has_intra_rank_pass(args) || !args.layout.totals().epoch || is_skipped(args) ||
        is_aborted(rank))
        return;
    DeviceWarp warp(rank, args.call, Role::Launch, 0, bulk_buffers());
    work(warp, args, position);
}

// This warp's number if few pieces of work are spread over many SMs.
template <class L>
EP_FN int number_over_blocks(const L& params, const WarpPosition<L>& position) {
    return position.block + warp_of_block() * params.blocks_per_rank;
}

// Runs at the same time as the exchange.
template <class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    own_rows_kernel(const __grid_constant__ L params) {
    run_intra_rank_pass(params, [&](auto& warp, const auto& args, const auto& position) {
        write_own_rows(warp, args, number_over_blocks(params, position), position.warps);
    });
}

template <class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    intra_rank_permute_kernel(const __grid_constant__ L params) {
    run_intra_rank_pass(params, [](auto& warp, const auto& args, const auto& position) {
        copy_to_other_output_rows(warp, args, position.warp, position.warps);
        clear_unfilled(warp, args, position.warp, position.warps);
    });
    end_call(params, WarpPosition<L>(params));
}

// Runs at the same time as the exchange, which waits for its sums: this rank's own come last.
template <class T, bool kWeighted, class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    intra_rank_reduce_kernel(const __grid_constant__ L params) {
    run_intra_rank_pass(params, [&](auto& warp, const auto& args, const auto& position) {
        typename L::Fabric fabric(params.fabric, args.rank);
        sum_all_rows<T, kWeighted>(warp, fabric, args, number_over_blocks(params, position),
                                   position.warps);
    });
}

template <class T, bool kWeighted, class L>
EP_FN void run_combine(const L& params, const WarpPosition<L>& position) {
    const CombineArgs& args = params.args[position.index];
    const int warps = params.roles.warps();
    const int number = role_of_warp(warps * args.layout.channels, position.block,
                                    params.blocks_per_rank, warp_of_block());
    if (!begins(params, position, args, number)) return;
    typename L::Fabric fabric(params.fabric, args.rank);
    const int channel = number / warps;
    BulkBuffers& buffers = bulk_buffers();
    auto warp_of = [&](Role role) {
        return DeviceWarp(params.ranks[position.index], args.call, role, channel, buffers);
    };
    run_combine_role<T, kWeighted>(warp_of, fabric, args, params.roles, channel, number % warps);
}

template <class T, bool kWeighted, class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    combine_kernel(const __grid_constant__ L params) {
    const WarpPosition<L> position(params);
    run_combine<T, kWeighted>(params, position);
    end_call(params, position);
}

}  // namespace ep::kernels

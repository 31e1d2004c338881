#pragma once

#include "launch/cuda/kernels.h"

// The kernel that runs notify and dispatch in one launch.
namespace ep::kernels {

// Counts that another warp of this rank may still be exchanging. That warp's waits are bounded, and
// one that expires sets the rank's abort word, so the wait here is bounded, too.
class PendingCounts {
  public:
    EP_FN PendingCounts(const DeviceRank& rank, uint64_t* epochs, uint64_t epoch)
        : rank_(rank), epochs_(epochs), epoch_(epoch) {}

    EP_FN bool known(DeviceWarp&) {
        if (are_there_) return true;
        bool seen = false;
        if (rows::lane_id() == 0) seen = ptx::load_acquire_gpu(epochs_) >= epoch_;
        are_there_ = __shfl_sync(rows::kAllLanes, seen, 0);
        __syncwarp();  // extends lane 0's acquire to all lanes: a shuffle orders no memory
        return are_there_;
    }
    EP_FN bool wait(DeviceWarp& warp) {
        while (!known(warp)) {
            if (is_aborted(rank_)) return false;
        }
        return true;
    }

  private:
    const DeviceRank& rank_;
    uint64_t* epochs_;
    uint64_t epoch_;
    bool are_there_ = false;
};

// Works for ranks of one node only, where a channel's sender numbers its rows without the counts of
// other ranks. It sends while the first receiver warps of the first channels exchange the counts,
// which all receivers need.
template <class L>
EP_FN void run_fused_dispatch(const L& params, const WarpPosition<L>& position) {
    const DispatchCallArgs& args = params.args[position.index];
    const DeviceRank& rank = params.ranks[position.index];
    const Progress& progress = params.progress[position.index];
    const NotifyArgs notify = args.notify(progress.notifies() + 1);
    BulkBuffers& buffers = bulk_buffers();
    auto warp = [&](Role name, int channel) {
        const uint64_t call = name == Role::Notify ? notify.epoch : args.call;
        return DeviceWarp(rank, call, name, channel, buffers);
    };
    {
        DeviceWarp w = warp(Role::Notify, 0);
        if (!count_rows(params, position, w, notify, progress.arrivals_of_fused_dispatch(), true))
            return;
    }
    if (position.warp == 0) {
        count_call(rank.control->entered.notify);
        begin_transfer(rank, args);
    }
    const int channels = args.layout.channels, warps = params.roles.warps();
    const int number =
        role_of_warp(warps * channels, position.block, params.blocks_per_rank, warp_of_block());
    if (number < 0) return;
    const int channel = number / warps, role = number % warps - 1;
    typename L::Fabric fabric(params.fabric, args.rank);
    PendingCounts counts(rank, &progress.notifies(), notify.epoch);
    if (role < 0) {
        DeviceWarp w = warp(Role::NvlSender, channel);
        index_channel(w, notify, channel);
        nvl_sender(w, fabric, args, channel, counts);
    } else {
        const int roles = num_exchange_roles(args.heap);
        if (role == 0 && channel < roles) {
            DeviceWarp w = warp(Role::Notify, 0);
            exchange_counts(rank, progress, w, fabric, notify, channel, channels);
        }
        DeviceWarp w = warp(Role::Receiver, channel);
        const int share = params.roles.ranks_per_peer_warp();
        if (counts.wait(w)) receiver(w, fabric, args, channel, role * share, share);
    }
    DeviceWarp w = warp(Role::Launch, 0);
    if (counts.wait(w)) clear_unfilled(w, args, number, warps * channels);
}

template <class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    fused_dispatch_kernel(const __grid_constant__ L params) {
    const WarpPosition<L> position(params);
    run_fused_dispatch(params, position);
    end_call(params, position);
}

}  // namespace ep::kernels

#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>

#include "core/cuda/runtime.h"
#include "launch/cuda/channels.h"
#include "launch/cuda/fused_dispatch.h"
#include "launch/cuda/group.h"
#include "launch/cuda/kernels.h"
#include "launch/cuda/load.h"
#include "protocol/notify.h"

// CudaGroup's definitions but for combine's kernels, which combine.inl launches.
namespace ep {
namespace {

constexpr size_t kPollsOfCounts = 1 << 12;  // between calls of `idle` and stream queries
constexpr std::chrono::milliseconds kListenInterval{50};  // while the host waits for counts

inline int blocks_for(int warps) { return ceil_div(warps, kBlockWarps); }

// Launches a kernel for all ranks. cooperative: because blocks wait for each other, all must be on
// the GPU at once, or CUDA reports an error. begun: an event to record when all blocks have begun.
template <class L>
void launch(void (*kernel)(L), const L& params, size_t ranks, CudaStream stream,
            bool cooperative = true, CudaEvent begun = nullptr) {
    static_assert(sizeof(L) <= 32764, "the most that CUDA passes to a kernel");
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeCooperative;
    attributes[0].val.cooperative = cooperative;
    attributes[1].id = cudaLaunchAttributeLaunchCompletionEvent;
    attributes[1].val.launchCompletionEvent.event = static_cast<cudaEvent_t>(begun);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(params.blocks_per_rank * ranks));
    config.blockDim = dim3(kBlockThreads);
    config.dynamicSmemBytes = shared_bytes();
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = begun ? 2 : 1;
    check_cuda(cudaLaunchKernelEx(&config, kernel, params), "kernel launch");
}

template <class L>
bool any_intra_rank_pass(const L& params, size_t ranks) {
    return std::any_of(params.args, params.args + ranks,
                       [](const auto& args) { return has_intra_rank_pass(args); });
}

inline int max_self_warps(const DispatchArgs&) { return 1; }
inline int max_self_warps(const CombineArgs& args) { return args.max_receivers(); }

// The GPU counts the epoch of notify itself.
inline std::vector<NotifyArgs> notify_args(const std::vector<DispatchCallArgs>& args) {
    std::vector<NotifyArgs> all;
    for (const DispatchCallArgs& a : args) all.push_back(a.notify(0));
    return all;
}

// Returns the launch spread over `sms` SMs in all, for kernels whose blocks wait for no others.
template <class L>
L spread(L params, size_t ranks, int sms) {
    params.blocks_per_rank = std::max<int>(1, sms / static_cast<int>(ranks));
    return params;
}

}  // namespace

// Launches combine's kernels, which take the longest to compile. So its definition is in
// combine.inl, and kernels with and without weights are compiled in separate files.
template <class P, int kRanks, bool kWeighted>
struct CombineLaunch {
    static void load_kernels();
    static void run(const CombineParams<P, kRanks>& params, size_t ranks, DType dtype,
                    CudaStream stream, const SideStream& side_stream);
};

template <class P>
CudaGroup<P>::CudaGroup(const Heap& heap, const P& fabric, std::vector<int> ranks,
                        const std::vector<char*>& own_heaps, const std::vector<char*>& heaps,
                        int device, int sms, double timeout)
    : heap_(heap),
      fabric_(fabric),
      ranks_(std::move(ranks)),
      own_heaps_(own_heaps),
      device_(device),
      sms_(sms),
      side_stream_(device, CudaDevice::of(device).sms, sms * static_cast<int>(ranks_.size())),
      timeout_ns_(static_cast<uint64_t>(timeout * 1e9)) {
    auto refuse = [](const std::string& message) { throw std::invalid_argument(message); };
    if (ranks_.size() > P::kMaxLocalRanks) {
        refuse("ranks in one process: " + std::to_string(ranks_.size()) + ", at most " +
               std::to_string(P::kMaxLocalRanks) + " on one GPU");
    }
    const CudaDevice gpu = CudaDevice::of(device_);
    if (gpu.major < 8) {
        refuse("GPU " + std::to_string(device_) + " has compute capability " +
               std::to_string(gpu.major) + "." + std::to_string(gpu.minor) +
               ", must be at least 8.0");
    }
    if (sms_ * ranks_.size() > static_cast<size_t>(gpu.sms)) {
        refuse("num_sms is " + std::to_string(sms_) + " for each of " +
               std::to_string(ranks_.size()) + " ranks, but the GPU has " +
               std::to_string(gpu.sms) + " SMs and all of their kernels must run at once");
    }
    const int warps = sms_ * kBlockWarps / heap_.channels;
    if (!fits(roles_for<DispatchRoles>(heap_.topology, warps), warps)) {
        const int needed =
            DispatchRoles{heap_.topology.nodes, heap_.topology.world(),
                          min_peer_warps(heap_.topology), min_rdma_warps(heap_.topology)}
                .warps();
        refuse("num_sms is " + std::to_string(sms_) + ", must be at least " +
               std::to_string(blocks_for(heap_.channels * needed)) + " for " +
               std::to_string(heap_.channels) + " channels of " + std::to_string(needed) +
               " warps");
    }

    const DeviceGuard guard(device_);
    load_kernels();
    for (char* base : heaps)
        reachable_.push_back(reinterpret_cast<ControlBlock*>(base + heap_.control()));
    const Topology& topology = heap_.topology;
    first_in_reach_ = heaps.size() == static_cast<size_t>(topology.world())
                          ? 0
                          : topology.rank(topology.node_of(ranks_.front()), 0);
    abort_stream_ = side_stream(device_);
    std::vector<uint64_t*> words;
    for (ControlBlock* block : reachable_) words.push_back(&block->abort);
    abort_words_ = device_array<uint64_t*>(device_, words.size());
    check_cuda(cudaMemcpy(abort_words_.get(), words.data(), words.size() * sizeof(uint64_t*),
                          cudaMemcpyHostToDevice),
               "cudaMemcpy");
    progress_ = device_array<uint64_t>(device_, ranks_.size() * Progress::kWords);
    totals_ = pinned_array<Layout::Totals>(device_, ranks_.size());
    std::fill_n(totals_.get(), ranks_.size(), Layout::Totals{});
    totals_on_gpu_ = on_gpu(totals_.get());
    if constexpr (P::kOverHost) {
        reports_ = fabric_.report;
    } else {
        own_reports_ = pinned_array<ControlBlock>(device_, ranks_.size());
        reports_ = own_reports_.get();
    }
    reports_on_gpu_ = on_gpu(reports_);
    reason_source_ = pinned_array<Reason>(device_, 1);
    abort_source_ = pinned_array<uint32_t>(device_, 1);
    fetched_ = pinned_array<uint64_t>(device_, reachable_.size());
    reset();
}

// Calls f.operator()<kRanks>(), where kRanks is 1 or the most ranks that a launch can have.
template <class P>
template <class F>
void CudaGroup<P>::for_local_ranks(F&& f) const {
    if constexpr (P::kMaxLocalRanks > 1) {
        if (ranks_.size() > 1) return f.template operator()<P::kMaxLocalRanks>();
    }
    f.template operator()<1>();
}

template <class P>
void CudaGroup<P>::load_kernels() const {
    for_local_ranks([&]<int kRanks>() {
        using Dispatch = DispatchParams<P, kRanks>;
        load(kernels::notify_kernel<NotifyParams<P, kRanks>>);
        load(kernels::dispatch_kernel<Dispatch>);
        load(kernels::own_rows_kernel<Dispatch>);
        load(kernels::intra_rank_permute_kernel<Dispatch>);
        if constexpr (P::kFusesNotify)
            load(kernels::fused_dispatch_kernel<FusedDispatchParams<P, kRanks>>);
        CombineLaunch<P, kRanks, false>::load_kernels();
        CombineLaunch<P, kRanks, true>::load_kernels();
    });
}

template <class P>
template <class L, class Args>
L CudaGroup<P>::params(const std::vector<Args>& args, int blocks_per_rank) const {
    L params{};
    params.fabric = fabric_;
    params.blocks_per_rank = blocks_per_rank;
    for (size_t i = 0; i < args.size(); ++i) {
        params.args[i] = args[i];
        params.progress[i] = {progress_.get() + i * Progress::kWords};
        params.ranks[i] = device_rank(i);
    }
    return params;
}

template <class P>
template <class L, class Args>
L CudaGroup<P>::params_of_roles(const std::vector<Args>& args) const {
    using Roles = decltype(L::roles);
    const int warps = sms_ * kBlockWarps / heap_.channels;
    const Roles roles = roles_for<Roles>(heap_.topology, warps, max_self_warps(args.front()));
    L all = params<L>(args, std::min(sms_, heap_.channels * roles.warps()));
    all.roles = roles;
    all.ends_call = true;
    return all;
}

template <class P>
void CudaGroup<P>::notify(const std::vector<NotifyArgs>& args, CudaStream stream) {
    const DeviceGuard guard(device_);
    const int blocks = notify_blocks(heap_.channels, num_exchange_roles(heap_), sms_);
    for_local_ranks([&]<int kRanks>() {
        using L = NotifyParams<P, kRanks>;
        launch(kernels::notify_kernel<L>, params<L>(args, blocks), args.size(), stream);
    });
}

template <class P>
std::vector<Layout::Totals> CudaGroup<P>::notify_and_wait(const std::vector<DispatchCallArgs>& args,
                                                          bool ahead, CudaStream stream,
                                                          const std::function<void()>& idle) {
    std::vector<NotifyArgs> counts = notify_args(args);
    request_reports(counts);
    notify(counts, stream);
    if (ahead) dispatch({args.begin(), args.end()}, stream);
    return wait_for_reports(stream, idle);
}

template <class P>
std::vector<Layout::Totals> CudaGroup<P>::wait_for_reports(CudaStream stream,
                                                           const std::function<void()>& idle) {
    const DeviceGuard guard(device_);
    auto has_reported = [&](size_t rank) {
        return std::atomic_ref<uint64_t>(totals_[rank].ticket).load(std::memory_order_acquire) ==
               ticket_;
    };
    // The kernel's waits are bounded: it writes the totals, aborts, or the stream shows its end.
    bool ended = false;
    auto listened = std::chrono::steady_clock::now();
    for (size_t rank = 0, polls = 0; rank < ranks_.size() && !ended;) {
        if (has_reported(rank)) {
            ++rank;
            continue;
        }
        ended = aborted();
        if (++polls % kPollsOfCounts) continue;
        idle();
        if (const auto now = std::chrono::steady_clock::now(); now - listened > kListenInterval) {
            listen();  // other work on the stream may wait for a rank that has given up
            listened = now;
        }
        const cudaError_t state = cudaStreamQuery(static_cast<cudaStream_t>(stream));
        if (state != cudaErrorNotReady) check_cuda(state, "waiting for counts");
        ended = ended || state == cudaSuccess;
    }
    std::vector<Layout::Totals> totals(ranks_.size());
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        if (has_reported(rank)) totals[rank] = totals_[rank];
        if (!has_reported(rank) && !aborted())
            throw std::runtime_error("a launch ended and reported no counts");
    }
    return totals;
}

template <class P>
void CudaGroup<P>::dispatch(const std::vector<DispatchArgs>& args, CudaStream stream) {
    const DeviceGuard guard(device_);
    for_local_ranks([&]<int kRanks>() {
        using L = DispatchParams<P, kRanks>;
        const L all = params_of_roles<L>(args);
        const size_t ranks = args.size();
        if (!any_intra_rank_pass(all, ranks))
            return launch(kernels::dispatch_kernel<L>, all, ranks, stream);
        L exchange = all;
        exchange.ends_call = false;
        const CudaStream side = side_stream_.fork(stream);
        // The exchange takes longest, so it is launched first.
        launch(kernels::dispatch_kernel<L>, exchange, ranks, stream);
        launch(kernels::own_rows_kernel<L>, spread(all, ranks, side_stream_.sms), ranks, side,
               false);
        side_stream_.join(stream);
        launch(kernels::intra_rank_permute_kernel<L>, spread(all, ranks, side_stream_.all_sms),
               ranks, stream, false);
    });
}

template <class P>
void CudaGroup<P>::dispatch_without_wait(const std::vector<DispatchCallArgs>& args,
                                         CudaStream stream) {
    const auto passes = [](const DispatchArgs& a) { return has_intra_rank_pass(a); };
    const Topology& topology = heap_.topology;
    if constexpr (P::kFusesNotify) {
        // The intra-rank pass and network roles cannot begin before the counts are there.
        if (topology.nodes == 1 && topology.world() > 1 &&
            std::none_of(args.begin(), args.end(), passes)) {
            const DeviceGuard guard(device_);
            return for_local_ranks([&]<int kRanks>() {
                using L = FusedDispatchParams<P, kRanks>;
                launch(kernels::fused_dispatch_kernel<L>, params_of_roles<L>(args), args.size(),
                       stream);
            });
        }
    }
    notify(notify_args(args), stream);
    dispatch({args.begin(), args.end()}, stream);
}

template <class P>
void CudaGroup<P>::combine(const std::vector<CombineArgs>& args, DType dtype, CudaStream stream) {
    const DeviceGuard guard(device_);
    for_local_ranks([&]<int kRanks>() {
        auto all = params_of_roles<CombineParams<P, kRanks>>(args);
        for (CombineArgs& a : all.args) a.sum_warps = sum_warps(heap_.topology);
        const auto run = args.front().is_weighted ? CombineLaunch<P, kRanks, true>::run
                                                  : CombineLaunch<P, kRanks, false>::run;
        run(all, args.size(), dtype, stream, side_stream_);
    });
}

template <class P>
uint64_t CudaGroup<P>::aborted() const {
    for (size_t i = 0; i < ranks_.size(); ++i) {
        const uint64_t word =
            std::atomic_ref<uint64_t>(reports_[i].abort).load(std::memory_order_acquire);
        if (word) return word;
    }
    return 0;
}

template <class P>
void CudaGroup<P>::abort(Outcome outcome, const std::string& reason) {
    const DeviceGuard guard(device_);
    const std::lock_guard lock(abort_mutex_);
    fetch_abort_words(reachable_);
    if (!has_reason_) {
        has_reason_ = true;
        Reason& source = reason_source_[0];
        source.bytes = std::min(reason.size(), Reason::kMaxBytes);
        std::memcpy(source.text, reason.data(), source.bytes);
        if (P::kOverHost) {  // SoftwareNic sends the report to the other machines
            Reason& report = reports_[0].reason;
            std::memcpy(report.text, source.text, source.bytes);
            std::atomic_ref<uint64_t>(report.bytes).store(source.bytes, std::memory_order_release);
        }
        copy_async(&device_rank(0).control->reason, &source, sizeof(Reason), abort_stream_.get());
    }
    abort_source_[0] = static_cast<uint32_t>(ControlBlock::abort_word(outcome, ranks_.front()));
    for (size_t i = 0; i < reachable_.size(); ++i) {
        if (fetched_[i]) continue;  // the first reason stays: a later one may follow from it
        // This sets the upper half: a kernel may set the lower half until then.
        copy_async(reinterpret_cast<uint32_t*>(&reachable_[i]->abort) + 1, abort_source_.get(),
                   sizeof(uint32_t), abort_stream_.get());
    }
    synchronize(abort_stream_.get());
    fetch_own_abort_words();
}

template <class P>
void CudaGroup<P>::listen() {
    const DeviceGuard guard(device_);
    const std::lock_guard lock(abort_mutex_);
    fetch_own_abort_words();
}

// Copies the abort words of control blocks to fetched_.
template <class P>
void CudaGroup<P>::fetch_abort_words(const std::vector<ControlBlock*>& blocks) {
    for (size_t i = 0; i < blocks.size(); ++i)
        copy_async(fetched_.get() + i, &blocks[i]->abort, sizeof(uint64_t), abort_stream_.get());
    synchronize(abort_stream_.get());
}

template <class P>
void CudaGroup<P>::fetch_own_abort_words() {
    std::vector<ControlBlock*> own;
    for (size_t i = 0; i < ranks_.size(); ++i) own.push_back(device_rank(i).control);
    fetch_abort_words(own);
    for (size_t i = 0; i < ranks_.size(); ++i) {
        if (fetched_[i])
            std::atomic_ref<uint64_t>(reports_[i].abort)
                .store(fetched_[i], std::memory_order_release);
    }
}

template <class P>
void CudaGroup<P>::retire() {
    const DeviceGuard guard(device_);
    synchronize_device();
    const uint64_t word = ControlBlock::abort_word(Outcome::Failed, ranks_.front());
    for (size_t i = 0; i < ranks_.size(); ++i) {
        check_cuda(
            cudaMemcpy(&device_rank(i).control->abort, &word, sizeof(word), cudaMemcpyHostToDevice),
            "cudaMemcpy");
    }
}

template <class P>
std::pair<std::vector<uint64_t>, std::vector<uint64_t>> CudaGroup<P>::waited(size_t index) const {
    const DeviceGuard guard(device_);
    const size_t world = heap_.topology.world();
    std::vector<uint64_t> all(world), last(world);
    for (const auto& [to, offset] :
         {std::pair(&all, heap_.waited()), std::pair(&last, heap_.waited_before())})
        copy_async(to->data(), own_heaps_[index] + offset, world * sizeof(uint64_t),
                   abort_stream_.get());
    synchronize(abort_stream_.get());
    for (size_t rank = 0; rank < world; ++rank) last[rank] = all[rank] - last[rank];
    return {last, all};
}

template <class P>
std::vector<ControlBlock> CudaGroup<P>::control_blocks() const {
    const DeviceGuard guard(device_);
    std::vector<ControlBlock> blocks(reachable_.size());
    for (size_t i = 0; i < blocks.size(); ++i)
        copy_async(&blocks[i], reachable_[i], sizeof(ControlBlock), abort_stream_.get());
    synchronize(abort_stream_.get());
    return blocks;
}

template <class P>
void CudaGroup<P>::drain() const {
    const DeviceGuard guard(device_);
    fabric_.drain(timeout_ns_);
}

template <class P>
void CudaGroup<P>::reset() {
    const DeviceGuard guard(device_);
    synchronize_device();
    // Calls are numbered from 1 again, so rows of earlier calls must not stay in the rings.
    for (char* base : own_heaps_) check_cuda(cudaMemset(base, 0, bytes_on_gpu()), "cudaMemset");
    check_cuda(cudaMemset(progress_.get(), 0, ranks_.size() * Progress::kWords * sizeof(uint64_t)),
               "cudaMemset");
    synchronize_device();
    fabric_.reset_signals(ranks_.front(), timeout_ns_);
    for (size_t i = 0; i < ranks_.size(); ++i) reports_[i] = {};
    has_reason_ = false;
}

}  // namespace ep

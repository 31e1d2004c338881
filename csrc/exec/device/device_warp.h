#pragma once

#include <type_traits>

#include "exec/device/architecture.h"
#include "exec/device/bulk.h"
#include "exec/device/device_rank.h"
#include "exec/device/lines.h"
#include "exec/device/plain.h"
#include "exec/device/ptx.h"
#include "exec/device/quantize.h"
#include "exec/device/rows.h"
#include "exec/device/shared_memory.h"
#include "exec/device/sums.h"
#include "exec/warp.h"

namespace ep {

// A warp of a GPU of compute capability 8.0 or later.
class DeviceWarp {
  public:
    static constexpr int kLanesAtOnce = 32;

    template <class T>
    struct PerLane {
        T value;
        EP_FN T& operator[](int) { return value; }
        EP_FN const T& operator[](int) const { return value; }
    };

    EP_FN DeviceWarp(const DeviceRank& rank, uint64_t call, Role role, int channel,
                     BulkBuffers& buffers)
        : rank_(rank), call_(call), role_(role), channel_(channel), bulk_(buffers) {}
    // Waits for the copy engine: nothing that it does for this warp outlives the warp.
    EP_FN ~DeviceWarp() {
        bulk_.drop();
        finish_writes();
    }
    DeviceWarp(const DeviceWarp&) = delete;

    template <class F>
    EP_FN void lanes(int count, F&& f) {
        if (lane_id() < count) f(lane_id());
        __syncwarp();
    }

    template <class F>
    EP_FN uint32_t ballot(int count, F&& f) {
        return __ballot_sync(kAll, lane_id() < count && f(lane_id()));
    }

    EP_FN uint32_t first_of(int count, const PerLane<int>& keys) {
        const int key = lane_id() < count ? keys.value : -1;
        const uint32_t equal = __match_any_sync(kAll, key);
        return __ballot_sync(kAll, key >= 0 && lowest_lane(equal) == lane_id());
    }

    EP_FN uint32_t last_of(int count, const PerLane<int>& keys) {
        const int key = lane_id() < count ? keys.value : -1;
        const uint32_t equal = __match_any_sync(kAll, key);
        return __ballot_sync(kAll, key >= 0 && equal >> lane_id() == 1);
    }

    EP_FN void match(int count, const PerLane<int>& keys, PerLane<uint32_t>& equal) {
        const int key = lane_id() < count ? keys.value : -1;
        const uint32_t lanes = __match_any_sync(kAll, key);
        equal.value = key < 0 ? 0 : lanes;
    }

    template <class T>
    EP_FN T broadcast(const PerLane<T>& values, int lane) {
        if constexpr (std::is_pointer_v<T>) {
            return rows::shuffle_pointer(values.value, lane);
        } else if constexpr (std::is_integral_v<T> && sizeof(T) == 8) {
            return static_cast<T>(
                __shfl_sync(kAll, static_cast<unsigned long long>(values.value), lane));
        } else {
            return __shfl_sync(kAll, values.value, lane);
        }
    }

    EP_FN int exclusive_scan(int count, PerLane<int>& values) {
        const int own = lane_id() < count ? values.value : 0;
        int sum = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int lower = __shfl_up_sync(kAll, sum, distance);
            if (lane_id() >= distance) sum += lower;
        }
        values.value = sum - own;
        return __shfl_sync(kAll, sum, 31);
    }

    // Swaps the off-diagonal blocks of 16 x 16 bits, then those of 8 x 8 in each block, and so on.
    EP_FN void transpose(PerLane<uint32_t>& bits) {
        uint32_t low = 0xffff;  // the bits of the left blocks
#pragma unroll
        for (int size = 16; size; size /= 2, low ^= low << size) {
            const uint32_t other = __shfl_xor_sync(kAll, bits.value, size);
            bits.value = lane_id() & size ? (bits.value & ~low) | (other & ~low) >> size
                                          : (bits.value & low) | (other & low) << size;
        }
    }

    template <class F>
    EP_FN bool met(int count, F&& need) {
        const bool all = __all_sync(kAll, lane_id() >= count || is_met(need(lane_id())));
        __syncwarp();  // what a lane has acquired is there for all: a vote orders nothing
        return all;
    }

    template <class F>
    EP_FN bool wait_all(Wait wait, int count, F&& need) {
        return poll(
                   wait, count, need, [](uint32_t met) { return met == kAll; },
                   nothing_to_wait_for()) != 0;
    }

    template <class F>
    EP_FN Waited wait_any_for(Wait wait, int count, F&& need, uint64_t ns) {
        bool over = false;
        const uint32_t met =
            poll(wait, count, need, [](uint32_t met) { return met != 0; }, never(), ns, &over);
        return over ? Waited::Over : met ? Waited::Met : Waited::Failed;
    }

    template <class F>
    EP_FN uint32_t wait_any(Wait wait, int count, F&& need) {
        return poll(wait, count, need, [](uint32_t met) { return met != 0; }, never());
    }

    EP_FN void fail(Outcome outcome, Wait wait, const WaitCondition& need) {
        if (lane_id() == 0) give_up(rank_, incident(outcome, wait, need));
        __syncwarp();
    }

    template <CacheHint hint>
    EP_FN void copy(void* dst, const void* src, size_t bytes) {
        move_row<hint>(dst, 1, src, bytes);
    }

    template <CacheHint hint>
    EP_FN void multicast(const PerLane<void*>& dsts, uint32_t mask, const void* src, size_t bytes) {
        if (mask) {
            move_row<hint>(dsts.value, mask, src, bytes);
        } else {
            bulk_.drop();
        }
    }

    template <CacheHint hint>
    EP_FN void copy_each(const PerLane<void*>& dsts, const PerLane<const void*>& srcs,
                         uint32_t mask, size_t bytes) {
        const uint32_t misaligned = rows::misalignment(dsts.value, mask, nullptr, bytes) |
                                    rows::misalignment(srcs.value, mask, nullptr, bytes);
        if (mask && !misaligned && is_bulk(bytes)) {
            bulk_.copy_each<hint>(dsts.value, srcs.value, mask, bytes);
        } else {
            for_each_lane(mask, [&](int lane) {
                rows::copy_in_units(rows::shuffle_pointer(dsts.value, lane),
                                    rows::shuffle_pointer(srcs.value, lane), bytes);
            });
        }
        __syncwarp();
    }

    template <CacheHint hint>
    EP_FN void stage(const void* src, size_t bytes) {
        if (is_bulk(bytes) && !rows::misalignment(src, 0, src, bytes))
            bulk_.stage<hint>(src, bytes);
    }

    template <class T, CacheHint hint, class Weights>
    EP_FN void sum(void* dst, const PerLane<const void*>& srcs, const Weights& weights,
                   uint32_t mask, size_t count) {
        const size_t bytes = count * sizeof(T);
        if (!mask) return zero(dst, bytes);
        if constexpr (std::is_same_v<Weights, Unweighted>) {
            if (!(mask & (mask - 1))) {
                const void* only = rows::shuffle_pointer(srcs.value, lowest_lane(mask));
                stage<hint>(only, bytes);
                return move_row<CacheHint::Keep>(dst, 1, only, bytes);
            }
        }
        add_rows<T, hint>(dst, srcs.value, own_weight(weights), mask, count);
    }

    EP_FN void quantize(const PerLane<void*>& dsts, uint32_t mask, const void* src, size_t count,
                        size_t scales_at, ScaleFormat format) {
        if (mask && is_bulk(2 * count) && !rows::misalignment(dsts.value, mask, src, count)) {
            bulk_.quantize(dsts.value, mask, src, count, scales_at, format);
        } else {
            bulk_.drop();
            if (mask) rows::quantize_elements(dsts.value, mask, src, count, scales_at, format);
        }
        __syncwarp();
    }

    EP_FN void zero(void* dst, size_t bytes) {
        rows::fill<0>(dst, bytes);
        __syncwarp();
    }

    template <Scope scope>
    EP_FN void publish(uint64_t* flag, uint64_t value) {
        finish_writes();
        if (lane_id() == 0)
            of_scope<scope>(ptx::store_release_gpu, ptx::store_release_sys)(flag, value);
        __syncwarp();
    }

    template <Scope scope, class F>
    EP_FN void publish_lanes(int count, F&& f) {
        finish_writes();
        if (lane_id() < count)
            f(lane_id(), of_scope<scope>(ptx::store_release_gpu, ptx::store_release_sys));
        __syncwarp();
    }

    // Orders this warp's reads of a slot before the producer's next write to it: if the flag were
    // seen first, the producer would overwrite a row that is still being read.
    //
    // The store is relaxed. The PTX memory model formally requires a release, which would also wait
    // for all that the warp has written. Relaxed is enough on the hardware: a warp issues in order,
    // so a load whose value it has used is over, and what the copy engine read has been waited for.
    // A warp that acquires this flag and stores another one passes that on.
    template <Scope scope>
    EP_FN void credit(uint64_t* flag, uint64_t value) {
        if (lane_id() == 0)
            of_scope<scope>(ptx::store_relaxed_gpu, ptx::store_relaxed_sys)(flag, value);
        __syncwarp();
    }

    template <Scope scope, class F>
    EP_FN void credit_lanes(int count, F&& f) {
        if (lane_id() < count)
            f(lane_id(), of_scope<scope>(ptx::store_relaxed_gpu, ptx::store_relaxed_sys));
        __syncwarp();
    }

    template <Scope scope>
    static EP_FN uint64_t acquire(uint64_t* flag) {
        return of_scope<scope>(ptx::load_acquire_gpu, ptx::load_acquire_sys)(flag);
    }

    EP_FN uint64_t elapsed() const { return ptx::globaltimer() - deadline_start_; }

    static EP_FN void raise(uint64_t* word, uint64_t least) { ptx::max_gpu(word, least); }

    // The old value is not read, so nothing waits for it.
    static EP_FN void add(int32_t* count, int32_t n) { ptx::add_gpu(count, n); }

    template <Scope scope>
    EP_FN uint64_t arrive(uint64_t* counter, uint64_t n = 1) {
        static_assert(scope == Scope::Rank);
        finish_writes();
        uint64_t before = 0;
        if (lane_id() == 0) before = ptx::fetch_add_acq_rel_gpu(counter, n);
        __syncwarp();  // what lane 0 has acquired is there for all: a shuffle orders nothing
        return static_cast<uint64_t>(__shfl_sync(kAll, static_cast<unsigned long long>(before), 0));
    }

    // Called by all threads of a block, at its start.
    static EP_FN void begin_block() {
        if (threadIdx.x == 0) done_of_block() = 0;
        __syncthreads();
    }

    // Only the block's last warp executes it: one does for all of its block, and blocks of the next
    // launch take room that other streams, and so other ranks, may wait for.
    static EP_FN void launch_dependents() {
        if constexpr (Architecture::kHasEarlyLaunches) {
            if (lane_id() == 0 && ptx::fetch_add_shared(&done_of_block(), 1) + 1 == blockDim.x / 32)
                ptx::launch_dependents();
        }
    }

    static EP_FN uint64_t take_number(uint64_t* counter) {
        return ptx::fetch_add_acq_rel_gpu(counter, 1);
    }

    template <Scope scope>
    static EP_FN void compare_exchange(uint64_t* word, uint64_t from, uint64_t to) {
        of_scope<scope>(ptx::compare_and_swap_release_gpu, ptx::compare_and_swap_release_sys)(
            word, from, to);
    }

    static EP_FN void store_word(uint64_t* word, uint64_t value) {
        ptx::store_relaxed_sys(word, value);
    }
    static EP_FN uint64_t load_word(const uint64_t* word) { return ptx::load_relaxed_sys(word); }

    EP_FN void send_lines(const PerLane<char*>& slots, uint32_t mask, const char* src, size_t bytes,
                          const Lines& lines, uint64_t tag, const char* scales,
                          const ScalePlan& plan) {
        rows::send_lines(slots.value, mask, src, bytes, lines, tag, scales, plan);
        __syncwarp();
    }

    EP_FN void quantize_lines(const PerLane<char*>& slots, uint32_t mask, const char* src,
                              size_t count, const Lines& lines, uint64_t tag, ScaleFormat format) {
        rows::quantize_lines(slots.value, mask, src, count, lines, tag, format);
        __syncwarp();
    }

    EP_FN bool receive_lines(Wait wait, const LineSource& source, const Lines& lines,
                             const PerLane<char*>& dsts, uint32_t mask, size_t bytes,
                             const PerLane<char*>& scales, const ScalePlan& plan) {
        constexpr int kGroups = 4, kAtOnce = kGroups * rows::kLinesAtOnce;
        for (int first = lines.first; first < lines.end(); first += kAtOnce) {
            uint4 units[kGroups];
            load_lines(source.slot, first, lines.end(), units);
            if (!await_lines(wait, source, first, lines.end(), units)) return false;
            rows::store_payload(dsts.value, mask, bytes, first, lines.end(), units);
            rows::store_beside(scales.value, mask, plan, first, lines.end(), units);
        }
        __syncwarp();
        return true;
    }

    template <class T, class Weights>
    EP_FN void send_sum(char* slot, const PerLane<const char*>& srcs, const Weights& weights,
                        uint32_t mask, size_t bytes, const Lines& lines, uint64_t tag) {
        bulk_.template send_sum<T>(slot, srcs.value, own_weight(weights), mask, bytes, lines, tag);
        __syncwarp();
    }

    template <class T, class Weights>
    EP_FN bool receive_sum(Wait wait, const RowsToSum<DeviceWarp>& rows, const Weights& weights,
                           char* dst, size_t bytes, const Lines& lines) {
        constexpr int kGroups = rows::kSummedGroups;
        for (int first = lines.first; first < lines.end(); first += rows::kLinesAtOnce * kGroups) {
            uint4 units[kGroups];
            auto load = [&](int lane, uint4(&row)[kGroups]) {
                load_lines(rows::shuffle_pointer(rows.slot.value, lane), first, lines.end(), row);
            };
            auto await = [&](int lane, uint4(&row)[kGroups]) {
                char* slot = const_cast<char*>(rows::shuffle_pointer(rows.slot.value, lane));
                const LineSource source{slot, rows.tag, broadcast(rows.rank, lane), nullptr};
                return await_lines(wait, source, first, lines.end(), row);
            };
            if (!rows::sum_units<T>(units, own_weight(weights), rows.mask, load, await))
                return false;
            rows::store_payload(dst, 1, bytes, first, lines.end(), units);
        }
        __syncwarp();
        return true;
    }

    // From now on the timeout applies to all waits together.
    EP_FN void begin_half(Role role) {
        role_ = role;
        deadline_start_ = ptx::globaltimer();
    }

    // Waits for what the copy engine wrote for this warp, before a flag that promises it: the
    // engine's writes are not ordered with the warp's stores, so a reader might see the flag first.
    // publish() calls this; a fabric that releases flags by other means must call it.
    EP_FN void finish_writes() {
        bulk_.wait_written();
        __syncwarp();
    }

  private:
    using Copier = std::conditional_t<Architecture::kHasCopyEngine, BulkCopier, PlainCopier>;

    static constexpr uint32_t kAll = rows::kAllLanes;
    static constexpr uint32_t kPollsBetweenChecks = 64;

    static EP_FN int lane_id() { return rows::lane_id(); }
    static EP_FN uint64_t& done_of_block() {
        return reinterpret_cast<BulkBuffers*>(dynamic_shared_memory())->done;
    }
    static EP_FN bool is_bulk(size_t bytes) { return bytes >= Copier::kMinBytes; }

    // Scope::Rank is the whole GPU, because roles of a rank may run on different SMs.
    template <Scope scope, class Instruction>
    static EP_FN constexpr Instruction* of_scope(Instruction* gpu, Instruction* sys) {
        return scope == Scope::Rank ? gpu : sys;
    }

    template <CacheHint hint>
    EP_FN void move_row(void* own_dst, uint32_t mask, const void* src, size_t bytes) {
        if (rows::misalignment(own_dst, mask, src, bytes)) {
            bulk_.drop();
            for_each_lane(mask, [&](int lane) {
                rows::copy_in_units(rows::shuffle_pointer(own_dst, lane), src, bytes);
            });
        } else if (is_bulk(bytes)) {
            bulk_.multicast<hint>(own_dst, mask, src, bytes);
        } else {
            rows::multicast_vectors<hint>(own_dst, mask, src, bytes);
        }
        __syncwarp();
    }

    template <class T, CacheHint hint, class Weight>
    EP_FN void add_rows(void* dst, const void* own_src, Weight own_weight, uint32_t mask,
                        size_t count) {
        const size_t bytes = count * sizeof(T);
        if (rows::misalignment(own_src, mask, dst, bytes)) {
            rows::sum_elements<T>(dst, own_src, own_weight, mask, count);
        } else if (is_bulk(bytes)) {
            bulk_.sum<T, hint>(dst, own_src, own_weight, mask, bytes);
        } else {
            rows::sum_vectors<T>(dst, own_src, own_weight, mask, bytes / sizeof(uint4));
        }
        __syncwarp();
    }

    static EP_FN rows::NoWeight own_weight(Unweighted) { return {}; }
    template <class Weight>
    static EP_FN Weight own_weight(const PerLane<Weight>& weights) {
        return weights.value;
    }

    // Loads the lane's units of up to kLinesAtOnce * kGroups lines [first, end), as they are now.
    template <int kGroups>
    static EP_FN void load_lines(const char* slot, int first, int end, uint4 (&units)[kGroups]) {
        const char* lines = rows::own_unit(slot, first);
        const int left = end - first - rows::line_of_lane();  // from the lane's first one on
        __syncwarp();                                         // the lanes of a line load together
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            if (rows::kLinesAtOnce * group < left)
                units[group] = ptx::load_line(lines + group * rows::kGroupBytes);
        }
    }

    // Waits until all of these lines have arrived. The caller has loaded them once.
    template <int kGroups>
    EP_FN bool await_lines(Wait wait, const LineSource& source, int first, int end,
                           uint4 (&units)[kGroups]) {
        const int left = end - first - rows::line_of_lane();
        const uint64_t number = LineTag{source.tag}.number();
        uint32_t loads = 0;
        auto need = [&](int) {
            if (loads++) load_lines(source.slot, first, end, units);
            WaitCondition all = {number, number, source.rank};
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                if (rows::kLinesAtOnce * group >= left || !rows::holds_tag()) continue;
                const uint64_t seen = LineTag{rows::tag_in(units[group])}.number();
                if (seen < all.observed) all.observed = seen;
            }
            return all;
        };
        if (!wait_all(wait, 32, need)) return false;
        if (source.waited && loads > 1) lanes(1, [&](int) { raise(source.waited, elapsed()); });
        uint64_t mismatched = source.tag;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            if (rows::kLinesAtOnce * group >= left || !rows::holds_tag()) continue;
            if (rows::tag_in(units[group]) != source.tag) mismatched = rows::tag_in(units[group]);
        }
        const uint32_t strange = __ballot_sync(kAll, mismatched != source.tag);
        if (!strange) return true;
        if (lane_id() == lowest_lane(strange))
            give_up(rank_, incident(Outcome::Mismatch, Wait::None,
                                    WaitCondition{mismatched, source.tag, source.rank}));
        __syncwarp();
        return false;
    }

    // Polls until enough(lanes whose need is met) holds. Returns these lanes; 0 if the wait ended
    // badly. Lanes from `count` on need `other`. over: set instead of giving up after max_ns or the
    // deadline.
    template <class F, class Enough>
    EP_FN uint32_t poll(Wait wait, int count, F&& need, Enough&& enough, const WaitCondition& other,
                        uint64_t max_ns = 0, bool* over = nullptr) {
        uint64_t start = deadline_start_;
        uint64_t began = 0;  // only a wait that lasts is measured: a short one costs nothing
        int peer = -1;
        for (uint32_t polls = 1;; ++polls) {
            const WaitCondition mine = lane_id() < count ? need(lane_id()) : other;
            const uint32_t met = __ballot_sync(kAll, is_met(mine));
            if (enough(met)) {
                if (began) note_wait(peer, began);
                __syncwarp();
                return met;
            }
            if (polls % kPollsBetweenChecks) continue;
            if (!began) began = ptx::globaltimer();
            peer = is_met(mine) ? -1 : mine.peer;
            // One lane decides for all, or some of them might go on.
            Outcome so_far = outcome_so_far(start);
            if (over && so_far == Outcome::Ok && ptx::globaltimer() - began > max_ns)
                so_far = Outcome::Timeout;
            const auto end = static_cast<Outcome>(__shfl_sync(kAll, static_cast<int>(so_far), 0));
            if (end == Outcome::Ok) continue;
            if (over && end == Outcome::Timeout) {
                note_wait(peer, began);
                *over = true;
                __syncwarp();
                return 0;
            }
            const uint32_t missing = __ballot_sync(kAll, !is_met(mine) && mine.peer >= 0);
            if (lane_id() == (missing ? lowest_lane(missing) : 0)) {
                give_up(rank_, incident(end, wait, mine));
            }
            __syncwarp();
            return 0;
        }
    }

    // Called by every lane: adds the wait to that for the rank it was last waiting for.
    EP_FN void note_wait(int peer, uint64_t began) const {
        if (peer >= 0 && peer != rank_.rank)
            ptx::add_sys(rank_.waited + peer, ptx::globaltimer() - began);
    }

    EP_FN Outcome outcome_so_far(uint64_t& start) const {
        if (has_ended(rank_)) return Outcome::Aborted;
        const uint64_t now = ptx::globaltimer();
        if (!start) start = now;
        return now - start > rank_.timeout_ns ? Outcome::Timeout : Outcome::Ok;
    }

    EP_FN Incident incident(Outcome outcome, Wait wait, const WaitCondition& need) const {
        return {outcome,   role_,         wait,          rank_.rank, channel_,
                need.peer, need.observed, need.required, call_};
    }

    const DeviceRank& rank_;
    uint64_t call_;
    Role role_;
    int channel_;
    uint64_t deadline_start_ = 0;  // 0: each wait has its own deadline
    Copier bulk_;
};

static_assert(LinesWarpLike<DeviceWarp>);

}  // namespace ep

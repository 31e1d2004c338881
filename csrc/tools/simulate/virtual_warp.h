#pragma once

#include <algorithm>
#include <cstring>

#include "exec/host/rows.h"
#include "exec/serial_lanes.h"
#include "exec/warp.h"
#include "tools/simulate/cluster.h"

namespace ep {

// Limit of a wait in ns. Waits expire once nothing else happens, so only a deadlock reaches it.
constexpr double kTimeout = 10e9;

// A warp that takes a GPU's time for what it does. Bytes are written at once, flags later: every
// reader comes through a flag.
class VirtualWarp : public SerialLanes {
  public:
    static constexpr int kLanesAtOnce = 32;

    VirtualWarp(VirtualCluster& cluster, VirtualFiber& fiber, Role role, int channel)
        : cluster_(cluster), machine_(cluster.machine), clock_(cluster.clock), fiber_(fiber) {
        fiber.task.role = role;
        fiber.channel = channel;
    }

    VirtualFiber& fiber() { return fiber_; }

    // ---- steps of the lanes

    template <class F>
    void lanes(int count, F&& f) {
        int most = 0;
        for (int lane = 0; lane < count; ++lane) {
            loads_ = 0;
            f(lane);
            most = std::max(most, loads_);
        }
        constexpr int kFew = 2, kAtOnce = 8;
        fiber_.time += machine_.step;
        if (most > kFew) fiber_.time += (most + kAtOnce - 1) / kAtOnce * machine_.gather;
    }

    template <class F>
    uint32_t ballot(int count, F&& f) {
        fiber_.time += machine_.ballot;
        return SerialLanes::ballot(count, f);
    }

    uint32_t first_of(int count, const PerLane<int>& keys) {
        fiber_.time += machine_.ballot;
        return SerialLanes::first_of(count, keys);
    }

    uint32_t last_of(int count, const PerLane<int>& keys) {
        fiber_.time += machine_.ballot;
        return SerialLanes::last_of(count, keys);
    }

    void match(int count, const PerLane<int>& keys, PerLane<uint32_t>& equal) {
        fiber_.time += machine_.ballot;
        SerialLanes::match(count, keys, equal);
    }

    int exclusive_scan(int count, PerLane<int>& values) {
        fiber_.time += 2 * machine_.ballot;
        return SerialLanes::exclusive_scan(count, values);
    }

    // ---- waits

    template <class F>
    bool met(int count, F&& need) {
        clock_.catch_up(fiber_);
        clock_.ask();
        const uint32_t mask = lanes_met(count, need);
        fiber_.time += poll();
        return mask == all_of(count);
    }

    template <class F>
    bool wait_all(Wait wait, int count, F&& need) {
        return wait_for(wait, count, need, kNever,
                        [&] { return lanes_met(count, need) == all_of(count); }) == Waited::Met;
    }

    template <class F>
    uint32_t wait_any(Wait wait, int count, F&& need) {
        uint32_t mask = 0;
        wait_for(wait, count, need, kNever, [&] { return (mask = lanes_met(count, need)) != 0; });
        return mask;
    }

    template <class F>
    Waited wait_any_for(Wait wait, int count, F&& need, uint64_t ns) {
        return wait_for(wait, count, need, static_cast<double>(ns),
                        [&] { return lanes_met(count, need) != 0; });
    }

    uint64_t elapsed() const { return static_cast<uint64_t>(fiber_.time - fiber_.begun); }

    void begin_half(Role role) {
        fiber_.begin_task(role);
        fiber_.begun = fiber_.time;
    }

    void fail(Outcome outcome, Wait wait, const WaitCondition& need) {
        record(outcome, wait, need);
        abort(outcome);
    }

    // ---- rows

    template <CacheHint>
    void copy(void* dst, const void* src, size_t bytes) {
        if (cluster_.rows_have_bytes) std::memcpy(dst, src, bytes);
        move(&dst, 1, bytes, bytes);
    }

    template <CacheHint>
    void multicast(const PerLane<void*>& dsts, uint32_t mask, const void* src, size_t bytes) {
        void* to[32];
        int count = 0;
        for_each_lane(mask, [&](int lane) {
            if (cluster_.rows_have_bytes) std::memcpy(dsts[lane], src, bytes);
            to[count++] = dsts[lane];
        });
        move(to, count, bytes, bytes);
    }

    template <CacheHint hint>
    void copy_each(const PerLane<void*>& dsts, const PerLane<const void*>& srcs, uint32_t mask,
                   size_t bytes) {
        for_each_lane(mask, [&](int lane) { copy<hint>(dsts[lane], srcs[lane], bytes); });
    }

    template <CacheHint>
    void stage(const void*, size_t) {
        fiber_.row_begun = fiber_.time;
    }

    template <class T, CacheHint hint, class Weights>
    void sum(void* dst, const PerLane<const void*>& srcs, const Weights& weights, uint32_t mask,
             size_t count) {
        const bool is_copy = std::is_same_v<Weights, Unweighted> && mask && !cluster_.sums_rows;
        if (cluster_.rows_have_bytes && is_copy)
            std::memcpy(dst, srcs[lowest_lane(mask)], count * sizeof(T));
        else if (cluster_.rows_have_bytes)
            SerialLanes::sum<T, hint>(dst, srcs, weights, mask, count);
        add(dst, popcount(mask), count * sizeof(T));
    }

    void quantize(const PerLane<void*>& dsts, uint32_t mask, const void* src, size_t count,
                  size_t scales_at, ScaleFormat format) {
        const size_t scales = scale_blocks(count) * scale_bytes(format);
        void* to[32];
        int rows = 0;
        for_each_lane(mask, [&](int lane) {
            auto* dst = static_cast<uint8_t*>(to[rows++] = dsts[lane]);
            if (!cluster_.rows_have_bytes) return;
            quantize_row(dst, reinterpret_cast<char*>(dst) + scales_at,
                         static_cast<const BFloat16*>(src), count, format);
        });
        move(to, rows, count + scales, count * sizeof(BFloat16), machine_.warp_quantize);
    }

    void zero(void* dst, size_t bytes) {
        if (!bytes) return;
        if (cluster_.rows_have_bytes) std::memset(dst, 0, bytes);
        move(&dst, 1, bytes, 0);
    }

    // ---- flags

    template <Scope scope>
    void publish(uint64_t* flag, uint64_t value) {
        finish_writes();
        credit<scope>(flag, value);
    }
    template <Scope scope, class F>
    void publish_lanes(int count, F&& f) {
        finish_writes();
        credit_lanes<scope>(count, f);
    }
    template <Scope scope>
    void credit(uint64_t* flag, uint64_t value) {
        begin_store<scope>();
        store<scope>(flag, value);
    }
    template <Scope scope, class F>
    void credit_lanes(int count, F&& f) {
        begin_store<scope>();
        auto one = [&](uint64_t* flag, uint64_t value) { store<scope>(flag, value); };
        for (int lane = 0; lane < count; ++lane) f(lane, one);
    }

    template <Scope>
    static uint64_t acquire(uint64_t* flag) {
        VirtualClock::note_asked(flag);
        return *flag;
    }

    static void raise(uint64_t* word, uint64_t least) { *word = std::max(*word, least); }
    static void add(int32_t* count, int32_t n) { *count += n; }

    template <Scope>
    uint64_t arrive(uint64_t* counter, uint64_t n = 1) {
        finish_writes();
        clock_.catch_up(fiber_);
        fiber_.time += machine_.own_flag;
        const uint64_t before = *counter;
        *counter += n;
        clock_.wake(counter, fiber_.time);
        return before;
    }

    static void launch_dependents() {}

    static uint64_t take_number(uint64_t* counter) { return (*counter)++; }

    template <Scope>
    static void compare_exchange(uint64_t* word, uint64_t from, uint64_t to) {
        if (*word == from) *word = to;
    }

    // Waits until all that it stored has been written.
    void finish_writes() { fiber_.time = std::max(fiber_.time, fiber_.writes_done); }

    // Counts a lane's load from its own heap: the loads of a lane add up.
    static void note_load() { ++loads_; }

  private:
    static constexpr uint32_t all_of(int count) {
        return static_cast<uint32_t>((uint64_t{1} << count) - 1);
    }

    template <class F>
    uint32_t lanes_met(int count, F&& need) {
        uint32_t mask = 0;
        for (int lane = 0; lane < count; ++lane) {
            clock_.ask_lane();
            mask |= static_cast<uint32_t>(is_met(need(lane))) << lane;
        }
        return mask;
    }

    double poll() const { return machine_.poll * std::max(1, clock_.max_asked()); }

    uint64_t& abort_word() { return cluster_.control(fiber_.rank).abort; }

    // A wait that is not over sleeps until a store to one of the flags that it read.
    template <class F, class C>
    Waited wait_for(Wait wait, int count, F&& need, double ns, C&& condition) {
        clock_.catch_up(fiber_);
        const double began = fiber_.time, deadline = began + std::min(ns, kTimeout);
        bool has_slept = false;
        auto ended = [&](Waited how) {
            if (has_slept) fiber_.task.waited[static_cast<int>(wait)] += fiber_.time - began;
            return how;
        };
        for (bool in_time = true;; has_slept = true) {
            clock_.ask();
            const bool is_met = condition();
            const double look = poll();
            if (is_met) {
                fiber_.time += look;
                return ended(Waited::Met);
            }
            if (abort_word()) {
                record_missing(Outcome::Aborted, wait, count, need);
                return ended(Waited::Failed);
            }
            if (!in_time) {
                if (ns < kTimeout) return ended(Waited::Over);
                record_missing(Outcome::Timeout, wait, count, need);
                abort(Outcome::Timeout);
                return ended(Waited::Failed);
            }
            fiber_.time += look / 2;  // a store comes between two loads
            in_time = clock_.sleep(fiber_, deadline);
        }
    }

    template <class F>
    void record_missing(Outcome outcome, Wait wait, int count, F&& need) {
        for (int lane = 0; lane < count; ++lane) {
            const WaitCondition missing = need(lane);
            if (!is_met(missing) && missing.peer >= 0) return record(outcome, wait, missing);
        }
    }

    void record(Outcome outcome, Wait wait, const WaitCondition& need) {
        ControlBlock& control = cluster_.control(fiber_.rank);
        const uint64_t index = control.incident_count++;
        if (index >= ControlBlock::kMaxIncidents) return;
        control.incidents[index] = {outcome,       fiber_.task.role, wait,
                                    fiber_.rank,   fiber_.channel,   need.peer,
                                    need.observed, need.required,    cluster_.call};
        control.complete[index] = 1;
    }

    void abort(Outcome outcome) {
        for (size_t rank = 0; rank < cluster_.heaps.size(); ++rank) {
            uint64_t& word = cluster_.control(static_cast<int>(rank)).abort;
            if (!word) word = ControlBlock::abort_word(outcome, fiber_.rank);
        }
        clock_.wake_all(fiber_.time + machine_.peer_flag);
    }

    template <Scope scope>
    void begin_store() {
        fiber_.time += machine_.flag_store;
        if constexpr (scope == Scope::Rank) clock_.catch_up(fiber_);
    }

    // A role reads what it stored itself, so what only its rank reads is stored at once, and fibers
    // that wait for it are woken later.
    template <Scope scope>
    void store(uint64_t* flag, uint64_t value) {
        if constexpr (scope == Scope::Rank) {
            *flag = std::max(*flag, value);
            clock_.wake(flag, fiber_.time + machine_.own_flag);
        } else {
            const bool is_own = cluster_.owner_of(flag) == fiber_.rank;
            clock_.store_at(fiber_.time + (is_own ? machine_.own_flag : machine_.peer_flag), flag,
                            value);
        }
    }

    // Takes the time to move a row: at the warp's own pace, or that of its SM, the memories or the
    // link if slower. Reads `read` bytes once, and stores `stored` bytes to each destination.
    void move(void* const* dsts, int count, size_t stored, size_t read) {
        move(dsts, count, stored, read, machine_.warp_copy);
    }
    // pace: of the warp, in GB/s.
    void move(void* const* dsts, int count, size_t stored, size_t read, double pace) {
        if (!count) return;
        clock_.catch_up(fiber_);
        ++cluster_.rows_moved;
        const double began = fiber_.time, to_store = cluster_.row.real(stored),
                     to_read = cluster_.row.real(read);
        const double there =
            std::max(began, std::min(fiber_.row_begun, began) + machine_.first_bytes);
        VirtualGpu& gpu = cluster_.gpus[fiber_.rank];
        const double sm = count * to_store / machine_.sm_store + to_read / machine_.sm_read;
        double end =
            std::max({there + std::max(to_store, to_read) / pace, gpu.sms[fiber_.sm].use(began, sm),
                      gpu.memory.use(began, to_read / machine_.memory)});
        for (int i = 0; i < count; ++i) end = std::max(end, reach(dsts[i], to_store, began, end));
        finish_row(began, end);
    }

    // Takes the time to sum `rows` rows of `bytes` bytes, which are read.
    void add(void* dst, int rows, size_t bytes) {
        if (!rows) return zero(dst, bytes);
        if (rows == 1) {
            fiber_.row_begun = fiber_.time;
            return move(&dst, 1, bytes, bytes);
        }
        clock_.catch_up(fiber_);
        ++cluster_.rows_moved;
        const double began = fiber_.time, row = cluster_.row.real(bytes), all = rows * row;
        VirtualGpu& gpu = cluster_.gpus[fiber_.rank];
        const double sm = all / machine_.sm_sum + row / machine_.sm_store;
        const double end = std::max({began + machine_.first_bytes + all / machine_.warp_sum,
                                     gpu.sms[fiber_.sm].use(began, sm),
                                     gpu.memory.use(began, all / machine_.memory)});
        finish_row(began, std::max(end, reach(dst, row, began, end)));
    }

    // Stores to a destination. Returns when the warp can continue, with some of it still in flight.
    double reach(const void* dst, double bytes, double began, double end) {
        VirtualGpu& own = cluster_.gpus[fiber_.rank];
        const int to = cluster_.owner_of(dst);
        if (to < 0 || to == fiber_.rank) {
            end = std::max(end, own.memory.use(began, bytes / machine_.memory));
            fiber_.writes_done = std::max(fiber_.writes_done, end + machine_.own_write);
            return end;
        }
        VirtualGpu& other = cluster_.gpus[to];
        other.memory.use(began, bytes / machine_.memory);
        const double link = std::max(own.link_out.use(began, bytes / machine_.link),
                                     other.link_in.use(began, bytes / machine_.link));
        end = std::max(end, link - machine_.link_slack);
        fiber_.writes_done =
            std::max(fiber_.writes_done, std::max(end, link) + machine_.peer_write);
        return end;
    }

    void finish_row(double began, double end) {
        fiber_.task.copied += end - began;
        fiber_.time = fiber_.row_begun = end;
    }

    static inline constinit thread_local int loads_ = 0;

    VirtualCluster& cluster_;
    const Machine& machine_;
    VirtualClock& clock_;
    VirtualFiber& fiber_;
};
static_assert(WarpLike<VirtualWarp>);

}  // namespace ep

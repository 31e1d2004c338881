#pragma once

#include <atomic>
#include <chrono>
#include <cstring>

#include "exec/host/executor.h"
#include "exec/host/lines.h"
#include "exec/host/rows.h"
#include "exec/serial_lanes.h"
#include "exec/warp.h"

namespace ep {

// A warp on the host: its lanes run one after the other, and its waits go to the executor.
class HostWarp : public SerialLanes {
  public:
    static constexpr int kLanesAtOnce = 1;

    HostWarp(Executor& executor, const RankState& rank, Role role, int channel)
        : executor_(executor), rank_(rank), role_(role), channel_(channel) {}

    template <class F>
    void lanes(int count, F&& f) {
        for (int lane = 0; lane < count; ++lane) f(lane);
    }

    template <class F>
    bool met(int count, F&& need) {
        for (int lane = 0; lane < count; ++lane) {
            if (!is_met(need(lane))) return false;
        }
        return true;
    }

    template <class F>
    bool wait_all(Wait wait, int count, F&& need) {
        int last = -1;  // the rank that was last waited for
        auto condition = [&] {
            for (int lane = 0; lane < count; ++lane) {
                const WaitCondition mine = need(lane);
                if (is_met(mine)) continue;
                last = mine.peer;
                return false;
            }
            return true;
        };
        return wait_for(wait, count, need, condition, [&](auto&& f) { f(last); }) == Waited::Met;
    }

    template <class F>
    uint32_t wait_any(Wait wait, int count, F&& need) {
        uint32_t mask = 0;
        return wait_some(wait, count, need, mask, kForever) == Waited::Met ? mask : 0;
    }

    template <class F>
    Waited wait_any_for(Wait wait, int count, F&& need, uint64_t ns) {
        uint32_t mask = 0;
        return wait_some(wait, count, need, mask, ns);
    }

    void fail(Outcome outcome, Wait wait, const WaitCondition& need) {
        rank_.give_up();
        record(outcome, wait, need);
        rank_.abort(outcome);
    }

    template <CacheHint hint>
    void copy(void* dst, const void* src, size_t bytes) {
        if constexpr (hint == CacheHint::EvictFirst) {
            copy_streaming(dst, src, bytes);
        } else {
            std::memcpy(dst, src, bytes);
        }
    }

    template <CacheHint hint>
    void multicast(const PerLane<void*>& dsts, uint32_t mask, const void* src, size_t bytes) {
        for_each_lane(mask, [&](int lane) { copy<hint>(dsts[lane], src, bytes); });
    }

    template <CacheHint hint>
    void copy_each(const PerLane<void*>& dsts, const PerLane<const void*>& srcs, uint32_t mask,
                   size_t bytes) {
        for_each_lane(mask, [&](int lane) { std::memcpy(dsts[lane], srcs[lane], bytes); });
    }

    template <CacheHint hint>
    void stage(const void*, size_t) {}

    void quantize(const PerLane<void*>& dsts, uint32_t mask, const void* src, size_t count,
                  size_t scales_at, ScaleFormat format) {
        const size_t scales = scale_blocks(count) * scale_bytes(format);
        const char* first = nullptr;
        for_each_lane(mask, [&](int lane) {
            char* dst = static_cast<char*>(dsts[lane]);
            if (first) {
                std::memcpy(dst, first, count);
                std::memcpy(dst + scales_at, first + scales_at, scales);
            } else {
                quantize_row(reinterpret_cast<uint8_t*>(dst), dst + scales_at,
                             static_cast<const BFloat16*>(src), count, format);
                first = dst;
            }
        });
    }

    void zero(void* dst, size_t bytes) {
        if (bytes) std::memset(dst, 0, bytes);
    }

    template <Scope scope>
    void publish(uint64_t* flag, uint64_t value) {
        std::atomic_ref<uint64_t>(*flag).store(value, std::memory_order_release);
    }

    template <Scope scope, class F>
    void publish_lanes(int count, F&& f) {
        auto store = [&](uint64_t* flag, uint64_t value) { publish<scope>(flag, value); };
        for (int lane = 0; lane < count; ++lane) f(lane, store);
    }

    template <Scope scope>
    void credit(uint64_t* flag, uint64_t value) {
        publish<scope>(flag, value);
    }

    template <Scope scope, class F>
    void credit_lanes(int count, F&& f) {
        publish_lanes<scope>(count, f);
    }

    template <Scope scope>
    static uint64_t acquire(uint64_t* flag) {
        return std::atomic_ref<uint64_t>(*flag).load(std::memory_order_acquire);
    }

    uint64_t elapsed() const {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began_).count();
    }

    static void add(int32_t* count, int32_t n) { *count += n; }

    // The deadline stays that of the launch.
    void begin_half(Role role) {
        role_ = role;
        began_ = Clock::now();
    }

    static void raise(uint64_t* word, uint64_t least) {
        const std::atomic_ref<uint64_t> all(*word);
        uint64_t before = all.load(std::memory_order_relaxed);
        while (before < least &&
               !all.compare_exchange_weak(before, least, std::memory_order_relaxed)) {
        }
    }

    template <Scope scope>
    uint64_t arrive(uint64_t* counter, uint64_t n = 1) {
        return std::atomic_ref<uint64_t>(*counter).fetch_add(n, std::memory_order_acq_rel);
    }

    static void launch_dependents() {}

    static uint64_t take_number(uint64_t* counter) {
        return std::atomic_ref<uint64_t>(*counter).fetch_add(1, std::memory_order_acq_rel);
    }

    template <Scope scope>
    static void compare_exchange(uint64_t* word, uint64_t from, uint64_t to) {
        std::atomic_ref<uint64_t>(*word).compare_exchange_strong(
            from, to, std::memory_order_release, std::memory_order_relaxed);
    }

    static void store_word(uint64_t* word, uint64_t value) {
        std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_relaxed);
    }
    static uint64_t load_word(const uint64_t* word) {
        // An atomic_ref of C++20 takes nothing const.
        return std::atomic_ref(const_cast<uint64_t&>(*word)).load(std::memory_order_relaxed);
    }

    void send_lines(const PerLane<char*>& slots, uint32_t mask, const char* src, size_t bytes,
                    const Lines& lines, uint64_t tag, const char* scales, const ScalePlan& plan) {
        for_each_lane(mask, [&](int lane) {
            for (int line = lines.first; line < lines.end(); ++line) {
                write_line(slots[lane], line, src, bytes, scales, plan);
                publish<Scope::System>(line_tag(slots[lane], line), tag);
            }
        });
    }

    void quantize_lines(const PerLane<char*>& slots, uint32_t mask, const char* src, size_t count,
                        const Lines& lines, uint64_t tag, ScaleFormat format) {
        constexpr int kBlockBytes = Line::kBlock * Line::kPayload;
        uint8_t values[kBlockBytes];
        char scales[Line::kScales * sizeof(float)];
        for (int first = lines.first; first < lines.end(); first += Line::kBlock) {
            const size_t before = static_cast<size_t>(first) * Line::kPayload;
            const size_t here = std::min<size_t>(kBlockBytes, count - before);
            quantize_row(values, scales, reinterpret_cast<const BFloat16*>(src) + before, here,
                         format);
            const ScalePlan plan{scale_blocks(here), scale_bytes(format)};
            PerLane<char*> from;
            for_each_lane(mask, [&](int lane) { from[lane] = line_of(slots[lane], first); });
            send_lines(from, mask, reinterpret_cast<const char*>(values), here,
                       {0, Line::count(here)}, tag, scales, plan);
        }
    }

    bool receive_lines(Wait wait, const LineSource& source, const Lines& lines,
                       const PerLane<char*>& dsts, uint32_t mask, size_t bytes,
                       const PerLane<char*>& scales, const ScalePlan& plan) {
        for (int first = lines.first; first < lines.end(); first += 32) {
            const int count = lanes_from(first, lines.end());
            const LineTag expected{source.tag};
            auto tag = [&](int lane) {
                return LineTag{acquire<Scope::System>(line_tag(source.slot, first + lane))};
            };
            bool has_waited = false;
            auto need = [&](int lane) {
                const uint64_t number = tag(lane).number();
                has_waited |= number < expected.number();
                return WaitCondition{number, expected.number(), source.rank};
            };
            if (!wait_all(wait, count, need)) return false;
            if (source.waited && has_waited) raise(source.waited, elapsed());
            for (int lane = 0; lane < count; ++lane) {
                if (const uint64_t seen = tag(lane).value; seen != source.tag) {
                    fail(Outcome::Mismatch, Wait::None, {seen, source.tag, source.rank});
                    return false;
                }
                const int line = first + lane;
                for_each_lane(mask, [&](int row) {
                    read_line(line_of(source.slot, line), line, dsts[row], bytes, scales[row],
                              plan);
                });
            }
        }
        return true;
    }

    template <class T, class Weights>
    void send_sum(char* slot, const PerLane<const char*>& srcs, const Weights& weights,
                  uint32_t mask, size_t bytes, const Lines& lines, uint64_t tag) {
        alignas(T) char payload[Line::kPayload];
        PerLane<const void*> parts;
        for (int line = lines.first; line < lines.end(); ++line) {
            const size_t here = payload_of(bytes, line);
            for_each_lane(mask, [&](int lane) { parts[lane] = payload_in(srcs[lane], line); });
            sum<T, CacheHint::Keep>(payload, parts, weights, mask, here / sizeof(T));
            std::memcpy(line_of(slot, line), payload, here);
            publish<Scope::System>(line_tag(slot, line), tag);
        }
    }

    template <class T, class W, class Weights>
    bool receive_sum(Wait wait, const RowsToSum<W>& rows, const Weights& weights, char* dst,
                     size_t bytes, const Lines& lines) {
        const LineTag expected{rows.tag};
        PerLane<const void*> parts;
        for (int line = lines.first; line < lines.end(); ++line) {
            auto tag = [&](int lane) {
                return LineTag{
                    acquire<Scope::System>(line_tag(const_cast<char*>(rows.slot[lane]), line))};
            };
            auto need = [&](int lane) {
                if (!(rows.mask >> lane & 1)) return nothing_to_wait_for();
                return WaitCondition{tag(lane).number(), expected.number(), rows.rank[lane]};
            };
            if (!wait_all(wait, 32, need)) return false;
            const uint32_t mismatches = ballot(
                32, [&](int lane) { return rows.mask >> lane & 1 && tag(lane).value != rows.tag; });
            if (mismatches) {
                const int lane = lowest_lane(mismatches);
                fail(Outcome::Mismatch, Wait::None, {tag(lane).value, rows.tag, rows.rank[lane]});
                return false;
            }
            for_each_lane(rows.mask,
                          [&](int lane) { parts[lane] = line_of(rows.slot[lane], line); });
            sum<T, CacheHint::Keep>(dst + static_cast<size_t>(line) * Line::kPayload, parts,
                                    weights, rows.mask, payload_of(bytes, line) / sizeof(T));
        }
        return true;
    }

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr uint64_t kForever = ~uint64_t{0};

    // mask: receives the lanes whose need is met.
    template <class F>
    Waited wait_some(Wait wait, int count, F&& need, uint32_t& mask, uint64_t ns) {
        auto condition = [&] {
            return (mask = ballot(count, [&](int lane) { return is_met(need(lane)); })) != 0;
        };
        auto for_each_peer = [&](auto&& f) {
            for (int lane = 0; lane < count; ++lane) f(need(lane).peer);
        };
        return wait_for(wait, count, need, condition, for_each_peer, ns);
    }

    // for_each_peer(f): calls f for the ranks that the wait depends on.
    template <class F, class C, class Peers>
    Waited wait_for(Wait wait, int count, F&& need, C& condition, Peers&& for_each_peer,
                    uint64_t ns = kForever) {
        if (!executor_.preempts() && condition()) return Waited::Met;
        const uint64_t before = executor_.idle_ns();
        const WaitEnd end = executor_.wait(Condition(condition), rank_, ns);
        if (const uint64_t idle = executor_.idle_ns() - before)
            for_each_peer([&](int peer) { rank_.note_wait(peer, idle); });
        if (end == WaitEnd::Met) return Waited::Met;
        if (end == WaitEnd::Expired && ns != kForever) return Waited::Over;
        int lane = 0;
        WaitCondition missing{};
        auto is_missing = [&] {
            missing = need(lane);
            return !is_met(missing) && missing.peer >= 0;
        };
        while (lane < count && !is_missing()) ++lane;
        if (lane == count && condition()) return Waited::Met;  // in the last moment
        rank_.give_up();
        const Outcome outcome = end == WaitEnd::Expired ? Outcome::Timeout : Outcome::Aborted;
        if (lane < count) record(outcome, wait, missing);
        if (end == WaitEnd::Expired) rank_.abort(outcome);
        return Waited::Failed;
    }

    void record(Outcome outcome, Wait wait, const WaitCondition& need) {
        rank_.record({outcome, role_, wait, rank_.rank, channel_, need.peer, need.observed,
                      need.required, rank_.call});
    }

    Executor& executor_;
    const RankState& rank_;
    Role role_;
    int channel_;
    Clock::time_point began_ = Clock::now();
};

static_assert(LinesWarpLike<HostWarp>);

}  // namespace ep

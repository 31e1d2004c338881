#pragma once

#include "exec/host/host_warp.h"

namespace ep {

// A HostWarp that leaves out what a test must see missed: credits, or the release of what is
// published.
struct FaultyWarp : HostWarp {
    using HostWarp::HostWarp;
    static inline bool gives_credit = true, releases = true;

    template <Scope scope>
    void publish(uint64_t* word, uint64_t value) {
        if (releases) return HostWarp::publish<scope>(word, value);
        std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_relaxed);
    }
    template <Scope scope, class F>
    void publish_lanes(int count, F&& of_lane) {
        const auto store = [&](uint64_t* word, uint64_t value) { publish<scope>(word, value); };
        for (int lane = 0; lane < count; ++lane) of_lane(lane, store);
    }
    template <Scope scope>
    void credit(uint64_t* word, uint64_t value) {
        if (gives_credit) publish<scope>(word, value);
    }
    template <Scope scope, class F>
    void credit_lanes(int count, F&& of_lane) {
        if (gives_credit) publish_lanes<scope>(count, std::forward<F>(of_lane));
    }
};

}  // namespace ep

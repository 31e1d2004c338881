// What a simulation in virtual time consists of: GPUs with their shared resources, and heaps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "exec/virtual/clock.h"
#include "exec/virtual/machine.h"

namespace ep {

// A shared resource, which serves one after the other in the order in which they come.
struct Server {
    double free = 0, busy = 0;

    // Returns when a use that comes at `time` and takes `lasts` is done.
    double use(double time, double lasts) {
        free = std::max(free, time) + lasts;
        busy += lasts;
        return free;
    }
};

struct VirtualGpu {
    std::vector<Server> sms;
    Server memory, link_out, link_in, card_out, card_in;
};

// Rows may have fewer bytes than the real ones, which they stand for and which take the time.
struct RowSize {
    size_t payload = 1, scales = 0;
    double real_payload = 1, real_scales = 0, real_slot = 1;

    double real(size_t bytes) const {
        if (scales && bytes == scales) return real_scales;
        const double part = static_cast<double>(std::min(bytes, payload)) * real_payload /
                            static_cast<double>(payload);
        return scales && bytes >= payload + scales ? part + real_scales : part;
    }
};

// The ranks that are simulated: their GPUs and heaps.
struct VirtualCluster {
    Machine machine;
    VirtualClock clock;
    std::vector<VirtualGpu> gpus;
    std::vector<char*> heaps;             // by rank
    std::vector<ControlBlock*> controls;  // by rank; where the heaps begin, unless set otherwise
    size_t heap_bytes;
    RowSize row;
    bool rows_have_bytes = true;  // else rows only take time, and are not read
    bool sums_rows = false;       // else a sum is a copy of its first row
    double timeout = kNever;
    uint64_t call = 0;
    uint64_t rows_moved = 0;  // copies and sums so far

    VirtualCluster(const Machine& of, std::vector<char*> memory, size_t bytes, uint64_t seed = 0)
        : machine(of),
          clock(seed),
          gpus(memory.size()),
          heaps(std::move(memory)),
          heap_bytes(bytes) {
        for (size_t rank = 0; rank < heaps.size(); ++rank) {
            controls.push_back(reinterpret_cast<ControlBlock*>(heaps[rank]));
            by_address_.emplace_back(heaps[rank], static_cast<int>(rank));
        }
        std::sort(by_address_.begin(), by_address_.end());
        reset_servers();
    }

    // The rank whose heap an address is in; -1: none.
    int owner_of(const void* address) const {
        const auto* byte = static_cast<const char*>(address);
        const auto after = std::upper_bound(
            by_address_.begin(), by_address_.end(), byte,
            [](const char* wanted, const auto& heap) { return wanted < heap.first; });
        if (after == by_address_.begin()) return -1;
        const auto& [first, rank] = *(after - 1);
        return byte < first + heap_bytes ? rank : -1;
    }
    ControlBlock& control(int rank) const { return *controls[rank]; }

    void reset_servers() {
        for (VirtualGpu& gpu : gpus) {
            gpu = {};
            gpu.sms.resize(machine.sms);
        }
    }

  private:
    std::vector<std::pair<const char*, int>> by_address_;
};

}  // namespace ep

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

// What was done last to each byte of the memory that is tracked.
namespace simt {

// Who accessed a byte, in which of its steps.
struct Access {
    static constexpr uint32_t kUnfinished = ~uint32_t{0};
    static constexpr uint8_t kSeveralLanes = 32;

    uint32_t actor;
    uint32_t step;
    uint8_t lane = 0;
    bool by_engine = false;
    bool exists = true;

    static Access none() { return {0, 0, 0, false, false}; }
    bool operator==(const Access&) const = default;
};

struct Cell {
    Access write = Access::none(), read = Access::none();
    std::vector<Access> other_reads;  // in no order with `read`
};

class Shadow {
  public:
    void track(const void* memory, size_t bytes, const char* name) {
        regions_[address_of(memory)] = {bytes, name};
        answers_ = {};
    }
    void ignore(const void* memory, size_t bytes) {
        ignored_[address_of(memory)] = bytes;
        answers_ = {};
    }
    void forget(const void* memory) {
        const auto region = regions_.find(address_of(memory));
        if (region == regions_.end()) return;
        const uintptr_t first = region->first, end = first + region->second.bytes;
        std::erase_if(ignored_, [&](auto& i) { return i.first >= first && i.first < end; });
        regions_.erase(region);
        answers_ = {};
    }
    void clear() { pages_.clear(); }

    bool has(const void* memory) {
        const uintptr_t address = address_of(memory);
        Answer& answer = answers_[address / 4096 % answers_.size()];
        if (address < answer.first || address >= answer.end) {
            answer = {0, ~uintptr_t{0}};
            const bool is_tracked = narrow(answer, regions_, address,
                                           [](const Region& region) { return region.bytes; });
            const bool is_ignored =
                narrow(answer, ignored_, address, [](size_t bytes) { return bytes; });
            answer.has = is_tracked && !is_ignored;
        }
        return answer.has;
    }

    // "name + offset"
    std::string describe(uintptr_t address) const {
        const auto& [first, region] = *std::prev(regions_.upper_bound(address));
        return std::string(region.name) + " + " + std::to_string(address - first);
    }

    // f(cell, address) for all that happened to the bytes; where it happened to 16 of them alike
    // they share a cell.
    template <class F>
    void for_cells(const void* memory, size_t bytes, F&& f) {
        uintptr_t address = address_of(memory);
        for (const uintptr_t end = address + bytes; address < end;) {
            auto& page = pages_[address / (kUnit * kUnits)];
            if (!page) page = std::make_unique<Page>();
            const size_t unit = address / kUnit % kUnits, first = address % kUnit,
                         count = std::min<size_t>(kUnit - first, end - address);
            auto& split = page->bytes[unit];
            if (count < kUnit && !split) {
                split = std::make_unique<std::array<Cell, kUnit>>();
                split->fill(page->units[unit]);
            }
            if (split) {
                for (size_t i = 0; i < count; ++i) f((*split)[first + i], address + i);
            } else {
                f(page->units[unit], address);
            }
            address += count;
        }
    }

  private:
    static constexpr size_t kUnit = 16, kUnits = 64;
    struct Page {
        Cell units[kUnits];
        std::unique_ptr<std::array<Cell, kUnit>> bytes[kUnits];
    };
    struct Region {
        size_t bytes;
        const char* name;
    };

    static uintptr_t address_of(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

    // The same for all addresses from first to end.
    struct Answer {
        uintptr_t first = 0, end = 0;
        bool has = false;
    };

    // Whether one of these parts holds the address; the answer's interval becomes no longer than
    // that part, or than the gap between two of them.
    template <class T, class Size>
    static bool narrow(Answer& answer, const std::map<uintptr_t, T>& parts, uintptr_t address,
                       Size&& size) {
        const auto after = parts.upper_bound(address);
        if (after != parts.end()) answer.end = std::min(answer.end, after->first);
        if (after == parts.begin()) return false;
        const uintptr_t first = std::prev(after)->first,
                        end = first + size(std::prev(after)->second);
        const bool holds = address < end;
        answer.first = std::max(answer.first, holds ? first : end);
        if (holds) answer.end = std::min(answer.end, end);
        return holds;
    }

    std::map<uintptr_t, Region> regions_;
    std::map<uintptr_t, size_t> ignored_;
    std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
    std::array<Answer, 64> answers_ = {};
};

}  // namespace simt

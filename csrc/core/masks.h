#pragma once

#include <cstdint>

namespace ep {

// What a rank tells another to whom it has cut the link.
enum class Cut : uint64_t {
    None,
    Asked,   // the caller of either of them wanted it so: both go on without the other
    Silent,  // it has waited for the other in vain, and has taken it for dead
};

// Why a rank goes on without another, for its host to read at any time.
struct MaskedRank {
    static constexpr uint64_t kAsked = 1, kWaited = 2;

    uint64_t state;  // 0: it does not; kAsked; or kWaited + for what (Wait)
    uint64_t waited_ns;
};

}  // namespace ep

#pragma once

#include <cstdint>

namespace ep {

// What a rank tells another one that it has masked.
enum class MaskReason : uint64_t {
    None,
    Asked,   // a caller wrote to active_ranks: both go on, each without the other
    Silent,  // it waited for the other in vain and takes it for dead: the other one must end
};

// Why a rank has masked another, for its host to read at any time.
struct MaskedRank {
    static constexpr uint64_t kAsked = 1, kWaited = 2;

    uint64_t state;  // 0: it has not; kAsked; or kWaited + for what (Wait)
    uint64_t waited_ns;
};

}  // namespace ep

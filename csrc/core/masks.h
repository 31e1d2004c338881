#pragma once

#include <cstdint>

namespace ep {

// The reason that a rank gives another one when it masks it.
enum class MaskReason : uint64_t {
    None,
    Asked,   // a caller wrote to active_ranks: both go on, without each other
    Silent,  // it waited for the other in vain and takes it for dead: the other must end
};

// Why a rank has masked another, for its host to read at any time.
struct MaskedRank {
    static constexpr uint64_t kAsked = 1, kWaited = 2;

    uint64_t state;  // 0: not masked; kAsked; or kWaited + what it waited for (Wait)
    uint64_t waited_ns;
};

}  // namespace ep

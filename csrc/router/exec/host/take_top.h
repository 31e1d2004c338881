#pragma once

#include <cstdint>

namespace ep::router {

template <class K>
struct Pick {
    K key;
    int index;
};

// Team::take_top (exec/team.h): writes count picks.
void take_top(int32_t* keys, int n, int count, Pick<int32_t>* picks);
void take_top(int64_t* keys, int n, int count, Pick<int64_t>* picks);

}  // namespace ep::router

#pragma once

#include <cstdint>

namespace ep::router {

template <class K>
struct Choice {
    K key;
    int index;
};

// Team::take_top (exec/team.h): writes count choices.
void take_top(int32_t* keys, int n, int count, Choice<int32_t>* choices);
void take_top(int64_t* keys, int n, int count, Choice<int64_t>* choices);

}  // namespace ep::router

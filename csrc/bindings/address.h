#pragma once

#include <cstdint>

namespace ep {

// As Python has it.
using Address = uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace ep

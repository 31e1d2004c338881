#pragma once

#include <cstdint>

namespace ep {

// An address as Python passes it: tensors cross the binding as integers.
using Address = uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace ep

#pragma once

#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/heap.h"
#include "expect.h"

namespace ep {

// Called with all memory of tensors when it begins, and with 0 bytes when it ends.
inline void (*note_memory)(const void* memory, size_t bytes) = nullptr;

// Memory that nothing may write outside of, aligned as a GPU's allocator does.
template <class T>
struct GuardedMemory {
    using value_type = T;

    GuardedMemory() = default;
    template <class U>
    GuardedMemory(const GuardedMemory<U>&) {}

    T* allocate(size_t count) {
        const size_t bytes = count * sizeof(T);
        char* memory =
            static_cast<char*>(std::aligned_alloc(256, align_up(bytes + 2 * kGuard, 256)));
        for (size_t i = 0; i < kGuard; ++i) memory[i] = memory[kGuard + bytes + i] = kMark;
        if (note_memory) note_memory(memory + kGuard, bytes);
        return reinterpret_cast<T*>(memory + kGuard);
    }
    void deallocate(T* data, size_t count) {
        char* memory = reinterpret_cast<char*>(data) - kGuard;
        for (size_t i = 0; i < kGuard; ++i)
            EXPECT(memory[i] == kMark && memory[kGuard + count * sizeof(T) + i] == kMark);
        if (note_memory) note_memory(data, 0);
        std::free(memory);
    }
    bool operator==(const GuardedMemory&) const = default;

  private:
#if defined(__SANITIZE_ADDRESS__)
    static constexpr size_t kGuard = 0;  // which looks by itself
#else
    static constexpr size_t kGuard = 256;
#endif
    static constexpr char kMark = 0x5a;
};

template <class T>
using Tensor = std::vector<T, GuardedMemory<T>>;

}  // namespace ep

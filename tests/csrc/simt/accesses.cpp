// What code that was compiled with -fsanitize=thread calls before each of its accesses to memory,
// instead of ThreadSanitizer's own library: an order between lanes is found, or missed, in order.h.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "order.h"

#define ACCESSES(bytes)                                                             \
    void __tsan_read##bytes(void* address) { simt::order::read(address, bytes); }   \
    void __tsan_write##bytes(void* address) { simt::order::write(address, bytes); } \
    void __tsan_unaligned_read##bytes(void* a) { simt::order::read(a, bytes); }     \
    void __tsan_unaligned_write##bytes(void* a) { simt::order::write(a, bytes); }

extern "C" {

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* address, size_t bytes) { simt::order::read(address, bytes); }
void __tsan_write_range(void* address, size_t bytes) { simt::order::write(address, bytes); }

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}

// Of the host's code, which one thread runs.
uint64_t __tsan_atomic64_load(const volatile uint64_t* address, int) { return *address; }
void __tsan_atomic64_store(volatile uint64_t* address, uint64_t value, int) { *address = value; }
uint64_t __tsan_atomic64_fetch_add(volatile uint64_t* address, uint64_t value, int) {
    const uint64_t before = *address;
    *address = before + value;
    return before;
}
int __tsan_atomic64_compare_exchange_strong(volatile uint64_t* address, uint64_t* expected,
                                            uint64_t value, int, int) {
    const uint64_t before = *address;
    if (before != *expected) return *expected = before, 0;
    return *address = value, 1;
}
uint32_t __tsan_atomic32_load(const volatile uint32_t* address, int) { return *address; }
uint32_t __tsan_atomic32_fetch_add(volatile uint32_t* address, uint32_t value, int) {
    const uint32_t before = *address;
    *address = before + value;
    return before;
}
uint8_t __tsan_atomic8_load(const volatile uint8_t* address, int) { return *address; }
}

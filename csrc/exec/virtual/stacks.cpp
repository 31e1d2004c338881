#include "exec/virtual/stacks.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <stdexcept>

#if !defined(__x86_64__)
#error "virtual time switches stacks with instructions of x86-64"
#endif

// The registers that a call must leave as they are.
extern "C" void ep_switch_stacks(void** from, void* to);
asm(R"(
.text
.type ep_switch_stacks, @function
ep_switch_stacks:
    endbr64
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size ep_switch_stacks, . - ep_switch_stacks
)");

namespace ep {
namespace {

constexpr size_t kPerSlab = 256;  // a mapping each would be more than the kernel allows
constexpr int kSavedRegisters = 6;
constexpr uint64_t kCanary = 0x5eed5eed5eed5eed;  // at the end that nobody should reach

}  // namespace

Stacks::~Stacks() {
    for (void* slab : slabs_) munmap(slab, kPerSlab * kBytes);
}

void* Stacks::prepare(void (*entry)(), void** context) {
    if (free_.empty()) {
        void* slab = mmap(nullptr, kPerSlab * kBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (slab == MAP_FAILED) throw std::bad_alloc();
        slabs_.push_back(slab);
        for (size_t i = 0; i < kPerSlab; ++i)
            free_.push_back(static_cast<char*>(slab) + i * kBytes);
    }
    char* stack = static_cast<char*>(free_.back());
    free_.pop_back();
    *reinterpret_cast<uint64_t*>(stack) = kCanary;
    auto** top = reinterpret_cast<void**>(stack + kBytes);
    *--top = nullptr;  // aligned to 16 bytes after a call
    *--top = nullptr;
    *--top = nullptr;  // where entry would return to
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
    *context = top;
    return stack;
}

void Stacks::release(void* stack) {
    if (*static_cast<uint64_t*>(stack) != kCanary)
        throw std::logic_error("a stack of virtual time is too small");
    free_.push_back(stack);
}

void Stacks::switch_to(void** from, void* to) { ep_switch_stacks(from, to); }

}  // namespace ep

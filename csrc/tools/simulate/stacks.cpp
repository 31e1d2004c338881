#include "tools/simulate/stacks.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <stdexcept>

// Saves the callee-saved registers on this stack and restores them from the other one.
extern "C" void ep_switch_stacks(void** from, void* to);
#if defined(__x86_64__)
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
#elif defined(__aarch64__)
asm(R"(
.text
.type ep_switch_stacks, %function
ep_switch_stacks:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size ep_switch_stacks, . - ep_switch_stacks
)");
#else
#error "virtual time switches stacks with instructions of x86-64 or aarch64"
#endif

namespace ep {
namespace {

constexpr size_t kPerSlab = 256;  // one mapping each would be more than the kernel allows
#if defined(__x86_64__)
// Six registers, the switch's return address, and padding to 16 bytes as after a call.
constexpr int kWords = 10, kReturnAddress = 6;
#else
constexpr int kWords = 20, kReturnAddress = 11;
#endif
constexpr uint64_t kCanary = 0x5eed5eed5eed5eed;  // at the end that must not be reached

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
    auto** top = reinterpret_cast<void**>(stack + kBytes) - kWords;
    std::fill_n(top, kWords, nullptr);
    top[kReturnAddress] = reinterpret_cast<void*>(entry);
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

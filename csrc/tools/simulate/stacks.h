#pragma once

#include <cstddef>
#include <vector>

namespace ep {

// Runs code on stacks of its own, to continue where it was left. swapcontext would call the kernel
// for the signal mask each time, and a simulation switches millions of times.
class Stacks {
  public:
    static constexpr size_t kBytes = 64 << 10;

    Stacks() = default;
    Stacks(const Stacks&) = delete;
    ~Stacks();

    // Returns a stack on which the first switch_to calls entry(), which must not return.
    void* prepare(void (*entry)(), void** context);
    // Frees the stack for another use. Throws std::logic_error if it was too small.
    void release(void* stack);

    // Continues at `to`. A switch to *from continues here.
    static void switch_to(void** from, void* to);

  private:
    std::vector<void*> slabs_, free_;
};

}  // namespace ep

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace ep {

// Code that runs on a stack of its own and goes on where it was left. swapcontext would ask the
// kernel about signals each time, and a simulation switches millions of times.
class Stacks {
  public:
    static constexpr size_t kBytes = 64 << 10;

    Stacks() = default;
    Stacks(const Stacks&) = delete;
    ~Stacks();

    // A stack on which the first switch_to calls entry(). It must not return.
    void* prepare(void (*entry)(), void** context);
    // The stack is free for another. Throws std::logic_error if it was too small.
    void release(void* stack);

    // Goes on at `to`; what goes on at *from is back here.
    static void switch_to(void** from, void* to);

  private:
    std::vector<void*> slabs_, free_;
};

}  // namespace ep

#include "core/cuda/runtime.h"
#include "fabric/cuda/device_memory.h"

namespace ep {
namespace {

__global__ void add_one_kernel(unsigned long long* counter) { atomicAdd_system(counter, 1ull); }

}  // namespace

void add_one(const DeviceMemory& memory) {
    const DeviceGuard guard(memory.device());
    add_one_kernel<<<1, 1>>>(reinterpret_cast<unsigned long long*>(memory.data()));
    check_cuda(cudaGetLastError(), "an atomic on another GPU's memory");
    check_cuda(cudaDeviceSynchronize(), "an atomic on another GPU's memory");
}

uint64_t first_word(const DeviceMemory& memory) {
    const DeviceGuard guard(memory.device());
    uint64_t word = 0;
    check_cuda(cudaMemcpy(&word, memory.data(), sizeof(word), cudaMemcpyDefault), "cudaMemcpy");
    return word;
}

}  // namespace ep

#include "launch/cuda/side_stream.h"

#include <cuda_runtime.h>

#include "core/cuda/runtime.h"

namespace ep {
namespace {

void order(CudaStream earlier, CudaStream later, const Resource<void>& event) {
    const auto recorded = static_cast<cudaEvent_t>(event.get());
    check_cuda(cudaEventRecord(recorded, static_cast<cudaStream_t>(earlier)), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(static_cast<cudaStream_t>(later), recorded, 0),
               "cudaStreamWaitEvent");
}

}  // namespace

SideStream::SideStream(int device, int all, int busy)
    : all_sms(all),
      has_room(3 * (all - busy) >= all),
      sms(has_room ? all - busy : all),
      stream_(side_stream(device)),
      forked_(event(device)),
      joined_(event(device)) {}

CudaStream SideStream::fork(CudaStream caller) const {
    if (!has_room) return caller;
    order(caller, stream_.get(), forked_);
    return stream_.get();
}

void SideStream::join(CudaStream caller) const {
    if (has_room) order(stream_.get(), caller, joined_);
}

}  // namespace ep

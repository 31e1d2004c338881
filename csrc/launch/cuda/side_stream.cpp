#include "launch/cuda/side_stream.h"

#include <cuda_runtime.h>

#include "core/cuda/runtime.h"

namespace ep {
namespace {

void wait(CudaStream stream, CudaEvent event) {
    check_cuda(
        cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0),
        "cudaStreamWaitEvent");
}

void order(CudaStream earlier, CudaStream later, const Resource<void>& event) {
    check_cuda(
        cudaEventRecord(static_cast<cudaEvent_t>(event.get()), static_cast<cudaStream_t>(earlier)),
        "cudaEventRecord");
    wait(later, event.get());
}

}  // namespace

SideStream::SideStream(int device, int all, int busy)
    : all_sms(all),
      has_room(3 * (all - busy) >= all),
      sms(has_room ? all - busy : all),
      stream_(side_stream(device)),
      forked_(event(device)),
      begun_(event(device)),
      joined_(event(device)) {}

CudaStream SideStream::fork(CudaStream caller) const {
    if (!has_room) return caller;
    order(caller, stream_.get(), forked_);
    return stream_.get();
}

CudaEvent SideStream::begun(CudaStream caller) const {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(caller), &capture),
               "cudaStreamIsCapturing");
    return has_room && capture == cudaStreamCaptureStatusActive ? begun_.get() : nullptr;
}

void SideStream::wait_for(CudaEvent begun, CudaStream caller) const {
    if (begun) wait(caller, begun);
}

bool SideStream::orders_graphs() {
    constexpr int kKnowsEvent = 12030;
    int version = 0;
    check_cuda(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
    return version >= kKnowsEvent;
}

void SideStream::join(CudaStream caller) const {
    if (has_room) order(stream_.get(), caller, joined_);
}

}  // namespace ep

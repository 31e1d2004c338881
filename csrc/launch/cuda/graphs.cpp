#include "launch/cuda/graphs.h"

#include <cuda_runtime.h>

#include "core/cuda/runtime.h"

namespace ep {
namespace {

using Count = std::shared_ptr<std::atomic<int>>;

// Runs on one of CUDA's threads, where calls of CUDA are not allowed.
void count_down(void* count) {
    const std::unique_ptr<Count> owned(static_cast<Count*>(count));
    --**owned;
}

cudaError_t find_capture(cudaStream_t stream, cudaStreamCaptureStatus* status,
                         unsigned long long* number, cudaGraph_t* graph) {
#if CUDART_VERSION >= 13000
    return cudaStreamGetCaptureInfo(stream, status, number, graph, nullptr, nullptr, nullptr);
#else
    return cudaStreamGetCaptureInfo_v2(stream, status, number, graph, nullptr, nullptr);
#endif
}

}  // namespace

void CudaGraphs::note(CudaStream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long number = 0;
    cudaGraph_t graph = nullptr;
    check_cuda(find_capture(static_cast<cudaStream_t>(stream), &status, &number, &graph),
               "cudaStreamGetCaptureInfo");
    if (status != cudaStreamCaptureStatusActive || number == noted_) return;
    cudaUserObject_t object = nullptr;
    auto count = std::make_unique<Count>(alive_);
    check_cuda(
        cudaUserObjectCreate(&object, count.get(), count_down, 1, cudaUserObjectNoDestructorSync),
        "cudaUserObjectCreate");
    count.release();
    ++*alive_;
    const cudaError_t error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
    if (error != cudaSuccess) cudaUserObjectRelease(object, 1);  // counts down
    check_cuda(error, "cudaGraphRetainUserObject");
    noted_ = number;
}

}  // namespace ep

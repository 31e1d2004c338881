#include "router/launch/cuda/launch_rows.h"
#include "router/launch/router.h"
#include "router/row/backward_row.h"

namespace ep {
namespace router {
namespace {

template <class R>
size_t backward_bytes(const RouterConfig& config) {
    const size_t wide = 2 * size_t(config.experts) + 2 * kMaxTopk;  // reals
    return align_up(wide * sizeof(R) + kMaxTopk * sizeof(int32_t), 16);
}

template <class Storage>
__global__ void __launch_bounds__(kMaxThreads)
    router_backward(const RouterConfig config, const RouterBackward args,
                    const int bytes_per_warp) {
    using R = Real<Storage>;
    extern __shared__ __align__(16) unsigned char memory[];
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= args.tokens) return;
    ScratchArrays arrays(memory + threadIdx.y * bytes_per_warp);
    BackwardScratch<R> scratch;
    scratch.score = arrays.take<R>(config.experts);
    scratch.grad = arrays.take<R>(config.experts);
    scratch.choice_score = arrays.take<R>(kMaxTopk);
    scratch.choice_grad = arrays.take<R>(kMaxTopk);
    scratch.id = arrays.take<int32_t>(kMaxTopk);
    WarpTeam team{static_cast<int>(threadIdx.x)};
    backward_row<Storage>(team, config, args, row, scratch);
}

template <class Storage>
void launch(const RouterConfig& config, const RouterBackward& args, cudaStream_t stream) {
    launch_rows(router_backward<Storage>, config, args, backward_bytes<Real<Storage>>(config),
                stream);
}

}  // namespace
}  // namespace router

void router_backward_cuda(const RouterConfig& config, const RouterBackward& args,
                          void* stream_handle) {
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    with_type(args.dtype, [&]<class T>() { router::launch<T>(config, args, stream); });
}

}  // namespace ep

#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "exec/warp.h"

namespace ep {

// How bytes leave a rank. Offsets are into the symmetric heap.
//
//   own<T>(offset), peer<T>(local, offset)      memory of this rank, and of a rank of the same
//   node: plain loads and stores rail<T>(node, offset)                       memory of the rank of
//   this rail on another node, where kMapsRail: plain stores put(warp, channel, node, dst, src,
//   bytes)   one-sided write to that rank. `src` lies in the own heap and must keep its value until
//   the
//                                               other side is known to have it
//   put_signal(warp, channel, node, flag, from, to)   moves the flag there on; seen after all puts
//   before it on that (channel, node), and after
//                                               all stores to the rail that this warp wrote or
//                                               acquired. The last one left the flag at `from`: a
//                                               fabric may set it, or add to it
//   put_credit(warp, channel, node, flag, from, to)   the same for what was read, by this warp or
//   those that it acquired from. In no order with
//                                               puts, nor with other credits: a fabric may set the
//                                               flag only if its own keep theirs
//   acquire_signal<W>(channel, flag)            this rank's flag, by a lane; whoever sees a signal
//   sees the puts before it
template <class F, class W>
concept FabricLike =
    WarpLike<W> && requires(F& fabric, W& warp, size_t offset, uint64_t from, uint64_t to) {
        { fabric.template own<uint64_t>(offset) } -> std::same_as<uint64_t*>;
        { fabric.template peer<uint64_t>(0, offset) } -> std::same_as<uint64_t*>;
        requires !F::kMapsRail || requires { fabric.template rail<uint64_t>(0, offset); };
        fabric.put(warp, 0, 0, offset, offset, offset);
        fabric.put_signal(warp, 0, 0, offset, from, to);
        fabric.put_credit(warp, 0, 0, offset, from, to);
        { fabric.template acquire_signal<W>(0, offset) } -> std::same_as<uint64_t>;
    };

}  // namespace ep

#pragma once

#include "launch/cuda/resource.h"

namespace ep {

// A second stream, whose launches run at the same time as a launch on the caller's stream, on the
// SMs that the latter leaves free.
class SideStream {
  public:
    SideStream(int device, int all_sms, int busy_sms);

    // Returns the stream for the concurrent launches, which run after all that is on the caller's
    // stream now. Without room it is the caller's stream.
    CudaStream fork(CudaStream caller) const;
    // Returns an event for the launch on the second stream to record once all its blocks have
    // begun; null outside of a capture, where the order of launches is enough. A graph may run its
    // branches in any order, so the caller's next launch must wait for the event.
    CudaEvent begun(CudaStream caller) const;
    // Makes later launches on the caller's stream wait for `begun`, unless it is null.
    void wait_for(CudaEvent begun, CudaStream caller) const;
    // Whether the event of begun() orders a graph, which takes a driver of CUDA 12.3 or later.
    static bool orders_graphs();
    // Makes later launches on the caller's stream wait for those on the second stream.
    void join(CudaStream caller) const;

    const int all_sms;
    const bool has_room;  // a third of the SMs is free; with fewer the caller's launch would wait
    const int sms;        // SMs for launches on the second stream

  private:
    Resource<void> stream_, forked_, begun_, joined_;
};

}  // namespace ep

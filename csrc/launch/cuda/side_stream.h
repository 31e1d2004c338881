#pragma once

#include "launch/cuda/resource.h"
#include "launch/cuda/stream.h"

namespace ep {

// A second stream: its launches run at the same time as one of the caller's, on the SMs that this
// one leaves free.
class SideStream {
  public:
    SideStream(int device, int all_sms, int busy_sms);

    // What is launched on the stream that this returns waits for what the caller's holds now:
    // another stream, or the caller's own where there is no room.
    CudaStream fork(CudaStream caller) const;
    // For the launch there, which what comes next on the caller's stream waits for in a graph: the
    // event that it shall record once all its blocks have begun. A graph may run its branches in
    // any order; outside of a capture the order of launches is enough, and this is null.
    CudaEvent begun(CudaStream caller) const;
    // What is launched on the caller's stream from now on comes after that event, if it is one.
    void wait_for(CudaEvent begun, CudaStream caller) const;
    // Whether such an event orders a graph: drivers before CUDA 12.3 do not know it.
    static bool orders_graphs();
    // What is launched on the caller's stream from now on waits for that.
    void join(CudaStream caller) const;

    const int all_sms;
    const bool has_room;  // a third is free: on fewer they would hold up the caller's launch
    const int sms;        // for launches of the second stream

  private:
    Resource<void> stream_, forked_, begun_, joined_;
};

}  // namespace ep

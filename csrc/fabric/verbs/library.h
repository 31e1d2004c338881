#pragma once

#include <memory>
#include <string>

#include "fabric/verbs/abi.h"

namespace ep::verbs {

// libibverbs, loaded on demand. Never unloaded: its drivers leave threads' data behind.
class Library {
  public:
    // name: as dlopen takes it. Throws std::runtime_error that says what is missing. Before its
    // first use in the process the library is told that the process may fork: registered memory
    // then stays with the parent.
    static std::shared_ptr<const Library> load(const std::string& name);

    // Why a fork may take memory away from cards; "" if it does not.
    std::string fork_error;

    Device** (*get_device_list)(int* count);
    void (*free_device_list)(Device** list);
    Context* (*open_device)(Device* device);
    int (*close_device)(Context* context);
    int (*query_device)(Context* context, DeviceAttr* found);
    int (*query_port)(Context* context, uint8_t port, PortAttr* found);
    int (*query_gid)(Context* context, uint32_t port, uint32_t index, GidEntry* found,
                     uint32_t flags, size_t bytes);
    Pd* (*alloc_pd)(Context* context);
    int (*dealloc_pd)(Pd* pd);
    Mr* (*reg_mr)(Pd* pd, void* address, size_t bytes, uint64_t begin, unsigned access);
    int (*dereg_mr)(Mr* mr);
    Cq* (*create_cq)(Context* context, int entries, void* cq_context, void* channel, int vector);
    int (*destroy_cq)(Cq* cq);
    Qp* (*create_qp)(Pd* pd, QpInitAttr* attr);
    int (*modify_qp)(Qp* qp, QpAttr* attr, int mask);
    int (*destroy_qp)(Qp* qp);
};

}  // namespace ep::verbs

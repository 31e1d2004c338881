#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "fabric/verbs/abi.h"

namespace ep::verbs {

// The ABI of libmlx5.so.1, as in infiniband/mlx5dv.h: see abi.h.

struct CqInitAttr {  // of libibverbs
    static constexpr uint32_t kHasFlags = 1 << 0, kIgnoreOverrun = 1 << 1;

    uint32_t entries;
    void *cq_context, *channel;
    uint32_t vector;
    uint64_t completion_fields;
    uint32_t has, flags;
    Pd* parent_domain;
};

struct Mlx5CqInitAttr {
    static constexpr uint64_t kHasEntryBytes = 1 << 2;

    uint64_t has;
    uint8_t compression;
    uint32_t flags;
    uint16_t entry_bytes;
};

struct Mlx5Ring {
    void* memory;
    uint32_t count, stride;
};

struct Mlx5Qp {
    uint32_t* doorbell;
    Mlx5Ring send, receive;
    struct {
        void* address;
        uint32_t bytes;
    } bell;
    uint64_t has;
    off_t bell_offset;
    uint32_t numbers[4];
    uint64_t icm_address;
};

struct Mlx5Cq {
    void* memory;
    uint32_t* doorbell;
    uint32_t count, entry_bytes;
    void* bell;
    uint32_t number;
    uint64_t has;
};

struct Mlx5Objects {
    static constexpr uint64_t kQp = 1 << 0, kCq = 1 << 1;

    struct {
        Qp* in;
        Mlx5Qp* out;
    } qp;
    struct {
        Cq* in;
        Mlx5Cq* out;
    } cq;
    void* others[10];
};

enum Mlx5Syndrome : uint8_t {  // of a completion with an error
    kMlx5LocalLength = 0x01,
    kMlx5LocalOperation = 0x02,
    kMlx5LocalProtection = 0x04,
    kMlx5Flushed = 0x05,
    kMlx5BadResponse = 0x10,
    kMlx5LocalAccess = 0x11,
    kMlx5RemoteInvalidRequest = 0x12,
    kMlx5RemoteAccess = 0x13,
    kMlx5RemoteOperation = 0x14,
    kMlx5RetriesExceeded = 0x15,
    kMlx5ReceiverNotReady = 0x16,
};

// libmlx5, the user-space driver of NVIDIA's cards, loaded on demand and never unloaded.
class Mlx5 {
  public:
    // name: as dlopen takes it. Throws std::runtime_error that says what is missing.
    static std::shared_ptr<const Mlx5> load(const std::string& name);

    bool (*is_supported)(Device* device);
    Cq* (*create_cq)(Context* context, CqInitAttr* attr, Mlx5CqInitAttr* own);
    int (*init_objects)(Mlx5Objects* objects, uint64_t which);
};

}  // namespace ep::verbs

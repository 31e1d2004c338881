#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

// The ABI of libibverbs.so.1, unchanged since rdma-core began. The library is loaded where it is
// installed, and not needed to build. Fields keep their places; names say what is used.
// tests/csrc/verbs_abi.cpp compares all of it with infiniband/verbs.h where that is installed.
namespace ep::verbs {

struct Context;
struct Cq;
struct Pd;  // a protection domain: its content is the library's

enum Transport : int { kInfiniBandTransport = 0 };  // and RoCE
enum LinkLayer : uint8_t { kInfiniBand = 1, kEthernet = 2 };
enum GidType : uint32_t { kGidInfiniBand = 0, kGidRoceV1 = 1, kGidRoceV2 = 2 };
enum PortState : int { kPortActive = 4 };
enum AtomicCap : int { kNoAtomics = 0 };
enum QpType : int { kReliableConnection = 2 };
enum QpState : int { kReset, kInit, kReadyToReceive, kReadyToSend, kSqDrained, kSqError, kError };
enum WrOpcode : int { kRdmaWrite = 0, kFetchAndAdd = 6 };
enum SendFlags : unsigned { kSignaled = 1 << 1 };
enum WcStatus : int {
    kSuccess = 0,
    kLocalLength = 1,
    kLocalOperation = 2,
    kLocalProtection = 4,
    kFlushed = 5,
    kBadResponse = 7,
    kLocalAccess = 8,
    kRemoteInvalidRequest = 9,
    kRemoteAccess = 10,
    kRemoteOperation = 11,
    kRetriesExceeded = 12,
    kReceiverNotReady = 13,
    kFatal = 19,
    kGeneral = 21,
};
enum Access : unsigned {
    kLocalWrite = 1,
    kRemoteWrite = 1 << 1,
    kRemoteAtomic = 1 << 3,
    kRelaxedOrdering = 1 << 20,
};
enum QpAttrMask : int {
    kQpState = 1 << 0,
    kQpAccessFlags = 1 << 3,
    kQpPkeyIndex = 1 << 4,
    kQpPort = 1 << 5,
    kQpAddress = 1 << 7,
    kQpPathMtu = 1 << 8,
    kQpTimeout = 1 << 9,
    kQpRetryCount = 1 << 10,
    kQpRnrRetry = 1 << 11,
    kQpRqPsn = 1 << 12,
    kQpMaxRdAtomic = 1 << 13,
    kQpMinRnrTimer = 1 << 15,
    kQpSqPsn = 1 << 16,
    kQpMaxDestRdAtomic = 1 << 17,
    kQpDestination = 1 << 20,
};

union Gid {
    uint8_t raw[16];
    uint64_t words[2];
};

struct GidEntry {
    Gid gid;
    uint32_t index, port, type, interface;
};

struct Device {
    void* operations[2];
    int node_type, transport;
    char name[64], dev_name[64], dev_path[256], ibdev_path[256];
};

struct DeviceAttr {
    char firmware[64];
    uint64_t node_guid, image_guid, max_mr_size, page_sizes;
    uint32_t vendor, part, hardware;
    int max_qp, max_qp_wr;
    unsigned capabilities;
    int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd;
    int max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom;
    int atomic_cap;
    int unused[14];
    uint16_t max_pkeys;
    uint8_t ack_delay, ports;
};

// The library's own function, which programs reach through an inline function of its header, fills
// only the fields before port_cap_flags2: the caller sets the rest to 0.
struct PortAttr {
    int state, max_mtu, active_mtu, gids;
    uint32_t capabilities, max_message, bad_pkeys, qkey_violations;
    uint16_t pkeys, lid, sm_lid;
    uint8_t lmc, max_vl, sm_sl, subnet_timeout, init_type, width, speed, phys_state;
    uint8_t link_layer, flags;
    uint16_t capabilities2;
};

struct Mr {
    Context* context;
    Pd* pd;
    void* address;
    size_t length;
    uint32_t handle, lkey, rkey;
};

struct Wc {
    uint64_t wr_id;
    int status, opcode;
    uint32_t vendor_error, bytes, immediate, qp, source_qp;
    unsigned flags;
    uint16_t pkey_index, source_lid;
    uint8_t sl, dlid_bits;
};

struct QpCap {
    uint32_t send_wr, receive_wr, send_sge, receive_sge, inline_data;
};

struct QpInitAttr {
    void* qp_context;
    Cq *send_cq, *receive_cq;
    void* srq;
    QpCap cap;
    int type, all_signaled;
};

struct GlobalRoute {
    Gid destination;
    uint32_t flow_label;
    uint8_t source_index, hop_limit, traffic_class;
};

struct AddressVector {
    GlobalRoute route;
    uint16_t lid;
    uint8_t sl, path_bits, static_rate, is_global, port;
};

struct QpAttr {
    int state, current_state, path_mtu, migration;
    uint32_t qkey, rq_psn, sq_psn, destination_qp;
    unsigned access;
    QpCap cap;
    AddressVector address, alternative;
    uint16_t pkey_index, alternative_pkey_index;
    uint8_t notifies_drained, draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port;
    uint8_t timeout, retries, rnr_retries, alternative_port, alternative_timeout;
    uint32_t rate_limit;
};

struct Sge {
    uint64_t address;
    uint32_t bytes, lkey;
};

struct SendWr {
    uint64_t wr_id;
    SendWr* next;
    Sge* pieces;
    int piece_count, opcode;
    unsigned flags;
    uint32_t immediate;
    union {
        struct {
            uint64_t address;
            uint32_t rkey;
        } rdma;
        struct {
            uint64_t address, add, swap;
            uint32_t rkey;
        } atomic;
    };
    void* unused[7];
};

struct Qp {
    Context* context;
    void* qp_context;
    Pd* pd;
    Cq *send_cq, *receive_cq;
    void* srq;
    uint32_t handle, number;
    int state, type;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t events;
};

struct Cq {
    Context* context;
    void *channel, *cq_context;
    uint32_t handle;
    int entries;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t completion_events, async_events;
};

// What ibv_poll_cq and ibv_post_send call: they are not symbols of the library.
struct ContextOps {
    void* before_poll[11];
    int (*poll_cq)(Cq* cq, int most, Wc* found);
    void* between[13];
    int (*post_send)(Qp* qp, SendWr* first, SendWr** bad);
    void* after_post[6];
};

struct Context {
    Device* device;
    ContextOps ops;
    int command_fd, async_fd, completion_vectors;
    pthread_mutex_t mutex;
    void* extension;
};

}  // namespace ep::verbs

// The own declarations of libibverbs' interface (fabric/verbs/abi.h), and of libmlx5's
// (fabric/verbs/mlx5.h), beside their headers, where these are installed: sizes, places and
// numbers. Elsewhere it says that nothing was compared.

#include <cstdio>

#include "fabric/verbs/abi.h"

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>

using namespace ep;
using namespace ep::verbs;
#define SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs))
#define SAME_PLACE(ours, field, theirs, their_field)                        \
    static_assert(offsetof(ours, field) == offsetof(theirs, their_field) && \
                  sizeof(ours::field) == sizeof(theirs::their_field))
#define SAME_NUMBER(ours, theirs) static_assert(ours == static_cast<unsigned>(theirs))

SAME_SIZE(Gid, ibv_gid);
SAME_SIZE(GidEntry, ibv_gid_entry);
SAME_PLACE(GidEntry, type, ibv_gid_entry, gid_type);
SAME_SIZE(Device, ibv_device);
SAME_PLACE(Device, transport, ibv_device, transport_type);
SAME_PLACE(Device, name, ibv_device, name);
SAME_SIZE(DeviceAttr, ibv_device_attr);
SAME_PLACE(DeviceAttr, max_qp_wr, ibv_device_attr, max_qp_wr);
SAME_PLACE(DeviceAttr, max_qp_rd_atom, ibv_device_attr, max_qp_rd_atom);
SAME_PLACE(DeviceAttr, max_qp_init_rd_atom, ibv_device_attr, max_qp_init_rd_atom);
SAME_PLACE(DeviceAttr, atomic_cap, ibv_device_attr, atomic_cap);
SAME_PLACE(DeviceAttr, ports, ibv_device_attr, phys_port_cnt);
// Later headers have members behind these, which ibv_query_port, the exported symbol, leaves alone.
static_assert(sizeof(PortAttr) <= sizeof(ibv_port_attr));
SAME_PLACE(PortAttr, state, ibv_port_attr, state);
SAME_PLACE(PortAttr, active_mtu, ibv_port_attr, active_mtu);
SAME_PLACE(PortAttr, gids, ibv_port_attr, gid_tbl_len);
SAME_PLACE(PortAttr, lid, ibv_port_attr, lid);
SAME_PLACE(PortAttr, link_layer, ibv_port_attr, link_layer);
SAME_SIZE(Mr, ibv_mr);
SAME_PLACE(Mr, lkey, ibv_mr, lkey);
SAME_PLACE(Mr, rkey, ibv_mr, rkey);
SAME_SIZE(Wc, ibv_wc);
SAME_PLACE(Wc, status, ibv_wc, status);
SAME_PLACE(Wc, vendor_error, ibv_wc, vendor_err);
SAME_PLACE(Wc, qp, ibv_wc, qp_num);
SAME_SIZE(QpCap, ibv_qp_cap);
SAME_SIZE(QpInitAttr, ibv_qp_init_attr);
SAME_PLACE(QpInitAttr, send_cq, ibv_qp_init_attr, send_cq);
SAME_PLACE(QpInitAttr, receive_cq, ibv_qp_init_attr, recv_cq);
SAME_PLACE(QpInitAttr, cap, ibv_qp_init_attr, cap);
SAME_PLACE(QpInitAttr, type, ibv_qp_init_attr, qp_type);
SAME_SIZE(GlobalRoute, ibv_global_route);
SAME_PLACE(GlobalRoute, source_index, ibv_global_route, sgid_index);
SAME_PLACE(GlobalRoute, hop_limit, ibv_global_route, hop_limit);
SAME_SIZE(AddressVector, ibv_ah_attr);
SAME_PLACE(AddressVector, lid, ibv_ah_attr, dlid);
SAME_PLACE(AddressVector, is_global, ibv_ah_attr, is_global);
SAME_PLACE(AddressVector, port, ibv_ah_attr, port_num);
SAME_SIZE(QpAttr, ibv_qp_attr);
SAME_PLACE(QpAttr, state, ibv_qp_attr, qp_state);
SAME_PLACE(QpAttr, path_mtu, ibv_qp_attr, path_mtu);
SAME_PLACE(QpAttr, rq_psn, ibv_qp_attr, rq_psn);
SAME_PLACE(QpAttr, sq_psn, ibv_qp_attr, sq_psn);
SAME_PLACE(QpAttr, destination_qp, ibv_qp_attr, dest_qp_num);
SAME_PLACE(QpAttr, access, ibv_qp_attr, qp_access_flags);
SAME_PLACE(QpAttr, address, ibv_qp_attr, ah_attr);
SAME_PLACE(QpAttr, pkey_index, ibv_qp_attr, pkey_index);
SAME_PLACE(QpAttr, max_rd_atomic, ibv_qp_attr, max_rd_atomic);
SAME_PLACE(QpAttr, max_dest_rd_atomic, ibv_qp_attr, max_dest_rd_atomic);
SAME_PLACE(QpAttr, min_rnr_timer, ibv_qp_attr, min_rnr_timer);
SAME_PLACE(QpAttr, port, ibv_qp_attr, port_num);
SAME_PLACE(QpAttr, timeout, ibv_qp_attr, timeout);
SAME_PLACE(QpAttr, retries, ibv_qp_attr, retry_cnt);
SAME_PLACE(QpAttr, rnr_retries, ibv_qp_attr, rnr_retry);
SAME_SIZE(Sge, ibv_sge);
SAME_PLACE(Sge, address, ibv_sge, addr);
SAME_PLACE(Sge, bytes, ibv_sge, length);
SAME_PLACE(Sge, lkey, ibv_sge, lkey);
SAME_SIZE(SendWr, ibv_send_wr);
SAME_PLACE(SendWr, next, ibv_send_wr, next);
SAME_PLACE(SendWr, pieces, ibv_send_wr, sg_list);
SAME_PLACE(SendWr, piece_count, ibv_send_wr, num_sge);
SAME_PLACE(SendWr, opcode, ibv_send_wr, opcode);
SAME_PLACE(SendWr, flags, ibv_send_wr, send_flags);
SAME_PLACE(SendWr, rdma.address, ibv_send_wr, wr.rdma.remote_addr);
SAME_PLACE(SendWr, rdma.rkey, ibv_send_wr, wr.rdma.rkey);
SAME_PLACE(SendWr, atomic.address, ibv_send_wr, wr.atomic.remote_addr);
SAME_PLACE(SendWr, atomic.add, ibv_send_wr, wr.atomic.compare_add);
SAME_PLACE(SendWr, atomic.rkey, ibv_send_wr, wr.atomic.rkey);
SAME_SIZE(Qp, ibv_qp);
SAME_PLACE(Qp, context, ibv_qp, context);
SAME_PLACE(Qp, number, ibv_qp, qp_num);
SAME_SIZE(Cq, ibv_cq);
SAME_PLACE(Cq, context, ibv_cq, context);
SAME_SIZE(ContextOps, ibv_context_ops);
SAME_PLACE(ContextOps, poll_cq, ibv_context_ops, poll_cq);
SAME_PLACE(ContextOps, post_send, ibv_context_ops, post_send);
SAME_SIZE(Context, ibv_context);
SAME_PLACE(Context, ops, ibv_context, ops);
SAME_PLACE(Context, async_fd, ibv_context, async_fd);

SAME_NUMBER(kInfiniBandTransport, IBV_TRANSPORT_IB);
SAME_NUMBER(kInfiniBand, IBV_LINK_LAYER_INFINIBAND);
SAME_NUMBER(kEthernet, IBV_LINK_LAYER_ETHERNET);
SAME_NUMBER(kGidInfiniBand, IBV_GID_TYPE_IB);
SAME_NUMBER(kGidRoceV1, IBV_GID_TYPE_ROCE_V1);
SAME_NUMBER(kGidRoceV2, IBV_GID_TYPE_ROCE_V2);
SAME_NUMBER(kPortActive, IBV_PORT_ACTIVE);
SAME_NUMBER(kNoAtomics, IBV_ATOMIC_NONE);
SAME_NUMBER(kReliableConnection, IBV_QPT_RC);
SAME_NUMBER(kInit, IBV_QPS_INIT);
SAME_NUMBER(kReadyToReceive, IBV_QPS_RTR);
SAME_NUMBER(kReadyToSend, IBV_QPS_RTS);
SAME_NUMBER(kError, IBV_QPS_ERR);
SAME_NUMBER(kRdmaWrite, IBV_WR_RDMA_WRITE);
SAME_NUMBER(kFetchAndAdd, IBV_WR_ATOMIC_FETCH_AND_ADD);
SAME_NUMBER(kSignaled, IBV_SEND_SIGNALED);
SAME_NUMBER(kSuccess, IBV_WC_SUCCESS);
SAME_NUMBER(kLocalLength, IBV_WC_LOC_LEN_ERR);
SAME_NUMBER(kLocalOperation, IBV_WC_LOC_QP_OP_ERR);
SAME_NUMBER(kLocalProtection, IBV_WC_LOC_PROT_ERR);
SAME_NUMBER(kFlushed, IBV_WC_WR_FLUSH_ERR);
SAME_NUMBER(kBadResponse, IBV_WC_BAD_RESP_ERR);
SAME_NUMBER(kLocalAccess, IBV_WC_LOC_ACCESS_ERR);
SAME_NUMBER(kRemoteInvalidRequest, IBV_WC_REM_INV_REQ_ERR);
SAME_NUMBER(kRemoteAccess, IBV_WC_REM_ACCESS_ERR);
SAME_NUMBER(kRemoteOperation, IBV_WC_REM_OP_ERR);
SAME_NUMBER(kRetriesExceeded, IBV_WC_RETRY_EXC_ERR);
SAME_NUMBER(kReceiverNotReady, IBV_WC_RNR_RETRY_EXC_ERR);
SAME_NUMBER(kFatal, IBV_WC_FATAL_ERR);
SAME_NUMBER(kGeneral, IBV_WC_GENERAL_ERR);
SAME_NUMBER(kLocalWrite, IBV_ACCESS_LOCAL_WRITE);
SAME_NUMBER(kRemoteWrite, IBV_ACCESS_REMOTE_WRITE);
SAME_NUMBER(kRemoteAtomic, IBV_ACCESS_REMOTE_ATOMIC);
SAME_NUMBER(kRelaxedOrdering, IBV_ACCESS_RELAXED_ORDERING);
SAME_NUMBER(kQpState, IBV_QP_STATE);
SAME_NUMBER(kQpAccessFlags, IBV_QP_ACCESS_FLAGS);
SAME_NUMBER(kQpPkeyIndex, IBV_QP_PKEY_INDEX);
SAME_NUMBER(kQpPort, IBV_QP_PORT);
SAME_NUMBER(kQpAddress, IBV_QP_AV);
SAME_NUMBER(kQpPathMtu, IBV_QP_PATH_MTU);
SAME_NUMBER(kQpTimeout, IBV_QP_TIMEOUT);
SAME_NUMBER(kQpRetryCount, IBV_QP_RETRY_CNT);
SAME_NUMBER(kQpRnrRetry, IBV_QP_RNR_RETRY);
SAME_NUMBER(kQpRqPsn, IBV_QP_RQ_PSN);
SAME_NUMBER(kQpMaxRdAtomic, IBV_QP_MAX_QP_RD_ATOMIC);
SAME_NUMBER(kQpMinRnrTimer, IBV_QP_MIN_RNR_TIMER);
SAME_NUMBER(kQpSqPsn, IBV_QP_SQ_PSN);
SAME_NUMBER(kQpMaxDestRdAtomic, IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_NUMBER(kQpDestination, IBV_QP_DEST_QPN);

#if __has_include(<infiniband/mlx5dv.h>)
#include <infiniband/mlx5dv.h>

#include "fabric/queue/entry.h"
#include "fabric/verbs/mlx5.h"

SAME_SIZE(CqInitAttr, ibv_cq_init_attr_ex);
SAME_PLACE(CqInitAttr, entries, ibv_cq_init_attr_ex, cqe);
SAME_PLACE(CqInitAttr, has, ibv_cq_init_attr_ex, comp_mask);
SAME_PLACE(CqInitAttr, flags, ibv_cq_init_attr_ex, flags);
SAME_SIZE(Mlx5CqInitAttr, mlx5dv_cq_init_attr);
SAME_PLACE(Mlx5CqInitAttr, has, mlx5dv_cq_init_attr, comp_mask);
SAME_PLACE(Mlx5CqInitAttr, entry_bytes, mlx5dv_cq_init_attr, cqe_size);
SAME_SIZE(Mlx5Qp, mlx5dv_qp);
SAME_PLACE(Mlx5Qp, doorbell, mlx5dv_qp, dbrec);
SAME_PLACE(Mlx5Qp, send.memory, mlx5dv_qp, sq.buf);
SAME_PLACE(Mlx5Qp, send.count, mlx5dv_qp, sq.wqe_cnt);
SAME_PLACE(Mlx5Qp, send.stride, mlx5dv_qp, sq.stride);
SAME_PLACE(Mlx5Qp, bell.address, mlx5dv_qp, bf.reg);
SAME_PLACE(Mlx5Qp, has, mlx5dv_qp, comp_mask);
SAME_SIZE(Mlx5Cq, mlx5dv_cq);
SAME_PLACE(Mlx5Cq, memory, mlx5dv_cq, buf);
SAME_PLACE(Mlx5Cq, count, mlx5dv_cq, cqe_cnt);
SAME_PLACE(Mlx5Cq, entry_bytes, mlx5dv_cq, cqe_size);
SAME_SIZE(Mlx5Objects, mlx5dv_obj);
SAME_PLACE(Mlx5Objects, qp.in, mlx5dv_obj, qp.in);
SAME_PLACE(Mlx5Objects, qp.out, mlx5dv_obj, qp.out);
SAME_PLACE(Mlx5Objects, cq.in, mlx5dv_obj, cq.in);
SAME_PLACE(Mlx5Objects, cq.out, mlx5dv_obj, cq.out);
SAME_NUMBER(CqInitAttr::kHasFlags, IBV_CQ_INIT_ATTR_MASK_FLAGS);
SAME_NUMBER(CqInitAttr::kIgnoreOverrun, IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN);
SAME_NUMBER(Mlx5CqInitAttr::kHasEntryBytes, MLX5DV_CQ_INIT_ATTR_MASK_CQE_SIZE);
SAME_NUMBER(Mlx5Objects::kQp, MLX5DV_OBJ_QP);
SAME_NUMBER(Mlx5Objects::kCq, MLX5DV_OBJ_CQ);
SAME_NUMBER(kMlx5LocalLength, MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
SAME_NUMBER(kMlx5LocalOperation, MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
SAME_NUMBER(kMlx5LocalProtection, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
SAME_NUMBER(kMlx5Flushed, MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
SAME_NUMBER(kMlx5BadResponse, MLX5_CQE_SYNDROME_BAD_RESP_ERR);
SAME_NUMBER(kMlx5LocalAccess, MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR);
SAME_NUMBER(kMlx5RemoteInvalidRequest, MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR);
SAME_NUMBER(kMlx5RemoteAccess, MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
SAME_NUMBER(kMlx5RemoteOperation, MLX5_CQE_SYNDROME_REMOTE_OP_ERR);
SAME_NUMBER(kMlx5RetriesExceeded, MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
SAME_NUMBER(kMlx5ReceiverNotReady, MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR);

static_assert(sizeof(SendEntry) == MLX5_SEND_WQE_BB);
SAME_SIZE(SendEntry::Control, mlx5_wqe_ctrl_seg);
SAME_PLACE(SendEntry::Control, index_and_opcode, mlx5_wqe_ctrl_seg, opmod_idx_opcode);
SAME_PLACE(SendEntry::Control, queue_and_size, mlx5_wqe_ctrl_seg, qpn_ds);
SAME_PLACE(SendEntry::Control, signature, mlx5_wqe_ctrl_seg, signature);
SAME_PLACE(SendEntry::Control, flags, mlx5_wqe_ctrl_seg, fm_ce_se);
SAME_PLACE(SendEntry::Control, immediate, mlx5_wqe_ctrl_seg, imm);
SAME_SIZE(SendEntry::Remote, mlx5_wqe_raddr_seg);
SAME_PLACE(SendEntry::Remote, address, mlx5_wqe_raddr_seg, raddr);
SAME_PLACE(SendEntry::Remote, key, mlx5_wqe_raddr_seg, rkey);
SAME_SIZE(SendEntry::Local, mlx5_wqe_data_seg);
SAME_PLACE(SendEntry::Local, bytes, mlx5_wqe_data_seg, byte_count);
SAME_PLACE(SendEntry::Local, key, mlx5_wqe_data_seg, lkey);
SAME_PLACE(SendEntry::Local, address, mlx5_wqe_data_seg, addr);
SAME_SIZE(SendEntry::Atomic, mlx5_wqe_atomic_seg);
SAME_PLACE(SendEntry::Atomic, increment, mlx5_wqe_atomic_seg, swap_add);
SAME_PLACE(SendEntry::Atomic, compare, mlx5_wqe_atomic_seg, compare);
SAME_NUMBER(SendEntry::kWrite, MLX5_OPCODE_RDMA_WRITE);
SAME_NUMBER(SendEntry::kFetchAdd, MLX5_OPCODE_ATOMIC_FA);
SAME_NUMBER(SendEntry::kReportCompletion, MLX5_WQE_CTRL_CQ_UPDATE);
SAME_SIZE(Completion, mlx5_cqe64);
SAME_PLACE(Completion, opcode_and_queue, mlx5_cqe64, sop_drop_qpn);
SAME_PLACE(Completion, entry, mlx5_cqe64, wqe_counter);
SAME_PLACE(Completion, signature, mlx5_cqe64, signature);
SAME_PLACE(Completion, kind, mlx5_cqe64, op_own);
SAME_SIZE(Completion, mlx5_err_cqe);
SAME_PLACE(Completion, vendor_syndrome, mlx5_err_cqe, vendor_err_synd);
SAME_PLACE(Completion, syndrome, mlx5_err_cqe, syndrome);
SAME_PLACE(Completion, opcode_and_queue, mlx5_err_cqe, s_wqe_opcode_qpn);
SAME_PLACE(Completion, entry, mlx5_err_cqe, wqe_counter);
SAME_PLACE(Completion, kind, mlx5_err_cqe, op_own);
SAME_NUMBER(Completion::kDone, MLX5_CQE_REQ);
SAME_NUMBER(Completion::kRequestError, MLX5_CQE_REQ_ERR);
SAME_NUMBER(Completion::kResponseError, MLX5_CQE_RESP_ERR);
SAME_NUMBER(Completion::kNothingYet, MLX5_CQE_INVALID);
static_assert(offsetof(DoorbellRecord, receive) == MLX5_RCV_DBR * sizeof(uint32_t));
static_assert(offsetof(DoorbellRecord, send) == MLX5_SND_DBR * sizeof(uint32_t));
#endif

int main() { std::puts("as the library has it"); }
#else
int main() { std::puts("infiniband/verbs.h is not installed: nothing was compared"); }
#endif

#include "fabric/verbs/queue_pair.h"

#include <errno.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <stdexcept>

namespace ep::verbs {
namespace {

// How one end finds the other. The card's name follows.
struct Address {
    uint32_t version, number, first_packet, mtu;
    uint16_t lid;
    uint8_t is_ethernet, unused;
    Gid gid;
};
static_assert(sizeof(Address) == 40);
constexpr uint32_t kVersion = 1;
constexpr size_t kMaxName = 128;

constexpr uint8_t kMinRnrTimer = 12, kHopLimit = 64;
constexpr int kMaxAtomics = 16;  // in flight

std::string failed(const std::string& what, int error) {
    return what + ": " + std::strerror(error);
}

}  // namespace

QueuePair::QueuePair(std::shared_ptr<Card> card)
    : QueuePair(card, card->library_->create_cq(card->context_, kDepth, nullptr, nullptr, 0),
                kDepth) {}

QueuePair::QueuePair(std::shared_ptr<Card> card, Cq* cq, uint32_t depth)
    : card_(std::move(card)), cq_(cq), first_packet_(std::random_device()() & 0xffffff) {
    if (!cq_) throw std::runtime_error(failed(card_->name() + ": ibv_create_cq", errno));
    QpInitAttr wanted{};
    wanted.send_cq = wanted.receive_cq = cq_;
    wanted.cap = {depth, 1, 1, 1, 0};
    wanted.type = kReliableConnection;
    qp_ = library().create_qp(card_->pd_, &wanted);
    if (!qp_) {
        const int error = errno;
        library().destroy_cq(cq_);
        throw std::runtime_error(failed(card_->name() + ": ibv_create_qp", error));
    }
}

QueuePair::~QueuePair() {
    library().destroy_qp(qp_);
    library().destroy_cq(cq_);
}

std::string QueuePair::address() const {
    const PortAttr& port = card_->port_attributes_;
    Address own{kVersion,
                qp_->number,
                first_packet_,
                static_cast<uint32_t>(port.active_mtu),
                port.lid,
                card_->port_.is_ethernet,
                0,
                card_->gid_};
    const std::string name = card_->name() + " (" + card_->port_.address + ")";
    return std::string(reinterpret_cast<const char*>(&own), sizeof own) + name.substr(0, kMaxName);
}

void QueuePair::connect(const std::string& address) {
    Address other;
    if (address.size() < sizeof other || address.size() > sizeof other + kMaxName)
        throw std::runtime_error("the other rank says nothing of its network card");
    std::memcpy(&other, address.data(), sizeof other);
    if (other.version != kVersion)
        throw std::runtime_error("the other rank has another version of this library");
    other_ = address.substr(sizeof other);
    const Port& port = card_->port_;
    if (other.is_ethernet != port.is_ethernet)
        throw std::runtime_error(between() + ": one of them is InfiniBand, the other RoCE");
    const auto step = [&](QpAttr& attr, QpState state, int mask) {
        attr.state = state;
        const int error = library().modify_qp(qp_, &attr, mask | kQpState);
        if (!error) return;
        const char* hint = state == kReadyToReceive && port.is_ethernet
                               ? "; the addresses of the two cards must reach each other"
                               : "";
        throw std::runtime_error(failed(between() + " cannot be connected", error) + hint);
    };
    const Service& service = card_->service_;
    QpAttr init{};
    init.pkey_index = service.pkey_index;
    init.port = static_cast<uint8_t>(port.number);
    init.access = kLocalWrite | kRemoteWrite | kRemoteAtomic;
    step(init, kInit, kQpPkeyIndex | kQpPort | kQpAccessFlags);
    QpAttr receive{};
    receive.path_mtu = std::min(card_->port_attributes_.active_mtu, static_cast<int>(other.mtu));
    receive.destination_qp = other.number;
    receive.rq_psn = other.first_packet;
    receive.max_dest_rd_atomic =
        static_cast<uint8_t>(std::min(kMaxAtomics, card_->attributes_.max_qp_rd_atom));
    receive.min_rnr_timer = kMinRnrTimer;
    receive.address.port = static_cast<uint8_t>(port.number);
    receive.address.lid = other.lid;
    receive.address.sl = service.level;
    const bool is_far = other.gid.words[0] != card_->gid_.words[0];  // in another subnet
    if (port.is_ethernet || is_far || other.lid == 0) {
        receive.address.is_global = 1;
        receive.address.route.destination = other.gid;
        receive.address.route.source_index = static_cast<uint8_t>(port.gid_index);
        receive.address.route.hop_limit = kHopLimit;
        receive.address.route.traffic_class = service.traffic_class;
    }
    step(receive, kReadyToReceive,
         kQpAddress | kQpPathMtu | kQpDestination | kQpRqPsn | kQpMaxDestRdAtomic | kQpMinRnrTimer);
    QpAttr send{};
    send.sq_psn = first_packet_;
    send.timeout = service.ack_timeout;
    send.retries = send.rnr_retries = service.retries;
    send.max_rd_atomic =
        static_cast<uint8_t>(std::min(kMaxAtomics, card_->attributes_.max_qp_init_rd_atom));
    step(send, kReadyToSend, kQpTimeout | kQpRetryCount | kQpRnrRetry | kQpSqPsn | kQpMaxRdAtomic);
}

void QueuePair::stop() {
    QpAttr error{};
    error.state = kError;
    library().modify_qp(qp_, &error, kQpState);
}

std::string QueuePair::write(const Request& to, const Region& region, const char* bytes,
                             uint32_t count) {
    Sge source{region.offset_of(bytes), count, region.local_key()};
    SendWr request{};
    request.opcode = kRdmaWrite;
    request.pieces = &source;
    request.piece_count = count ? 1 : 0;
    request.rdma = {to.remote_address, to.remote_key};
    return post(request);
}

std::string QueuePair::add(const Request& to, uint64_t increment) {
    Sge old_value{0, sizeof(uint64_t), card_->scratch_mr_->lkey};
    SendWr request{};
    request.opcode = kFetchAndAdd;
    request.pieces = &old_value;
    request.piece_count = 1;
    request.atomic = {to.remote_address, increment, 0, to.remote_key};
    return post(request);
}

std::string QueuePair::post(SendWr& request) {
    request.flags = kSignaled;
    SendWr* bad = nullptr;
    const int error = card_->context_->ops.post_send(qp_, &request, &bad);
    return error ? failed(between() + ": ibv_post_send", error) : "";
}

std::string QueuePair::poll(const std::function<void()>& done) {
    std::array<Wc, 32> found;
    const int count =
        card_->context_->ops.poll_cq(cq_, static_cast<int>(found.size()), found.data());
    if (count < 0) return between() + ": ibv_poll_cq fails";
    for (int i = 0; i < count; ++i) {
        if (found[i].status != kSuccess) return reason_of(found[i]);
        done();
    }
    return "";
}

std::string QueuePair::reason_of(const Wc& completion) const {
    const auto what = [&]() -> std::string {
        switch (completion.status) {
            case kRetriesExceeded:
                return "the other card confirmed nothing of what was sent";
            case kReceiverNotReady:
                return "the other card was not ready to receive";
            case kRemoteAccess:
                return "the other card refused access to memory";
            case kRemoteInvalidRequest:
            case kRemoteOperation:
                return "the other card refused what was asked for";
            case kFlushed:
                return "the connection was in an error already";
            case kLocalProtection:
            case kLocalAccess:
                return "the own card was refused access to memory";
            case kFatal:
                return "the own card is out of order";
            default:
                return "the own card reports an error";
        }
    }();
    const std::string fault = card_->fault();
    return between() + ": " + what + " (status " + std::to_string(completion.status) +
           ", vendor's " + std::to_string(completion.vendor_error) + ")" +
           (fault.empty() ? "" : "; " + fault);
}

std::string QueuePair::between() const {
    return card_->name() + " (" + card_->port_.address + ") and " + (other_.empty() ? "?" : other_);
}

}  // namespace ep::verbs

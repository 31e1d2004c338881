#include "fabric/verbs/direct_pair.h"

#include <errno.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace ep::verbs {
namespace {

// No consumer index goes back to the card, which must not wait for one.
Cq* new_cq(const Mlx5& mlx5, Context* context, const std::string& card, uint32_t depth) {
    CqInitAttr wanted{};
    wanted.entries = depth;
    wanted.has = CqInitAttr::kHasFlags;
    wanted.flags = CqInitAttr::kIgnoreOverrun;
    Mlx5CqInitAttr own{};  // no compressed completions
    own.has = Mlx5CqInitAttr::kHasEntryBytes;
    own.entry_bytes = sizeof(Completion);
    Cq* cq = mlx5.create_cq(context, &wanted, &own);
    if (!cq) throw std::runtime_error(card + ": mlx5dv_create_cq: " + std::strerror(errno));
    return cq;
}

template <class T>
T* aligned(void* address) {
    return reinterpret_cast<uintptr_t>(address) % alignof(T) ? nullptr : static_cast<T*>(address);
}

uint64_t last_word(const Completion& completion) {
    return std::atomic_ref<uint64_t>(*const_cast<Completion&>(completion).last_word())
        .load(std::memory_order_acquire);
}

constexpr std::pair<Mlx5Syndrome, WcStatus> kStatuses[] = {
    {kMlx5LocalLength, kLocalLength},
    {kMlx5LocalOperation, kLocalOperation},
    {kMlx5LocalProtection, kLocalProtection},
    {kMlx5Flushed, kFlushed},
    {kMlx5BadResponse, kBadResponse},
    {kMlx5LocalAccess, kLocalAccess},
    {kMlx5RemoteInvalidRequest, kRemoteInvalidRequest},
    {kMlx5RemoteAccess, kRemoteAccess},
    {kMlx5RemoteOperation, kRemoteOperation},
    {kMlx5RetriesExceeded, kRetriesExceeded},
    {kMlx5ReceiverNotReady, kReceiverNotReady},
};

WcStatus status_of(uint8_t syndrome) {
    for (const auto& [reported, status] : kStatuses)
        if (reported == syndrome) return status;
    return kGeneral;
}

}  // namespace

DirectPair::DirectPair(std::shared_ptr<Card> card, uint32_t depth)
    : QueuePair(card, new_cq(*card->mlx5_, card->context_, card->name(), depth), depth) {
    Mlx5Qp qp{};
    Mlx5Cq cq{};
    Mlx5Objects objects{};
    objects.qp = {qp_, &qp};
    objects.cq = {cq_, &cq};
    if (const int error = card_->mlx5_->init_objects(&objects, Mlx5Objects::kQp | Mlx5Objects::kCq))
        throw std::runtime_error(card_->name() + ": mlx5dv_init_obj: " + std::strerror(error));
    queue_.entries = aligned<SendEntry>(qp.send.memory);
    queue_.doorbell = aligned<uint64_t>(qp.doorbell);
    queue_.bell = aligned<uint64_t>(qp.bell.address);
    queue_.completions = aligned<Completion>(cq.memory);
    queue_.last_entry = qp.send.count - 1;
    queue_.last_completion = cq.count - 1;
    queue_.completion_bits = static_cast<uint32_t>(std::countr_zero(cq.count));
    queue_.number = qp_->number;
    queue_.scratch = {card_->scratch_mr_->lkey, 0};
    const auto fits = [&](uint32_t count, uint32_t bytes) {
        return std::has_single_bit(count) && count >= depth && bytes == sizeof(SendEntry);
    };
    if (!queue_.entries || !queue_.doorbell || !queue_.bell || !queue_.completions ||
        !fits(qp.send.count, qp.send.stride) || !fits(cq.count, cq.entry_bytes))
        throw std::runtime_error(card_->name() +
                                 ": its driver keeps queues in another form than mlx5's");
}

// The completion of the entry before the one in the doorbell record; null: it is not there yet.
const Completion* DirectPair::last_completion() const {
    const auto record = std::bit_cast<DoorbellRecord>(
        std::atomic_ref<uint64_t>(*queue_.doorbell).load(std::memory_order_acquire));
    const auto last = static_cast<uint16_t>(record.send - 1);
    const Completion& there = queue_.completions[last & queue_.last_completion];
    const uint64_t word = last_word(there);
    if (Completion::kind_of(word) == Completion::kNothingYet) return nullptr;
    return Completion::entry_of(word) == last ? &there : nullptr;
}

bool DirectPair::is_idle() const {
    if (last_completion()) return true;
    // no completion in the ring's last place: none of entry 2^16 - 1, so nothing was posted
    const bool begins = !std::atomic_ref<uint64_t>(*queue_.doorbell).load();
    const uint64_t word = last_word(queue_.completions[queue_.last_completion]);
    return begins && Completion::kind_of(word) == Completion::kNothingYet;
}

std::string DirectPair::fault() const {
    const Completion* found = last_completion();
    if (!found || !Completion::is_error(last_word(*found))) return "";
    for (uint32_t i = 0; i <= queue_.last_completion; ++i) {  // find the cause among all errors
        const Completion& other = queue_.completions[i];
        if (Completion::is_error(last_word(other)) && other.syndrome != kMlx5Flushed)
            found = &other;
    }
    Wc error{};
    error.status = status_of(found->syndrome);
    error.vendor_error = found->vendor_syndrome;
    return reason_of(error);
}

}  // namespace ep::verbs

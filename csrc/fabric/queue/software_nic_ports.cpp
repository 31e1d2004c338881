#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "fabric/queue/card_link.h"
#include "fabric/queue/software_nic.h"
#include "fabric/queue/verbs_link.h"

// How SoftwareNic opens and closes ports, and how ranks exchange their cards' queue pairs.
// software_nic.cpp has the thread that carries the queues out.
namespace ep {

std::shared_ptr<SoftwareNic::Port> SoftwareNic::open(std::vector<char*> heaps, size_t bytes,
                                                     int channels,
                                                     const std::optional<QueueMemory>& of_gpu,
                                                     int stride) {
    const std::lock_guard lock(ports_mutex_);
    if (next_port_ > std::numeric_limits<uint16_t>::max())
        throw std::runtime_error("65536 heaps were opened on this network: make a new buffer");
    const auto number = static_cast<uint16_t>(next_port_++);
    const int ranks = static_cast<int>(heaps.size());
    const auto port = std::make_shared<Port>();
    const size_t count = SendQueues::count(ranks, channels);
    if (!of_gpu) {
        port->memory_.resize((SendQueues::bytes(count, depth_) + sizeof(SendEntry) - 1) /
                             sizeof(SendEntry));
        port->producers_.resize(count);
    }
    const QueueMemory memory = of_gpu.value_or(
        QueueMemory{reinterpret_cast<char*>(port->memory_.data()), port->producers_.data()});
    for (const auto& card : cards_)
        port->regions_.push_back(std::make_shared<verbs::Region>(card, heaps[rank_], bytes));
    port->heaps_ = std::move(heaps);
    port->bytes_ = bytes;
    port->stride_ = stride;
    port->queues_ = SendQueues::over(memory.shared, memory.producers, ranks, channels,
                                     of_gpu ? kDepth : depth_, number, of_gpu ? nullptr : this);
    port->taken_.resize(count);
    for (size_t i = 0; i < count; ++i) port->queues_[i].clear();
    if (is_direct()) {
        port->sides_.resize(ranks);
        port->cards_.resize(count);
        port->gpu_ = memory.cards;
        port->queues_.cards = port->gpu_ ? port->gpu_->cards() : port->cards_.data();
    } else if (of_gpu) {
        polls_ = true;
    }
    ports_[number] = port;
    for (size_t rank = 0; rank < links_.size(); ++rank) {
        if (links_[rank]) share(*links_[rank], rank, number);
    }
    wake();
    return port;
}

// Opens a port on a link to a rank, if a card carries it.
void SoftwareNic::share(Link& link, size_t rank, uint16_t number) {
    const auto& port = ports_.at(number);
    if (cards_.empty()) return;
    if (!is_direct()) return static_cast<VerbsLink&>(link).open(number, port->regions_.front());
    if (const Port::Side& side = port->sides_[rank]; side.is_connected)
        static_cast<CardLink&>(link).open(number, side.pairs);
}

namespace {

// What ranks tell each other about a port. For each queue pair follow the keys of its card's
// region, the length of its address, and the address.
struct Invitation {
    uint32_t port, pairs;
};
struct Invited {
    uint32_t data, flags, bytes;
};

template <class T>
void append(std::string& text, const T& value) {
    text.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::string_view take_bytes(std::string_view& text, size_t bytes) {
    if (text.size() < bytes) throw std::runtime_error("the other rank says less of its queues");
    const std::string_view taken = text.substr(0, bytes);
    text.remove_prefix(bytes);
    return taken;
}

template <class T>
T take_value(std::string_view& text) {
    T value;
    std::memcpy(&value, take_bytes(text, sizeof value).data(), sizeof value);
    return value;
}

}  // namespace

std::string SoftwareNic::invite(int rank) {
    std::map<uint16_t, std::shared_ptr<Port>> ports;
    {
        const std::lock_guard lock(ports_mutex_);
        ports = ports_;
    }
    std::string invitations;
    for (const auto& [number, port] : ports) {
        if (!reaches(*port, rank_, rank) || port->sides_[rank].is_connected) continue;
        CardLink::Pairs& pairs = port->sides_[rank].pairs;
        pairs.clear();
        const size_t count = std::min(queues_towards(*port), kMaxPairs);
        append(invitations, Invitation{number, static_cast<uint32_t>(count)});
        for (size_t i = 0; i < count; ++i) {
            const size_t card = card_of(i);
            pairs.push_back(std::make_shared<verbs::DirectPair>(cards_[card], kDepth));
            const std::string address = pairs.back()->address();
            append(invitations, Invited{port->regions_[card]->data(), port->regions_[card]->flags(),
                                        static_cast<uint32_t>(address.size())});
            invitations += address;
        }
    }
    return invitations;
}

void SoftwareNic::join(int rank, const std::string& invitations) {
    std::string_view rest = invitations;
    while (!rest.empty()) {
        const auto invitation = take_value<Invitation>(rest);
        std::shared_ptr<Port> port;
        {
            const std::lock_guard lock(ports_mutex_);
            const auto found = ports_.find(static_cast<uint16_t>(invitation.port));
            if (found != ports_.end()) port = found->second;
        }
        if (!port || port->sides_[rank].pairs.size() != invitation.pairs)
            throw std::runtime_error("the other rank has other queues than this one");
        Port::Side& side = port->sides_[rank];
        std::vector<CardQueue> cards;
        for (const auto& pair : side.pairs) {
            const auto invited = take_value<Invited>(rest);
            pair->connect(std::string(take_bytes(rest, invited.bytes)));
            CardQueue card = pair->queue();
            card.data = invited.data;
            card.flags = invited.flags;
            card.source = port->regions_[card_of(cards.size())]->local_key();
            card.producer = &port->queues_.producers[number_of(rank, cards.size())];
            if (port->gpu_) port->gpu_->reach(*pair, card);
            cards.push_back(card);
        }
        for (size_t i = 0; i < queues_towards(*port); ++i)
            port->cards_[number_of(rank, i)] = cards[i % cards.size()];
        if (port->gpu_) port->gpu_->upload(port->cards_);
        const std::lock_guard lock(ports_mutex_);
        side.is_connected = true;
        if (links_[rank]) share(*links_[rank], rank, static_cast<uint16_t>(invitation.port));
    }
}

void SoftwareNic::close(const std::shared_ptr<Port>& port) {
    if (is_forked()) return;
    const auto deadline = Clock::now() + std::chrono::seconds(2);
    while (!forget(port, Clock::now() > deadline)) {
        wake();
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
}

// Closes a port once all that was posted has left, or at once. Returns whether it is closed.
bool SoftwareNic::forget(const std::shared_ptr<Port>& port, bool at_once) {
    const std::lock_guard lock(ports_mutex_);
    const uint16_t number = region_of(*port);
    const auto place = ports_.find(number);
    if (place == ports_.end() || place->second != port) return true;
    bool has_left = true;
    for (size_t i = 0; i < port->taken_.size(); ++i) {
        const Link* link = link_of(i);
        const bool is_served = is_running() && (!link || link->end().empty());
        has_left &=
            !is_served || port->queues_[i].rung() == static_cast<uint16_t>(port->taken_[i].begun);
    }
    for (const auto& link : links_)
        has_left &= !link || !link->end().empty() || link->forget(number);
    if (!has_left && !at_once) return false;
    for (const auto& link : links_) {
        if (!link || link->forget(number)) continue;
        link->fail("it took nothing of what a part that is closed had sent");
        link->forget(number);
    }
    port->regions_.clear();
    ports_.erase(place);
    return true;
}

}  // namespace ep

// Ports of network cards, and memory that is registered with them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fabric/verbs/library.h"
#include "fabric/verbs/mlx5.h"

namespace ep::verbs {

// A port of a network card.
struct Port {
    std::string device;
    int number;
    bool is_ethernet;     // RoCE; else InfiniBand
    int gid_index;        // index of its address
    std::string address;  // as text
    std::string lacks;    // why it cannot be used; "" if it can
};

// How a network treats messages between cards. Both ends use the same.
struct Service {
    uint8_t traffic_class = 0;  // RoCE: DSCP and ECN
    uint8_t level = 0;          // InfiniBand, and RoCE's priority if a VLAN carries it
    uint16_t pkey_index = 0;    // index among the port's partition keys
    // A card sends again what was not acknowledged within 4.096 us * 2^ack_timeout, `retries`
    // times. By default that takes 4 s, then the connection is lost: a link that returns sooner is
    // no failure.
    uint8_t ack_timeout = 17;
    uint8_t retries = 7;
};

// Finds the ports of this machine. mlx5: ports of other drivers cannot be used. Throws
// std::runtime_error with the reason if there are none.
std::vector<Port> find_ports(const Library& library, const Mlx5* mlx5 = nullptr);

// An open port.
class Card {
  public:
    // mlx5: ranks post in the card's queues directly (DirectPair); null: a thread posts through
    // libibverbs. Throws std::runtime_error that says what fails.
    Card(std::shared_ptr<const Library> library, const Port& port,
         std::shared_ptr<const Mlx5> mlx5 = nullptr, const Service& service = {});
    ~Card();
    Card(const Card&) = delete;

    const Port& port() const { return port_; }
    std::string name() const { return port_.device + " port " + std::to_string(port_.number); }
    bool is_direct() const { return mlx5_ != nullptr; }
    // Why it cannot be used; "" while it is up.
    std::string fault() const;

  private:
    friend class Region;
    friend class QueuePair;
    friend class DirectPair;

    void release();

    std::shared_ptr<const Library> library_;
    std::shared_ptr<const Mlx5> mlx5_;
    Port port_;
    Service service_;
    Context* context_ = nullptr;
    DeviceAttr attributes_{};
    PortAttr port_attributes_{};
    Gid gid_{};
    Pd* pd_ = nullptr;
    char* scratch_ = nullptr;  // where additions leave the old value; not read
    Mr* scratch_mr_ = nullptr;
};

// Memory that a card reads, and that cards of other ranks write, at offsets from its beginning.
//
// It has two keys. Writes through `data` may become visible in any order, which PCIe needs to be
// fast. Additions through `flags` become visible after all that the same queue pair did before.
class Region {
  public:
    Region(std::shared_ptr<Card> card, char* memory, size_t bytes);
    ~Region();
    Region(const Region&) = delete;

    uint64_t offset_of(const char* address) const {
        return static_cast<uint64_t>(address - memory_);
    }
    uint32_t local_key() const { return data_->lkey; }
    uint32_t data() const { return data_->rkey; }
    uint32_t flags() const { return flags_->rkey; }

  private:
    std::shared_ptr<Card> card_;
    char* memory_;
    Mr *data_ = nullptr, *flags_ = nullptr;
};

}  // namespace ep::verbs

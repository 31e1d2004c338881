#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/incident.h"
#include "fabric/queue/software_nic.h"

namespace ep {

// Loads a network to measure its speed and to check that it keeps its promises. Puts, each with a
// signal behind it, go to rings in the memory of other ranks, and credits come back, as in a
// dispatch. All ranks of the network make one of the same sizes, in the same order.
class NetworkLoad {
  public:
    using Seconds = std::chrono::duration<double>;

    struct Sizes {
        int world;
        int channels;      // rings between two ranks, each with its own queues
        size_t max_bytes;  // of a put

        // Bytes of the memory that a rank provides.
        size_t heap_bytes() const;
    };

    // control: this rank's, for the network to send. heap: sizes.heap_bytes() bytes of zeros.
    NetworkLoad(SoftwareNic& nic, const ControlBlock& control, char* heap, int rank, Sizes sizes);
    ~NetworkLoad() { nic_.close(port_); }
    NetworkLoad(const NetworkLoad&) = delete;

    // Sends a put and its signal there and back between two ranks, of which one begins. Returns
    // half of each round trip's time. Throws std::runtime_error on a broken connection or a
    // timeout.
    std::vector<Seconds> ping(int peer, bool begins, size_t bytes, int rounds, Seconds timeout);

    // Puts `puts` times in each channel to each of `targets` and from each of `sources`, all at
    // once. Returns how long that takes. With a seed, sizes are random up to `bytes`, and what
    // arrives is checked. Throws std::runtime_error like ping(), and on wrong bytes.
    Seconds exchange(const std::vector<int>& targets, const std::vector<int>& sources, int puts,
                     size_t bytes, std::optional<uint64_t> seed, Seconds timeout);

  private:
    static constexpr size_t kSlots = 8;  // of a ring

    struct Ring {
        int channel, peer;
        uint64_t sent = 0, received = 0;  // puts so far
    };

    Ring& ring(int channel, int peer) { return rings_[ring_index(channel, peer)]; }
    size_t ring_index(int channel, int peer) const;
    size_t slot(bool to_send, int channel, int peer, uint64_t number) const;
    size_t signal(int channel, int peer) const;
    size_t credit(int channel, int peer) const;
    uint64_t word_at(size_t offset) const;

    bool send(Ring& ring, uint64_t goal, size_t bytes, std::optional<uint64_t> seed);
    bool receive(Ring& ring, uint64_t goal, size_t bytes, std::optional<uint64_t> seed);
    void post_put(const Ring& ring, size_t bytes);
    void wait(const std::function<bool()>& moved, const std::function<bool()>& is_done,
              const std::function<std::string()>& missing, Seconds timeout,
              std::chrono::steady_clock::time_point since) const;
    void require_no_abort() const;

    SoftwareNic& nic_;
    const ControlBlock& control_;
    char* heap_;
    int rank_;
    Sizes sizes_;
    std::vector<Ring> rings_;
    std::shared_ptr<SoftwareNic::Port> port_;
};

}  // namespace ep

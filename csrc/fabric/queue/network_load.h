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

// Loads a network in order to see how fast it is, and whether it keeps what it promises: puts with
// a signal behind each go to rings in the memory of other ranks, and credits come back, as those of
// a dispatch do. All ranks of the network make one of the same sizes, in the same order.
class NetworkLoad {
  public:
    using Seconds = std::chrono::duration<double>;

    struct Sizes {
        int world;
        int channels;      // rings between two ranks, with queues of their own
        size_t max_bytes;  // of a put

        // Of the memory that a rank gives to it.
        size_t heap_bytes() const;
    };

    // control: this rank's, of which the network tells the others. heap: of sizes.heap_bytes(),
    // zero.
    NetworkLoad(SoftwareNic& nic, const ControlBlock& control, char* heap, int rank, Sizes sizes);
    ~NetworkLoad() { nic_.close(port_); }
    NetworkLoad(const NetworkLoad&) = delete;

    // A put and its signal there and back, between two ranks of which one begins. Half of each
    // round trip. Throws std::runtime_error when the connection breaks, or the time is over.
    std::vector<Seconds> ping(int peer, bool begins, size_t bytes, int rounds, Seconds timeout);

    // `puts` puts in each channel to each of `targets` and from each of `sources`, all at once; how
    // long that takes. With a seed they are of random sizes up to `bytes`, and what arrives is
    // compared with what was sent. Throws std::runtime_error as above, and when bytes are wrong.
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

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fabric/queue/link.h"

namespace ep {

// Seconds since the other machine has answered on a TCP connection, whether or not its process
// does; 0 where that is no TCP. After `limit` seconds it counts as gone, unless it was last asked
// long ago: the kernel asks ever less often where a process takes nothing.
double silence_of(int descriptor, double limit);

// All of it over a TCP connection.
class TcpLink : public Link {
  public:
    // Takes the socket, which is connected, and on which nothing was sent yet.
    explicit TcpLink(int descriptor);
    ~TcpLink() override;
    TcpLink(const TcpLink&) = delete;

    bool has_room() const override { return waiting_bytes_ < kMaxWaiting && end_.empty(); }
    void add(const Frame& frame, const char* bytes, std::function<void()> sent) override;
    void add_copy(Frame frame, std::string bytes) override;
    bool send() override;
    bool has_to_send() const override {
        return !waiting_.empty() && end_.empty() && broken_.empty();
    }
    bool is_acknowledged() const override;
    bool receive(const Target& target, const Done& done) override;
    bool forget(uint8_t region) override;
    int descriptor() const override { return descriptor_; }

  private:
    static constexpr int kUserTimeoutMs = 20 * 24 * 3600 * 1000;
    static constexpr size_t kMaxWaiting = 256 << 10, kMaxFrames = 64, kBuffer = 64 << 10;

    struct Outgoing {
        Frame frame;
        std::string copy;
        const char* bytes;
        std::function<void()> sent;
        size_t gone = 0;  // of header and bytes
    };

    bool take_frames(const Target& target, const Done& done);

    int descriptor_;
    std::string
        broken_;  // why nothing can be sent; what the other side has said may still be there
    std::deque<Outgoing> waiting_;
    size_t waiting_bytes_ = 0;

    std::vector<char> buffer_;
    size_t begin_ = 0, filled_ = 0;  // of the buffer: what was received and not taken
    std::optional<Frame> current_;   // whose bytes are not all there
    char* target_ = nullptr;
    size_t missing_ = 0;
    std::vector<char> nowhere_;
};

}  // namespace ep

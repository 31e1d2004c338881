// TcpLink: a link over one TCP connection.
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
// does; 0 if it is no TCP connection. A machine silent for more than `limit` is gone, but not
// before the kernel's next probe, which comes ever later while a process takes nothing.
double silence_of(int descriptor, double limit);

class TcpLink : public Link {
  public:
    // Takes ownership of the socket, which is connected and on which nothing was sent yet.
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
    bool forget(uint16_t region) override;
    int descriptor() const override { return descriptor_; }

  private:
    static constexpr int kUserTimeoutMs = 20 * 24 * 3600 * 1000;
    static constexpr size_t kMaxWaiting = 256 << 10, kMaxFrames = 64, kBuffer = 64 << 10;

    struct Outgoing {
        Frame frame;
        std::string copy;
        const char* bytes;
        std::function<void()> sent;
        size_t gone = 0;  // bytes of header and data that have left
    };

    bool take_frames(const Target& target, const Done& done);

    int descriptor_;
    // Why nothing can be sent. What the other side has sent may still be there.
    std::string broken_;
    std::deque<Outgoing> waiting_;
    size_t waiting_bytes_ = 0;

    std::vector<char> buffer_;
    size_t begin_ = 0, filled_ = 0;  // what was received into the buffer and not taken
    std::optional<Frame> current_;   // frame whose bytes have not all arrived
    char* target_ = nullptr;
    size_t missing_ = 0;
    std::vector<char> nowhere_;
};

}  // namespace ep

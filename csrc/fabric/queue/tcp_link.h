#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ep {

// What travels on a connection between two ranks: a header, and `bytes` bytes behind it.
struct Frame {
    enum Kind : uint8_t {
        kWrite = 1,  // the bytes belong at `address` of the region
        kAdd,        // increment of the word at `address`
        kStatus,     // the sender's control block
        kAbort,      // increment: the sender's abort word
        kBye,        // nothing comes after it
    };

    uint8_t kind;
    uint8_t region = 0;
    uint16_t unused = 0;
    uint32_t bytes = 0;
    uint64_t address = 0;
    uint64_t increment = 0;
};
static_assert(sizeof(Frame) == 24);

// A TCP connection to one rank, which never blocks. Frames arrive in the order in which they were
// sent.
class TcpLink {
  public:
    // Takes the socket, which is connected, and on which nothing was sent yet.
    explicit TcpLink(int descriptor);
    ~TcpLink();
    TcpLink(const TcpLink&) = delete;

    int descriptor() const { return descriptor_; }
    // Why the connection is of no more use; "" while it is. "end": the other side said that it
    // would go.
    const std::string& end() const { return end_; }

    // ---- sending

    // Whether more should be added: what is added waits in order, so little of it should.
    bool has_room() const { return waiting_bytes_ < kMostWaiting && end_.empty(); }
    // The bytes are read when they leave; `sent` is called then.
    void add(const Frame& frame, const char* bytes, std::function<void()> sent = {});
    void add_copy(Frame frame, std::string bytes);
    bool has_to_send() const { return !waiting_.empty() && end_.empty() && broken_.empty(); }
    // Whether the other machine has all that was sent, or will never have it. A connection that is
    // closed before may take back what is under way.
    bool is_acknowledged() const;
    // Sends what the system takes. Returns whether it took any.
    bool send();

    // ---- receiving

    // Where the bytes of a frame belong, of which there are frame.bytes; null: the frame is not
    // what may come, and the connection ends.
    using Place = std::function<char*(const Frame&)>;
    using Done = std::function<void(const Frame&)>;
    // Receives what is there, some of it at least. Returns whether there was any.
    bool receive(const Place& place, const Done& done);

    void fail(const std::string& why);
    // What still arrives of a frame for this region is thrown away; false if some is still to be
    // sent from it.
    bool forget(uint8_t region);

  private:
    static constexpr size_t kMostWaiting = 256 << 10, kMostAtOnce = 16, kBuffer = 64 << 10;

    struct Outgoing {
        Frame frame;
        std::string copy;
        const char* bytes;
        std::function<void()> sent;
        size_t gone = 0;  // of header and bytes
    };

    bool take_frames(const Place& place, const Done& done);

    int descriptor_;
    std::string end_;
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

// Link: a connection of SoftwareNic to another rank, and the frames that it carries.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace ep {

// A message between two ranks: a header, then `bytes` bytes.
struct Frame {
    enum Kind : uint8_t {
        kWrite = 1,  // the bytes belong at `address` of the region
        kAdd,        // increment of the word at `address`
        kStatus,     // the sender's control block
        kAbort,      // increment: the sender's abort word
        kBye,        // the sender's last frame
        kKeys,       // keys of the region, with which the receiver's card may write there
        kClose,      // the receiver must stop writing to the region ...
        kClosed,     // ... and has stopped
    };

    uint8_t kind;
    uint16_t region = 0;
    uint32_t bytes = 0;
    uint64_t address = 0;
    uint64_t increment = 0;
};
static_assert(sizeof(Frame) == 24);

// A connection to one rank. Frames arrive in the order in which they were added. No call blocks.
class Link {
  public:
    virtual ~Link() = default;

    // Why the connection cannot be used any more; "" while it can.
    const std::string& end() const { return end_; }
    virtual void fail(const std::string& why) {
        if (end_.empty()) end_ = why;
    }

    // ---- sending

    // Whether more frames should be added. They wait in order, so only few should.
    virtual bool has_room() const = 0;
    // Same as has_room for frames that concern a region.
    virtual bool has_room_for(uint16_t) const { return has_room(); }
    // Adds a frame. Its bytes are read when they leave; `sent` is called then or later, for one
    // frame after the other in the order in which they were added.
    virtual void add(const Frame& frame, const char* bytes, std::function<void()> sent = {}) = 0;
    virtual void add_copy(Frame frame, std::string bytes) = 0;
    // Sends what can be sent. Returns whether anything was.
    virtual bool send() = 0;
    virtual bool has_to_send() const = 0;
    // Whether the other machine has all that was sent, or will never have it. Closing the
    // connection before may discard what is in flight.
    virtual bool is_acknowledged() const = 0;

    // ---- receiving

    // Returns where a frame's bytes belong; null: the frame is not valid, and the connection ends.
    using Target = std::function<char*(const Frame&)>;
    using Done = std::function<void(const Frame&)>;
    // Receives at least some of what is there. Returns whether there was any.
    virtual bool receive(const Target& target, const Done& done) = 0;

    // Discards what still arrives for this region. Returns false while something of it is still to
    // be sent, or may still arrive.
    virtual bool forget(uint16_t region) = 0;

    // ---- sleeping

    virtual int descriptor() const = 0;
    // Whether sending waits until the descriptor is writable.
    virtual bool waits_for_descriptor() const { return has_to_send(); }
    // Whether progress must be polled for.
    virtual bool is_polled() const { return false; }

  protected:
    std::string end_;
};

}  // namespace ep

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace ep {

// What travels between two ranks: a header, and `bytes` bytes behind it.
struct Frame {
    enum Kind : uint8_t {
        kWrite = 1,  // the bytes belong at `address` of the region
        kAdd,        // increment of the word at `address`
        kStatus,     // the sender's control block
        kAbort,      // increment: the sender's abort word
        kBye,        // nothing comes after it
        kKeys,       // of the region, by which the receiver's card may write there
        kClose,      // the receiver must write to the region no more ...
        kClosed,     // ... and does not
    };

    uint8_t kind;
    uint8_t region = 0;
    uint16_t queue = 0;  // of the sender's towards this rank
    uint32_t bytes = 0;
    uint64_t address = 0;
    uint64_t increment = 0;
    uint32_t batch = 0;   // of a queue: additions before it
    uint32_t writes = 0;  // of an addition: in its batch
};
static_assert(sizeof(Frame) == 32);

// A connection to one rank, which never blocks.
class Link {
  public:
    virtual ~Link() = default;

    // Why the connection is of no more use; "" while it is.
    const std::string& end() const { return end_; }
    virtual void fail(const std::string& why) {
        if (end_.empty()) end_ = why;
    }

    // Whether frames arrive in the order in which they were added. If not, those that are no writes
    // and no additions do.
    virtual bool keeps_order() const { return true; }

    // ---- sending

    // Whether more should be added: what is added waits in order, so little of it should.
    virtual bool has_room() const = 0;
    // The same for what concerns a region.
    virtual bool has_room_for(uint8_t) const { return has_room(); }
    // The bytes are read when they leave; `sent` is called then, or later: one after the other, in
    // the order in which they were added.
    virtual void add(const Frame& frame, const char* bytes, std::function<void()> sent = {}) = 0;
    virtual void add_copy(Frame frame, std::string bytes) = 0;
    // Sends what can be sent. Returns whether anything was.
    virtual bool send() = 0;
    virtual bool has_to_send() const = 0;
    // Whether the other machine has all that was sent, or will never have it. A connection that is
    // closed before may take back what is under way.
    virtual bool is_acknowledged() const = 0;

    // ---- receiving

    // Where the bytes of a frame belong, of which there are frame.bytes; null: the frame is not
    // what may come, and the connection ends.
    using Target = std::function<char*(const Frame&)>;
    using Done = std::function<void(const Frame&)>;
    // Receives what is there, some of it at least. Returns whether there was any.
    virtual bool receive(const Target& target, const Done& done) = 0;

    // What still arrives of a frame for this region is thrown away; false if some is still to be
    // sent from it, or may still arrive.
    virtual bool forget(uint8_t region) = 0;

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

#pragma once

#include <memory>

#include "fabric/queue/link.h"

namespace ep {

// A link whose writes and additions a network card carries out. Other frames go over TCP, which
// also shows that the other rank has gone.
//
// Before a side closes a region, the other one confirms that all it had posted there is over.
class RdmaLink : public Link {
  public:
    void fail(const std::string& why) override {
        if (end_.empty()) stop();
        Link::fail(why);
    }
    bool has_room() const override { return end_.empty() && control_->has_room(); }
    void add_copy(Frame frame, std::string bytes) override {
        control_->add_copy(frame, std::move(bytes));
    }
    bool has_to_send() const override {
        return end_.empty() && (control_->has_to_send() || !is_idle());
    }
    bool is_acknowledged() const override {
        return !end_.empty() || (is_idle() && control_->is_acknowledged());
    }
    bool receive(const Target& target, const Done& done) override {
        char nothing;
        const auto is_own = [this](const Frame& frame) {
            return frame.kind == Frame::kClose || frame.kind == Frame::kClosed ||
                   (frame.kind == Frame::kKeys && takes_keys());
        };
        const bool moved = control_->receive(
            [&](const Frame& frame) -> char* {
                if (is_own(frame)) return frame.bytes ? nullptr : &nothing;
                const bool is_of_card = frame.kind == Frame::kWrite || frame.kind == Frame::kAdd;
                return is_of_card ? nullptr : target(frame);
            },
            [&](const Frame& frame) { is_own(frame) ? take(frame) : done(frame); });
        if (!control_->end().empty()) fail(control_->end());
        return moved;
    }
    int descriptor() const override { return control_->descriptor(); }
    bool waits_for_descriptor() const override { return control_->has_to_send(); }

  protected:
    // How far a region is closed.
    struct Closing {
        bool was_closed = false;  // by the other side
        bool is_to_confirm = false;
        bool asked = false, was_confirmed = false;  // this side's request to close it
    };

    explicit RdmaLink(std::unique_ptr<Link> control) : control_(std::move(control)) {}

    // From now on nothing that the other rank has posted is written here.
    virtual void stop() = 0;
    // Whether all that was posted is over.
    virtual bool is_idle() const = 0;
    // Takes a frame of the links themselves.
    virtual void take(const Frame& frame) = 0;
    virtual bool takes_keys() const { return false; }

    std::unique_ptr<Link> control_;
};

}  // namespace ep

#pragma once

#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "fabric/queue/link.h"

namespace ep {

// For tests: makes a network that keeps no order, like Amazon's EFA (SRD), of one that does. Writes
// and additions leave in a random order.
class UnorderedLink : public Link {
  public:
    UnorderedLink(std::unique_ptr<Link> inner, uint64_t seed)
        : inner_(std::move(inner)), random_(seed) {}

    bool keeps_order() const override { return false; }
    void fail(const std::string& why) override;
    bool has_room() const override { return end_.empty() && inner_->has_room(); }
    bool has_room_for(uint8_t) const override {
        return end_.empty() && waiting_.size() < kMaxWaiting;
    }
    void add(const Frame& frame, const char* bytes, std::function<void()> sent) override;
    void add_copy(Frame frame, std::string bytes) override;
    bool send() override;
    bool has_to_send() const override;
    bool is_acknowledged() const override;
    bool receive(const Target& target, const Done& done) override;
    bool forget(uint8_t region) override;
    int descriptor() const override { return inner_->descriptor(); }
    bool waits_for_descriptor() const override { return has_to_send(); }

  private:
    static constexpr size_t kMaxWaiting = 32;

    struct Waiting {
        Frame frame;
        const char* bytes;
        uint64_t number;
    };
    struct Sent {
        bool is_over = false;
        std::function<void()> tell;
    };
    void tell(uint64_t number);

    std::unique_ptr<Link> inner_;
    std::mt19937_64 random_;
    std::vector<Waiting> waiting_;
    std::deque<Sent> sent_;  // in the order in which they were added
    uint64_t first_ = 0;     // number of the first one in sent_
};

}  // namespace ep

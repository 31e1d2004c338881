#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>

#include "fabric/queue/rdma_link.h"
#include "fabric/verbs/queue_pair.h"

namespace ep {

// A link over a network card in whose queue pair the thread of SoftwareNic posts. Each side sends
// the keys of a region when it opens it, and nothing is posted for the region before.
class VerbsLink : public RdmaLink {
  public:
    // pair: connected.
    VerbsLink(std::unique_ptr<Link> control, std::shared_ptr<verbs::QueuePair> pair);
    ~VerbsLink() override { pair_->stop(); }

    void open(uint16_t region, std::shared_ptr<const verbs::Region> memory);

    bool has_room_for(uint16_t region) const override;
    void add(const Frame& frame, const char* bytes, std::function<void()> sent) override;
    bool send() override;
    bool forget(uint16_t region) override;
    bool is_polled() const override { return end_.empty() && !posted_.empty(); }

  private:
    static constexpr size_t kMaxPosted = 1 << 20;  // bytes: more would delay what comes after them

    struct Keys {
        uint32_t data, flags;
    };
    struct Shared : Closing {  // what both sides know of a region
        std::shared_ptr<const verbs::Region> own;
        std::optional<Keys> theirs;
    };
    struct Posted {
        uint16_t region;
        uint32_t bytes;
        std::function<void()> sent;
        bool is_dropped = false;  // it was not given to the card
    };

    void stop() override { pair_->stop(); }
    bool is_idle() const override { return posted_.empty(); }
    void take(const Frame& frame) override;
    bool takes_keys() const override { return true; }
    void report_first();
    bool is_posted(uint16_t region) const;
    void confirm_closed(uint16_t region);

    std::shared_ptr<verbs::QueuePair> pair_;
    std::map<uint16_t, Shared> regions_;
    std::deque<Posted> posted_;
    size_t posted_bytes_ = 0;
};

}  // namespace ep

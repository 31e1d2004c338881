#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>

#include "fabric/queue/link.h"
#include "fabric/verbs/queue_pair.h"

namespace ep {

// A link over a network card that writes to the other rank's memory: writes and additions are
// posted in a queue pair. Other frames go over TCP, which also shows that the other rank has gone.
//
// Each side sends the keys of a region when it opens it, and nothing is posted for the region
// before. Before a side closes it, the other one confirms that it has posted its last.
class VerbsLink : public Link {
  public:
    // pair: connected.
    VerbsLink(std::unique_ptr<Link> words, std::shared_ptr<verbs::QueuePair> pair);
    ~VerbsLink() override { pair_->stop(); }

    void open(uint16_t region, std::shared_ptr<const verbs::Region> memory);

    void fail(const std::string& why) override;
    bool has_room() const override { return end_.empty() && words_->has_room(); }
    bool has_room_for(uint16_t region) const override;
    void add(const Frame& frame, const char* bytes, std::function<void()> sent) override;
    void add_copy(Frame frame, std::string bytes) override;
    bool send() override;
    bool has_to_send() const override;
    bool is_acknowledged() const override;
    bool receive(const Target& target, const Done& done) override;
    bool forget(uint16_t region) override;
    int descriptor() const override { return words_->descriptor(); }
    bool waits_for_descriptor() const override { return words_->has_to_send(); }
    bool is_polled() const override { return end_.empty() && !posted_.empty(); }

  private:
    static constexpr size_t kMaxPosted = 1 << 20;  // bytes: more would delay what comes after them

    struct Keys {
        uint32_t data, flags;
    };
    struct Shared {  // what both sides know of a region
        std::shared_ptr<const verbs::Region> own;
        std::optional<Keys> theirs;
        bool was_closed = false;  // by the other side
        bool is_to_confirm = false;
        bool asked = false, was_confirmed = false;  // this side's request to close it
    };
    struct Posted {
        uint16_t region;
        uint32_t bytes;
        std::function<void()> sent;
        bool is_for_nobody = false;  // it was not given to the card
    };

    void take(const Frame& frame);
    void tell_of_first();
    bool is_posted(uint16_t region) const;
    void confirm_closed(uint16_t region);

    std::unique_ptr<Link> words_;
    std::shared_ptr<verbs::QueuePair> pair_;
    std::map<uint16_t, Shared> regions_;
    std::deque<Posted> posted_;
    size_t posted_bytes_ = 0;
};

}  // namespace ep

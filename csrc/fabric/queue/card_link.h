// CardLink: the link to a rank if a network card carries the send queues out directly.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "fabric/queue/link.h"
#include "fabric/queue/send_queue.h"
#include "fabric/verbs/direct_pair.h"

namespace ep {

// A queue over these rings. The caller fills in its keys and producer.
CardQueue queue_in(const verbs::DirectPair::Rings& rings);

// Connection to a rank where ranks post in a network card's queues directly. The card carries out
// writes and additions. This watches it, because an entry that fails tells its producer only that
// it is over. Other frames go over TCP, which also shows that the other rank has gone.
//
// Before a side closes a region, the other one confirms that all it had posted there is over. What
// it posts there later fails, which does no harm.
class CardLink : public Link {
  public:
    using Pairs = std::vector<std::shared_ptr<verbs::DirectPair>>;

    explicit CardLink(std::unique_ptr<Link> words) : words_(std::move(words)) {}
    ~CardLink() override;

    // pairs: connected, or nothing is posted in them yet.
    void open(uint16_t region, Pairs pairs) { regions_[region].pairs = std::move(pairs); }

    void fail(const std::string& why) override;
    bool has_room() const override { return end_.empty() && words_->has_room(); }
    void add(const Frame&, const char*, std::function<void()>) override;
    void add_copy(Frame frame, std::string bytes) override;
    bool send() override;
    bool has_to_send() const override;
    bool is_acknowledged() const override;
    bool receive(const Target& target, const Done& done) override;
    bool forget(uint16_t region) override;
    int descriptor() const override { return words_->descriptor(); }
    bool waits_for_descriptor() const override { return words_->has_to_send(); }

  private:
    struct Region {
        Pairs pairs;
        bool was_closed = false;  // by the other side
        bool is_to_confirm = false;
        bool asked = false, was_confirmed = false;  // this side's request to close it
    };
    static bool is_idle(const Region& region);
    bool is_idle() const;
    void stop();
    static void stop(const Region& region);

    std::unique_ptr<Link> words_;
    std::map<uint16_t, Region> regions_;
};

}  // namespace ep

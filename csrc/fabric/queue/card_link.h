#pragma once

#include <map>
#include <memory>
#include <vector>

#include "fabric/queue/rdma_link.h"
#include "fabric/verbs/direct_pair.h"

namespace ep {

// A link to a rank where ranks post in a network card's queues directly. This watches the card,
// because an entry that fails tells its producer only that it is over. What is posted for a region
// after it was closed fails, which does no harm.
class CardLink : public RdmaLink {
  public:
    using Pairs = std::vector<std::shared_ptr<verbs::DirectPair>>;

    explicit CardLink(std::unique_ptr<Link> control) : RdmaLink(std::move(control)) {}
    ~CardLink() override { CardLink::stop(); }

    // pairs: connected, or nothing is posted in them yet.
    void open(uint16_t region, Pairs pairs) { regions_[region].pairs = std::move(pairs); }

    void add(const Frame&, const char*, std::function<void()>) override;
    bool send() override;
    bool forget(uint16_t region) override;

  private:
    struct Region : Closing {
        Pairs pairs;
    };
    void stop() override;
    static void stop(const Region& region);
    bool is_idle() const override;
    static bool is_idle(const Region& region);
    void take(const Frame& frame) override;

    std::map<uint16_t, Region> regions_;
};

}  // namespace ep

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "fabric/verbs/card.h"

namespace ep::verbs {

// A reliable connection of a card with one queue pair of another card. What is posted is carried
// out in order, and told of in order.
class QueuePair {
  public:
    // Throws std::runtime_error with what fails, as connect does.
    explicit QueuePair(std::shared_ptr<Card> card);
    ~QueuePair();
    QueuePair(const QueuePair&) = delete;

    // What the other end must be told, to connect.
    std::string address() const;
    // Both ends, before either of them posts.
    void connect(const std::string& address);
    // Nothing that the other end has posted is written here any more.
    void stop();

    // ---- posting: at most kDepth requests that nothing was told of yet

    static constexpr uint32_t kDepth = 256;

    struct Request {
        uint32_t remote_key;
        uint64_t remote_address;
    };
    // "" or what fails.
    std::string write(const Request& to, const Region& region, const char* bytes, uint32_t count);
    std::string add(const Request& to, uint64_t increment);

    // Calls done once for each completed request. Returns "" or why the next one failed; after that
    // all fail.
    std::string poll(const std::function<void()>& done);

    // Of both ends, for messages.
    std::string between() const;

  protected:
    // Over this completion queue, which it takes.
    QueuePair(std::shared_ptr<Card> card, Cq* cq, uint32_t depth);

    const Library& library() const { return *card_->library_; }
    std::string reason_of(const Wc& completion) const;

    std::shared_ptr<Card> card_;
    Cq* cq_;
    Qp* qp_ = nullptr;

  private:
    std::string post(SendWr& request);

    uint32_t first_packet_;  // its number
    std::string other_;      // card
};

}  // namespace ep::verbs

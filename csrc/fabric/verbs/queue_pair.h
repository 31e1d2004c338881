#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "fabric/verbs/card.h"

namespace ep::verbs {

// A reliable connection to one queue pair of another card. Requests are carried out and reported in
// order.
class QueuePair {
  public:
    // Throws std::runtime_error that says what fails, like connect().
    explicit QueuePair(std::shared_ptr<Card> card);
    ~QueuePair();
    QueuePair(const QueuePair&) = delete;

    // What the other end needs in order to connect.
    std::string address() const;
    // Connects. Both ends do before either of them posts.
    void connect(const std::string& address);
    // From now on nothing that the other end has posted is written here.
    void stop();

    // ---- posting: at most kDepth requests that have not completed

    static constexpr uint32_t kDepth = 256;

    struct Request {
        uint32_t remote_key;
        uint64_t remote_address;
    };
    // Both return "" or what failed.
    std::string write(const Request& to, const Region& region, const char* bytes, uint32_t count);
    std::string add(const Request& to, uint64_t increment);

    // Calls done once for each completed request. Returns "" or why the next one failed; after that
    // all fail.
    std::string poll(const std::function<void()>& done);

    // Names both ends, for messages.
    std::string between() const;

  protected:
    // Uses and owns this completion queue.
    QueuePair(std::shared_ptr<Card> card, Cq* cq, uint32_t depth);

    const Library& library() const { return *card_->library_; }
    std::string reason_of(const Wc& completion) const;

    std::shared_ptr<Card> card_;
    Cq* cq_;
    Qp* qp_ = nullptr;

  private:
    std::string post(SendWr& request);

    uint32_t first_packet_;  // number of its first packet
    std::string other_;      // name of the other card
};

}  // namespace ep::verbs

#include "fabric/queue/unordered_link.h"

#include <algorithm>

namespace ep {

void UnorderedLink::fail(const std::string& why) {
    Link::fail(why);
    inner_->fail(why);
}

void UnorderedLink::add(const Frame& frame, const char* bytes, std::function<void()> sent) {
    waiting_.push_back({frame, bytes, first_ + sent_.size()});
    sent_.push_back({false, std::move(sent)});
}

void UnorderedLink::add_copy(Frame frame, std::string bytes) {
    inner_->add_copy(frame, std::move(bytes));
}

bool UnorderedLink::send() {
    bool moved = false;
    while (!waiting_.empty() && inner_->has_room() && random_() % 8) {
        std::swap(waiting_[random_() % waiting_.size()], waiting_.back());
        const Waiting next = waiting_.back();
        waiting_.pop_back();
        inner_->add(next.frame, next.bytes, [this, number = next.number] { tell(number); });
        moved = true;
    }
    return inner_->send() || moved;
}

// Reports a frame as sent, and the later ones that had to wait for it.
void UnorderedLink::tell(uint64_t number) {
    sent_[number - first_].is_over = true;
    for (; !sent_.empty() && sent_.front().is_over; ++first_) {
        if (sent_.front().tell) sent_.front().tell();
        sent_.pop_front();
    }
}

bool UnorderedLink::has_to_send() const {
    return end_.empty() && (!waiting_.empty() || inner_->has_to_send());
}

bool UnorderedLink::is_acknowledged() const {
    return !end_.empty() || (waiting_.empty() && inner_->is_acknowledged());
}

bool UnorderedLink::receive(const Target& target, const Done& done) {
    const bool moved = inner_->receive(target, done);
    if (!inner_->end().empty()) Link::fail(inner_->end());
    return moved;
}

bool UnorderedLink::forget(uint8_t region) {
    const bool is_sent = std::none_of(waiting_.begin(), waiting_.end(), [&](const Waiting& next) {
        return next.frame.region == region;
    });
    return inner_->forget(region) && is_sent;
}

}  // namespace ep

#include "fabric/queue/verbs_link.h"

#include <algorithm>

namespace ep {

VerbsLink::VerbsLink(std::unique_ptr<Link> control, std::shared_ptr<verbs::QueuePair> pair)
    : RdmaLink(std::move(control)), pair_(std::move(pair)) {}

void VerbsLink::open(uint16_t region, std::shared_ptr<const verbs::Region> memory) {
    regions_[region].own = std::move(memory);
    const verbs::Region& own = *regions_[region].own;
    add_copy({Frame::kKeys, region, 0, own.data(), own.flags()}, {});
}

bool VerbsLink::has_room_for(uint16_t region) const {
    if (!end_.empty()) return false;
    const Shared& shared = regions_.at(region);
    return (shared.was_closed || shared.theirs) && posted_.size() < verbs::QueuePair::kDepth &&
           posted_bytes_ < kMaxPosted;
}

void VerbsLink::add(const Frame& frame, const char* bytes, std::function<void()> sent) {
    const Shared& shared = regions_.at(frame.region);
    if (shared.was_closed) {  // there is no reader any more
        posted_.push_back({frame.region, 0, std::move(sent), true});
        if (posted_.size() == 1) report_first();
        return;
    }
    const bool is_write = frame.kind == Frame::kWrite;
    const std::string fault =
        is_write
            ? pair_->write({shared.theirs->data, frame.address}, *shared.own, bytes, frame.bytes)
            : pair_->add({shared.theirs->flags, frame.address}, frame.increment);
    if (!fault.empty()) return fail(fault);
    posted_.push_back({frame.region, frame.bytes, std::move(sent)});
    posted_bytes_ += frame.bytes;
}

bool VerbsLink::send() {
    bool moved = control_->send();
    if (posted_.empty() || !end_.empty()) return moved;
    const std::string fault = pair_->poll([&] {
        report_first();
        moved = true;
    });
    if (!fault.empty()) fail(fault);
    return moved;
}

// Reports the first posted frame as sent, and the next ones up to one that the card was given.
void VerbsLink::report_first() {
    do {
        const Posted first = std::move(posted_.front());
        posted_.pop_front();
        posted_bytes_ -= first.bytes;
        if (first.sent) first.sent();
        confirm_closed(first.region);
    } while (!posted_.empty() && posted_.front().is_dropped);
}

void VerbsLink::take(const Frame& frame) {
    Shared& shared = regions_[frame.region];
    if (frame.kind == Frame::kKeys) {
        shared.theirs = {static_cast<uint32_t>(frame.address),
                         static_cast<uint32_t>(frame.increment)};
    } else if (frame.kind == Frame::kClose) {
        shared.was_closed = shared.is_to_confirm = true;
        confirm_closed(frame.region);
    } else {
        shared.was_confirmed = true;
    }
}

bool VerbsLink::is_posted(uint16_t region) const {
    return std::any_of(posted_.begin(), posted_.end(),
                       [&](const Posted& posted) { return posted.region == region; });
}

void VerbsLink::confirm_closed(uint16_t region) {
    if (!regions_[region].is_to_confirm || is_posted(region)) return;
    regions_[region].is_to_confirm = false;
    add_copy({Frame::kClosed, region}, {});
}

bool VerbsLink::forget(uint16_t region) {
    Shared& shared = regions_[region];
    if (end_.empty() && shared.own) {
        if (!shared.asked) add_copy({Frame::kClose, region}, {});
        shared.asked = true;
        if (!shared.was_confirmed || is_posted(region)) return false;
    }
    shared.own.reset();
    return true;
}

}  // namespace ep

#include "fabric/queue/card_link.h"

#include <algorithm>

namespace ep {

void CardLink::stop() {
    for (const auto& [number, region] : regions_) stop(region);
}

void CardLink::stop(const Region& region) {
    for (const auto& pair : region.pairs) pair->stop();
}

void CardLink::add(const Frame&, const char*, std::function<void()>) {
    fail("what the card carries was given to the host");
}

bool CardLink::send() {
    if (!end_.empty()) return control_->send();
    for (auto& [number, region] : regions_) {
        if (region.is_to_confirm && is_idle(region)) {
            region.is_to_confirm = false;
            add_copy({Frame::kClosed, number}, {});
            stop(region);  // what is posted later fails at once
        }
        if (region.was_closed) continue;
        for (const auto& pair : region.pairs) {
            const std::string fault = pair->fault();
            if (fault.empty()) continue;
            fail(fault);
            return true;
        }
    }
    return control_->send();
}

bool CardLink::is_idle(const Region& region) {
    return std::all_of(region.pairs.begin(), region.pairs.end(),
                       [](const auto& pair) { return pair->is_idle(); });
}

bool CardLink::is_idle() const {
    return std::all_of(regions_.begin(), regions_.end(),
                       [](const auto& region) { return is_idle(region.second); });
}

void CardLink::take(const Frame& frame) {
    Region& region = regions_[frame.region];
    if (frame.kind == Frame::kClose)
        region.was_closed = region.is_to_confirm = true;
    else
        region.was_confirmed = true;
}

bool CardLink::forget(uint16_t number) {
    const auto found = regions_.find(number);
    if (found == regions_.end()) return true;
    Region& region = found->second;
    const bool is_over = region.was_closed && !region.is_to_confirm;
    if (end_.empty() && !region.pairs.empty() && !is_over) {
        if (!region.asked && !is_idle(region)) return false;
        if (!region.asked) add_copy({Frame::kClose, number}, {});
        region.asked = true;
        if (!region.was_confirmed) return false;
    }
    stop(region);
    region.pairs.clear();
    return true;
}

}  // namespace ep

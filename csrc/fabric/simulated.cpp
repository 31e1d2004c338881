#include "fabric/simulated.h"

#include <atomic>
#include <cstring>
#include <vector>

namespace ep {

void SimulatedNetwork::put(Connection connection, char* dst, const char* src, size_t bytes) {
    pending_[{connection, Order::AfterPuts}].push_back({dst, src, bytes});
}

void SimulatedNetwork::signal(Connection connection, uint64_t* flag, uint64_t increment) {
    add(connection, Order::AfterPuts, flag, increment);
}

void SimulatedNetwork::credit(Connection connection, uint64_t* flag, uint64_t increment) {
    add(connection, Order::Any, flag, increment);
}

void SimulatedNetwork::add(Connection connection, Order order, uint64_t* flag, uint64_t increment) {
    if (++signals_ == lost_signal_) return;
    pending_[{connection, order}].push_back({reinterpret_cast<char*>(flag), nullptr, increment});
}

bool SimulatedNetwork::deliver(std::mt19937_64& random) {
    if (pending_.empty()) return false;
    auto queue = std::next(pending_.begin(), random() % pending_.size());
    std::deque<Message>& messages = queue->second;
    std::vector<size_t> choices;
    bool after_put = false;
    for (size_t i = 0; i < messages.size(); ++i) {
        const bool waits = !messages[i].src && after_put && queue->first.second == Order::AfterPuts;
        if (!waits) choices.push_back(i);
        after_put |= messages[i].src != nullptr;
    }
    const size_t chosen = choices[random() % choices.size()];
    const Message message = messages[chosen];
    messages.erase(messages.begin() + chosen);
    if (messages.empty()) pending_.erase(queue);
    if (message.src) {
        std::memcpy(message.dst, message.src, message.bytes_or_increment);
    } else {
        std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(message.dst))
            .fetch_add(message.bytes_or_increment, std::memory_order_release);
    }
    return true;
}

}  // namespace ep

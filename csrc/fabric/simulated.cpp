#include "fabric/simulated.h"

#include <atomic>
#include <cstring>

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
    size_t puts = 0;
    while (puts < messages.size() && messages[puts].src) ++puts;
    const size_t choices = queue->first.second == Order::Any ? messages.size() : puts;
    const size_t chosen = choices ? random() % choices : 0;
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

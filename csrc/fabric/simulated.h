#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <utility>

#include "exec/host/fibers.h"

namespace ep {

// A network between the nodes of one process that keeps only the promises of a real one: puts
// arrive late and in any order, a put reads its source when it leaves and not when it was posted,
// and a signal adds to its flag after earlier puts on its connection have arrived, though not after
// earlier signals; a credit does so at any time. For one thread.
class SimulatedNetwork : public Network {
  public:
    using Connection = std::array<int, 3>;  // source rank, destination rank, channel

    // lost_signal: number of the signal or credit that never arrives, from 1; 0: none.
    explicit SimulatedNetwork(uint64_t lost_signal = 0) : lost_signal_(lost_signal) {}

    void put(Connection connection, char* dst, const char* src, size_t bytes);
    void signal(Connection connection, uint64_t* flag, uint64_t increment);
    void credit(Connection connection, uint64_t* flag, uint64_t increment);
    bool deliver(std::mt19937_64& random) override;
    void clear() { pending_.clear(); }

  private:
    struct Message {
        char* dst;
        const char* src;  // null: a signal or credit
        uint64_t bytes_or_increment;
    };
    enum class Order { AfterPuts, Any };

    void add(Connection connection, Order order, uint64_t* flag, uint64_t increment);

    std::map<std::pair<Connection, Order>, std::deque<Message>> pending_;
    uint64_t lost_signal_;
    uint64_t signals_ = 0;
};

}  // namespace ep

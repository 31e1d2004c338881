#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "exec/host/fibers.h"
#include "fabric/queue/host_queues.h"

namespace ep {

// Between two ranks of a process: what is under way to each end, in order, until it is cut.
struct Wire {
    struct Arriving {
        Frame frame;
        std::string bytes;
    };
    std::array<std::deque<Arriving>, 2> to;
    bool is_cut = false;
};

// An end of a wire, which takes and gives as many frames at a time as chance says.
class WireLink : public Link {
  public:
    WireLink(std::shared_ptr<Wire> wire, int side, uint64_t seed)
        : wire_(std::move(wire)), side_(side), random_(seed) {}

    bool has_room() const override { return end_.empty() && waiting_.size() < kMost; }
    void add(const Frame& frame, const char* bytes, std::function<void()> sent) override {
        waiting_.push_back({frame, {}, bytes, std::move(sent)});
    }
    void add_copy(Frame frame, std::string bytes) override {
        frame.bytes = static_cast<uint32_t>(bytes.size());
        waiting_.push_back({frame, std::move(bytes), nullptr, {}});
    }
    bool send() override {
        std::deque<Wire::Arriving>& there = wire_->to[1 - side_];
        bool moved = false;
        for (; has_to_send() && there.size() < kMost && random_() % 4; moved = true) {
            Outgoing next = std::move(waiting_.front());
            waiting_.pop_front();
            if (next.bytes) next.copy.assign(next.bytes, next.frame.bytes);
            there.push_back({next.frame, std::move(next.copy)});
            if (next.sent) next.sent();
        }
        return moved;
    }
    bool has_to_send() const override { return end_.empty() && !waiting_.empty(); }
    bool is_acknowledged() const override { return !end_.empty() || wire_->to[1 - side_].empty(); }

    bool receive(const Target& target, const Done& done) override {
        std::deque<Wire::Arriving>& here = wire_->to[side_];
        if (wire_->is_cut) fail("the connection was cut");
        bool moved = false;
        for (; end_.empty() && !here.empty() && random_() % 4; moved = true) {
            const Wire::Arriving next = std::move(here.front());
            here.pop_front();
            char* const place = target(next.frame);
            if (!place) {
                fail("it sent what no rank sends");
                break;
            }
            std::memcpy(place, next.bytes.data(), next.bytes.size());
            done(next.frame);
        }
        return moved;
    }

    bool forget(uint16_t) override { return true; }
    int descriptor() const override { return -1; }

  private:
    static constexpr size_t kMost = 16;  // frames that wait, and that are under way

    struct Outgoing {
        Frame frame;
        std::string copy;
        const char* bytes;
        std::function<void()> sent;
    };

    std::shared_ptr<Wire> wire_;
    int side_;
    std::mt19937_64 random_;
    std::deque<Outgoing> waiting_;
};

// Between the nodes of one process send queues, and for each rank a software network card whose
// thread is the scheduler. The seed says how deep queues are.
class SoftwareNetwork : public Network {
  public:
    // Ranks hear of failures of other nodes through these alone. cut_at: after so many steps a
    // connection breaks; 0: none does. tolerates_loss: as with masks.
    template <class AnyHeap>
    SoftwareNetwork(uint64_t seed, const AnyHeap& heap, const std::vector<char*>& heaps,
                    std::vector<RankState>& states, uint64_t cut_at = 0,
                    bool tolerates_loss = false)
        : random_(seed), topology_(heap.topology), cut_at_(cut_at), mirrors_(heaps.size()) {
        const uint32_t depth = 2 << random_() % 3;
        for (RankState& state : states) {
            std::vector<char*> near(heaps.size(), nullptr);
            mirrors_[state.rank].resize(heaps.size());
            for (size_t other = 0; other < heaps.size(); ++other) {
                if (is_near(state.rank, other))
                    near[other] = heaps[other];
                else
                    state.everyone[other] = &mirrors_[state.rank][other];
            }
            nics_.push_back(std::make_unique<SoftwareNic>(state.rank, state.everyone,
                                                          SoftwareNic::Cards(), depth));
            if (tolerates_loss) nics_.back()->tolerate_loss();
            queues_.push_back(
                std::make_unique<HostQueues>(*nics_.back(), heap, state.rank, near, 1));
        }
        clear();
    }
    ~SoftwareNetwork() override {
        for (const auto& nic : nics_) nic->start_stepped(SoftwareNic::Links(world()));
    }

    QueueFabric fabric_of(int rank) const { return {queues_[rank]->params(), rank}; }

    // New connections: what was under way, or posted, is lost.
    void clear() {
        std::vector<SoftwareNic::Links> links(world());
        for (auto& own : links) own.resize(world());
        connections_.clear();
        for (size_t one = 0; one < world(); ++one) {
            for (size_t other = 0; other < one; ++other) {
                if (is_near(one, other)) continue;
                const auto wire = std::make_shared<Wire>();
                links[one][other] = std::make_unique<WireLink>(wire, 0, random_());
                links[other][one] = std::make_unique<WireLink>(wire, 1, random_());
                connections_.push_back({wire, {links[one][other].get(), links[other][one].get()}});
            }
        }
        for (size_t rank = 0; rank < world(); ++rank)
            nics_[rank]->start_stepped(std::move(links[rank]));
    }

    bool deliver(std::mt19937_64& random) override {
        if (++steps_ == cut_at_ && !connections_.empty())
            connections_[random() % connections_.size()].wire->is_cut = true;
        const size_t first = random() % world();
        for (size_t i = 0; i < world(); ++i) {
            if (nics_[(first + i) % world()]->step()) return true;
        }
        return std::any_of(connections_.begin(), connections_.end(), is_busy);
    }

  private:
    struct Connection {
        std::shared_ptr<Wire> wire;
        std::array<const Link*, 2> ends;
    };
    static bool is_busy(const Connection& connection) {
        const auto& [wire, ends] = connection;
        return ends[0]->end().empty() && ends[1]->end().empty() &&
               (wire->is_cut || ends[0]->has_to_send() || ends[1]->has_to_send() ||
                !wire->to[0].empty() || !wire->to[1].empty());
    }

    size_t world() const { return mirrors_.size(); }
    bool is_near(size_t one, size_t other) const {
        return topology_.node_of(static_cast<int>(one)) ==
               topology_.node_of(static_cast<int>(other));
    }

    std::mt19937_64 random_;
    Topology topology_;
    uint64_t cut_at_, steps_ = 0;
    std::vector<std::vector<ControlBlock>> mirrors_;  // [rank][of rank]
    std::vector<std::unique_ptr<SoftwareNic>> nics_;
    std::vector<std::unique_ptr<HostQueues>> queues_;
    std::vector<Connection> connections_;
};

}  // namespace ep

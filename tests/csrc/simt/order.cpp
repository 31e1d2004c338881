#include "order.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shadow.h"
#include "simt.h"

namespace simt::order {
namespace {

constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();

// How many steps of each actor somebody knows to be over. Warps are actors, too: their steps end
// with a __syncwarp.
class Clock {
  public:
    uint32_t operator[](uint32_t actor) const { return actor < steps_.size() ? steps_[actor] : 0; }
    void set(uint32_t actor, uint32_t steps) {
        if (actor >= steps_.size()) steps_.resize(actor + 1);
        steps_[actor] = steps;
    }
    void raise(uint32_t actor, uint32_t steps) { set(actor, std::max((*this)[actor], steps)); }
    void join(const Clock& other) {
        if (other.steps_.size() > steps_.size()) steps_.resize(other.steps_.size());
        for (size_t i = 0; i < other.steps_.size(); ++i)
            steps_[i] = std::max(steps_[i], other.steps_[i]);
    }

  private:
    std::vector<uint32_t> steps_;
};

// Which actors' writes are visible to an actor, and which actors' reads it knows to be over.
struct Knowledge {
    Clock written, read;
    void join(const Knowledge& other) {
        written.join(other.written);
        read.join(other.read);
    }
};
using Shared = std::shared_ptr<const Knowledge>;

// What a lane got to know of a flag's knowledge, or, if there is none, of an actor's steps.
struct News {
    Shared knowledge;
    const void* source;
    uint32_t actor = 0;
    uint32_t steps = 0;

    uint32_t of(Clock Knowledge::* clock, uint32_t other) const {
        if (knowledge) return ((*knowledge).*clock)[other];
        return other == actor ? steps : 0;
    }
    void join_to(Clock Knowledge::* clock, Clock& to) const {
        knowledge ? to.join((*knowledge).*clock) : to.raise(actor, steps);
    }
    void join_to(Knowledge& to) const {
        join_to(&Knowledge::written, to.written);
        join_to(&Knowledge::read, to.read);
    }
};

constexpr int kFences = 3;

struct Lane {
    std::vector<News> news;                 // since the last __syncwarp
    std::optional<size_t> fenced[kFences];  // since then: how much of the news before
    uint32_t unfenced_since[kFences] = {kNever, kNever, kNever};  // the step of the first write
};

struct Warp {
    uint32_t step = 0;
    Knowledge known;
    Clock fenced[kFences];  // of known.written
    Lane lanes[32];
    std::unordered_map<const void*, Shared> joined;  // by flag
};

struct Flag {
    Shared knowledge;
    Scope scope;
    unsigned rank;
};

struct Signal {
    uint64_t sum;
    Shared knowledge;
};

// Its steps are over one by one.
struct Card {
    uint32_t number;
    uint32_t step = 0;
    Knowledge known;
};

Shadow shadow;
std::vector<Warp> warps;
std::map<Name, Card> cards;
unsigned warps_of_rank;
std::map<Name, Actor> actors;
std::unordered_map<const uint64_t*, Flag> flags;
std::unordered_map<const uint64_t*, std::vector<Signal>> signals;

Warp& warp() { return warps[warp_index()]; }
Lane& own_lane() { return warp().lanes[simt::lane()]; }
unsigned rank() { return warp_index() / warps_of_rank; }

Access access(uint32_t step, bool by_engine) {
    return {warp_index(), step, static_cast<uint8_t>(simt::lane()), by_engine};
}
bool is_own(const Access& access) {
    return access.actor == warp_index() && access.lane == simt::lane();
}

bool knows(Clock Knowledge::* clock, const Access& access) {
    if (!access.exists) return true;
    if (access.step == Access::kUnfinished) return false;
    if (is_own(access) || (warp().known.*clock)[access.actor] > access.step) return true;
    for (const News& news : own_lane().news) {
        if (news.of(clock, access.actor) > access.step) return true;
    }
    return false;
}

// Whether a write is visible to those that this lane's fence was for.
bool is_fenced(Fence fence, const Access& write) {
    if (!write.exists) return true;
    if (write.step == Access::kUnfinished) return false;
    const int kind = static_cast<int>(fence);
    const Lane& lane = own_lane();
    if (is_own(write)) return write.step < lane.unfenced_since[kind];
    if (warp().fenced[kind][write.actor] > write.step) return true;
    if (!lane.fenced[kind] || write.actor == warp_index()) return false;
    if (warp().known.written[write.actor] > write.step) return true;
    for (size_t i = 0; i < *lane.fenced[kind]; ++i) {
        if (lane.news[i].of(&Knowledge::written, write.actor) > write.step) return true;
    }
    return false;
}

[[noreturn]] void die_of_race(const char* now, uintptr_t address, const char* before,
                              const Access& access) {
    std::string who = access.actor < warps.size() ? "warp " : "actor ";
    who += std::to_string(access.actor);
    if (access.actor < warps.size()) who += ", lane " + std::to_string(access.lane);
    who +=
        access.step == Access::kUnfinished ? ", not over" : ", step " + std::to_string(access.step);
    const std::string text = std::string("a race: ") + now + " " + shadow.describe(address) +
                             " by warp " + std::to_string(warp_index()) + ", step " +
                             std::to_string(warp().step) + ", and " + before + " by " + who;
    die(text.c_str());
}

void expect_reads_over(const Cell& cell, const char* now, uintptr_t address) {
    if (!knows(&Knowledge::read, cell.read)) die_of_race(now, address, "a read", cell.read);
    for (const Access& other : cell.other_reads) {
        if (!knows(&Knowledge::read, other)) die_of_race(now, address, "a read", other);
    }
}

void remember_read(Cell& cell, Access read) {
    // What comes after this read comes after those that are in order before it as well.
    auto covers = [&](Access& other) {
        if (other.step == Access::kUnfinished) return false;
        if (other.actor != read.actor || read.step == Access::kUnfinished)
            return knows(&Knowledge::read, other);
        if (other.exists && other.step == read.step && other.lane != read.lane)
            read.lane = Access::kSeveralLanes;
        return other.step <= read.step;
    };
    std::erase_if(cell.other_reads, covers);
    if (!covers(cell.read)) cell.other_reads.push_back(cell.read);
    cell.read = read;
}

void remember_write(Cell& cell, const Access& write) {
    cell.write = write;
    cell.read = Access::none();
    cell.other_reads.clear();
}

// The memory holds generic writes of this lane that nobody but other lanes can see yet.
void leave_unfenced() {
    for (uint32_t& step : own_lane().unfenced_since) step = std::min(step, warp().step);
}

Knowledge all_known() {
    Knowledge all = warp().known;
    for (const News& news : own_lane().news) news.join_to(all);
    return all;
}

void learn_from(const void* source, const Shared& knowledge) {
    if (warp().joined[source] == knowledge) return;
    for (const News& news : own_lane().news) {
        if (news.knowledge == knowledge) return;
    }
    own_lane().news.push_back({knowledge, source});
}

bool is_compared(const void* address) { return in_lane() && shadow.has(address); }

}  // namespace

void track(const void* memory, size_t bytes, const char* name) {
    shadow.track(memory, bytes, name);
}
void ignore(const void* memory, size_t bytes) { shadow.ignore(memory, bytes); }
void forget(const void* memory) { shadow.forget(memory); }

void begin(unsigned num_warps, unsigned warps_per_rank) {
    warps = std::vector<Warp>(num_warps);
    warps_of_rank = warps_per_rank;
}

void end() {
    warps.clear();
    actors.clear();
    cards.clear();
    flags.clear();
    signals.clear();
    shadow.clear();
}

void sync(unsigned number) {
    Warp& warp = warps[number];
    ++warp.step;
    for (int kind = 0; kind < kFences; ++kind) {
        Clock& fenced = warp.fenced[kind];
        uint32_t own_steps = warp.step;
        bool any = false;
        for (Lane& lane : warp.lanes) {
            own_steps = std::min(own_steps, lane.unfenced_since[kind]);
            if (!lane.fenced[kind]) continue;
            if (!std::exchange(any, true)) fenced.join(warp.known.written);
            for (size_t i = 0; i < *lane.fenced[kind]; ++i)
                lane.news[i].join_to(&Knowledge::written, fenced);
            lane.fenced[kind].reset();
        }
        fenced.set(number, own_steps);
    }
    for (Lane& lane : warp.lanes) {
        for (const News& news : lane.news) {
            news.join_to(warp.known);
            if (news.source) warp.joined[news.source] = news.knowledge;
        }
        lane.news.clear();
    }
    warp.known.written.set(number, warp.step);
    warp.known.read.set(number, warp.step);
}

void read(const void* address, size_t bytes) {
    if (!is_compared(address)) return;
    const Access own = access(warp().step, false);
    shadow.for_cells(address, bytes, [&](Cell& cell, uintptr_t at) {
        if (!knows(&Knowledge::written, cell.write))
            die_of_race("a read of", at, "a write", cell.write);
        remember_read(cell, own);
    });
}

void write(const void* address, size_t bytes) {
    if (!is_compared(address)) return;
    const Access own = access(warp().step, false);
    shadow.for_cells(address, bytes, [&](Cell& cell, uintptr_t at) {
        if (!knows(&Knowledge::written, cell.write))
            die_of_race("a write of", at, "a write", cell.write);
        expect_reads_over(cell, "a write of", at);
        remember_write(cell, own);
    });
    leave_unfenced();
}

uint64_t acquire(const uint64_t* address, Scope scope) {
    const auto flag = flags.find(address);
    if (flag != flags.end()) {
        const bool in_scope = flag->second.rank == rank() ||
                              (scope == Scope::System && flag->second.scope == Scope::System);
        if (in_scope) learn_from(address, flag->second.knowledge);
    }
    const uint64_t value = *address;
    if (scope == Scope::System && signals.contains(address)) acquire_signal(address, value);
    return value;
}

void release(uint64_t* address, uint64_t value, Scope scope) {
    flags[address] = {std::make_shared<Knowledge>(all_known()), scope, rank()};
    *address = value;
}

void relaxed(uint64_t* address, uint64_t value, Scope scope) {
    flags[address] = {std::make_shared<Knowledge>(Knowledge{{}, all_known().read}), scope, rank()};
    *address = value;
}

uint64_t fetch_add_acq_rel(uint64_t* address, uint64_t value, Scope scope) {
    const uint64_t before = acquire(address, scope);
    release(address, before + value, scope);
    return before;
}

uint64_t load_relaxed(const uint64_t* address) { return *address; }
uint64_t fetch_add_relaxed(uint64_t* address, uint64_t value) {
    return std::exchange(*address, *address + value);
}
void compare_and_swap_release(uint64_t* address, uint64_t expected, uint64_t value, Scope scope) {
    if (*address == expected) release(address, value, scope);
}

void fence(Fence fence) {
    Lane& lane = own_lane();
    lane.fenced[static_cast<int>(fence)] = lane.news.size();
    lane.unfenced_since[static_cast<int>(fence)] = kNever;
}

void begin_bulk_read(const void* address, size_t bytes) {
    if (!is_compared(address)) return;
    const Access own = access(Access::kUnfinished, true);
    shadow.for_cells(address, bytes, [&](Cell& cell, uintptr_t at) {
        const bool visible = cell.write.by_engine ? knows(&Knowledge::written, cell.write)
                                                  : is_fenced(Fence::AsyncShared, cell.write);
        if (!visible) die_of_race("a bulk store's read of", at, "a write", cell.write);
        remember_read(cell, own);
    });
}

void end_bulk_read(const void* address, size_t bytes) {
    if (!is_compared(address)) return;
    const Access before = access(Access::kUnfinished, true), after = access(warp().step, true);
    shadow.for_cells(address, bytes, [&](Cell& cell, uintptr_t) {
        if (cell.read == before) cell.read = after;
        std::replace(cell.other_reads.begin(), cell.other_reads.end(), before, after);
    });
}

void begin_bulk_write(const void* address, size_t bytes) {
    if (!is_compared(address)) return;
    const Access own = access(Access::kUnfinished, true);
    shadow.for_cells(address, bytes, [&](Cell& cell, uintptr_t at) {
        if (!knows(&Knowledge::written, cell.write))
            die_of_race("a bulk write of", at, "a write", cell.write);
        expect_reads_over(cell, "a bulk write of", at);
        remember_write(cell, own);
    });
}

void end_bulk_write(const void* address, size_t bytes) {
    if (!is_compared(address)) return;
    const Access before = access(Access::kUnfinished, true), after = access(warp().step, true);
    shadow.for_cells(address, bytes, [&](Cell& cell, uintptr_t) {
        if (cell.write == before) cell.write = after;
    });
    leave_unfenced();
}

Actor& actor(const Name& name) {
    const auto number = static_cast<uint32_t>(warps.size() + actors.size());
    return actors.try_emplace(name, Actor{number, 0}).first->second;
}

void read_by(const Actor& actor, uint32_t step, const void* address, size_t bytes, Fence fence) {
    if (!is_compared(address)) return;
    shadow.for_cells(address, bytes, [&](Cell& cell, uintptr_t at) {
        if (!is_fenced(fence, cell.write))
            die_of_race("a read without its fence of", at, "a write", cell.write);
        remember_read(cell, {actor.number, step});
    });
}

void write_by(const Actor& actor, uint32_t step, const void* address, size_t bytes, Fence fence) {
    if (!is_compared(address)) return;
    shadow.for_cells(address, bytes, [&](Cell& cell, uintptr_t at) {
        const bool own = cell.write.exists && cell.write.actor == actor.number;
        const bool visible = cell.write.by_engine ? knows(&Knowledge::written, cell.write)
                                                  : is_fenced(fence, cell.write);
        if (!own && !visible)
            die_of_race("a write without its fence of", at, "a write", cell.write);
        expect_reads_over(cell, "a write for this lane of", at);
        remember_write(cell, {actor.number, step, 0, true});
    });
}

void learn(const Actor& actor, uint32_t steps) {
    own_lane().news.push_back({nullptr, nullptr, actor.number, steps});
}

void signal(const Actor& actor, const uint64_t* word, uint64_t sum) {
    const int kind = static_cast<int>(Fence::System);
    Knowledge knowledge{warp().fenced[kind], all_known().read};
    if (const auto fenced = own_lane().fenced[kind]) {
        knowledge.written.join(warp().known.written);
        for (size_t i = 0; i < *fenced; ++i)
            own_lane().news[i].join_to(&Knowledge::written, knowledge.written);
    }
    knowledge.written.raise(actor.number, actor.steps);
    knowledge.read.raise(actor.number, actor.steps);
    signals[word].push_back({sum, std::make_shared<Knowledge>(std::move(knowledge))});
}

void acquire_signal(const uint64_t* word, uint64_t found) {
    const Shared* last = nullptr;
    for (const Signal& signal : signals[word]) {
        if (signal.sum <= found) last = &signal.knowledge;
    }
    if (last) learn_from(word, *last);
}

namespace {

Card& card_of(const Name& name) {
    return cards.try_emplace(name, Card{actor({~uintptr_t{0}, name[0], name[1]}).number})
        .first->second;
}

void expect_known(const Clock& clock, const Access& access, const char* what, uintptr_t address) {
    if (!access.exists) return;
    if (access.step != Access::kUnfinished && clock[access.actor] > access.step) return;
    const std::string text = std::string("a race: the network card ") + what + " " +
                             shadow.describe(address) + ", after warp or actor " +
                             std::to_string(access.actor) + ", step " + std::to_string(access.step);
    die(text.c_str());
}

void end_step(Card& card) {
    ++card.step;
    card.known.written.set(card.number, card.step);
    card.known.read.set(card.number, card.step);
}

}  // namespace

void card_acquire(const Name& name, const uint64_t* flag) {
    const auto found = flags.find(flag);
    if (found != flags.end() && found->second.scope == Scope::System)
        card_of(name).known.join(*found->second.knowledge);
}

void card_read(const Name& name, const void* address, size_t bytes) {
    if (!shadow.has(address)) return;
    Card& card = card_of(name);
    shadow.for_cells(address, bytes, [&](Cell& cell, uintptr_t at) {
        expect_known(card.known.written, cell.write, "reads", at);
        if (cell.read.exists) cell.other_reads.push_back(cell.read);
        cell.read = {card.number, card.step};
    });
    end_step(card);
}

void card_write(const Name& name, void* address, const void* bytes, size_t count) {
    std::memcpy(address, bytes, count);
    if (!shadow.has(address)) return;
    Card& card = card_of(name);
    shadow.for_cells(address, count, [&](Cell& cell, uintptr_t at) {
        expect_known(card.known.written, cell.write, "writes", at);
        expect_known(card.known.read, cell.read, "writes what is read of", at);
        for (const Access& other : cell.other_reads)
            expect_known(card.known.read, other, "writes what is read of", at);
        remember_write(cell, {card.number, card.step, 0, true});
    });
    end_step(card);
}

void card_signal(const Name& name, const uint64_t* word, uint64_t sum) {
    signals[word].push_back({sum, std::make_shared<Knowledge>(card_of(name).known)});
}

}  // namespace simt::order

#include "fabric/queue/software_nic.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "fabric/queue/status.h"
#include "fabric/queue/tcp_link.h"
#include "fabric/queue/verbs_link.h"

namespace ep {
namespace {

constexpr char kEnd[] = "it has closed its buffer";
constexpr char kForeign[] = "it sent what no rank sends";

uint64_t abort_word_of(ControlBlock& block) {
    return std::atomic_ref<uint64_t>(block.abort).load(std::memory_order_acquire);
}

void abort(ControlBlock& block, uint64_t word) {
    uint64_t none = 0;
    std::atomic_ref<uint64_t>(block.abort).compare_exchange_strong(none, word);
}

// Sets the reason unless there is one.
void note(Reason& reason, const std::string& why) {
    if (std::atomic_ref<uint64_t>(reason.bytes).load()) return;
    const size_t bytes = std::min(why.size(), Reason::kMaxBytes);
    std::memcpy(reason.text, why.data(), bytes);
    std::atomic_ref<uint64_t>(reason.bytes).store(bytes, std::memory_order_release);
}

// Moves a value to where it is never destroyed.
template <class T>
void leak(T& value) {
    new T(std::move(value));
}

// Whether the rank is in a call of the normal mode.
bool is_in_transfer(ControlBlock& block) {
    const auto is_under_way = [&](uint64_t Calls::* kind) {
        const auto number = [&](Calls& calls) {
            return std::atomic_ref<uint64_t>(calls.*kind).load(std::memory_order_relaxed);
        };
        return number(block.entered) != number(block.finished);
    };
    return is_under_way(&Calls::notify) || is_under_way(&Calls::transfer);
}

// Whether a rank reports an outcome to others: not one that it received, nor one that ends it
// alone.
bool is_reported(Outcome outcome) {
    return outcome > Outcome::Ok && outcome <= Outcome::Lost && outcome != Outcome::Aborted &&
           outcome != Outcome::CutOff;
}

void add(char* word, uint64_t increment) {
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(word))
        .fetch_add(increment, std::memory_order_release);
}

}  // namespace

SoftwareNic::SoftwareNic(int rank, std::vector<ControlBlock*> controls, Cards cards, uint32_t depth)
    : rank_(rank),
      controls_(std::move(controls)),
      cards_(std::move(cards)),
      depth_(depth),
      links_(controls_.size()),
      arriving_(controls_.size()),
      reported_(controls_.size()),
      has_left_(controls_.size()),
      waker_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (waker_ < 0) throw std::runtime_error("no event descriptor for the network's thread");
}

SoftwareNic::~SoftwareNic() {
    if (is_forked()) {  // the thread is not here, and the cards' state is the parent's
        leak(thread_);
        leak(links_);
        leak(ports_);
        leak(cards_);
    }
    stop(std::chrono::seconds(0));
    ::close(waker_);
}

// The connection that carries a queue; null: memory is mapped.
Link* SoftwareNic::link_of(size_t queue) const {
    return links_[queue / 2 % links_.size()].get();  // see SendQueues
}

void SoftwareNic::start(const std::vector<int>& sockets, const QueuePairs& pairs, double limit) {
    limit_ = limit;
    Links links(sockets.size());
    for (size_t rank = 0; rank < sockets.size(); ++rank) {
        if (sockets[rank] < 0) continue;
        std::unique_ptr<Link>& link = links[rank];
        link = std::make_unique<TcpLink>(sockets[rank]);
        if (is_direct()) {
            link = std::make_unique<CardLink>(std::move(link));
        } else if (!cards_.empty()) {
            link = std::make_unique<VerbsLink>(std::move(link), pairs.at(rank));
        }
        for (const auto& [number, port] : ports_) share(*link, rank, number);
    }
    start_over(std::move(links));
}

void SoftwareNic::start_over(Links links) {
    start_stepped(std::move(links));
    thread_ = std::jthread([this] { run(); });
    has_thread_ = true;
}

void SoftwareNic::start_stepped(Links links) {
    const std::lock_guard lock(ports_mutex_);
    links_ = std::move(links);
    for (size_t rank = 0; rank < links_.size(); ++rank) {
        reported_[rank] = 0;
        has_left_[rank] = false;
        if (links_[rank]) std::memset(controls_[rank], 0, sizeof(ControlBlock));
    }
    for (const auto& [number, port] : ports_) {
        for (size_t i = 0; i < port->taken_.size(); ++i) port->queues_[i].clear();
        std::fill(port->producers_.begin(), port->producers_.end(), SendQueue::Producer{});
        std::fill(port->taken_.begin(), port->taken_.end(), Port::Taken{});
    }
    last_heartbeat_ = urgent_until_ = {};
    last_step_ = last_silence_check_ = Clock::now();
    heard_.assign(links_.size(), last_step_);
    unanswered_.assign(links_.size(), 0);
    last_abort_ = 0;
    why_lost_ = {};
    lost_.reset();
    stopping_ = sent_bye_ = false;
}

void SoftwareNic::stop(std::chrono::duration<double> most) {
    if (!is_running()) return;
    stop_at_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(most);
    stopping_ = true;
    wake();
    thread_.join();
    const std::lock_guard lock(ports_mutex_);  // others may report failures or close ports
    has_thread_ = false;
    for (auto& link : links_) link.reset();
    for (const auto& [number, port] : ports_) {
        for (Port::Side& side : port->sides_) side.is_connected = false;
    }
}

void SoftwareNic::run() {
    pthread_setname_np(pthread_self(), kThreadName);
    Clock::time_point idle_since = Clock::now();
    while (true) {
        const bool moved = step();
        bool polls = false;
        {
            const std::lock_guard lock(ports_mutex_);
            if (stopping_ && !moved && leave()) return;
            polls = polls_ || is_polled();
        }
        const auto now = Clock::now();
        if (moved) {
            idle_since = now;
        } else if (now - idle_since < kSpin) {
            std::this_thread::yield();
        } else {
            sleep(poll_interval(now - idle_since, polls));
        }
    }
}

bool SoftwareNic::step() {
    const std::lock_guard lock(ports_mutex_);
    bool moved = false;
    for (const auto& [number, port] : ports_) {
        for (size_t i = 0; i < port->taken_.size(); ++i) moved |= carry_out(*port, i);
    }
    const auto now = Clock::now();
    send_reports(now);
    moved |= move_bytes(now);
    lose_silent(now);
    end_waits();
    last_step_ = now;
    return moved;
}

// How long to sleep. If nothing wakes the thread when something comes, an eighth of the idle time.
SoftwareNic::Clock::duration SoftwareNic::poll_interval(Clock::duration idle, bool polls) const {
    if (polls) return std::clamp<Clock::duration>(idle / 8, kMinInterval, kMaxInterval);
    return Clock::now() < urgent_until_ || stopping_ ? kUrgent : kUrgent * 2;
}

// Sends goodbyes once everything has left, or it is late, and gives the other machines a moment to
// receive them. Returns whether that is over.
bool SoftwareNic::leave() {
    const auto now = Clock::now();
    bool has_left = !has_work(), is_heard = true;
    for (const auto& link : links_) {
        if (!link) continue;
        has_left &= !link->has_to_send();
        is_heard &= link->is_acknowledged();
    }
    if (!has_left && now <= stop_at_) return false;
    if (sent_bye_) return is_heard || now > stop_at_ + kLinger;
    for (const auto& link : links_) {
        if (!link || !link->end().empty()) continue;
        add_status(*link);
        link->add_copy({Frame::kBye}, {});
    }
    sent_bye_ = true;
    return false;
}

bool SoftwareNic::is_polled() const {
    return std::ranges::any_of(links_, [](const auto& link) { return link && link->is_polled(); });
}

bool SoftwareNic::has_work() const {
    for (const auto& [number, port] : ports_) {
        for (size_t i = 0; i < port->taken_.size(); ++i) {
            const Link* link = link_of(i);
            if (link && !link->has_room_for(region_of(*port))) continue;
            if (port->queues_[i].rung() != static_cast<uint16_t>(port->taken_[i].begun))
                return true;
        }
    }
    return false;
}

// Carries out some of what was posted in a queue. Returns whether there was any.
bool SoftwareNic::carry_out(Port& port, size_t number) {
    const SendQueue queue = port.queues_[number];
    Port::Taken& taken = port.taken_[number];
    const int rank = static_cast<int>(number / 2 % links_.size());
    const uint16_t rung = queue.rung();
    Link* link = link_of(number);
    if (link && !link->end().empty()) {  // give up, as a card does: nothing waits for room then
        taken.begun += static_cast<uint16_t>(rung - static_cast<uint16_t>(taken.begun));
        if (taken.begun == taken.given_up) return false;
        queue.completion->report(static_cast<uint16_t>(taken.begun - 1), Completion::kRequestError);
        taken.given_up = taken.begun;
        return true;
    }
    char* const own = port.heaps_[rank_];
    bool moved = false;
    const uint16_t region = region_of(port);
    while (static_cast<uint16_t>(taken.begun) != rung && (!link || link->has_room_for(region))) {
        const SendEntry& entry = queue.entries[taken.begun & (queue.depth - 1)];
        const uint64_t address = entry.remote.address;
        const uint16_t index = entry.index();
        const auto complete = [completion = queue.completion, index] {
            completion->report(index, Completion::kDone);
        };
        moved = true;
        if (entry.opcode() == SendEntry::kFetchAdd) {
            const uint64_t increment = entry.add.atomic.increment;
            ++taken.begun;
            if (link) {
                link->add({Frame::kAdd, region, 0, address, increment}, nullptr, complete);
            } else {
                add(port.heaps_[rank] + address, increment);
                complete();
            }
            continue;
        }
        const uint64_t bytes = uint32_t{entry.write.source.bytes};
        const char* source = own + uint64_t{entry.write.source.address};
        if (!link) {
            std::memcpy(port.heaps_[rank] + address, source, bytes);
            ++taken.begun;
            complete();
            continue;
        }
        const uint64_t piece = std::min<uint64_t>(kPiece, bytes - taken.offset);
        const bool is_last = taken.offset + piece == bytes;
        link->add({Frame::kWrite, region, static_cast<uint32_t>(piece), address + taken.offset},
                  source + taken.offset, is_last ? complete : std::function<void()>());
        taken.offset = is_last ? 0 : taken.offset + piece;
        taken.begun += is_last;
        if (!is_last) break;  // other queues' entries go between the pieces
    }
    return moved;
}

bool SoftwareNic::move_bytes(Clock::time_point now) {
    bool moved = false;
    for (size_t rank = 0; rank < links_.size(); ++rank) {
        const int from = static_cast<int>(rank);
        const auto& link = links_[rank];
        if (!link) continue;
        if (link->end().empty()) {
            moved |= link->send();
            if (link->receive([&](const Frame& frame) { return place_of(from, frame); },
                              [&](const Frame& frame) { take(from, frame); })) {
                moved = true;
                heard_[rank] = now;
                unanswered_[rank] = 0;
            }
        }
        if (!link->end().empty() && link->end() != kEnd && !stopping_) lose(from, link->end());
    }
    return moved;
}

// Returns where the bytes of a frame belong; null: no rank sends such a frame.
char* SoftwareNic::place_of(int rank, const Frame& frame) {
    switch (frame.kind) {
        case Frame::kStatus:
            if (frame.bytes != sizeof(ControlBlock)) return nullptr;
            return reinterpret_cast<char*>(&arriving_[rank]);
        case Frame::kAbort:
        case Frame::kBye:
            return frame.bytes ? nullptr : reinterpret_cast<char*>(controls_[rank]);
        case Frame::kWrite:
        case Frame::kAdd: {
            if (frame.region >= next_port_ || frame.bytes > kPiece) return nullptr;
            const auto found = ports_.find(frame.region);
            const Port* port = found == ports_.end() ? nullptr : found->second.get();
            const uint64_t bytes = frame.kind == Frame::kAdd ? sizeof(uint64_t) : frame.bytes;
            if (frame.kind == Frame::kAdd && (frame.bytes || frame.address % bytes)) return nullptr;
            if (!port) {
                nowhere_.resize(kPiece);
                return nowhere_.data();
            }
            if (bytes > port->bytes_ || frame.address > port->bytes_ - bytes) return nullptr;
            return port->heaps_[rank_] + frame.address;
        }
    }
    return nullptr;
}

void SoftwareNic::take(int rank, const Frame& frame) {
    Link& link = *links_[rank];
    if (frame.kind == Frame::kAdd) {
        if (const auto port = ports_.find(frame.region); port != ports_.end())
            add(port->second->heaps_[rank_] + frame.address, frame.increment);
    } else if (frame.kind == Frame::kStatus) {
        ControlBlock& said = arriving_[rank];
        said.reason.bytes = std::min<uint64_t>(said.reason.bytes, Reason::kMaxBytes);
        copy_status(*controls_[rank], said);
    } else if (frame.kind == Frame::kAbort) {
        const Outcome outcome = ControlBlock::outcome_of(frame.increment);
        const auto blamed = static_cast<size_t>(ControlBlock::rank_of(frame.increment));
        if (!is_reported(outcome) || blamed >= links_.size()) return link.fail(kForeign);
        if (!tolerates_loss_ || outcome != Outcome::Lost) return abort(own(), frame.increment);
        const Reason& reason = controls_[rank]->reason;
        note_loss(static_cast<int>(blamed), std::string(reason.text, reason.bytes));
    } else if (frame.kind == Frame::kBye) {
        has_left_[rank] = true;  // its last status is here
        link.fail(kEnd);
    }
}

// What must be reported to a rank of another machine: an abort word, or a loss; 0: nothing.
uint64_t SoftwareNic::report_for(size_t rank) const {
    const uint64_t word = abort_word_of(*controls_[rank]);
    return word || !lost_ ? word : ControlBlock::abort_word(Outcome::Lost, *lost_);
}

// Sends the abort words that ranks of this machine have set in mirrors, losses, and from time to
// time this rank's status: more often shortly after a failure.
void SoftwareNic::send_reports(Clock::time_point now) {
    if (const uint64_t word = abort_word_of(own()); word != last_abort_) {
        last_abort_ = word;
        urgent_until_ = now + std::chrono::seconds(1);
        // a GPU cannot write to mirrors
        for (size_t rank = 0;
             ControlBlock::outcome_of(word) != Outcome::CutOff && rank < links_.size(); ++rank) {
            if (!is_mapped(static_cast<int>(rank))) abort(*controls_[rank], word);
        }
    }
    const bool is_time = now - last_heartbeat_ > (now < urgent_until_ ? kUrgent : kHeartbeat);
    for (size_t rank = 0; rank < links_.size(); ++rank) {
        const auto& link = links_[rank];
        if (!link || !link->end().empty()) continue;
        const uint64_t word = report_for(rank);
        const bool is_new = word && word != reported_[rank];
        if (is_new) {
            add_abort(rank, word);
        } else if (is_time && link->has_room() && unanswered_[rank] < kMaxUnanswered) {
            ++unanswered_[rank];
            add_status(*link);
        }
    }
    if (is_time) last_heartbeat_ = now;
}

// Gives up ranks whose machine no longer answers. A stopped process is waited for like a slow one,
// because its machine answers. If losses are tolerated, only until it takes nothing sent to it.
void SoftwareNic::lose_silent(Clock::time_point now) {
    if (now - last_silence_check_ < kSilenceCheck || stopping_) return;
    last_silence_check_ = now;
    for (size_t rank = 0; rank < links_.size(); ++rank) {
        const auto& link = links_[rank];
        if (!link || !link->end().empty()) continue;
        const double machine = silence_of(link->descriptor(), limit_);
        const double process = std::chrono::duration<double>(now - heard_[rank]).count();
        const bool is_stuck = tolerates_loss_ && link->has_to_send() && process > limit_;
        if (machine <= limit_ && !is_stuck) continue;
        const std::string time = std::to_string(static_cast<int>(is_stuck ? process : machine));
        lose(static_cast<int>(rank), is_stuck
                                         ? "it took nothing of what was sent for " + time + " s"
                                         : "nothing was heard from its machine for " + time +
                                               " s: the network between, or that machine");
    }
}

std::pair<double, double> SoftwareNic::silence(int rank) {
    const std::lock_guard lock(ports_mutex_);
    if (is_mapped(rank)) return {};
    const std::chrono::duration<double> process = last_step_ - heard_[rank];
    return {process.count(), silence_of(links_[rank]->descriptor(), limit_)};
}

void SoftwareNic::add_status(Link& link) {
    ControlBlock said{};
    copy_status(said, own());
    if (!said.reason.bytes) said.reason = why_lost_;  // for ranks whose own connections still work
    link.add_copy({Frame::kStatus}, {reinterpret_cast<const char*>(&said), sizeof said});
}

void SoftwareNic::add_abort(size_t rank, uint64_t word) {
    Link& link = *links_[rank];
    add_status(link);
    link.add_copy({Frame::kAbort, 0, 0, 0, word}, {});
    reported_[rank] = word;
}

// Gives up a rank when its connection breaks, and notifies it if only a card has failed.
void SoftwareNic::lose(int rank, const std::string& why) {
    links_[rank]->fail(why);
    note(controls_[rank]->reason, why);
    note_loss(rank, why);
    if (reported_[rank]) return;
    add_abort(rank, ControlBlock::abort_word(Outcome::Lost, *lost_));
    links_[rank]->send();
}

void SoftwareNic::note_loss(int rank, const std::string& why) {
    if (lost_) return;
    lost_ = rank;
    note(why_lost_, why);
}

// Ends all waits because of the connection that broke first. If losses are tolerated, ends only
// those of ranks of this machine that are in a call of the normal mode, now or later, which cannot
// go on without a rank; other machines do so for theirs.
void SoftwareNic::end_waits() {
    if (!lost_) return;
    const uint64_t word = ControlBlock::abort_word(Outcome::Lost, *lost_);
    for (size_t rank = 0; rank < controls_.size(); ++rank) {
        const bool is_near = is_mapped(static_cast<int>(rank));
        if (!tolerates_loss_ || (is_near && is_in_transfer(*controls_[rank])))
            abort(*controls_[rank], word);
    }
}

std::vector<int> SoftwareNic::ranks_that_left() const {
    std::vector<int> ranks;
    for (size_t rank = 0; rank < has_left_.size(); ++rank) {
        if (has_left_[rank]) ranks.push_back(static_cast<int>(rank));
    }
    return ranks;
}

void SoftwareNic::flush_reports() {
    const auto deadline = Clock::now() + std::chrono::seconds(1);
    const auto is_reported = [&] {
        const std::lock_guard lock(ports_mutex_);
        if (abort_word_of(own()) != last_abort_) return false;  // the mirrors do not have it yet
        for (size_t rank = 0; rank < links_.size(); ++rank) {
            const auto& link = links_[rank];
            if (!link || !link->end().empty()) continue;
            if (report_for(rank) != reported_[rank] || link->has_to_send() ||
                !link->is_acknowledged())
                return false;
        }
        return true;
    };
    while (is_running() && !is_reported() && Clock::now() < deadline) {
        wake();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

void SoftwareNic::sleep(Clock::duration most) {
    asleep_.exchange(1, std::memory_order_acq_rel);
    std::vector<pollfd> files{{waker_, POLLIN, 0}};
    {
        const std::lock_guard lock(ports_mutex_);
        if (has_work()) most = {};
        for (const auto& link : links_) {
            if (!link || !link->end().empty()) continue;
            const short events = POLLIN | (link->waits_for_descriptor() ? POLLOUT : 0);
            files.push_back({link->descriptor(), events, 0});
        }
    }
    const auto ns = std::chrono::nanoseconds(most).count();
    const timespec time{static_cast<time_t>(ns / 1'000'000'000),
                        static_cast<long>(ns % 1'000'000'000)};
    ppoll(files.data(), files.size(), &time, nullptr);
    asleep_.store(0, std::memory_order_relaxed);
    uint64_t count;
    [[maybe_unused]] const ssize_t ignored = read(waker_, &count, sizeof count);
}

// Either this finds that the thread sleeps, or the thread finds before it sleeps what was rung: of
// two atomic changes of a word, one sees the other.
void SoftwareNic::wake() {
    if (!asleep_.fetch_add(0, std::memory_order_acq_rel)) return;
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t ignored = write(waker_, &one, sizeof one);
}

void wake(SoftwareNic& nic) { nic.wake(); }

}  // namespace ep

// SoftwareNic: the thread that carries send queues out, and the proxy for status and failures.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/incident.h"
#include "fabric/queue/card_link.h"
#include "fabric/queue/link.h"
#include "fabric/queue/send_queue.h"
#include "fabric/verbs/queue_pair.h"

namespace ep {

// The GPU's side where it posts in a card's queues directly. Called when queues are connected, on
// the thread that connects them.
class CardMapper {
  public:
    // Memory of the GPU for all queues of a port.
    virtual CardQueue* cards() = 0;
    // Maps a queue pair's rings and bell for the GPU, and sets their addresses to the GPU's. Throws
    // std::runtime_error if that fails.
    virtual void reach(verbs::DirectPair& pair, CardQueue& card) = 0;
    virtual void upload(const std::vector<CardQueue>& cards) = 0;

  protected:
    ~CardMapper() = default;
};

// A thread that carries out the send queues of one rank as a network card would: to ranks of other
// machines over TCP or with a card (verbs), to ranks whose memory is mapped by copying. A write
// reads its source when it leaves, and an addition is visible after the writes before it in its
// queue. A direct card carries out by itself what goes to other machines, and the thread watches
// it.
//
// It also sends this rank's control block to the others, and keeps a mirror of each of theirs. So a
// failure anywhere ends the waits everywhere, and a rank that waited can name the one that never
// came. A connection that breaks ends all waits, too.
//
// In a process that is forked from its own it does nothing, and is only destroyed.
class SoftwareNic {
  public:
    using Cards = std::vector<std::shared_ptr<verbs::Card>>;

    static constexpr char kThreadName[] = "megatron_ep nic";  // as top shows it

    // controls: by rank; for ranks of other machines a mirror that belongs to this rank. cards:
    // none for TCP alone, one, or several direct ones; each channel uses one, which keeps its
    // order. depth: of the queues in which ranks on the host post.
    SoftwareNic(int rank, std::vector<ControlBlock*> controls, Cards cards = {},
                uint32_t depth = kDepth);
    ~SoftwareNic();
    SoftwareNic(const SoftwareNic&) = delete;

    static constexpr uint32_t kDepth = 128;  // of a queue

    // Whether ranks post in its cards' queues directly.
    bool is_direct() const { return !cards_.empty() && cards_.front()->is_direct(); }

    // The queues of a symmetric heap, and how far they are carried out.
    class Port {
      public:
        const SendQueues& queues() const { return queues_; }

      private:
        friend class SoftwareNic;
        struct Taken {              // of one queue, used by the thread
            uint64_t begun = 0;     // entries that were begun
            uint64_t offset = 0;    // bytes of the next entry that have been sent
            uint64_t given_up = 0;  // entries that were given up because the connection was lost
        };

        // Heaps by rank; those of other machines are not accessed.
        std::vector<char*> heaps_;
        size_t bytes_;
        int stride_;
        SendQueues queues_;
        std::vector<Taken> taken_;                                   // by queue
        std::vector<std::shared_ptr<const verbs::Region>> regions_;  // by card
        // Memory of the queues, unless a GPU posts in them.
        std::vector<SendEntry> memory_;
        std::vector<SendQueue::Producer> producers_;

        // With a direct card.
        struct Side {  // the queue pairs to a rank of another machine
            CardLink::Pairs pairs;
            bool is_connected = false;
        };
        std::vector<Side> sides_;       // by rank
        std::vector<CardQueue> cards_;  // by queue
        CardMapper* gpu_ = nullptr;
    };
    // Memory of queues in which a GPU posts. The thread polls them, because a GPU cannot wake it.
    struct QueueMemory {
        char* shared;  // see SendQueues
        SendQueue::Producer* producers;
        CardMapper* cards = nullptr;  // with a direct card
    };

    // All ranks open the same ports in the same order. heaps: by rank, as the network reads and
    // writes them; those of other machines are not accessed. stride: the queues lead to every
    // stride-th rank, this one included; other ranks take no queues of a card.
    std::shared_ptr<Port> open(std::vector<char*> heaps, size_t bytes, int channels,
                               const std::optional<QueueMemory>& of_gpu = std::nullopt,
                               int stride = 1);
    // Closes a port. What still arrives for it is not written.
    void close(const std::shared_ptr<Port>& port);

    // With a direct card, after ports were opened and before anything is posted in them, whether or
    // not the network runs: makes queue pairs to a rank of another machine for all ports that have
    // none, and returns invitations for that rank ...
    std::string invite(int rank);
    // ... and takes those of that rank. Both throw std::runtime_error that says what fails.
    void join(int rank, const std::string& invitations);

    // Begins to carry out what is posted. sockets: by rank, connected; -1 for ranks whose memory is
    // mapped. Takes ownership. pairs: by rank, with a card that is not direct: a connected one for
    // each socket. limit: seconds without an answer from its machine after which a rank is lost.
    using QueuePairs = std::vector<std::shared_ptr<verbs::QueuePair>>;
    void start(const std::vector<int>& sockets, const QueuePairs& pairs = {}, double limit = 10);
    // Does the same over connections of any kind, without a card: by rank, null where memory is
    // mapped.
    using Links = std::vector<std::unique_ptr<Link>>;
    void start_over(Links links);
    // Does the same for tests, without a thread: the test calls step().
    void start_stepped(Links links);
    // Runs one iteration of the thread. Returns whether anything moved.
    bool step();
    // Carries out what was posted, for at most this long, and closes the connections. Empties the
    // queues.
    void stop(std::chrono::duration<double> most);
    bool is_running() const { return has_thread_ && !is_forked(); }
    // Wakes the thread. Called after a queue of the host has rung.
    void wake();
    // Waits until the other machines have what this rank knows of failures, a moment at most: its
    // process may be about to end.
    void flush_reports();
    // Ranks of other machines whose network has stopped. Their mirrors hold their last status.
    std::vector<int> ranks_that_left() const;
    // For a rank of another machine: seconds since its process has sent anything, up to this
    // thread's last step, and since its machine has answered; 0, 0 for the others.
    std::pair<double, double> silence(int rank);
    // From now on a lost connection ends no waits of the low-latency mode: the waiting ranks mask
    // the lost one. It still ends waits of the normal mode of ranks on the host.
    void tolerate_loss() { tolerates_loss_ = true; }

  private:
    using Clock = std::chrono::steady_clock;
    // Queue pairs to a rank; more queues share them. A card and its driver hold some thousands.
    static constexpr size_t kMaxPairs = 16;
    static constexpr uint32_t kPiece = 64 << 10;  // so that a long write delays no credit
    // With these intervals the thread takes 0.3 % of a core while nothing is sent (`megatron-ep
    // bench`). Each alone is not measured: chosen as short for what waits for it.
    static constexpr std::chrono::milliseconds kHeartbeat{200}, kUrgent{10};
    static constexpr int kMaxUnanswered = 4;  // statuses sent to a rank that sends nothing itself
    static constexpr std::chrono::seconds kSilenceCheck{1};   // between two checks for silent ranks
    static constexpr std::chrono::milliseconds kLinger{200};  // for goodbyes to arrive
    static constexpr std::chrono::microseconds kSpin{20};
    static constexpr std::chrono::microseconds kMinInterval{50}, kMaxInterval{1000};

    bool is_forked() const { return getpid() != process_; }
    void run();
    bool leave();
    // The card of a queue pair. Both queues of a channel have the same.
    size_t card_of(size_t pair) const { return pair / 2 % cards_.size(); }
    static size_t queues_towards(const Port& port) {
        return 2 * (static_cast<size_t>(port.queues_.channels) + 1);
    }
    // Index in SendQueues of a queue to a rank, from its index among those to this rank.
    size_t number_of(int rank, size_t queue) const {
        return 2 * (queue / 2 * links_.size() + rank) + queue % 2;
    }
    static bool reaches(const Port& port, int from, int to) {
        return from != to && from % port.stride_ == to % port.stride_;
    }
    void share(Link& link, size_t rank, uint16_t number);
    bool forget(const std::shared_ptr<Port>& port, bool at_once);
    bool carry_out(Port& port, size_t queue);
    bool move_bytes(Clock::time_point now);
    void send_reports(Clock::time_point now);
    void lose_silent(Clock::time_point now);
    void add_status(Link& link);
    void add_abort(size_t rank, uint64_t word);
    void lose(int rank, const std::string& why);
    void note_loss(int rank, const std::string& why);
    void end_waits();
    uint64_t report_for(size_t rank) const;
    bool is_mapped(int rank) const { return !links_[rank]; }
    Link* link_of(size_t queue) const;
    Clock::duration poll_interval(Clock::duration idle, bool polls) const;
    void sleep(Clock::duration most);
    bool has_work() const;
    bool is_polled() const;
    static uint16_t region_of(const Port& port) { return static_cast<uint16_t>(port.queues_.key); }
    char* place_of(int rank, const Frame& frame);
    void take(int rank, const Frame& frame);
    ControlBlock& own() const { return *controls_[rank_]; }

    const pid_t process_ = getpid();
    int rank_;
    std::vector<ControlBlock*> controls_;
    Cards cards_;
    uint32_t depth_;
    Links links_;  // by rank
    std::mutex ports_mutex_;
    std::map<uint16_t, std::shared_ptr<Port>> ports_;  // open ones, by number
    uint32_t next_port_ = 0;
    std::vector<char> nowhere_;                    // for what arrives for closed ports
    std::vector<ControlBlock> arriving_;           // by rank
    std::vector<std::atomic<uint64_t>> reported_;  // by rank: the abort word that was sent to it
    std::vector<std::atomic<bool>> has_left_;      // by rank
    Clock::time_point last_heartbeat_, last_silence_check_, last_step_;
    std::vector<Clock::time_point> heard_;  // by rank: when it has last sent anything
    std::vector<int> unanswered_;           // by rank: statuses sent to it since
    double limit_ = 10;                     // see start()
    uint64_t last_abort_ = 0;
    // The rank whose connection broke first, here or as another rank reported, and why.
    std::optional<int> lost_;
    Reason why_lost_{};
    Clock::time_point urgent_until_;

    std::jthread thread_;
    std::atomic<bool> has_thread_ = false, stopping_ = false, tolerates_loss_ = false;
    Clock::time_point stop_at_;
    bool sent_bye_ = false;
    bool polls_ = false;  // whether there are queues that do not wake the thread
    alignas(64) std::atomic<int> asleep_ = 0;
    int waker_;  // an eventfd
};

}  // namespace ep

// A libibverbs of the tests' own: cards whose wire is Unix sockets, between processes and within
// one. Reliable connections do what their specification allows: different queue pairs are not in
// order with each other; what is written through a key with relaxed ordering becomes visible late
// and in any order, but before a request through a key without it is carried out on its queue pair;
// a request may take long; a card that hears nothing gives up after its retries; memory that was
// not registered is refused; and after an error a queue pair flushes what it has.
//
// It is a libmlx5, too: of queue pairs whose completion queue is made with mlx5dv_create_cq, the
// cards listen to bells and carry out what lies in the rings (fake_mlx5.h).
//
// Facts of the cards are settings, "name=value" of the variable FAKE_IBVERBS, separated by commas,
// and of the function fake_ibverbs_set.

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fabric/verbs/abi.h"
#include "fabric/verbs/mlx5.h"
#include "fake_mlx5.h"

using namespace ep::verbs;

namespace {

using Clock = std::chrono::steady_clock;
using Microseconds = std::chrono::microseconds;

class Settings {
  public:
    Settings() {
        const char* given = std::getenv("FAKE_IBVERBS");
        std::string text = given ? given : "";
        while (!text.empty()) {
            const size_t comma = text.find(','), equals = text.find('=');
            set(text.substr(0, equals), std::atoll(text.c_str() + equals + 1));
            text = comma == std::string::npos ? "" : text.substr(comma + 1);
        }
    }
    long long operator[](const std::string& name) {
        const std::lock_guard lock(mutex_);
        return values_.at(name);
    }
    void set(const std::string& name, long long value) {
        const std::lock_guard lock(mutex_);
        values_.at(name) = value;
    }

  private:
    std::mutex mutex_;
    std::map<std::string, long long> values_ = {
        {"devices", 1},        {"down", 0},        {"atomics", 1},      {"ethernet", 1},
        {"iwarp", 0},          {"gids", 4},        {"address", 1},  // the last of 10.99.0.x
        {"network", 0},       // the third of it: cards of different ones do not reach each other
        {"astray", -1},       // number of the card whose network is 9 instead; -1: none
        {"slow", -1},         // number of the card that takes 20 ms for each write of 4 KB or more
        {"unregistered", 0},  // registering memory fails with this errno
        {"unposted", 0},      // posting a request fails with this errno
        {"unforkable", 0},    // the library cannot provide for forks any more, with this errno ...
        {"copies", 0},        // ... and whether the kernel does
        {"traffic_class", -1},  // with which connections must be made; -1: any
        {"service_level", -1}, {"pkey_index", -1}, {"ack_timeout", -1}, {"retries", -1},
        {"seed", 0},            // what is late, and by how much; 0: nothing
        {"silent", -1},         // number of the card that says nothing; -1: none
        {"silent_after", -1},   // requests that a card carries out before it says nothing any more
        {"refused_after", -1},  // requests that a card carries out before it refuses all memory
        {"retry_ms", 60'000},   // until a card gives up: no busy machine makes it
        {"mlx5", 1},            // whether the cards are of this driver
        {"stride", 64},         // bytes from an entry of a ring to the next one, as the driver says
    };
};

Settings& settings() {
    static Settings all;
    return all;
}

struct Header {
    enum Kind : uint32_t { kWrite = 1, kAdd, kReply } kind;
    uint32_t source, packet, key;
    uint64_t address, add;
    uint32_t bytes;
    int32_t status;
};

struct Message {
    Header header;
    std::vector<char> data;
};

struct Request {
    Header header;
    std::vector<Sge> pieces;  // what it writes, or where the old value goes
    bool tells;               // when it is done
    uint64_t number;          // that the other side gave it, or of an entry of a ring
    Clock::time_point since = Clock::now();
};

struct Arrived {
    Message message;
    int from;  // the socket
    Clock::time_point due;
};

struct FakeContext;
struct FakeCq : Cq {
    std::deque<Wc> found;
    std::unique_ptr<fake_mlx5::Completions> ring;  // instead
};

struct FakeQp : Qp {
    FakeContext* card;
    QpAttr attr{};
    uint32_t most;
    int listener = -1, out = -1;
    std::vector<int> in;
    std::deque<Request> waiting, unconfirmed;
    std::deque<Arrived> arrived;
    uint32_t next_packet = 0, expected_packet = 0;
    struct Late {
        char* to;
        std::vector<char> data;
    };
    std::vector<Late> late;  // what was written with relaxed ordering
    Clock::time_point slow_until;
    std::unique_ptr<fake_mlx5::SendRing> ring;
};

struct FakeMr : Mr {
    uint64_t begin;
    unsigned access;
};

sockaddr_un name_of(uint32_t qp, socklen_t& bytes) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const std::string text = "fake-ibverbs-" + std::to_string(qp);
    std::memcpy(name.sun_path + 1, text.data(), text.size());
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
    return name;
}

struct FakeContext : Context {
    std::mutex lock;
    std::mt19937_64 random{static_cast<uint64_t>(settings()["seed"])};
    std::list<FakeQp*> qps;
    std::map<uint32_t, FakeMr*> regions;  // by key
    long long carried_out = 0;
    int waker = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    bool stopping = false;
    std::thread engine;
    const pid_t process = getpid();

    void run();
    bool step();
    void take_from_ring(FakeQp& qp);
    void post(FakeQp& qp, Request request);
    void tell(FakeQp& qp, const Request& request, int status);
    void send_requests(FakeQp& qp);
    void receive(FakeQp& qp);
    void carry_out(FakeQp& qp);
    int execute(FakeQp& qp, const Message& message);
    void place_late(FakeQp& qp, bool all);
    void end(FakeQp& qp, int status);
    char* place_of(uint32_t key, uint64_t address, uint64_t bytes, unsigned access);
    bool is_late() { return settings()["seed"] != 0; }
    long long number() const { return std::atoll(device->name + std::strlen("fake_")); }
};

// A fork has the descriptors of the process before it, and with them what its cards do.
void expect_own(const FakeContext& card) {
    if (getpid() == card.process) return;
    std::fputs("a card is changed by a process that did not open it\n", stderr);
    std::abort();
}

bool is_silent(FakeContext& card) {
    const long long most = settings()["silent_after"];
    return settings()["down"] || settings()["silent"] == card.number() ||
           (most >= 0 && card.carried_out >= most);
}

void FakeContext::run() {
    while (true) {
        std::vector<pollfd> files{{waker, POLLIN, 0}};
        bool moved, has_rings = false;
        {
            const std::lock_guard held(lock);
            if (stopping) return;
            moved = step();
            for (FakeQp* qp : qps) {
                has_rings |= qp->ring != nullptr;
                files.push_back({qp->listener, POLLIN, 0});
                for (const int socket : qp->in) files.push_back({socket, POLLIN, 0});
                if (qp->out >= 0) files.push_back({qp->out, POLLIN, 0});
            }
        }
        const timespec poll_interval{0, moved       ? 0
                                        : has_rings ? 50'000
                                                    : 1'000'000};  // nobody says of a bell
        ppoll(files.data(), files.size(), &poll_interval, nullptr);
        uint64_t count;
        [[maybe_unused]] const ssize_t ignored = read(waker, &count, sizeof count);
    }
}

bool FakeContext::step() {
    bool busy = false;
    for (FakeQp* qp : qps) {
        while (true) {
            const int socket =
                accept4(qp->listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
            if (socket < 0) break;
            qp->in.push_back(socket);
        }
        if (qp->ring) take_from_ring(*qp);
        send_requests(*qp);
        receive(*qp);
        carry_out(*qp);
        place_late(*qp, false);
        const auto limit = std::chrono::milliseconds(settings()["retry_ms"]);
        const auto& oldest = qp->unconfirmed.empty() ? qp->waiting : qp->unconfirmed;
        if (!oldest.empty() && Clock::now() - oldest.front().since > limit)
            end(*qp, kRetriesExceeded);
        busy |= !qp->waiting.empty() || !qp->arrived.empty() || !qp->late.empty();
    }
    return busy;
}

char* FakeContext::place_of(uint32_t key, uint64_t address, uint64_t bytes, unsigned access) {
    const auto found = regions.find(key);
    if (found == regions.end() || (found->second->access & access) != access) return nullptr;
    const FakeMr& region = *found->second;
    if (address < region.begin || bytes > region.length ||
        address - region.begin > region.length - bytes)
        return nullptr;
    return static_cast<char*>(region.address) + (address - region.begin);
}

// What the bell has rung for; in an error all of it is given up.
void FakeContext::take_from_ring(FakeQp& qp) {
    const bool is_eager = !is_late() || random() % 2;
    try {
        while (qp.state == kError && qp.ring->is_rung(true)) {
            static_cast<FakeCq*>(qp.send_cq)->ring->tell(qp.number, qp.ring->next(), kMlx5Flushed);
            qp.ring->drop();
        }
        while (qp.state == kReadyToSend) {
            const uint64_t number = qp.ring->next();
            const auto entry = qp.ring->take(is_eager);
            if (!entry) return;
            constexpr uint32_t kMost = 1 << 16;  // of a packet
            uint32_t done = 0;
            do {
                const uint32_t part = std::min(entry->bytes - done, kMost);
                Header header{entry->is_write ? Header::kWrite : Header::kAdd};
                header.key = entry->remote_key;
                header.address = entry->remote + done;
                header.add = entry->increment;
                const Sge piece{entry->local + done, part, entry->local_key};
                done += part;
                post(qp, {header, {piece}, entry->tells && done == entry->bytes, number});
            } while (done < entry->bytes);
        }
    } catch (const std::runtime_error& error) {
        std::fprintf(stderr, "fake_ibverbs: %s\n", error.what());
        std::abort();
    }
}

void FakeContext::post(FakeQp& qp, Request request) {
    request.header.source = qp.number;
    request.header.packet = qp.next_packet;
    qp.next_packet = (qp.next_packet + 1) & 0xffffff;
    qp.waiting.push_back(std::move(request));
}

void FakeContext::tell(FakeQp& qp, const Request& request, int status) {
    auto& cq = *static_cast<FakeCq*>(qp.send_cq);
    if (cq.ring) {
        const std::map<int, uint8_t> syndromes = {
            {kSuccess, 0},
            {kLocalProtection, kMlx5LocalProtection},
            {kFlushed, kMlx5Flushed},
            {kRemoteInvalidRequest, kMlx5RemoteInvalidRequest},
            {kRemoteAccess, kMlx5RemoteAccess},
            {kRetriesExceeded, kMlx5RetriesExceeded}};
        return cq.ring->tell(qp.number, static_cast<uint16_t>(request.number),
                             syndromes.at(status));
    }
    Wc found{};
    found.wr_id = request.number;
    found.qp = qp.number;
    found.status = status;
    found.vendor_error = status ? 0x81 : 0;
    cq.found.push_back(found);
}

void FakeContext::send_requests(FakeQp& qp) {
    if (qp.state != kReadyToSend || is_silent(*this)) return;
    if (qp.out < 0 && !qp.waiting.empty()) {
        const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        const int bytes = 1 << 20;
        setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
        socklen_t size;
        const sockaddr_un name = name_of(qp.attr.destination_qp, size);
        if (connect(socket, reinterpret_cast<const sockaddr*>(&name), size)) {
            close(socket);
            return;  // it tries again, until it gives up
        }
        qp.out = socket;
    }
    while (!qp.waiting.empty()) {
        if (is_late() && random() % 4 == 0) return;
        const Request& request = qp.waiting.front();
        Message message{request.header, {}};
        const bool is_add = request.header.kind == Header::kAdd;
        for (const Sge& piece : request.pieces) {
            const char* from =
                place_of(piece.lkey, piece.address, piece.bytes, is_add ? kLocalWrite : 0);
            if (!from || (is_add && piece.bytes != 8)) return end(qp, kLocalProtection);
            if (!is_add) message.data.insert(message.data.end(), from, from + piece.bytes);
        }
        message.header.bytes = static_cast<uint32_t>(message.data.size());
        iovec parts[2] = {{&message.header, sizeof message.header},
                          {message.data.data(), message.data.size()}};
        msghdr packet{};
        packet.msg_iov = parts;
        packet.msg_iovlen = 2;
        if (sendmsg(qp.out, &packet, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) return;
        qp.unconfirmed.push_back(request);
        qp.unconfirmed.back().since = Clock::now();
        qp.waiting.pop_front();
    }
}

void FakeContext::receive(FakeQp& qp) {
    std::vector<char> buffer(sizeof(Header) + (1 << 17));
    std::erase_if(qp.in, [&](int socket) {
        while (true) {
            const ssize_t got = recv(socket, buffer.data(), buffer.size(), MSG_DONTWAIT);
            if (got == 0) close(socket);
            if (got <= 0) return got == 0;
            Arrived one{{}, socket, Clock::now()};
            std::memcpy(&one.message.header, buffer.data(), sizeof(Header));
            one.message.data.assign(buffer.begin() + sizeof(Header), buffer.begin() + got);
            if (is_late() && random() % 8 == 0) one.due += Microseconds(random() % 2000);
            if (settings()["slow"] == number() && got > 4096)
                one.due = std::max(one.due, qp.slow_until) + Microseconds(20'000),
                qp.slow_until = one.due;
            qp.arrived.push_back(std::move(one));
        }
    });
    while (qp.out >= 0 && qp.state == kReadyToSend) {
        Header reply;
        if (recv(qp.out, &reply, sizeof reply, MSG_DONTWAIT) != sizeof reply) break;
        if (qp.unconfirmed.empty() || reply.packet != qp.unconfirmed.front().header.packet)
            continue;
        if (reply.status != kSuccess) return end(qp, reply.status);
        if (qp.unconfirmed.front().tells) tell(qp, qp.unconfirmed.front(), kSuccess);
        qp.unconfirmed.pop_front();
    }
}

void FakeContext::carry_out(FakeQp& qp) {
    while (!is_silent(*this) && !qp.arrived.empty() && qp.arrived.front().due <= Clock::now()) {
        const Arrived one = std::move(qp.arrived.front());
        qp.arrived.pop_front();
        const Header& header = one.message.header;
        const bool hears = qp.state == kReadyToReceive || qp.state == kReadyToSend;
        if (!hears || header.source != qp.attr.destination_qp ||
            header.packet != qp.expected_packet)
            continue;
        qp.expected_packet = (qp.expected_packet + 1) & 0xffffff;
        Header reply = header;
        reply.kind = Header::kReply;
        reply.status = execute(qp, one.message);
        ++carried_out;
        send(one.from, &reply, sizeof reply, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (reply.status != kSuccess) return end(qp, kFlushed);
    }
}

int FakeContext::execute(FakeQp& qp, const Message& message) {
    const Header& header = message.header;
    const bool is_add = header.kind == Header::kAdd;
    const long long most = settings()["refused_after"];
    char* place = place_of(header.key, header.address, is_add ? 8 : header.bytes,
                           is_add ? kRemoteAtomic : kRemoteWrite);
    if (!place || (most >= 0 && carried_out >= most) ||
        !(qp.attr.access & (is_add ? kRemoteAtomic : kRemoteWrite)))
        return kRemoteAccess;
    if (is_add && header.address % 8) return kRemoteInvalidRequest;
    const bool is_relaxed = regions[header.key]->access & kRelaxedOrdering;
    if (!is_relaxed) place_late(qp, true);
    if (is_add)
        std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(place))
            .fetch_add(header.add, std::memory_order_release);
    else if (is_relaxed && is_late())
        qp.late.push_back({place, message.data});
    else
        std::memcpy(place, message.data.data(), message.data.size());
    return kSuccess;
}

void FakeContext::place_late(FakeQp& qp, bool all) {
    std::shuffle(qp.late.begin(), qp.late.end(), random);
    while (!qp.late.empty() && (all || random() % 16 == 0)) {
        std::memcpy(qp.late.back().to, qp.late.back().data.data(), qp.late.back().data.size());
        qp.late.pop_back();
    }
}

void FakeContext::end(FakeQp& qp, int status) {
    qp.state = kError;
    qp.arrived.clear();
    place_late(qp, true);
    std::optional<uint64_t> told;  // entry of a ring, which may be several packets
    for (auto* requests : {&qp.unconfirmed, &qp.waiting}) {
        for (const Request& request : *requests) {
            if (qp.ring && request.number == told) continue;
            told = request.number;
            tell(qp, request, status);
            status = kFlushed;
        }
        requests->clear();
    }
}

int poll_cq(Cq* cq, int most, Wc* found) {
    auto& queue = *static_cast<FakeCq*>(cq);
    const std::lock_guard held(static_cast<FakeContext*>(cq->context)->lock);
    int count = 0;
    for (; count < most && !queue.found.empty(); queue.found.pop_front())
        found[count++] = queue.found.front();
    return count;
}

int post_send(Qp* base, SendWr* wr, SendWr** bad) {
    auto& qp = *static_cast<FakeQp*>(base);
    FakeContext& card = *qp.card;
    const std::lock_guard held(card.lock);
    for (; wr; wr = wr->next) {
        *bad = wr;
        if (const int error = static_cast<int>(settings()["unposted"])) return error;
        const auto& found = static_cast<FakeCq*>(qp.send_cq)->found;
        const size_t posted = qp.waiting.size() + qp.unconfirmed.size();
        if (qp.state != kReadyToSend && qp.state != kError) return EINVAL;
        if (posted >= qp.most || posted + found.size() >= static_cast<size_t>(qp.send_cq->entries))
            return ENOMEM;
        Header header{wr->opcode == kRdmaWrite ? Header::kWrite : Header::kAdd};
        header.key = wr->opcode == kRdmaWrite ? wr->rdma.rkey : wr->atomic.rkey;
        header.address = wr->opcode == kRdmaWrite ? wr->rdma.address : wr->atomic.address;
        header.add = wr->atomic.add;
        card.post(qp, {header,
                       {wr->pieces, wr->pieces + wr->piece_count},
                       (wr->flags & kSignaled) != 0,
                       wr->wr_id});
        if (qp.state == kError) card.end(qp, kFlushed);
    }
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t ignored = write(card.waker, &one, sizeof one);
    return 0;
}

GidEntry gid_at(const FakeContext& card, uint32_t index) {
    GidEntry entry{};
    entry.index = index;
    entry.port = 1;
    const bool is_ethernet = settings()["ethernet"];
    entry.type = !is_ethernet ? kGidInfiniBand : index % 2 ? kGidRoceV2 : kGidRoceV1;
    const auto host = static_cast<uint8_t>(settings()["address"]);
    const bool is_astray = settings()["astray"] == card.number();
    const auto network = static_cast<uint8_t>(is_astray ? 9 : settings()["network"]);
    if (index < 2) {
        entry.gid.raw[0] = 0xfe;
        entry.gid.raw[1] = 0x80;
        entry.gid.raw[14] = network;
        entry.gid.raw[15] = host;
    } else {
        const uint8_t ipv4[] = {0xff, 0xff, 10, 99, network, host};
        std::memcpy(entry.gid.raw + 10, ipv4, sizeof ipv4);
    }
    return entry;
}

bool has(int mask, int wanted) { return (mask & wanted) == wanted; }

}  // namespace

extern "C" {

void fake_ibverbs_set(const char* name, long long value) { settings().set(name, value); }

std::atomic<bool> may_fork = false;

int ibv_fork_init() {
    may_fork = true;
    return static_cast<int>(settings()["unforkable"]);
}
int ibv_is_fork_initialized() { return settings()["copies"] ? 2 : 1; }

Device** ibv_get_device_list(int* count) {
    if (!may_fork) std::abort();  // too late: what is registered from now on is lost to a fork
    *count = static_cast<int>(settings()["devices"]);
    auto** list = new Device*[*count + 1]();
    for (int i = 0; i < *count; ++i) {
        list[i] = new Device{};
        list[i]->transport = settings()["iwarp"] ? 1 : kInfiniBandTransport;
        std::strcpy(list[i]->name, ("fake_" + std::to_string(i)).c_str());
    }
    return list;
}

void ibv_free_device_list(Device** list) { delete[] list; }  // devices may be open

Context* ibv_open_device(Device* device) {
    auto* card = new FakeContext;
    card->device = device;
    card->ops.poll_cq = poll_cq;
    card->ops.post_send = post_send;
    card->engine = std::thread([card] { card->run(); });
    return card;
}

int ibv_close_device(Context* context) {
    auto* card = static_cast<FakeContext*>(context);
    expect_own(*card);
    if (!card->qps.empty() || !card->regions.empty()) return EBUSY;
    {
        const std::lock_guard held(card->lock);
        card->stopping = true;
    }
    card->engine.join();
    close(card->waker);
    delete card;
    return 0;
}

int ibv_query_device(Context*, DeviceAttr* found) {
    *found = {};
    found->ports = 1;
    found->max_qp_wr = 1024;
    found->max_qp_rd_atom = found->max_qp_init_rd_atom = 16;
    found->atomic_cap = settings()["atomics"] ? 1 : kNoAtomics;
    return 0;
}

int ibv_query_port(Context*, uint8_t, PortAttr* found) {
    found->state = settings()["down"] ? 1 : kPortActive;
    found->active_mtu = found->max_mtu = 5;
    found->gids = static_cast<int>(settings()["gids"]);
    found->link_layer = settings()["ethernet"] ? kEthernet : kInfiniBand;
    found->lid = settings()["ethernet"] ? 0 : 7;
    return 0;
}

int _ibv_query_gid_ex(Context* context, uint32_t, uint32_t index, GidEntry* found, uint32_t,
                      size_t) {
    if (index >= settings()["gids"]) return ENODATA;
    *found = gid_at(*static_cast<FakeContext*>(context), index);
    return 0;
}

Pd* ibv_alloc_pd(Context* context) { return reinterpret_cast<Pd*>(context); }

int ibv_dealloc_pd(Pd*) { return 0; }

Mr* ibv_reg_mr_iova2(Pd* pd, void* address, size_t bytes, uint64_t begin, unsigned access) {
    if (const int error = static_cast<int>(settings()["unregistered"])) {
        errno = error;
        return nullptr;
    }
    auto* card = static_cast<FakeContext*>(reinterpret_cast<Context*>(pd));
    const std::lock_guard held(card->lock);
    auto* region = new FakeMr{};
    do {
        region->lkey = region->rkey = std::random_device()();
    } while (card->regions.contains(region->rkey));
    region->context = card;
    region->address = address;
    region->length = bytes;
    region->begin = begin;
    region->access = access;
    card->regions[region->rkey] = region;
    return region;
}

int ibv_dereg_mr(Mr* mr) {
    auto* card = static_cast<FakeContext*>(mr->context);
    expect_own(*card);
    const std::lock_guard held(card->lock);
    auto* region = static_cast<FakeMr*>(mr);
    for (FakeQp* qp : card->qps) {  // what is under way lands
        const char* begin = static_cast<char*>(region->address);
        for (const auto& late : qp->late) {
            if (late.to < begin || late.to >= begin + region->length) continue;
            std::memcpy(late.to, late.data.data(), late.data.size());
        }
        std::erase_if(qp->late, [&](const auto& late) {
            return late.to >= begin && late.to < begin + region->length;
        });
    }
    card->regions.erase(mr->rkey);
    delete region;
    return 0;
}

Cq* ibv_create_cq(Context* context, int entries, void* cq_context, void* channel, int) {
    auto* cq = new FakeCq{};
    cq->context = context;
    cq->entries = entries;
    cq->cq_context = cq_context;
    cq->channel = channel;
    return cq;
}

bool mlx5dv_is_supported(Device*) { return settings()["mlx5"]; }

Cq* mlx5dv_create_cq(Context* context, CqInitAttr* attr, Mlx5CqInitAttr* own) {
    const bool is_known = attr->has == CqInitAttr::kHasFlags &&
                          attr->flags == CqInitAttr::kIgnoreOverrun && !attr->channel &&
                          own->has == Mlx5CqInitAttr::kHasEntryBytes && own->entry_bytes == 64;
    if (!is_known) {
        errno = EINVAL;
        return nullptr;
    }
    auto* cq = static_cast<FakeCq*>(
        ibv_create_cq(context, static_cast<int>(attr->entries), attr->cq_context, nullptr, 0));
    cq->ring = std::make_unique<fake_mlx5::Completions>(std::bit_ceil(attr->entries + 1));
    return cq;
}

int mlx5dv_init_obj(Mlx5Objects* objects, uint64_t which) {
    if (which & Mlx5Objects::kQp) {
        auto& ring = *static_cast<FakeQp*>(objects->qp.in)->ring;
        *objects->qp.out = {};
        objects->qp.out->doorbell = static_cast<uint32_t*>(ring.record());
        objects->qp.out->send = {ring.entries(), ring.count(),
                                 static_cast<uint32_t>(settings()["stride"])};
        objects->qp.out->bell = {ring.bell(), 256};
    }
    if (which & Mlx5Objects::kCq) {
        auto& ring = *static_cast<FakeCq*>(objects->cq.in)->ring;
        *objects->cq.out = {};
        objects->cq.out->memory = ring.memory();
        objects->cq.out->count = ring.count();
        objects->cq.out->entry_bytes = 64;
    }
    return 0;
}

int ibv_destroy_cq(Cq* cq) {
    delete static_cast<FakeCq*>(cq);
    return 0;
}

Qp* ibv_create_qp(Pd* pd, QpInitAttr* attr) {
    if (attr->type != kReliableConnection) {
        errno = EINVAL;
        return nullptr;
    }
    auto* card = static_cast<FakeContext*>(reinterpret_cast<Context*>(pd));
    auto* qp = new FakeQp{};
    qp->context = qp->card = card;
    qp->pd = pd;
    qp->send_cq = attr->send_cq;
    qp->receive_cq = attr->receive_cq;
    qp->type = attr->type;
    qp->most = attr->cap.send_wr;
    qp->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    socklen_t size;
    sockaddr_un name;
    do {
        qp->number = std::random_device()() & 0xffffff;
        name = name_of(qp->number, size);
    } while (bind(qp->listener, reinterpret_cast<const sockaddr*>(&name), size));
    listen(qp->listener, 8);
    if (static_cast<FakeCq*>(attr->send_cq)->ring)  // larger than was asked for, as the driver's
        qp->ring = std::make_unique<fake_mlx5::SendRing>(qp->number, 2 * std::bit_ceil(qp->most));
    const std::lock_guard held(card->lock);
    card->qps.push_back(qp);
    return qp;
}

bool is_wanted(const char* name, long long value) {
    const long long wanted = settings()[name];
    return wanted < 0 || wanted == value;
}

int ibv_modify_qp(Qp* base, QpAttr* attr, int mask) {
    auto& qp = *static_cast<FakeQp*>(base);
    expect_own(*qp.card);
    const std::lock_guard held(qp.card->lock);
    if (!has(mask, kQpState)) return EINVAL;
    switch (attr->state) {
        case kInit:
            if (qp.state != kReset || !has(mask, kQpPkeyIndex | kQpPort | kQpAccessFlags) ||
                !is_wanted("pkey_index", attr->pkey_index))
                return EINVAL;
            qp.attr.access = attr->access;
            break;
        case kReadyToReceive: {
            if (qp.state != kInit || !has(mask, kQpAddress | kQpPathMtu | kQpDestination |
                                                    kQpRqPsn | kQpMaxDestRdAtomic | kQpMinRnrTimer))
                return EINVAL;
            const GlobalRoute& route = attr->address.route;
            if (!is_wanted("traffic_class", route.traffic_class) ||
                !is_wanted("service_level", attr->address.sl))
                return EINVAL;
            if (settings()["ethernet"]) {
                if (!attr->address.is_global) return EINVAL;
                const GidEntry own = gid_at(*qp.card, route.source_index);
                if (own.type != kGidRoceV2) return EINVAL;
                if (std::memcmp(own.gid.raw, route.destination.raw, 15)) return ETIMEDOUT;
            } else if (attr->address.lid == 0) {
                return EINVAL;
            }
            qp.attr.destination_qp = attr->destination_qp;
            qp.expected_packet = attr->rq_psn;
            break;
        }
        case kReadyToSend:
            if (qp.state != kReadyToReceive ||
                !has(mask, kQpTimeout | kQpRetryCount | kQpRnrRetry | kQpSqPsn | kQpMaxRdAtomic) ||
                !is_wanted("ack_timeout", attr->timeout) || !is_wanted("retries", attr->retries))
                return EINVAL;
            qp.next_packet = attr->sq_psn;
            break;
        case kError:
            qp.card->end(qp, kFlushed);
            break;
        default:
            return EINVAL;
    }
    qp.state = attr->state;
    return 0;
}

int ibv_destroy_qp(Qp* base) {
    auto* qp = static_cast<FakeQp*>(base);
    expect_own(*qp->card);
    const std::lock_guard held(qp->card->lock);
    qp->card->place_late(*qp, true);
    qp->card->qps.remove(qp);
    for (const int socket : qp->in) close(socket);
    if (qp->out >= 0) close(qp->out);
    close(qp->listener);
    delete qp;
    return 0;
}

}  // extern "C"

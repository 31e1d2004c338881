#include "fabric/verbs/card.h"

#include <arpa/inet.h>
#include <errno.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <stdexcept>

namespace ep::verbs {
namespace {

constexpr size_t kScratchBytes = 4096;
constexpr int kMaxGids = 256;
constexpr std::array<uint8_t, 12> kIpv4{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

std::string text_of(const Gid& gid) {
    char text[INET6_ADDRSTRLEN];
    if (!std::memcmp(gid.raw, kIpv4.data(), kIpv4.size()))
        return inet_ntop(AF_INET, gid.raw + kIpv4.size(), text, sizeof text);
    return inet_ntop(AF_INET6, gid.raw, text, sizeof text);
}

// How suitable an address of a port is for RoCE; 0: not at all.
int rank_of(const GidEntry& entry) {
    if (entry.type != kGidRoceV2 || !(entry.gid.words[0] | entry.gid.words[1])) return 0;
    if (!std::memcmp(entry.gid.raw, kIpv4.data(), kIpv4.size())) return 3;
    const bool is_of_link = entry.gid.raw[0] == 0xfe && (entry.gid.raw[1] & 0xc0) == 0x80;
    return is_of_link ? 1 : 2;
}

std::optional<GidEntry> gid_of(const Library& library, Context* context, int port,
                               const PortAttr& attributes) {
    std::optional<GidEntry> best;
    for (int i = 0; i < std::min(attributes.gids, kMaxGids); ++i) {
        GidEntry entry{};
        if (library.query_gid(context, static_cast<uint32_t>(port), static_cast<uint32_t>(i),
                              &entry, 0, sizeof entry))
            continue;
        entry.index = static_cast<uint32_t>(i);
        if (attributes.link_layer != kEthernet) return entry;
        if (rank_of(entry) > (best ? rank_of(*best) : 0)) best = entry;
    }
    return best;
}

Port examine(const Library& library, Context* context, const std::string& device, int number,
             int atomics) {
    Port port{device, number, false, 0, "", ""};
    PortAttr found{};
    if (const int error = library.query_port(context, static_cast<uint8_t>(number), &found)) {
        port.lacks = std::string("it cannot be asked: ") + std::strerror(error);
        return port;
    }
    port.is_ethernet = found.link_layer == kEthernet;
    if (const auto gid = gid_of(library, context, number, found)) {
        port.gid_index = static_cast<int>(gid->index);
        port.address = text_of(gid->gid);
    }
    if (atomics == kNoAtomics)
        port.lacks = "it has no atomics";
    else if (found.state != kPortActive)
        port.lacks = "it is down";
    else if (port.address.empty())
        port.lacks = port.is_ethernet ? "it has no RoCE v2 address" : "it has no address";
    return port;
}

}  // namespace

std::vector<Port> find_ports(const Library& library, const Mlx5* mlx5) {
    int count = 0;
    Device** list = library.get_device_list(&count);
    if (!list)
        throw std::runtime_error(std::string("libibverbs finds no devices: ") +
                                 std::strerror(errno));
    std::vector<Port> ports;
    for (int i = 0; i < count; ++i) {
        const std::string device = list[i]->name;
        if (list[i]->transport != kInfiniBandTransport) {
            ports.push_back({device, 1, true, 0, "", "it is neither InfiniBand nor RoCE"});
            continue;
        }
        if (mlx5 && !mlx5->is_supported(list[i])) {
            ports.push_back({device, 1, true, 0, "", "it is no card of the driver mlx5"});
            continue;
        }
        Context* context = library.open_device(list[i]);
        if (!context) {
            ports.push_back({device, 1, true, 0, "",
                             std::string("it cannot be opened: ") + std::strerror(errno)});
            continue;
        }
        DeviceAttr attributes{};
        library.query_device(context, &attributes);
        for (int port = 1; port <= attributes.ports; ++port)
            ports.push_back(examine(library, context, device, port, attributes.atomic_cap));
        library.close_device(context);
    }
    library.free_device_list(list);
    return ports;
}

Card::Card(std::shared_ptr<const Library> library, const Port& port,
           std::shared_ptr<const Mlx5> mlx5, const Service& service)
    : library_(std::move(library)), mlx5_(std::move(mlx5)), port_(port), service_(service) {
    const auto fail = [&](const char* call, int error) {
        const std::string text = name() + ": " + call + ": " + std::strerror(error);
        release();
        throw std::runtime_error(text);
    };
    int count = 0;
    Device** list = library_->get_device_list(&count);
    for (int i = 0; list && i < count; ++i) {
        if (list[i]->name == port.device) context_ = library_->open_device(list[i]);
    }
    const int error = errno;
    if (list) library_->free_device_list(list);
    if (!context_) fail("ibv_open_device", error);
    const auto number = static_cast<uint8_t>(port.number);
    if (const int failed = library_->query_device(context_, &attributes_))
        fail("ibv_query_device", failed);
    if (const int failed = library_->query_port(context_, number, &port_attributes_))
        fail("ibv_query_port", failed);
    GidEntry gid{};
    if (const int failed = library_->query_gid(
            context_, number, static_cast<uint32_t>(port.gid_index), &gid, 0, sizeof gid))
        fail("ibv_query_gid_ex", failed);
    gid_ = gid.gid;
    pd_ = library_->alloc_pd(context_);
    if (!pd_) fail("ibv_alloc_pd", errno);
    // shared, so that a fork leaves it where the card knows it
    void* scratch =
        mmap(nullptr, kScratchBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (scratch == MAP_FAILED) fail("mmap", errno);
    scratch_ = static_cast<char*>(scratch);
    scratch_mr_ = library_->reg_mr(pd_, scratch_, kScratchBytes, 0, kLocalWrite);
    if (!scratch_mr_) fail("ibv_reg_mr", errno);
}

Card::~Card() { release(); }

void Card::release() {
    if (scratch_mr_) library_->dereg_mr(scratch_mr_);
    if (scratch_) munmap(scratch_, kScratchBytes);
    if (pd_) library_->dealloc_pd(pd_);
    if (context_) library_->close_device(context_);
}

std::string Card::fault() const {
    PortAttr found{};
    const int error = library_->query_port(context_, static_cast<uint8_t>(port_.number), &found);
    if (error) return name() + " cannot be asked: " + std::strerror(error);
    return found.state == kPortActive ? "" : name() + " is down";
}

Region::Region(std::shared_ptr<Card> card, char* memory, size_t bytes)
    : card_(std::move(card)), memory_(memory) {
    const Library& library = *card_->library_;
    constexpr unsigned kWritten = kLocalWrite | kRemoteWrite;
    data_ = library.reg_mr(card_->pd_, memory, bytes, 0, kWritten | kRelaxedOrdering);
    if (data_) flags_ = library.reg_mr(card_->pd_, memory, bytes, 0, kWritten | kRemoteAtomic);
    if (flags_) return;
    const int error = errno;
    if (data_) library.dereg_mr(data_);
    throw std::runtime_error(
        card_->name() + ": " + std::to_string(bytes) +
        " bytes of memory cannot be given to it (ibv_reg_mr): " + std::strerror(error) +
        (error == ENOMEM ? "; ulimit -l may be too small: it must be unlimited" : ""));
}

Region::~Region() {
    card_->library_->dereg_mr(flags_);
    card_->library_->dereg_mr(data_);
}

}  // namespace ep::verbs

#include "fabric/queue/tcp_link.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace ep {

TcpLink::TcpLink(int descriptor) : descriptor_(descriptor), buffer_(kBuffer) {
    fcntl(descriptor_, F_SETFL, fcntl(descriptor_, F_GETFL) | O_NONBLOCK);
    const auto set = [&](int level, int option, int value) {
        setsockopt(descriptor_, level, option, &value, sizeof value);
    };
    set(IPPROTO_TCP, TCP_NODELAY, 1);
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
    set(IPPROTO_TCP, TCP_KEEPIDLE, 1);
    set(IPPROTO_TCP, TCP_KEEPINTVL, 1);
    // silence_of decides which ranks are gone. The kernel compares this limit, and without one its
    // limit of retries, with the time since the connection's first outage, however long ago.
    set(IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs);
}

double silence_of(int descriptor, double limit) {
    tcp_info info{};
    socklen_t bytes = sizeof info;
    if (getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return 0;
    const double silence = 1e-3 * std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv);
    // With nothing in flight the kernel has probed whether the other side lives, or has room again.
    if (info.tcpi_unacked == 0) return info.tcpi_probes < 3 ? 0 : silence;
    const double retransmit_timeout = 1.25e-6 * info.tcpi_rto;  // a timer may be late
    return retransmit_timeout > limit && silence < retransmit_timeout ? 0 : silence;
}

TcpLink::~TcpLink() { close(descriptor_); }

void TcpLink::add(const Frame& frame, const char* bytes, std::function<void()> sent) {
    waiting_bytes_ += sizeof(Frame) + frame.bytes;
    waiting_.push_back({frame, {}, bytes, std::move(sent)});
}

void TcpLink::add_copy(Frame frame, std::string bytes) {
    frame.bytes = static_cast<uint32_t>(bytes.size());
    waiting_bytes_ += sizeof(Frame) + frame.bytes;
    waiting_.push_back({frame, std::move(bytes), nullptr, {}});
    waiting_.back().bytes = waiting_.back().copy.data();
}

bool TcpLink::is_acknowledged() const {
    int bytes = 0;
    return !end_.empty() || !broken_.empty() || ioctl(descriptor_, SIOCOUTQ, &bytes) != 0 ||
           bytes == 0;
}

bool TcpLink::send() {
    if (!has_to_send()) return false;
    std::array<iovec, 2 * kMaxFrames> parts;
    size_t count = 0;
    const size_t frames = std::min(waiting_.size(), kMaxFrames);
    for (size_t i = 0; i < frames; ++i) {
        Outgoing& next = waiting_[i];
        if (next.gone < sizeof(Frame)) {
            parts[count++] = {reinterpret_cast<char*>(&next.frame) + next.gone,
                              sizeof(Frame) - next.gone};
        }
        const size_t gone = next.gone > sizeof(Frame) ? next.gone - sizeof(Frame) : 0;
        if (gone < next.frame.bytes)
            parts[count++] = {const_cast<char*>(next.bytes) + gone, next.frame.bytes - gone};
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(descriptor_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
        if (errno != EAGAIN && errno != EINTR) broken_ = std::strerror(errno);
        return false;
    }
    size_t left = static_cast<size_t>(sent);
    while (!waiting_.empty()) {
        Outgoing& first = waiting_.front();
        const size_t size = sizeof(Frame) + first.frame.bytes;
        const size_t part = std::min(left, size - first.gone);
        first.gone += part;
        left -= part;
        if (first.gone < size) break;
        waiting_bytes_ -= size;
        const std::function<void()> done = std::move(first.sent);
        waiting_.pop_front();
        if (done) done();
    }
    return sent > 0;
}

bool TcpLink::receive(const Target& target, const Done& done) {
    if (!end_.empty()) return false;
    ssize_t got;
    if (missing_ > 0) {  // into the frame's place, and what follows it into the buffer
        iovec parts[2] = {{target_, missing_}, {buffer_.data(), buffer_.size()}};
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = 2;
        got = recvmsg(descriptor_, &message, MSG_DONTWAIT);
    } else {
        if (begin_ > 0) {
            std::memmove(buffer_.data(), buffer_.data() + begin_, filled_ - begin_);
            filled_ -= begin_;
            begin_ = 0;
        }
        got = recv(descriptor_, buffer_.data() + filled_, buffer_.size() - filled_, MSG_DONTWAIT);
    }
    if (got < 0) {
        if (errno != EAGAIN && errno != EINTR)
            fail(std::strerror(errno));
        else if (!broken_.empty())
            fail(broken_);
        return false;
    }
    if (got == 0) {
        fail("the connection was closed");
        return false;
    }
    size_t size = static_cast<size_t>(got);
    if (missing_ > 0) {
        const size_t part = std::min(size, missing_);
        target_ += part;
        missing_ -= part;
        size -= part;
        begin_ = filled_ = 0;
        if (missing_ == 0) {
            done(*current_);
            current_.reset();
        }
    }
    filled_ += size;
    return take_frames(target, done);
}

bool TcpLink::take_frames(const Target& target, const Done& done) {
    while (filled_ - begin_ >= sizeof(Frame)) {
        Frame frame;
        std::memcpy(&frame, buffer_.data() + begin_, sizeof frame);
        begin_ += sizeof frame;
        target_ = target(frame);
        if (!target_) {
            fail("it sent what no rank sends");
            return true;
        }
        const size_t part = std::min<size_t>(frame.bytes, filled_ - begin_);
        std::memcpy(target_, buffer_.data() + begin_, part);
        begin_ += part;
        target_ += part;
        missing_ = frame.bytes - part;
        if (missing_ > 0) {
            current_ = frame;
            begin_ = filled_ = 0;
            return true;
        }
        done(frame);
    }
    return true;
}

bool TcpLink::forget(uint16_t region) {
    if (missing_ > 0 && current_->kind == Frame::kWrite && current_->region == region) {
        nowhere_.resize(missing_);
        target_ = nowhere_.data();
    }
    return std::none_of(waiting_.begin(), waiting_.end(), [&](const Outgoing& next) {
        return next.frame.kind == Frame::kWrite && next.frame.region == region;
    });
}

}  // namespace ep

#include "fabric/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace ep {
namespace {

[[noreturn]] void fail(int error, const std::string& what) { throw std::system_error(error, std::generic_category(), what); }

char* map(int fd, size_t bytes, int flags) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (data == MAP_FAILED) fail(errno, "mapping " + std::to_string(bytes) + " bytes of symmetric heap");
    return static_cast<char*>(data);
}

class File {
  public:
    File(const std::string& name, int flags) : fd_(shm_open(name.c_str(), flags, 0600)) {
        if (fd_ < 0) fail(errno, "opening shared memory " + name);
    }
    ~File() { close(fd_); }
    int fd() const { return fd_; }

  private:
    int fd_;
};

}  // namespace

Segment Segment::anonymous(size_t bytes) { return {map(-1, bytes, MAP_PRIVATE | MAP_ANONYMOUS), bytes}; }

Segment Segment::create(const std::string& name, size_t bytes) {
    File file(name, O_CREAT | O_EXCL | O_RDWR);
    int error;
    do {
        error = posix_fallocate(file.fd(), 0, static_cast<off_t>(bytes));
    } while (error == EINTR);
    if (error) {
        unlink(name);
        fail(error, "reserving " + std::to_string(bytes) + " bytes of shared memory in /dev/shm (in a container, see --shm-size)");
    }
    return {map(file.fd(), bytes, MAP_SHARED), bytes};
}

Segment Segment::open(const std::string& name, size_t bytes) { return {map(File(name, O_RDWR).fd(), bytes, MAP_SHARED), bytes}; }

void Segment::unlink(const std::string& name) { shm_unlink(name.c_str()); }

Segment::Segment(Segment&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

Segment::~Segment() {
    if (data_) munmap(data_, bytes_);
}

}  // namespace ep

#pragma once

#include <cstddef>
#include <string>

namespace ep {

// Zeroed memory of one process, or of all processes of a machine that map the same name. Unmapped when destroyed.
class Segment {
  public:
    static Segment anonymous(size_t bytes);
    // Makes a new POSIX shared-memory object and reserves its memory, so that a full /dev/shm is an error here and not a SIGBUS later.
    static Segment create(const std::string& name, size_t bytes);
    static Segment open(const std::string& name, size_t bytes);
    static void unlink(const std::string& name);

    Segment(Segment&& other) noexcept;
    Segment& operator=(Segment&& other) noexcept;
    ~Segment();

    char* data() const { return data_; }
    size_t bytes() const { return bytes_; }

  private:
    Segment(char* data, size_t bytes) : data_(data), bytes_(bytes) {}

    char* data_;
    size_t bytes_;
};

}  // namespace ep

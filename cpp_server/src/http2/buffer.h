// Memory that grows without being filled, and that says so when there is none.
//
// Contract: owns its memory; one thread at a time. Growing moves the bytes.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <span>
#include <utility>

namespace tessera::http2 {

class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { std::free(data_); }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // False: there is no memory, and nothing has changed.
  bool reserve(std::size_t capacity) {
    if (capacity <= capacity_) return true;
    void* const moved = std::realloc(data_, capacity);
    if (moved == nullptr) return false;
    data_ = static_cast<std::byte*>(moved);
    capacity_ = capacity;
    return true;
  }

  // `bytes` more, for which there must be capacity.
  std::byte* extend(std::size_t bytes) {
    std::byte* const begin = data_ + size_;
    size_ += bytes;
    return begin;
  }
  void append(std::span<const std::byte> bytes) {
    if (!bytes.empty()) std::memcpy(extend(bytes.size()), bytes.data(), bytes.size());
  }

  // Where the next bytes go, within what is reserved.
  std::byte* end() const { return data_ + size_; }

  // Forgets what is beyond `size` bytes.
  void truncate(std::size_t size) { size_ = size; }

  void clear() { size_ = 0; }
  void free() {
    std::free(data_);
    data_ = nullptr;
    size_ = capacity_ = 0;
  }

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::size_t size() const { return size_; }
  std::size_t capacity() const { return capacity_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

}  // namespace tessera::http2

// What CUDA lends: pinned host memory and events, given back when their owner goes.
//
// Contract: one owner, one thread at a time; calls may block while the driver works. Throw
// std::runtime_error with CUDA's own words.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>

#include "common/clock.h"

namespace tessera {

// Throws unless `status` is success.
void check_cuda(cudaError_t status, const char* what);

// Host memory that a GPU copies from and to without the CPU. Grows and stays.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  // At least `bytes` bytes, valid until the next take; what was there is lost when it grows.
  std::byte* take(std::size_t bytes);
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A point in a stream's work. Belongs to the device that is current when it is first set, which
// must be the stream's.
class StreamMark {
 public:
  StreamMark() = default;
  ~StreamMark();
  StreamMark(const StreamMark&) = delete;
  StreamMark& operator=(const StreamMark&) = delete;

  void set(cudaStream_t stream);
  // Blocks until the stream has come here. Looks again and again for kSpin, which is faster than
  // being woken, and sleeps from then on: large batches leave the CPU to those who merge the next.
  void wait() const;
  // Between two marks that have been waited for.
  Duration since(const StreamMark& earlier) const;

  static constexpr Duration kSpin = std::chrono::microseconds(200);

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace tessera

#include "model/gpu_resources.h"

#include <algorithm>
#include <stdexcept>

#include "common/text.h"

namespace tessera {

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(text(what, ": ", cudaGetErrorString(status)));
}

PinnedMemory::~PinnedMemory() { cudaFreeHost(data_); }

std::byte* PinnedMemory::take(std::size_t bytes) {
  if (bytes > bytes_) {
    check_cuda(cudaFreeHost(data_), "giving pinned memory back");
    data_ = nullptr;
    bytes_ = 0;
    const std::size_t wanted = std::max<std::size_t>(bytes + bytes / 2, 1U << 16U);
    void* memory = nullptr;
    check_cuda(cudaHostAlloc(&memory, wanted, cudaHostAllocPortable), "taking pinned memory");
    data_ = static_cast<std::byte*>(memory);
    bytes_ = wanted;
  }
  return data_;
}

StreamMark::~StreamMark() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

void StreamMark::set(cudaStream_t stream) {
  if (event_ == nullptr) {
    // With times, and so that who waits for it sleeps.
    check_cuda(cudaEventCreateWithFlags(&event_, cudaEventBlockingSync), "making an event");
  }
  check_cuda(cudaEventRecord(event_, stream), "recording an event");
}

void StreamMark::wait() const {
  cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    while (status == cudaErrorNotReady && std::chrono::steady_clock::now() < until) {
      status = cudaEventQuery(event_);
    }
    cudaGetLastError();  // or others would take "not ready" for an error of theirs
    if (status == cudaErrorNotReady) status = cudaEventSynchronize(event_);
  }
  check_cuda(status, "computing a batch on the GPU");
}

Duration StreamMark::since(const StreamMark& earlier) const {
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, earlier.event_, event_), "reading an event");
  return std::chrono::duration_cast<Duration>(
      std::chrono::duration<double, std::milli>(milliseconds));
}

}  // namespace tessera

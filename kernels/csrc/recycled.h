// Memory for tensors that are made anew for every batch, used again once nobody holds the tensor.
//
// A batch of a table takes about a megabyte.  The C library gives so much back to the system
// between batches, and pages that are new to the process are cleared and mapped one by one: a sixth
// of the time of reading a table in order.
//
// Contract: any thread may make tensors and let go of them.  Blocks of one size class serve each
// other, eight classes to a doubling, so that at most an eighth of a block is unused.  Free blocks
// of more than kMostFree bytes in all are given back to the system; the pool lives as long as the
// process.
#pragma once

#include <ATen/ATen.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

namespace tessera {

class RecycledMemory {
 public:
  static constexpr size_t kMostFree = size_t{64} << 20;
  // Smaller tensors are the C library's, which keeps memory of their size itself.
  static constexpr size_t kLeast = size_t{64} << 10;

  // The pool of the process.  It is never destroyed: tensors may outlive what is at exit.
  static RecycledMemory& process() {
    static auto* const pool = new RecycledMemory;
    return *pool;
  }

  // An uninitialised vector or matrix on the CPU, like at::empty's.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type) {
    const auto options = at::TensorOptions().dtype(type);
    const size_t bytes =
        static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(type);
    if (bytes < kLeast) return at::empty(sizes, options);
    const size_t capacity = class_of(bytes);
    void* const block = take(capacity);
    return at::from_blob(
        block, sizes, [this, capacity](void* own) { give_back(own, capacity); }, options);
  }

  // The size of the blocks that serve `bytes`, which are at least kLeast.
  static size_t class_of(size_t bytes) {
    const size_t step = std::bit_floor(bytes) / 8;
    return (bytes + step - 1) / step * step;
  }

 private:
  void* take(size_t capacity) {
    {
      const std::lock_guard lock(mutex_);
      const auto found = free_.find(capacity);
      if (found != free_.end() && !found->second.empty()) {
        void* const block = found->second.back();
        found->second.pop_back();
        free_bytes_ -= capacity;
        return block;
      }
    }
    void* const block = std::aligned_alloc(4096, (capacity + 4095) / 4096 * 4096);
    TORCH_CHECK(block != nullptr, "out of memory: ", capacity, " bytes for a batch");
    return block;
  }

  void give_back(void* block, size_t capacity) {
    {
      const std::lock_guard lock(mutex_);
      if (free_bytes_ + capacity <= kMostFree) {
        free_[capacity].push_back(block);
        free_bytes_ += capacity;
        return;
      }
    }
    std::free(block);
  }

  std::mutex mutex_;
  std::map<size_t, std::vector<void*>> free_;
  size_t free_bytes_ = 0;
};

}  // namespace tessera

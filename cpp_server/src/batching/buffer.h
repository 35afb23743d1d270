// Memory that is used again from batch to batch: it grows to the largest batch and stays.
//
// Contract: not thread-safe; one worker owns it. What `take` returns is valid until the next
// `take` and holds whatever was there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>

namespace tessera {

template <typename T>
class Buffer {
 public:
  std::span<T> take(std::size_t count) {
    if (count > capacity_) {
      // Doubled, so that slowly growing batches do not allocate each time.
      const std::size_t wanted = std::max<std::size_t>(2 * count, 256);
      // Where that fails, what there was is still there.
      data_ = std::make_unique_for_overwrite<T[]>(wanted);
      capacity_ = wanted;
    }
    return {data_.get(), count};
  }

  T* data() { return data_.get(); }

  std::size_t bytes() const { return capacity_ * sizeof(T); }

 private:
  std::unique_ptr<T[]> data_;
  std::size_t capacity_ = 0;
};

}  // namespace tessera

// Bytes that are not set to zero when they are made, as whoever makes them fills them at once: the
// zeros would be written to all of a large piece of memory without a pause, and each page of it
// costs the kernel a microsecond or more at its first byte. The system has large pieces back as
// soon as they go (csrc/returned_memory.h).
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace tessera {

// The functions of csrc/returned_memory.h, which is not on the path of all who include this.
void* take_raw_memory(std::size_t bytes);
void give_raw_memory_back(void* memory, std::size_t bytes) noexcept;

template <typename T>
struct Uninitialized : std::allocator<T> {
  template <typename U>
  struct rebind {
    using other = Uninitialized<U>;
  };
  template <typename U, typename... Args>
  void construct(U* place, Args&&... args) {
    if constexpr (sizeof...(Args) == 0) {
      ::new (static_cast<void*>(place)) U;
    } else {
      ::new (static_cast<void*>(place)) U(std::forward<Args>(args)...);
    }
  }

  T* allocate(std::size_t count) { return static_cast<T*>(take_raw_memory(count * sizeof(T))); }
  void deallocate(T* memory, std::size_t count) noexcept {
    give_raw_memory_back(memory, count * sizeof(T));
  }
};

using RawBytes = std::vector<std::byte, Uninitialized<std::byte>>;

}  // namespace tessera

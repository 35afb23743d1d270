// Rows of a table in this process's memory that change places with others: how a server applies a
// commit, and how it takes one back.
//
// Rows lie anywhere in gigabytes, so each is a miss of the caches and of the TLB: they are asked
// for kRowsAhead rows before their turn, which hides most of the way to memory. A page that nobody
// has written to lately may be protected from it besides, by the system or by the host of a virtual
// machine, which follows what changes; the first write to such a page takes a microsecond and more,
// and a commit may touch as many pages as rows. `touch_rows_at` and `keep_rows_at` have that behind
// them before anybody waits.
//
// To exchange a row two lines are read and two written; to write one whose old bytes were kept
// before takes half of that. So tessera-server keeps them beside serving, and writes while it alone
// has the table.
//
// The rows behind the present one are asked for within the loop and in no function of their own:
// GCC takes one that only prefetches for one that does nothing, and leaves out its calls.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace tessera {

// More than a core keeps misses open for rows of 2 or 3 lines.
inline constexpr std::size_t kRowsAhead = 24;
inline constexpr std::size_t kRowLine = 64;
// So many bytes of a wide row are asked for; the processor fetches what lies behind them without
// being asked.
inline constexpr std::size_t kRowAsked = 512;
inline constexpr std::size_t kRowPage = 4096;

// Calls `work(row, i)` for rows 0 to `count - 1`, of `width` bytes each; `row_at(i)` is where row i
// begins.
template <typename RowAt, typename Work>
void for_each_row(std::size_t count, std::size_t width, RowAt row_at, Work work) {
  if (width == 0) return;
  const std::size_t asked = std::min(width, kRowAsked);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kRowsAhead < count) {
      const std::byte* const next = row_at(i + kRowsAhead);
      for (std::size_t at = 0; at < asked; at += kRowLine) {
        __builtin_prefetch(next + at, /*rw=*/1);
      }
      __builtin_prefetch(next + asked - 1, /*rw=*/1);
    }
    work(row_at(i), i);
  }
}

// The compiler knows the size, so that registers hold what is moved.
template <std::size_t kBytes>
void exchange_piece(std::byte* a, std::byte* b) {
  std::byte first[kBytes];
  std::byte second[kBytes];
  std::memcpy(first, a, kBytes);
  std::memcpy(second, b, kBytes);
  std::memcpy(a, second, kBytes);
  std::memcpy(b, first, kBytes);
}

// std::swap_ranges moves one byte at a time, which takes longer, while no batch is computed.
inline void exchange_bytes(std::byte* a, std::byte* b, std::size_t bytes) {
  std::size_t at = 0;
  for (; at + 64 <= bytes; at += 64) exchange_piece<64>(a + at, b + at);
  for (; at + 16 <= bytes; at += 16) exchange_piece<16>(a + at, b + at);
  for (; at + 4 <= bytes; at += 4) exchange_piece<4>(a + at, b + at);
  for (; at < bytes; ++at) exchange_piece<1>(a + at, b + at);
}

// Exchanges each row with the `width` bytes at `values + i * width`; a second call undoes it.
template <typename RowAt>
void exchange_rows_at(std::size_t count, std::size_t width, RowAt row_at, std::byte* values) {
  for_each_row(count, width, row_at, [values, width](std::byte* row, std::size_t i) {
    exchange_bytes(row, values + i * width, width);
  });
}

// Each row becomes the `width` bytes at `values + i * width`.
template <typename RowAt>
void write_rows_at(std::size_t count, std::size_t width, RowAt row_at, const std::byte* values) {
  for_each_row(count, width, row_at, [values, width](std::byte* row, std::size_t i) {
    std::memcpy(row, values + i * width, width);
  });
}

// Brings the rows that come next into the caches, beside those who read them; writes nothing.
template <typename RowAt>
void fetch_rows_at(std::size_t count, std::size_t width, RowAt row_at) {
  for_each_row(count, width, row_at, [](const std::byte* row, std::size_t) {
    static_cast<void>(*static_cast<const volatile std::byte*>(row));
  });
}

// Writes to where `byte` lies and leaves it as it is, whoever reads it meanwhile: one instruction
// of the processor that changes no bit. C++ has no such operation beside plain readers and would
// call it a race, so it is the processor's by name where its name is known.
inline void write_nothing(std::byte* byte) {
#if defined(__x86_64__)
  asm volatile("lock orb $0, %0" : "+m"(*byte));
#else
  static const volatile unsigned char nothing = 0;  // so that no compiler makes a reading of it
  __atomic_fetch_or(reinterpret_cast<unsigned char*>(byte), nothing, __ATOMIC_RELAXED);
#endif
}

// Writes nothing to each page of a row.
inline void write_nothing_to(std::byte* row, std::size_t width) {
  for (std::size_t at = 0; at < width; at += kRowPage) write_nothing(row + at);
  write_nothing(row + width - 1);
}

// Brings rows into the caches and has their pages written to, and changes no byte; beside those who
// read them, and beside nobody who writes them.
template <typename RowAt>
void touch_rows_at(std::size_t count, std::size_t width, RowAt row_at) {
  for_each_row(count, width, row_at,
               [width](std::byte* row, std::size_t) { write_nothing_to(row, width); });
}

// `touch_rows_at` that also copies each row to `kept + i * width`; beside the same.
template <typename RowAt>
void keep_rows_at(std::size_t count, std::size_t width, RowAt row_at, std::byte* kept) {
  for_each_row(count, width, row_at, [kept, width](std::byte* row, std::size_t i) {
    write_nothing_to(row, width);
    std::memcpy(kept + i * width, row, width);
  });
}

}  // namespace tessera

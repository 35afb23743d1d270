// Whether memory that was left to the system (MADV_FREE of madvise(2)) still has what it had.
//
// A page of such memory has its old content until the kernel takes it, has zeros from then on, and
// stays from the first write to it on. So where a page had a byte other than zero, that byte tells
// whether the page was taken; a page of zeros alone is the same in either case. One such byte is
// found in each page: 2 bytes are kept for 4 KiB, nothing is hashed, and no content is read but the
// beginning of each page, as far as it is zero.
//
// Contract: one thread at a time has the memory, which begins where a page does. Both functions
// block; their work is done while a CPU has nothing else to do, where there is such a time
// (idle_thread.h), and pauses between pieces of 4 MiB: for 50 ms a gigabyte beside 10 to 30 ms of
// work. They throw std::bad_alloc alone.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stop_token>
#include <thread>
#include <vector>

#include "idle_thread.h"

namespace tessera {

// The kernel takes whole pages, which are of this size or a multiple of it.
inline constexpr std::size_t kMarkedPage = 4096;
// The mark of a page of zeros alone.
inline constexpr std::uint16_t kNoMark = kMarkedPage;

inline std::size_t marked_pages(std::size_t bytes) {
  return (bytes + kMarkedPage - 1) / kMarkedPage;
}

// Calls `work` for each page, in order, until it returns false.
template <typename Work>
void page_by_page(std::size_t pages, const Work& work) {
  constexpr std::size_t kAtOnce = 1024;
  constexpr std::chrono::microseconds kPause{200};
  // Somebody waits for the version, perhaps because the one that answers is a bad one.
  constexpr Patience kPatience{.length = std::chrono::milliseconds(200)};
  std::size_t page = 0;  // what is left where another thread goes on
  run_when_idle(
      [&](const std::stop_token& stop) {
        while (page < pages && !stop.stop_requested()) {
          for (const std::size_t end = std::min(page + kAtOnce, pages); page < end; ++page) {
            if (work(page)) continue;
            page = pages;
            return;
          }
          if (page < pages) std::this_thread::sleep_for(kPause);
        }
      },
      kPatience);
}

// Where a page's first byte other than zero is; kNoMark: nowhere.
inline std::uint16_t mark_of(std::span<const std::byte> page) {
  std::size_t at = 0;
  for (std::uint64_t word = 0; at + sizeof word <= page.size(); at += sizeof word) {
    std::memcpy(&word, page.data() + at, sizeof word);
    if (word != 0) break;
  }
  const auto rest = page.subspan(at);
  const auto found = std::ranges::find_if(rest, [](std::byte byte) { return byte != std::byte{}; });
  return found == rest.end() ? kNoMark
                             : static_cast<std::uint16_t>(at + std::size_t(found - rest.begin()));
}

// The mark of each page of `content`, which is not left to the system yet.
inline std::vector<std::uint16_t> page_marks(std::span<const std::byte> content) {
  std::vector<std::uint16_t> marks(marked_pages(content.size()));
  page_by_page(marks.size(), [&](std::size_t page) {
    const std::size_t begin = page * kMarkedPage;
    marks[page] = mark_of(content.subspan(begin, std::min(kMarkedPage, content.size() - begin)));
    return true;
  });
  return marks;
}

// Takes memory back from the system by writing to each of its pages, the last one as a whole, and
// says whether it has all of its content: that of which `marks` are.
inline bool take_back_pages(std::span<std::byte> content, std::span<const std::uint16_t> marks) {
  if (marked_pages(content.size()) != marks.size()) return false;
  bool whole = true;
  page_by_page(marks.size(), [&](std::size_t page) {
    std::byte* const begin = content.data() + page * kMarkedPage;
    const std::uint16_t mark = marks[page];
    // Another byte than the mark: the kernel may take the page between this reading and this
    // writing, and then the byte is there again and the mark is not.
    volatile std::byte* const other = begin + (mark == 0 ? 1 : 0);
    *other = *other;
    const volatile std::byte* const marked = begin + mark;
    whole = mark == kNoMark || *marked != std::byte{};
    return whole;
  });
  return whole;
}

}  // namespace tessera

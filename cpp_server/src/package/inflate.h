// Raw deflate (RFC 1951), as zip archives use it, from a range of a file.
//
// Contract: a free function without state; any thread; blocks on the disk. Memory stays
// bounded however large the content is. Throws PackageError when the range is no deflate
// stream of exactly the promised size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "package/package_file.h"

namespace tessera {

// Hands the content of the `stored_bytes` bytes at `offset` to `sink`, piece by piece.
// `bytes` is the size of the content.
void inflate_range(const PackageFile& file, std::uint64_t offset, std::uint64_t stored_bytes,
                   std::uint64_t bytes,
                   const std::function<void(std::span<const std::byte>)>& sink);

}  // namespace tessera

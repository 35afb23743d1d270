#include "package/inflate.h"

#include <zlib.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "package/package_error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kChunkBytes = 256ULL << 10;

// Ends the stream on every way out.
class Inflater {
 public:
  Inflater() {
    // Negative window bits: raw deflate, without zlib's own header.
    if (inflateInit2(&stream, -MAX_WBITS) != Z_OK) throw std::runtime_error("zlib cannot work");
  }
  ~Inflater() { inflateEnd(&stream); }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;

  z_stream stream{};
};

}  // namespace

void inflate_range(const PackageFile& file, std::uint64_t offset, std::uint64_t stored_bytes,
                   std::uint64_t bytes,
                   const std::function<void(std::span<const std::byte>)>& sink) {
  Inflater inflater;
  z_stream& stream = inflater.stream;
  std::vector<std::byte> in(std::min(stored_bytes, kChunkBytes));
  std::vector<std::byte> out(kChunkBytes);
  std::uint64_t produced = 0;
  int result = Z_OK;
  while (result == Z_OK) {
    if (stream.avail_in == 0 && stored_bytes > 0) {
      const std::span part(in.data(), std::min<std::uint64_t>(stored_bytes, in.size()));
      file.read_at(offset, part);
      offset += part.size();
      stored_bytes -= part.size();
      stream.next_in = reinterpret_cast<Bytef*>(part.data());
      stream.avail_in = static_cast<uInt>(part.size());
    }
    stream.next_out = reinterpret_cast<Bytef*>(out.data());
    stream.avail_out = static_cast<uInt>(out.size());
    result = inflate(&stream, Z_NO_FLUSH);  // Z_BUF_ERROR where nothing is left to read
    const std::size_t count = out.size() - stream.avail_out;
    produced += count;
    if (produced > bytes) break;
    if (count > 0) sink({out.data(), count});
  }
  if (result != Z_STREAM_END || produced != bytes || stream.avail_in > 0 || stored_bytes > 0) {
    throw PackageError(file.path(), "a compressed record is damaged");
  }
}

}  // namespace tessera

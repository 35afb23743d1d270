#include "http2/unpacker.h"

#include <algorithm>

namespace tessera::http2 {
namespace {

constexpr std::size_t kLeastBytes = 4 * 1024;
// Memory is taken for so many times what came, and then for twice what there is.
constexpr std::size_t kFirstGuess = 4;
constexpr int kGzipFormat = 16;  // added to the window's bits (zlib.h, inflateInit2)

}  // namespace

Unpacker::Unpacker(Encoding encoding, std::span<const std::byte> packed, std::size_t most_bytes,
                   ConnectionBytes& bytes)
    : left_(packed), most_bytes_(most_bytes), bytes_(bytes) {
  const int format = encoding == Encoding::kGzip ? kGzipFormat : 0;
  ready_ = ::inflateInit2(&stream_, MAX_WBITS + format) == Z_OK;
}

Unpacker::~Unpacker() {
  if (ready_) ::inflateEnd(&stream_);
  if (accounted_ > 0) bytes_.give(accounted_);
}

Unpacker::State Unpacker::step() {
  if (!ready_) return State::kNoMemory;
  if (const State grown = grow(); grown != State::kMore) return grown;
  const std::size_t before = made_.size();
  const std::size_t in = std::min(left_.size(), kStepBytes);
  const std::size_t room = std::min(made_.capacity() - before, kStepBytes);
  stream_.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(left_.data()));
  stream_.avail_in = static_cast<uInt>(in);
  stream_.next_out = reinterpret_cast<Bytef*>(made_.extend(room));
  stream_.avail_out = static_cast<uInt>(room);
  const int result = ::inflate(&stream_, Z_NO_FLUSH);
  made_.truncate(before + room - stream_.avail_out);
  left_ = left_.subspan(in - stream_.avail_in);
  if (made_.size() > most_bytes_) return State::kTooLarge;
  if (result == Z_STREAM_END) return left_.empty() ? State::kWhole : State::kDamaged;
  if (result == Z_MEM_ERROR) return State::kNoMemory;
  const bool cut = left_.empty() && stream_.avail_out > 0;
  return result == Z_OK && !cut ? State::kMore : State::kDamaged;
}

// Makes room for more of the message, up to a byte above the most, which tells that it is larger.
Unpacker::State Unpacker::grow() {
  if (made_.size() < made_.capacity()) return State::kMore;
  const std::size_t wanted =
      made_.capacity() == 0 ? kFirstGuess * left_.size() : 2 * made_.capacity();
  const std::size_t capacity = std::min(std::max(wanted, kLeastBytes), most_bytes_ + 1);
  const std::int64_t more = static_cast<std::int64_t>(capacity) - accounted_;
  using Room = ConnectionBytes::Room;
  switch (bytes_.take(more)) {
    case Room::kTaken: break;
    case Room::kConnectionFull: return State::kConnectionFull;
    case Room::kServerFull: return State::kServerFull;
  }
  accounted_ += more;
  return made_.reserve(capacity) ? State::kMore : State::kNoMemory;
}

}  // namespace tessera::http2

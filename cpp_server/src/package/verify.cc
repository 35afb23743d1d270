#include "package/verify.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "common/text.h"
#include "common/thread_name.h"
#include "csrc/idle_thread.h"
#include "package/package_error.h"
#include "package/sha256.h"

namespace tessera {
namespace {

constexpr std::uint64_t kWorthThreads = 2U << 20;  // bytes

// Bytes of a content that have a hash of their own.
struct Part {
  const std::string* name = nullptr;
  std::uint64_t begin = 0;   // within the content
  std::uint64_t offset = 0;  // within the file
  std::uint64_t bytes = 0;
  const std::string* sha256 = nullptr;
  std::span<std::byte> place;  // empty: not kept
  bool staged = false;
};

// The chunks of a content, or all of it.
void add_parts(std::vector<Part>& parts, const std::string& name, const Record& record,
               const RecordInfo& listed, const Destination& to) {
  const bool divided = !listed.chunks.empty();
  const std::uint64_t step = divided ? kChunkBytes : record.bytes;
  std::uint64_t begin = 0;
  for (std::size_t i = 0; i < (divided ? listed.chunks.size() : 1); ++i, begin += step) {
    const std::uint64_t bytes = std::min(step, record.bytes - begin);
    parts.push_back({.name = &name,
                     .begin = begin,
                     .offset = record.offset + begin,
                     .bytes = bytes,
                     .sha256 = divided ? &listed.chunks[i] : &listed.sha256,
                     .place = to.place.empty() ? to.place : to.place.subspan(begin, bytes),
                     .staged = to.staged});
  }
}

// Hands `sink` the bytes of `part`, in their place or in memory that is used again.
template <typename Sink>
void read_part(const PackageFile& file, const Part& part, const Sink& sink) {
  std::vector<std::byte> scratch(part.place.empty() ? std::min(part.bytes, kPieceBytes) : 0);
  for (std::uint64_t done = 0; done < part.bytes;) {
    const std::uint64_t bytes = std::min(part.bytes - done, kPieceBytes);
    const auto piece =
        part.place.empty() ? std::span(scratch).first(bytes) : part.place.subspan(done, bytes);
    file.read_at(part.offset + done, piece);
    sink(std::span<const std::byte>(piece));
    done += bytes;
  }
}

void compare(const Records& records, const Part& part, std::uint64_t record_bytes,
             const std::string& found) {
  if (found == *part.sha256) return;
  const std::string where =
      part.bytes == record_bytes
          ? text(part.bytes, " bytes")
          : text("bytes ", part.begin, " to ", part.begin + part.bytes, " of ", record_bytes);
  throw PackageError(records.file().path(),
                     text("record '", *part.name, "' was changed: SHA-256 ", found, " of ", where,
                          ", ", records.kind().last_word, " says ", *part.sha256));
}

// Compares a part piece by piece: one thread can go on where another has stopped.
class Comparison {
 public:
  // `staging`, where the part goes through one, must outlive this.
  Comparison(const Records& records, const Part& part, Staging* staging)
      : records_(records),
        part_(part),
        staging_(part.staged ? staging : nullptr),
        scratch_(part.place.empty() && staging_ == nullptr ? std::min(part.bytes, kPieceBytes)
                                                           : 0) {}

  // Reads a piece and gives its bytes; none: the part has been read, and has its hash.
  std::uint64_t go_on() {
    const std::uint64_t bytes = std::min(part_.bytes - done_, kPieceBytes);
    if (bytes > 0) {
      const std::span<std::byte> piece = room(bytes);
      records_.file().read_at(part_.offset + done_, piece);
      digest_.update(piece);
      if (staging_ != nullptr) staging_->filled();
      done_ += bytes;
      return bytes;
    }
    compare(records_, part_, records_.all().at(*part_.name).bytes, digest_.hex());
    return 0;
  }

 private:
  std::span<std::byte> room(std::uint64_t bytes) {
    if (staging_ != nullptr) return staging_->room(*part_.name, part_.begin + done_, bytes);
    return part_.place.empty() ? std::span(scratch_).first(bytes)
                               : part_.place.subspan(done_, bytes);
  }

  const Records& records_;
  const Part& part_;
  Staging* const staging_;
  std::vector<std::byte> scratch_;
  std::uint64_t done_ = 0;
  Sha256 digest_;
};

// The first failure in the parts' order.
class FirstFailure {
 public:
  void note(std::size_t number, std::exception_ptr failure) {
    const MutexLock lock(mutex_);
    if (failure_ == nullptr || number < number_) {
      number_ = number;
      failure_ = std::move(failure);
    }
    any_ = true;
  }

  bool any() const { return any_; }

  void rethrow() {
    const MutexLock lock(mutex_);
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }

 private:
  Mutex mutex_;
  std::size_t number_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::exception_ptr failure_ TESSERA_GUARDED_BY(mutex_);
  std::atomic<bool> any_ = false;
};

// What the threads that read have in common.
struct Reading {
  const Records& records;
  const std::vector<Part>& parts;
  const ReadOptions& options;
  std::atomic<std::size_t> next = 0;
  FirstFailure failure = {};
};

// One of them, which takes part after part.
class Reader {
 public:
  explicit Reader(Reading& reading)
      : reading_(reading),
        staging_(reading.options.staging != nullptr ? reading.options.staging() : nullptr),
        pause_(reading.options.pauses != nullptr ? reading.options.pauses() : nullptr) {}

  // Until no part is left, one has failed, or `stop` is asked for: then another thread may go on.
  void run(const std::stop_token& stop) {
    try {
      while (!done_) {
        if (stop.stop_requested()) return;
        go_on();
      }
    } catch (...) {
      reading_.failure.note(at_, std::current_exception());
      current_.reset();
      done_ = true;
    }
  }

 private:
  void go_on() {
    if (!current_.has_value()) {
      at_ = reading_.next++;
      if (at_ >= reading_.parts.size() || reading_.failure.any()) {
        done_ = true;
        if (staging_ != nullptr) staging_->finish();
        return;
      }
      current_.emplace(reading_.records, reading_.parts[at_], staging_.get());
    }
    const std::uint64_t bytes = current_->go_on();
    if (bytes == 0) return current_.reset();
    if (reading_.options.progress != nullptr) reading_.options.progress(bytes);
    if (pause_ != nullptr) pause_();
  }

  Reading& reading_;
  const std::unique_ptr<Staging> staging_;
  const std::function<void()> pause_;
  std::size_t at_ = 0;
  bool done_ = false;
  std::optional<Comparison> current_;
};

void read_parts(Reading& reading) {
  try {
    Reader reader(reading);
    if (!reading.options.when_idle) return reader.run({});
    run_when_idle([&](const std::stop_token& stop) { reader.run(stop); });
  } catch (...) {  // there is no memory for what it needs
    reading.failure.note(reading.parts.size(), std::current_exception());
  }
}

void check_sizes(const Records& records, const std::string& name, const Record& record,
                 const RecordInfo& listed) {
  const std::string& path = records.file().path();
  if (record.bytes != listed.bytes) {
    throw PackageError(path, text("record '", name, "' was changed: it has ", record.bytes,
                                  " bytes, ", records.kind().last_word, " says ", listed.bytes));
  }
  if (listed.chunks.size() != chunk_count(record.bytes)) {
    throw PackageError(
        path, text(records.kind().last_word, " names ", listed.chunks.size(), " chunks of record '",
                   name, "', whose ", record.bytes, " bytes have ", chunk_count(record.bytes)));
  }
}

}  // namespace

void verify_headers(const Records& records, const Listed& listed) {
  const std::string& path = records.file().path();
  for (const auto& [name, info] : listed) {
    if (!records.has(name)) throw PackageError(path, text("records are missing: ", name));
  }
  for (const auto& [name, record] : records.all()) {
    if (name == records.kind().last_record) continue;
    const auto found = listed.find(name);
    if (found == listed.end()) {
      throw PackageError(path,
                         text("records are not listed in ", records.kind().last_word, ": ", name));
    }
    if (found->second.crc32 != record.crc32) {
      throw PackageError(
          path, text("the header of record '", name, "' was changed: CRC-32 ", record.crc32, ", ",
                     records.kind().last_word, " says ", found->second.crc32));
    }
    check_sizes(records, name, record, found->second);
  }
}

std::vector<std::byte> read_verified(const Records& records, const Listed& listed,
                                     const std::string& name, std::uint64_t max_bytes) {
  std::vector<std::byte> content = records.read(name, max_bytes);
  const Record& record = records.all().at(name);
  std::vector<Part> parts;
  add_parts(parts, name, record, listed.at(name), {});
  for (const Part& part : parts) {
    Sha256 digest;
    digest.update(std::span<const std::byte>(content).subspan(part.begin, part.bytes));
    compare(records, part, record.bytes, digest.hex());
  }
  return content;
}

void verify_records(const Records& records, const Listed& listed, const ReadOptions& options) {
  verify_headers(records, listed);
  std::vector<Part> parts;
  std::uint64_t bytes = 0;
  for (const auto& [name, info] : listed) {
    const Record& record = records.all().at(name);
    const Destination to = options.into == nullptr ? Destination() : options.into(name, record);
    if (to.known) continue;
    add_parts(parts, name, record, info, to);
    bytes += record.bytes;
  }
  Reading reading{.records = records, .parts = parts, .options = options};
  {
    std::vector<std::jthread> others;
    const unsigned count = bytes < kWorthThreads ? 1
                                                 : std::clamp(std::thread::hardware_concurrency(),
                                                              1U, options.threads);
    for (unsigned i = 1; i < count; ++i) {
      others.emplace_back([&reading, i] {
        name_thread("verify", i);
        read_parts(reading);
      });
    }
    read_parts(reading);
  }
  reading.failure.rethrow();
}

std::string file_sha256(const Records& records, const Listed& listed, const Contents& contents,
                        const std::stop_token& stop, const std::function<void()>& rest) {
  Sha256 whole;
  std::string directory;
  std::uint64_t offset = 0;
  const auto add = [&](const std::string& name, const Record& record) {
    const std::string header = local_header(name, record, offset, records.kind().top_folder);
    directory += directory_entry(name, record, offset, records.kind().top_folder);
    whole.update(std::as_bytes(std::span(header)));
    offset += header.size() + record.bytes;
    if (const auto kept = contents.find(name); kept != contents.end()) {
      auto left = kept->second;
      while (!left.empty() && !stop.stop_requested()) {
        const auto piece = left.first(std::min<std::size_t>(left.size(), kPieceBytes));
        whole.update(piece);
        left = left.subspan(piece.size());
        if (rest != nullptr) rest();
      }
      return;
    }
    std::vector<Part> parts;
    add_parts(parts, name, record, listed.at(name), {});
    for (const Part& part : parts) {
      if (stop.stop_requested()) return;
      Sha256 own;
      read_part(records.file(), part, [&](std::span<const std::byte> piece) {
        own.update(piece);
        whole.update(piece);
        if (rest != nullptr) rest();
      });
      if (own.hex() != *part.sha256) {
        throw PackageError(records.file().path(),
                           "was changed while it was being loaded; load it again");
      }
    }
  };
  for (const auto& [name, record] : records.all()) {
    if (name != records.kind().last_record) add(name, record);
  }
  add(records.kind().last_record, records.all().at(records.kind().last_record));
  if (stop.stop_requested()) return "";
  directory += directory_end(records.all().size(), directory.size(), offset);
  whole.update(std::as_bytes(std::span(directory)));
  return whole.hex();
}

}  // namespace tessera

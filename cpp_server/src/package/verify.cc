#include "package/verify.h"

#include <algorithm>
#include <atomic>
#include <exception>
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
// They stay in a core's cache from reading to hashing, and the kernel copies them at once: whoever
// waits for the CPU waits for no longer than that.
constexpr std::uint64_t kPieceBytes = 64U << 10;

// Bytes of a content that have a hash of their own.
struct Part {
  const std::string* name = nullptr;
  std::uint64_t begin = 0;   // within the content
  std::uint64_t offset = 0;  // within the file
  std::uint64_t bytes = 0;
  const std::string* sha256 = nullptr;
  std::span<std::byte> place;  // empty: not kept
};

// The chunks of a content, or all of it.
void add_parts(std::vector<Part>& parts, const std::string& name, const Record& record,
               const RecordInfo& listed, std::span<std::byte> place) {
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
                     .place = place.empty() ? place : place.subspan(begin, bytes)});
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
  Comparison(const Records& records, const Part& part)
      : records_(records),
        part_(part),
        scratch_(part.place.empty() ? std::min(part.bytes, kPieceBytes) : 0) {}

  // Reads a piece; false: it was the last one, and the part has its hash.
  bool go_on(const ReadOptions& options) {
    const std::uint64_t bytes = std::min(part_.bytes - done_, kPieceBytes);
    const auto piece =
        part_.place.empty() ? std::span(scratch_).first(bytes) : part_.place.subspan(done_, bytes);
    if (bytes > 0) records_.file().read_at(part_.offset + done_, piece);
    digest_.update(piece);
    done_ += bytes;
    if (options.progress != nullptr) options.progress(bytes);
    if (done_ < part_.bytes) return true;
    compare(records_, part_, records_.all().at(*part_.name).bytes, digest_.hex());
    return false;
  }

 private:
  const Records& records_;
  const Part& part_;
  std::vector<std::byte> scratch_;
  std::uint64_t done_ = 0;
  Sha256 digest_;
};

void check_when_idle(const Records& records, const std::vector<Part>& parts,
                     const ReadOptions& options) {
  auto part = parts.begin();
  std::optional<Comparison> current;
  run_when_idle([&](const std::stop_token& stop) {
    while (part != parts.end()) {
      if (!current.has_value()) current.emplace(records, *part);
      while (current->go_on(options)) {
        if (stop.stop_requested()) return;
      }
      current.reset();
      ++part;
    }
  });
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

namespace {

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

}  // namespace

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
    add_parts(parts, name, record, info, to.place);
    bytes += record.bytes;
  }
  if (options.when_idle && options.threads == 1) {
    check_when_idle(records, parts, options);
    return;
  }
  std::atomic<std::size_t> next = 0;
  FirstFailure failure;
  const auto work = [&] {
    for (std::size_t i = next++; i < parts.size() && !failure.any(); i = next++) {
      try {
        Comparison comparison(records, parts[i]);
        while (comparison.go_on(options)) {
        }
      } catch (...) {
        failure.note(i, std::current_exception());
      }
    }
  };
  {
    std::vector<std::jthread> others;
    const unsigned count = bytes < kWorthThreads ? 1
                                                 : std::clamp(std::thread::hardware_concurrency(),
                                                              1U, options.threads);
    for (unsigned i = 1; i < count; ++i) {
      others.emplace_back([&work, i] {
        name_thread("verify", i);
        work();
      });
    }
    work();
  }
  failure.rethrow();
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

// Comparing every byte of a package, or of a commit, with the hashes that its last record names,
// before anything runs.
//
// Contract: blocks on the disk; uses a few short-lived threads of its own where it may. Throws
// PackageError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "package/manifest.h"
#include "package/records.h"

namespace tessera {

// What becomes of a record's content.
struct Destination {
  std::span<std::byte> place = {};  // of its size; empty: it is compared and not kept
  bool known = false;               // it is neither read nor compared: whoever asks has the content
  bool staged = false;              // it goes through a Staging
};
using Into = std::function<Destination(const std::string& name, const Record& record)>;

// As much of a content as is read and hashed at a time. It stays in a core's cache from the one to
// the other, and the kernel copies it at once: whoever waits for the CPU waits for no longer than
// that.
inline constexpr std::uint64_t kPieceBytes = 64U << 10;

// Where one of the threads that read puts contents which go on to somewhere else, such as a GPU.
// What it was given is to be used only if verify_records returns.
class Staging {
 public:
  virtual ~Staging() = default;  // nothing is on its way any more

  // Memory for `bytes` (kPieceBytes at most) of the record, from its byte `begin` on; may wait
  // until there is some.
  virtual std::span<std::byte> room(const std::string& record, std::uint64_t begin,
                                    std::uint64_t bytes) = 0;

  // What room gave last has been filled.
  virtual void filled() = 0;

  // Waits until all that was filled is where it goes.
  virtual void finish() = 0;
};

struct ReadOptions {
  Into into = nullptr;   // null: nothing is kept
  unsigned threads = 1;  // at most
  // Each reads while CPUs have nothing else to do (idle_thread.h).
  bool when_idle = false;
  // Called, from any of those threads, when so many more bytes have been compared. What it throws
  // ends the reading.
  std::function<void(std::uint64_t bytes)> progress = nullptr;
  // Makes what each of them calls between pieces, which may block; null: they go on at once.
  std::function<std::function<void()>()> pauses = nullptr;
  // Makes the Staging of each; null where no destination is staged.
  std::function<std::unique_ptr<Staging>()> staging = nullptr;
};

// What the archive's last record says of the others, by their name.
using Listed = std::map<std::string, RecordInfo>;

// Contents that were kept, by the record's name.
using Contents = std::map<std::string, std::span<const std::byte>>;

// Compares the names, sizes and CRC-32s of the headers with what is listed; reads no content.
void verify_headers(const Records& records, const Listed& listed);

// The content of one record of at most `max_bytes` bytes, compared with its hash; verify_headers
// must have passed.
std::vector<std::byte> read_verified(const Records& records, const Listed& listed,
                                     const std::string& name, std::uint64_t max_bytes);

// Reads every content once. Throws when a record is missing, is there without being listed, or
// differs; what was written through `into` is to be used only if this returns.
void verify_records(const Records& records, const Listed& listed, const ReadOptions& options = {});

// SHA-256 of the whole file as verify_records saw it, lower-case hex; empty where `stop` was asked
// for meanwhile. What `contents` lacks (it has the manifest) is read, and compared, again. `rest`,
// if given, is called between pieces and may block.
std::string file_sha256(const Records& records, const Listed& listed, const Contents& contents,
                        const std::stop_token& stop, const std::function<void()>& rest = nullptr);

}  // namespace tessera

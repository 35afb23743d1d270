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
};
using Into = std::function<Destination(const std::string& name, const Record& record)>;

struct ReadOptions {
  Into into = nullptr;   // null: nothing is kept
  unsigned threads = 1;  // at most
  // With one: it reads on a thread that runs while CPUs have nothing else to do (idle_thread.h).
  bool when_idle = false;
  // Called, from any of those threads, when so many more bytes have been compared. It may block,
  // and what it throws ends the reading.
  std::function<void(std::uint64_t bytes)> progress = nullptr;
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

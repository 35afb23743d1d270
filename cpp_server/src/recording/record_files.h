// The folder of recorded requests: files of bounded size, and a bound on all of them.
//
// Several processes may write to one folder, each to a file of its own, which it holds a lock on
// (flock) while it writes; so a file whose writer was killed is free at once. Before a file is
// begun, the oldest ones that nobody writes to are removed until it fits; a file that is being
// written to counts as if it were full.
//
// Contract: an object belongs to one thread; everything blocks as long as the disk does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "recording/record_format.h"
#include "recording/record_options.h"

namespace tessera {

// Something could not be written; says why.
class RecordError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Makes the folder, for its owner alone, where there is none. Throws UsageError where it cannot be
// written to.
void check_record_folder(const std::string& folder);

class RecordFiles {
 public:
  RecordFiles(RecordOptions options, RecordingHeader header);
  ~RecordFiles();
  RecordFiles(const RecordFiles&) = delete;
  RecordFiles& operator=(const RecordFiles&) = delete;

  // What a file has room for.
  std::size_t room() const;

  // Appends records of room() bytes at most, to one file. Throws RecordError, and then none of them
  // is there.
  void write(std::string_view records);

 private:
  void open_next();
  void make_room(int folder) const;
  void begin_file(int folder);
  bool is_gone() const;
  void close();
  void append(std::string_view bytes);

  const RecordOptions options_;
  const RecordingHeader header_;
  int file_ = -1;
  std::int64_t size_ = 0;
};

}  // namespace tessera

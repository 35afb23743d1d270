#include "request/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/text.h"

namespace tessera {
namespace {

constexpr std::size_t kMaxNameBytes = 255;  // as those of files
// Descriptors that the rest of the server has at least, beside those of regions.
constexpr std::int64_t kOtherDescriptors = 64;

// Whether shm_open may be called with it: one name, after one '/' at most.
bool is_object_name(std::string_view key) {
  if (key.starts_with('/')) key.remove_prefix(1);
  return !key.empty() && key.size() <= kMaxNameBytes && key != "." && key != ".." &&
         key.find('/') == key.npos && key.find('\0') == key.npos;
}

Status check_facts(const SharedRegionFacts& facts) {
  if (facts.name.empty()) return Status::invalid("name is empty, expected a name for the region");
  if (facts.name.size() > kMaxNameBytes) {
    return Status::invalid(
        text("name has ", facts.name.size(), " bytes, the limit is ", kMaxNameBytes));
  }
  if (!is_object_name(facts.key)) {
    return Status::invalid(text("key '", facts.key,
                                "' is not a name of POSIX shared memory, expected one such as "
                                "/name, of at most ",
                                kMaxNameBytes, " bytes and without a further '/'"));
  }
  if (facts.byte_size == 0) return Status::invalid("byte_size is 0, expected at least 1");
  return {};
}

Status not_opened(const std::string& key, int error) {
  switch (error) {
    case ENOENT: return {Code::kNotFound, text("there is no shared memory '", key, "'")};
    case EACCES:
    case EPERM:
      return {Code::kFailedPrecondition,
              text("the server may not read the shared memory '", key, "'")};
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return {Code::kResourceExhausted, text("the server has no descriptor for the shared memory '",
                                             key, "'; try again later")};
    default: return Status::invalid(text("'", key, "' is not POSIX shared memory"));
  }
}

// The object's size, or why the region does not lie in it.
Status check_object(const SharedRegionFacts& facts, int descriptor) {
  struct stat about {};
  if (::fstat(descriptor, &about) != 0 || !S_ISREG(about.st_mode)) {
    return not_opened(facts.key, EINVAL);
  }
  const auto size = static_cast<std::uint64_t>(about.st_size);
  if (facts.offset <= size && facts.byte_size <= size - facts.offset) return {};
  return Status::invalid(text("offset ", facts.offset, " and byte_size ", facts.byte_size,
                              " reach beyond the shared memory '", facts.key, "', which has ", size,
                              " bytes"));
}

}  // namespace

SharedRegion::SharedRegion(SharedMemory& memory, SharedRegionFacts facts, int descriptor)
    : memory_(memory), facts_(std::move(facts)), descriptor_(descriptor) {}

SharedRegion::~SharedRegion() {
  const int writable = writable_.load();
  if (writable >= 0) ::close(writable);
  ::close(descriptor_);
  memory_.held_descriptors_ -= writable >= 0 ? 2 : 1;
  memory_.held_bytes_ -= facts_.byte_size;
}

Status SharedRegion::shrunk(std::uint64_t offset, std::size_t bytes) const {
  return Status::invalid(text("shared memory region '", facts_.name, "' has shrunk: its ", bytes,
                              " bytes from ", offset, " on are not all there"));
}

Status SharedRegion::read(std::uint64_t offset, std::span<std::byte> out) const {
  std::size_t at = 0;
  while (at < out.size()) {
    const ssize_t count = ::pread(descriptor_, out.data() + at, out.size() - at,
                                  static_cast<off_t>(facts_.offset + offset + at));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return shrunk(offset, out.size());
    at += static_cast<std::size_t>(count);
  }
  return {};
}

Status SharedRegion::open_for_writing() {
  if (writable_.load(std::memory_order_acquire) >= 0) return {};
  const MutexLock lock(mutex_);
  if (writable_.load(std::memory_order_relaxed) >= 0) return {};
  if (!memory_.take_descriptor()) return not_opened(facts_.key, EMFILE);
  // The same object, though its name may stand for another one by now.
  const std::string path = text("/proc/self/fd/", descriptor_);
  const int opened = ::open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (opened < 0) {
    const int error = errno;
    --memory_.held_descriptors_;
    if (error == EMFILE || error == ENFILE) return not_opened(facts_.key, error);
    return Status::invalid(
        text("the server may not write to shared memory region '", facts_.name, "'"));
  }
  writable_.store(opened, std::memory_order_release);
  return {};
}

Status SharedRegion::write(std::uint64_t offset, Bytes bytes) const {
  const int descriptor = writable_.load(std::memory_order_acquire);
  struct stat about {};
  // pwrite would make it as large again.
  const std::uint64_t end = facts_.offset + offset + bytes.size();
  if (::fstat(descriptor, &about) != 0 || static_cast<std::uint64_t>(about.st_size) < end) {
    return shrunk(offset, bytes.size());
  }
  std::size_t at = 0;
  while (at < bytes.size()) {
    const ssize_t count = ::pwrite(descriptor, bytes.data() + at, bytes.size() - at,
                                   static_cast<off_t>(facts_.offset + offset + at));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      if (count < 0 && (errno == ENOSPC || errno == ENOMEM)) {
        return {Code::kResourceExhausted,
                text("the system has no memory for shared memory region '", facts_.name, "'")};
      }
      return Status::invalid(text("shared memory region '", facts_.name, "' cannot be written to"));
    }
    at += static_cast<std::size_t>(count);
  }
  return {};
}

std::int64_t SharedMemory::descriptors_to_be_had(std::int64_t most) {
  rlimit open_files{};
  if (::getrlimit(RLIMIT_NOFILE, &open_files) != 0 || open_files.rlim_cur == RLIM_INFINITY) {
    return most;
  }
  const rlim_t wanted = open_files.rlim_cur + static_cast<rlim_t>(most);
  rlimit raised = open_files;
  raised.rlim_cur = std::min(wanted, open_files.rlim_max);
  if (::setrlimit(RLIMIT_NOFILE, &raised) != 0) raised = open_files;
  // Half of what there is at most: connections need theirs.
  const auto left = static_cast<std::int64_t>(raised.rlim_cur) - kOtherDescriptors;
  return std::clamp<std::int64_t>(left / 2, 1, most);
}

bool SharedMemory::take_descriptor() {
  if (held_descriptors_.fetch_add(1) < limits_.descriptors) return true;
  --held_descriptors_;
  return false;
}

Status SharedMemory::make_room(const SharedRegionFacts& facts) {
  if (regions_.contains(facts.name)) {
    return {Code::kAlreadyExists,
            text("shared memory region '", facts.name, "' is registered; unregister it first")};
  }
  const std::uint64_t held = held_bytes_.load();
  if (facts.byte_size > limits_.bytes - std::min(held, limits_.bytes)) {
    return {Code::kResourceExhausted,
            text("the shared memory regions that are registered have ", held, " bytes (limit ",
                 limits_.bytes, "), this one has ", facts.byte_size)};
  }
  if (!take_descriptor()) {
    return {Code::kResourceExhausted, text("the shared memory regions that are registered have ",
                                           limits_.descriptors, " descriptors, the limit")};
  }
  return {};
}

Status SharedMemory::add(SharedRegionFacts facts) {
  Status status = check_facts(facts);
  if (!status.ok()) return status;
  const MutexLock lock(mutex_);
  status = make_room(facts);
  if (!status.ok()) return status;
  const int descriptor = ::shm_open(facts.key.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK, 0);
  status = descriptor < 0 ? not_opened(facts.key, errno) : check_object(facts, descriptor);
  if (!status.ok()) {
    if (descriptor >= 0) ::close(descriptor);
    --held_descriptors_;
    return status;
  }
  held_bytes_ += facts.byte_size;
  const std::string name = facts.name;
  regions_.emplace(name, std::make_shared<SharedRegion>(*this, std::move(facts), descriptor));
  return {};
}

void SharedMemory::remove(const std::string& name) {
  std::shared_ptr<SharedRegion> gone;  // closed without the mutex
  const MutexLock lock(mutex_);
  const auto found = regions_.find(name);
  if (found == regions_.end()) return;
  gone = std::move(found->second);
  regions_.erase(found);
}

void SharedMemory::remove_all() {
  Regions gone;
  const MutexLock lock(mutex_);
  gone.swap(regions_);
}

Status SharedMemory::list(const std::string& name, std::vector<SharedRegionFacts>& found) const {
  found.clear();
  const MutexLock lock(mutex_);
  if (name.empty()) {
    for (const auto& [each, region] : regions_) found.push_back(region->facts());
    return {};
  }
  const auto one = regions_.find(name);
  if (one == regions_.end()) {
    return {Code::kNotFound, text("shared memory region '", name, "' is not registered")};
  }
  found.push_back(one->second->facts());
  return {};
}

std::shared_ptr<SharedRegion> SharedMemory::find(std::string_view name) const {
  const MutexLock lock(mutex_);
  const auto found = regions_.find(name);
  return found == regions_.end() ? nullptr : found->second;
}

}  // namespace tessera

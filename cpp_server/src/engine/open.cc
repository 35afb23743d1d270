// tessera_engine_open: from a path and flags to an engine that takes requests.
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/thread_name.h"
#include "engine/engine.h"
#include "package/package_error.h"
#include "server/load_options.h"

namespace {

std::unique_ptr<tessera_engine> open(const std::string& path,
                                     const std::vector<std::string>& flags) {
  const tessera::ServerConfig config = tessera::engine_config(path, flags);
  tessera::LoadOptions options = tessera::load_options(config, tessera::read_keys(config));
  options.load_timeout_s = 0;  // what would end the process is the caller's to decide
  return std::make_unique<tessera_engine>(
      tessera::load_package(config.models.front().path, options), config);
}

}  // namespace

std::int32_t tessera_engine_open(const char* path, const char* const* flags, std::size_t flag_count,
                                 tessera_engine** engine, char* message,
                                 std::size_t message_bytes) {
  *engine = nullptr;
  const std::span<char> out(message, message == nullptr ? 0 : message_bytes);
  try {
    std::unique_ptr<tessera_engine> opened;
    std::exception_ptr failure;
    // In a thread of its own: loading sets the number of torch's threads for the one that loads.
    std::thread([&] {
      tessera::name_thread("loader");
      try {
        opened = open(path, {flags, flags + flag_count});
      } catch (...) {
        failure = std::current_exception();
      }
    }).join();
    if (failure != nullptr) std::rethrow_exception(failure);
    tessera::copy_text("", out);
    *engine = opened.release();
    return TESSERA_ENGINE_OK;
  } catch (const tessera::UsageError& error) {
    tessera::copy_text(error.what(), out);
  } catch (const tessera::PackageError& error) {
    tessera::copy_text(error.what(), out);
  } catch (const std::bad_alloc&) {
    tessera::copy_text("the process has no memory left for this package", out);
    return TESSERA_ENGINE_RESOURCE_EXHAUSTED;
  } catch (const std::exception& error) {
    tessera::copy_text(error.what(), out);
    return TESSERA_ENGINE_INTERNAL;
  }
  return TESSERA_ENGINE_INVALID_ARGUMENT;
}

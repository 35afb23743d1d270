// tessera-server: see usage() in config.cc, or --help.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "package/package_error.h"
#include "server/config.h"
#include "server/flag_sources.h"
#include "server/heap_trimmer.h"
#include "server/log.h"
#include "server/package_trial.h"
#include "server/server.h"
#include "server/signals.h"
#include "server/version.h"

namespace {

constexpr int kExitUserError = 2;

int user_error(const char* what) {
  std::cerr << "tessera-server: error: " << what << '\n';
  return kExitUserError;
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.size() >= 2 && arguments[0] == tessera::kTrialArgument) {
    return tessera::run_trial(arguments);
  }
  // First of all: threads inherit which signals are blocked.
  tessera::block_signals();
  tessera::keep_freed_memory();
  try {
    const tessera::ServerConfig config =
        tessera::parse_flags(arguments, tessera::environment_of_process());
    if (config.help) {
      std::cout << tessera::usage();
      return 0;
    }
    if (config.version) {
      std::cout << "tessera-server " << tessera::kVersion << '\n';
      return 0;
    }
    const tessera::Log log(config.log_level, config.log_json);
    return tessera::Server(config, log).run();
  } catch (const tessera::UsageError& error) {
    return user_error(error.what());
  } catch (const tessera::PackageError& error) {
    return user_error(error.what());
  } catch (const std::exception& error) {
    std::cerr << "tessera-server: bug: " << error.what() << '\n';
    return 1;
  }
}

// Ends the process without destroying what is static. Of torch, thousands of operators take 0.1 s
// of a CPU to destroy, which the trial of a version would take from passes. A sanitizer reports at
// the end of a whole process.
[[noreturn]] void end(int status) {
  std::cout.flush();
  std::fflush(nullptr);
#if defined(TESSERA_SANITIZED)
  std::exit(status);
#else
  std::_Exit(status);
#endif
}

}  // namespace

int main(int argc, char** argv) { end(run({argv + 1, argv + argc})); }

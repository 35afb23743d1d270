#include "server/package_trial.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <iostream>
#include <utility>

#include "common/clock.h"
#include "common/text.h"
#include "model/loader.h"
#include "model/operator_libraries.h"
#include "package/package_error.h"

extern char** environ;

namespace tessera {
namespace {

constexpr int kLookMs = 20;
constexpr std::size_t kMaxReasonBytes = 4'096;
constexpr int kRefused = 2;

class Pipe {
 public:
  explicit Pipe(const std::string& path) {
    if (::pipe2(ends_.data(), O_CLOEXEC) != 0) {
      throw PackageError(path, text("no process can try it: ", std::strerror(errno)));
    }
  }
  ~Pipe() {
    ::close(ends_[0]);
    close_writing();
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  int reading() const { return ends_[0]; }
  int writing() const { return ends_[1]; }
  void close_writing() {
    if (ends_[1] >= 0) ::close(std::exchange(ends_[1], -1));
  }

 private:
  std::array<int, 2> ends_{-1, -1};
};

// A process that is killed unless it has been waited for.
class Child {
 public:
  Child(std::vector<std::string> arguments, int stderr_descriptor, const std::string& path) {
    std::vector<char*> pointers;
    pointers.reserve(arguments.size() + 1);
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    ::posix_spawn_file_actions_adddup2(&actions, stderr_descriptor, STDERR_FILENO);
    posix_spawnattr_t attributes;
    ::posix_spawnattr_init(&attributes);
    sigset_t none;
    ::sigemptyset(&none);
    ::posix_spawnattr_setsigmask(&attributes, &none);
    ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    const int failure =
        ::posix_spawn(&id_, "/proc/self/exe", &actions, &attributes, pointers.data(), environ);
    ::posix_spawnattr_destroy(&attributes);
    ::posix_spawn_file_actions_destroy(&actions);
    if (failure != 0) {
      id_ = -1;
      throw PackageError(path, text("no process can try it: ", std::strerror(failure)));
    }
  }
  ~Child() {
    if (id_ < 0) return;
    ::kill(id_, SIGKILL);
    wait();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // As waitpid gives it.
  int wait() {
    int status = 0;
    while (::waitpid(id_, &status, 0) < 0 && errno == EINTR) {
    }
    id_ = -1;
    return status;
  }

 private:
  pid_t id_ = -1;
};

std::vector<std::string> trial_arguments(const PackageFile& file, const ServerConfig& config) {
  // The file that is open here, whatever is at its path by now.
  std::vector<std::string> arguments = {"tessera-server", kTrialArgument,
                                        text("/proc/", ::getpid(), "/fd/", file.descriptor())};
  for (const std::string& folder : config.ops_dirs) {
    arguments.insert(arguments.end(), {"--ops-dir", folder});
  }
  for (const std::string& op : config.allow_ops)
    arguments.insert(arguments.end(), {"--allow-op", op});
  if (!config.verify_golden) arguments.emplace_back("--skip-golden");
  return arguments;
}

// Reads what the process writes until it closes its end. False: `limit` has passed.
bool read_until_end(int descriptor, TimePoint limit, const std::function<void()>& waiting,
                    std::string& said) {
  std::array<char, 512> piece{};
  while (true) {
    waiting();
    if (std::chrono::steady_clock::now() >= limit) return false;
    pollfd ready{.fd = descriptor, .events = POLLIN, .revents = 0};
    if (::poll(&ready, 1, kLookMs) <= 0) continue;
    const ssize_t got = ::read(descriptor, piece.data(), piece.size());
    if (got == 0) return true;
    if (got < 0) continue;
    said.append(piece.data(), static_cast<std::size_t>(got));
    if (said.size() > kMaxReasonBytes) said.erase(0, said.size() - kMaxReasonBytes);
  }
}

// The last line, which is the one that run_trial writes.
std::string last_line(std::string said) {
  while (!said.empty() && said.back() == '\n') said.pop_back();
  return said.substr(said.rfind('\n') + 1);
}

}  // namespace

void try_package(const PackageFile& file, const ServerConfig& config,
                 const std::function<void()>& waiting) {
  const TimePoint limit =
      std::chrono::steady_clock::now() +
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(config.load_timeout_s));
  Pipe pipe(file.path());
  Child child(trial_arguments(file, config), pipe.writing(), file.path());
  pipe.close_writing();
  std::string said;
  if (!read_until_end(pipe.reading(), limit, waiting, said)) {
    throw PackageError(file.path(),
                       text("its model ran longer than --load-timeout-s ", config.load_timeout_s,
                            " while it was tried; do not use it, or give it more time"));
  }
  const int status = child.wait();
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
  if (WIFEXITED(status) && WEXITSTATUS(status) == kRefused) {
    throw PackageError(file.path(), last_line(std::move(said)));
  }
  throw PackageError(file.path(), text("its model ended the process that tried it (",
                                       WIFSIGNALED(status) ? text("signal ", WTERMSIG(status))
                                                           : text("status ", WEXITSTATUS(status)),
                                       "); do not use it"));
}

int run_trial(const std::vector<std::string>& arguments) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::vector<std::string> flags = {"--model"};
  flags.insert(flags.end(), arguments.begin() + 1, arguments.end());
  const ServerConfig config = parse_flags(flags);
  try {
    load_package(config.models.at(0).path,
                 {.verify_golden = config.verify_golden,
                  .library_folders = library_folders(config.ops_dirs),
                  .load_timeout_s = 0,
                  .allow_ops = {config.allow_ops.begin(), config.allow_ops.end()},
                  .beside = true,
                  .only_try = true});
    return 0;
  } catch (const PackageError& error) {
    std::cerr << error.reason() << '\n';
    return kRefused;
  }
}

}  // namespace tessera

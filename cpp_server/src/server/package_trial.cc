#include "server/package_trial.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <iostream>
#include <utility>

#include "common/clock.h"
#include "common/cpus.h"
#include "common/pace.h"
#include "common/text.h"
#include "csrc/idle_thread.h"
#include "model/loader.h"
#include "model/operator_libraries.h"
#include "package/package_error.h"

namespace tessera {
namespace {

// How long it runs between two pauses, at least.
constexpr std::chrono::microseconds kTurn{500};
constexpr std::size_t kMaxReasonBytes = 4'096;
constexpr int kRefused = 2;
// More than anybody goes to and fro between.
constexpr std::size_t kMostPassed = 1'024;

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

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TESSERA_THREAD_SANITIZER
#endif
#endif
// As posix_spawn has it: no page is copied, and this thread waits until the program is being
// executed. ThreadSanitizer follows a child only into memory of its own.
#ifdef TESSERA_THREAD_SANITIZER
constexpr int kChildFlags = SIGCHLD;
#else
constexpr int kChildFlags = CLONE_VM | CLONE_VFORK | SIGCHLD;
#endif

// What begin_child does: in the memory of this process, on a stack of its own, until it executes
// the program.
struct Start {
  std::vector<char*> arguments;
  bool idle = false;  // it runs while CPUs have nothing else to do (idle_thread.h)
  int stderr_descriptor = -1;
  int failure = 0;  // errno where the program cannot be executed
};

int begin_child(void* given) {
  Start& start = *static_cast<Start*>(given);
  // Before anything else: a process that is stopped cannot end itself when this one is gone.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (start.idle) be_idle();
  const int nothing = ::open("/dev/null", O_RDWR);
  ::dup2(nothing, STDIN_FILENO);
  ::dup2(nothing, STDOUT_FILENO);
  ::dup2(start.stderr_descriptor, STDERR_FILENO);
  ::close(nothing);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::execv("/proc/self/exe", start.arguments.data());
  start.failure = errno;
  return 1;
}

// A process that is killed unless it has been waited for.
class Child {
 public:
  Child(std::vector<std::string> arguments, int stderr_descriptor, const std::string& path,
        bool idle) {
    Start start;
    start.idle = idle;
    start.stderr_descriptor = stderr_descriptor;
    start.arguments.reserve(arguments.size() + 1);
    for (std::string& argument : arguments) start.arguments.push_back(argument.data());
    start.arguments.push_back(nullptr);
    constexpr std::size_t kStackBytes = 64 * 1024;
    std::vector<std::byte> stack(kStackBytes);
    id_ = ::clone(begin_child, stack.data() + kStackBytes, kChildFlags, &start);
    const int failure = id_ < 0 ? errno : start.failure;
    if (failure == 0) return;
    if (id_ >= 0) wait();
    throw PackageError(path, text("no process can try it: ", std::strerror(failure)));
  }
  ~Child() {
    if (id_ < 0) return;
    ::kill(id_, SIGKILL);
    const sched_param none{};
    ::sched_setscheduler(id_, SCHED_OTHER, &none);  // to end it needs a CPU; this takes a privilege
    wait();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // The clock of what it uses of CPUs.
  clockid_t cpu_clock() const {
    clockid_t clock = CLOCK_THREAD_CPUTIME_ID;
    ::clock_getcpuclockid(id_, &clock);
    return clock;
  }

  // Lets it wait while this sleeps.
  void pause(const std::function<void()>& sleep) const {
    ::kill(id_, SIGSTOP);
    sleep();
    ::kill(id_, SIGCONT);
  }

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

// What a process has written.
class Watch {
 public:
  explicit Watch(int descriptor) : descriptor_(descriptor) {}

  // Reads what is written within `most`; false: the process has closed its end.
  bool read_for(std::chrono::microseconds most) {
    const TimePoint begin = std::chrono::steady_clock::now();
    pollfd ready{.fd = descriptor_, .events = POLLIN, .revents = 0};
    const timespec limit{.tv_sec = 0, .tv_nsec = Duration(most).count()};
    const bool any = ::ppoll(&ready, 1, &limit, nullptr) > 0;
    waited_ += std::chrono::steady_clock::now() - begin;
    if (!any) return true;
    std::array<char, 512> piece{};
    const ssize_t got = ::read(descriptor_, piece.data(), piece.size());
    if (got > 0) said_.append(piece.data(), static_cast<std::size_t>(got));
    if (said_.size() > kMaxReasonBytes) said_.erase(0, said_.size() - kMaxReasonBytes);
    return got != 0;
  }

  // How long it was read for.
  Duration waited() const { return waited_; }
  const std::string& said() const { return said_; }

 private:
  const int descriptor_;
  Duration waited_{};
  std::string said_;
};

// The last line, which is the one that run_trial writes.
std::string last_line(std::string said) {
  while (!said.empty() && said.back() == '\n') said.pop_back();
  return said.substr(said.rfind('\n') + 1);
}

// As try_package does, in a process that runs while CPUs have nothing else to do where `idle` says
// so; false: it had too little of them, and the package has not been tried.
bool try_in_process(const PackageFile& file, const ServerConfig& config,
                    const std::function<bool()>& answering, const std::function<void()>& waiting,
                    bool idle) {
  const auto limit =
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(config.load_timeout_s));
  Pipe pipe(file.path());
  Child child(trial_arguments(file, config), pipe.writing(), file.path(), idle);
  pipe.close_writing();
  Watch watch(pipe.reading());
  // A package is not refused because others had the CPUs meanwhile: then what it used of them
  // counts.
  const auto ran = [&]() -> Duration { return idle ? time_of(child.cpu_clock()) : watch.waited(); };
  const int cpus = available_cpus();
  Pace pace(answering, child.cpu_clock(), idle ? idle_share(cpus) / aside_share(cpus) : 1);
  Starvation starvation(child.cpu_clock());
  while (watch.read_for(kTurn)) {
    waiting();
    if (ran() >= limit) {
      throw PackageError(file.path(),
                         text("its model ran longer than --load-timeout-s ", config.load_timeout_s,
                              " while it was tried; do not use it, or give it more time"));
    }
    if (idle && starvation.seen()) return false;
    if (answering != nullptr) {
      pace.rest([&](const std::function<void()>& sleep) { child.pause(sleep); });
    }
  }
  const int status = child.wait();
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return true;
  if (WIFEXITED(status) && WEXITSTATUS(status) == kRefused) {
    throw PackageError(file.path(), last_line(watch.said()));
  }
  throw PackageError(file.path(), text("its model ended the process that tried it (",
                                       WIFSIGNALED(status) ? text("signal ", WTERMSIG(status))
                                                           : text("status ", WEXITSTATUS(status)),
                                       "); do not use it"));
}

}  // namespace

void PackageTrials::try_package(const PackageFile& file, const std::string& manifest_sha256,
                                const std::function<bool()>& answering,
                                const std::function<void()>& waiting) {
  if (std::find(passed_.begin(), passed_.end(), manifest_sha256) != passed_.end()) return;
  const bool idle = answering != nullptr && idle_thread_gets_on();
  if (!try_in_process(file, config_, answering, waiting, idle)) {
    try_in_process(file, config_, answering, waiting, /*idle=*/false);
  }
  if (passed_.size() == kMostPassed) passed_.pop_front();
  passed_.push_back(manifest_sha256);
}

int run_trial(const std::vector<std::string>& arguments) {
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

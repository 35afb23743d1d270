// Versions of a repository that come and go while requests are answered, with a plain function in
// the place of torch: the file's first word says what the load does.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/text.h"
#include "echo_model.h"
#include "metrics/model_list.h"
#include "package/package_error.h"
#include "repository/manager.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

std::string content_of(const std::string& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

LoadedPackage load_text(const std::string& path, const RepositoryManager::Progress& progress,
                        bool /*beside*/) {
  const std::string word = content_of(path);
  progress(0.5);
  if (word == "endless") {
    while (true) {
      std::this_thread::sleep_for(1ms);
      progress(0.6);
    }
  }
  if (word != "good") throw PackageError(path, "is " + word);
  return test::echo_package();
}

class ManagerTest : public testing::Test {
 public:
  ManagerTest() {
    folder = fs::temp_directory_path() / ("manager_test." + std::to_string(::getpid()));
    fs::remove_all(folder);
    fs::create_directories(folder);
    config.repositories = {folder};
    config.workers = 1;
    config.poll_s = 0.01;
    config.control = ModelControl::kPoll;
  }
  ~ManagerTest() override {
    manager.reset();
    fs::remove_all(folder);
  }

  // As package-model does it: a whole folder by rename.
  void put(int version, const std::string& word, const std::string& model = "m") const {
    const fs::path target = folder / model / std::to_string(version);
    const fs::path hidden = folder / model / ".new";
    fs::create_directories(hidden);
    std::ofstream(hidden / "model.pt") << word;
    if (fs::exists(target)) {
      fs::rename(hidden / "model.pt", target / "model.pt");
    } else {
      fs::rename(hidden, target);
    }
  }
  void write(const std::string& name, const std::string& content) const {
    fs::create_directories(folder / "m");
    std::ofstream(folder / "m" / ("." + name)) << content;
    fs::rename(folder / "m" / ("." + name), folder / "m" / name);
  }

  void start(const RepositoryManager::WarmUp& warm_up = nullptr) {
    const RepositoryManager::Listener listener{.serving =
                                                   [this](const std::string&, bool now) {
                                                     if (trouble) throw std::bad_alloc();
                                                     serving = now;
                                                   },
                                               .gone = [this](const std::string&) { gone = true; },
                                               .started = [this] { started.set_value(); },
                                               .left =
                                                   [this](const LoadedPackage& package) {
                                                     if (package.runner != nullptr) ++left;
                                                   }};
    manager = std::make_unique<RepositoryManager>(config, std::vector<RepositoryManager::Fixed>(),
                                                  registry, list, load_text, warm_up, listener,
                                                  clock, log);
    manager->start();
  }

  std::shared_ptr<ServedModel> find(const std::string& version = "") const {
    Status status;
    return registry.find("m", version, status);
  }
  std::string answering() const {
    const auto model = find();
    return model == nullptr ? "" : model->version();
  }
  IndexEntry entry(const std::string& version) const {
    for (IndexEntry& each : manager->index()) {
      if (each.version == version) return each;
    }
    return {};
  }
  // Waits until `holds`; ends the test where it never does.
  template <typename Holds>
  static void until(const Holds& holds) {
    for (int i = 0; i < 20'000 && !holds(); ++i) std::this_thread::sleep_for(1ms);
    ASSERT_TRUE(holds());
  }

  Status load(const LoadRequest& request) {
    std::promise<Status> outcome;
    manager->load("m", request, [&](const Status& status) { outcome.set_value(status); });
    return outcome.get_future().get();
  }
  Status unload(std::optional<Version> version = {}, const std::string& model = "m") {
    std::promise<Status> outcome;
    manager->unload(model, version, [&](const Status& status) { outcome.set_value(status); });
    return outcome.get_future().get();
  }

  fs::path folder;
  ServerConfig config;
  SteadyClock clock;
  Log log{LogLevel::kError, true, -1};
  ModelList list;
  Registry registry{std::vector<std::string>()};
  std::atomic<bool> serving = false;
  std::atomic<bool> gone = false;
  std::atomic<bool> trouble = false;  // the listener throws
  std::atomic<int> left = 0;          // packages of versions that have left
  std::promise<void> started;
  std::unique_ptr<RepositoryManager> manager;
};

TEST_F(ManagerTest, ServesTheNewestAndGivesBackTheOldOne) {
  put(1, "good");
  start();
  started.get_future().wait();
  EXPECT_EQ(answering(), "1");
  EXPECT_TRUE(serving);
  put(2, "good");
  until([&] { return answering() == "2"; });
  until([&] { return entry("1").state == VersionState::kUnavailable; });
  until([&] { return left == 1; });
  EXPECT_EQ(registry.loaded().size(), 1u);
  EXPECT_EQ(list.all().size(), 2u);  // the first one is in its folder still
  fs::remove_all(folder / "m" / "1");
  until([&] { return list.all().size() == 1; });
  EXPECT_EQ(manager->load_counts().at(0).ok, 2u);
}

TEST_F(ManagerTest, AVersionThatAnswersACallWaitsForIt) {
  put(1, "good");
  start();
  started.get_future().wait();
  auto held = find();
  put(2, "good");
  until([&] { return answering() == "2"; });
  until([&] { return entry("1").state == VersionState::kUnloading; });
  EXPECT_EQ(held->version(), "1");
  held.reset();
  until([&] { return entry("1").state == VersionState::kUnavailable; });
}

TEST_F(ManagerTest, AFailureChangesNothingAndIsToldAndTriedAgain) {
  put(1, "good");
  start();
  started.get_future().wait();
  put(2, "damaged");
  until([&] { return entry("2").reason.ends_with("model.pt: is damaged"); });
  EXPECT_EQ(entry("2").state, VersionState::kUnavailable);
  EXPECT_EQ(answering(), "1");
  EXPECT_GE(manager->load_counts().at(0).failed, 1u);
  put(2, "good");
  until([&] { return entry("2").state == VersionState::kReady; });
  EXPECT_EQ(entry("2").reason, "");
}

TEST_F(ManagerTest, AModelWhoseFolderIsGoneIsUnloaded) {
  put(1, "good");
  start();
  started.get_future().wait();
  fs::remove_all(folder / "m");
  until([&] { return gone.load(); });
  EXPECT_TRUE(manager->index().empty());
  EXPECT_TRUE(list.all().empty());
  EXPECT_TRUE(registry.names().empty());
}

TEST_F(ManagerTest, RefusesBeforeReadingWhatDoesNotFit) {
  config.max_model_bytes = 7;
  put(1, "good");
  start();
  started.get_future().wait();
  put(2, "good");
  until([&] { return !entry("2").reason.empty(); });
  EXPECT_NE(
      entry("2").reason.find("has 4 bytes, loaded versions have 4; together that is more than "
                             "--max-model-bytes 7"),
      std::string::npos)
      << entry("2").reason;
  EXPECT_EQ(answering(), "1");
}

TEST_F(ManagerTest, CallsLoadLabelRollBackAndUnload) {
  config.control = ModelControl::kExplicit;
  put(1, "good");
  start();
  started.get_future().wait();
  put(2, "good");
  put(3, "damaged");
  EXPECT_EQ(load({.version = 2}).message, "");
  EXPECT_EQ(load({.version = 1, .label = "canary"}).message, "");
  EXPECT_EQ(find("canary")->version(), "1");
  EXPECT_EQ(answering(), "2");
  const Status failed = load({.version = 3});
  EXPECT_EQ(failed.code, Code::kFailedPrecondition);
  EXPECT_TRUE(failed.message.ends_with("model.pt: is damaged")) << failed.message;
  EXPECT_FALSE(read_control_record(folder / "m").add.contains(3));
  fs::remove_all(folder / "m" / "3");
  EXPECT_EQ(unload(1).code, Code::kFailedPrecondition);  // the label names it
  EXPECT_EQ(load({.rollback = Rollback{.version = 1}}).message, "");
  EXPECT_EQ(answering(), "1");
  EXPECT_EQ(unload({}, "x").code, Code::kNotFound);
  EXPECT_EQ(unload().message, "");
  EXPECT_EQ(find(), nullptr);
  EXPECT_FALSE(serving);
  EXPECT_EQ(load({}).message, "");
  EXPECT_TRUE(serving);

  // Another server finds the same state.
  const std::string before = answering();
  manager.reset();
  started = {};
  start();
  started.get_future().wait();
  EXPECT_EQ(answering(), before);
}

TEST_F(ManagerTest, ChangesNothingWhereTheRecordCannotBeWritten) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
  config.control = ModelControl::kExplicit;
  put(1, "good");
  put(2, "good");
  write("serving.yaml", "versions: [1]\n");
  start();
  started.get_future().wait();
  fs::permissions(folder / "m", fs::perms::owner_read | fs::perms::owner_exec);
  EXPECT_EQ(load({.version = 2}).code, Code::kFailedPrecondition);
  fs::permissions(folder / "m", fs::perms::owner_all);
  EXPECT_EQ(answering(), "1");
  EXPECT_EQ(find("2"), nullptr);
}

TEST_F(ManagerTest, CallsAreRefusedUnlessTheyAreAllowed) {
  put(1, "good");
  start();
  started.get_future().wait();
  EXPECT_EQ(load({}).code, Code::kFailedPrecondition);
}

TEST_F(ManagerTest, AVersionIsCalledBeforeItAnswers) {
  std::vector<std::string> calls;
  put(1, "good");
  start([&](const std::string& model, ServedModel& version) {
    calls.push_back(text(model, " ", version.version(), " beside '", answering(), "'"));
  });
  started.get_future().wait();
  put(2, "good");
  until([&] { return answering() == "2"; });
  EXPECT_EQ(calls, (std::vector<std::string>{"m 1 beside ''", "m 2 beside '1'"}));
}

TEST_F(ManagerTest, WhatGoesWrongOnItsThreadEndsNothing) {
  config.control = ModelControl::kExplicit;
  put(1, "good");
  start();
  started.get_future().wait();
  trouble = true;
  const Status refused = unload();
  EXPECT_EQ(refused.code, Code::kInternal);
  EXPECT_TRUE(refused.message.starts_with("internal error, id ")) << refused.message;
  trouble = false;
  EXPECT_TRUE(load({}).ok());
  until([&] { return answering() == "1"; });
}

TEST_F(ManagerTest, CallsWaitInABoundedNumber) {
  config.control = ModelControl::kExplicit;
  put(1, "good");
  start();
  started.get_future().wait();
  put(2, "endless");
  std::atomic<std::size_t> drained = 0;
  const auto count = [&](const Status& status) { drained += status.code == Code::kUnavailable; };
  manager->load("m", {.version = 2}, count);
  until([&] { return entry("2").state == VersionState::kLoading; });
  for (std::size_t i = 0; i < kMaxWaitingCalls; ++i) manager->unload("m", 1, count);
  const Status refused = unload();
  EXPECT_EQ(refused.code, Code::kResourceExhausted);
  EXPECT_EQ(refused.message,
            "64 calls about repositories wait already; try again when one has been answered");
  manager->stop();
  EXPECT_EQ(drained, kMaxWaitingCalls + 1);
  EXPECT_EQ(answering(), "1");
}

TEST_F(ManagerTest, StopsInTheMiddleOfALoad) {
  config.control = ModelControl::kExplicit;
  put(1, "good");
  start();
  started.get_future().wait();
  put(2, "endless");
  std::promise<Status> outcome;
  manager->load("m", {.version = 2}, [&](const Status& status) { outcome.set_value(status); });
  until([&] { return entry("2").state == VersionState::kLoading && entry("2").progress == 0.6; });
  manager->stop();
  EXPECT_EQ(outcome.get_future().get().code, Code::kUnavailable);
  EXPECT_EQ(load({}).code, Code::kUnavailable);
  EXPECT_EQ(answering(), "1");
}

TEST_F(ManagerTest, NoCallFailsWhileVersionsAreSwapped) {
  put(1, "good");
  start();
  started.get_future().wait();
  std::atomic<bool> stop = false;
  std::atomic<int> missing = 0;
  std::atomic<int> answered = 0;
  std::vector<std::jthread> clients;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back([&, i] {
      test::Random random(static_cast<std::uint32_t>(i));
      const test::RequestData data = test::random_request(random, 1, 4);
      while (!stop) {
        const auto model = find();
        if (model == nullptr) {
          ++missing;
          continue;
        }
        test::Scored request;
        request.arrive(*model, data);
        if (request.score.get_future().get() != data.dense[0]) ++missing;
        ++answered;
      }
    });
  }
  for (int version = 2; version <= 40; ++version) {
    put(version, "good");
    until([&] { return answering() == std::to_string(version); });
    fs::remove_all(folder / "m" / std::to_string(version - 1));
  }
  stop = true;
  clients.clear();
  EXPECT_EQ(missing, 0);
  EXPECT_GT(answered, 0);
}

}  // namespace
}  // namespace tessera

// The registry's snapshot while requests look at it and versions come and go.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "common/published.h"
#include "echo_model.h"
#include "metrics/model_list.h"
#include "model/registry.h"

namespace tessera {
namespace {

std::shared_ptr<ServedModel> echo_model(ModelList& list, const std::string& version) {
  static const SteadyClock clock;
  static const Log log(LogLevel::kError, true);
  ServerConfig config;
  config.workers = 1;
  return std::make_shared<ServedModel>(test::echo_package(), config, list.add("m", version), clock,
                                       log);
}

TEST(PublishedTest, ReadersSeeWholeValuesThatGrow) {
  Published<std::vector<int>> published(std::make_unique<std::vector<int>>(8, 0));
  std::atomic<bool> stop = false;
  std::atomic<int> torn = 0;
  std::vector<std::jthread> readers;
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&] {
      int last = 0;
      while (!stop) {
        const int seen = published.read([&](const std::vector<int>& value) {
          for (const int number : value) torn += number != value.front() ? 1 : 0;
          return value.front();
        });
        torn += seen < last ? 1 : 0;
        last = seen;
      }
    });
  }
  for (int i = 1; i <= 300; ++i) published.replace(std::make_unique<std::vector<int>>(8, i));
  stop = true;
  readers.clear();
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(published.read([](const std::vector<int>& value) { return value.front(); }), 300);
}

TEST(PublishedTest, NobodySeesAFormerValueOnceItIsReplaced) {
  Published<int> published(std::make_unique<int>(1));
  std::atomic<bool> inside = false;
  std::atomic<bool> leave = false;
  std::atomic<bool> replaced = false;
  std::jthread reader([&] {
    published.read([&](const int&) {
      inside = true;
      while (!leave) std::this_thread::yield();
      EXPECT_FALSE(replaced);
      return 0;
    });
  });
  while (!inside) std::this_thread::yield();
  std::jthread writer([&] {
    published.replace(std::make_unique<int>(2));
    replaced = true;
  });
  while (published.read([](const int& value) { return value; }) == 1) std::this_thread::yield();
  EXPECT_FALSE(replaced);
  leave = true;
  writer.join();
  EXPECT_TRUE(replaced);
}

TEST(RegistryTest, SaysWhatIsThere) {
  ModelList list;
  Registry registry({"m", "n"});
  Status status;
  EXPECT_EQ(registry.find("m", "", status), nullptr);
  EXPECT_EQ(status.code, Code::kUnavailable);
  EXPECT_EQ(status.message, "model 'm' is still loading");
  registry.publish("m", echo_model(list, "1"));
  ASSERT_NE(registry.find("", "", status), nullptr);
  EXPECT_EQ(registry.find("", "", status)->version(), "1");
  EXPECT_EQ(registry.find("m", "2", status), nullptr);
  EXPECT_EQ(status.message, "model_version '2' of model 'm' is not loaded; version '1' is");
  EXPECT_EQ(registry.find("x", "", status), nullptr);
  EXPECT_EQ(status.code, Code::kNotFound);
  EXPECT_EQ(status.message, "model_name 'x' is unknown; this server has 'm', 'n'");
  EXPECT_FALSE(registry.ready());
  EXPECT_EQ(registry.loaded().size(), 1u);
}

// Whoever found a version keeps it while others are put in its place; whoever published it can tell
// when nobody has it any more.
TEST(RegistryTest, VersionsComeAndGoWhileRequestsAreAnswered) {
  ModelList list;
  Registry registry({"m"});
  registry.publish("m", echo_model(list, "0"));
  std::atomic<bool> stop = false;
  std::atomic<int> answered = 0;
  std::vector<std::jthread> clients;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back([&, i] {
      test::Random random(static_cast<std::uint32_t>(i));
      const test::RequestData data = test::random_request(random, 1, 4);
      while (!stop) {
        Status status;
        const auto model = registry.find("m", "", status);
        ASSERT_NE(model, nullptr);
        test::Scored request;
        request.arrive(*model, data);
        EXPECT_EQ(request.score.get_future().get(), data.dense[0]);
        ++answered;
      }
    });
  }
  for (int version = 1; version <= 60; ++version) {
    auto next = echo_model(list, std::to_string(version));
    Status status;
    std::shared_ptr<ServedModel> former = registry.find("m", "", status);
    registry.publish("m", std::move(next));
    while (former.use_count() > 1) std::this_thread::yield();
    list.remove(former->metrics());
    former.reset();
  }
  stop = true;
  clients.clear();
  EXPECT_GT(answered, 0);
  EXPECT_EQ(list.all().size(), 1u);
  EXPECT_EQ(list.all().front()->version, "60");
}

}  // namespace
}  // namespace tessera

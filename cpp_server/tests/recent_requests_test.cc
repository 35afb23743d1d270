// The requests that are kept for the warm-up of versions that come.
#include "front/recent_requests.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "echo_message.h"
#include "echo_model.h"
#include "infer_message.h"
#include "shared_object.h"

namespace tessera {
namespace {

std::vector<std::byte> bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

struct RecentRequestsTest : testing::Test {
  void keep(const std::string& model, const std::vector<std::byte>& message) {
    recent.add(model, message, *protocol);
  }
  std::shared_ptr<ServedModel> served() {
    return std::make_shared<ServedModel>(test::echo_package(), config,
                                         std::make_shared<ModelMetrics>("m", "1"), clock, log);
  }

  const std::unique_ptr<WireProtocol> protocol = make_predict_protocol();
  ServerConfig config;
  SteadyClock clock;
  Log log{LogLevel::kError, true};
  RecentRequests recent;
};

TEST_F(RecentRequestsTest, TheLastOnesOfEachModelAreKept) {
  for (std::size_t i = 0; i < RecentRequests::kKept + 3; ++i) {
    keep("m", bytes_of(std::string(i, 'x')));
  }
  keep("other", bytes_of("y"));
  std::vector<std::size_t> sizes;
  for (const auto& one : recent.of("m")) sizes.push_back(one->message.size());
  std::sort(sizes.begin(), sizes.end());
  ASSERT_EQ(sizes.size(), RecentRequests::kKept);
  EXPECT_EQ(sizes.front(), 3U);
  EXPECT_EQ(recent.of("other").size(), 1U);
  recent.forget("m");
  EXPECT_TRUE(recent.of("m").empty());
  EXPECT_EQ(recent.of("other").size(), 1U);
}

TEST_F(RecentRequestsTest, WhatIsTooLargeIsNotKept) {
  const std::vector<std::byte> large(RecentRequests::kMostBytes);
  keep("m", std::vector<std::byte>(RecentRequests::kMostBytes + 1));
  EXPECT_TRUE(recent.of("m").empty());
  const std::size_t most = RecentRequests::kAllBytes / RecentRequests::kMostBytes;
  std::size_t held = 0;
  const std::size_t models = 2 * most / RecentRequests::kKept;
  for (std::size_t model = 0; model < models; ++model) {
    for (std::size_t i = 0; i < RecentRequests::kKept; ++i) keep(std::to_string(model), large);
    held += recent.of(std::to_string(model)).size();
  }
  EXPECT_EQ(held, most);
  recent.forget("0");
  keep("m", large);  // there is room again
  EXPECT_EQ(recent.of("m").size(), 1U);
}

TEST_F(RecentRequestsTest, OneInSixtyFourIsDueOnEachThread) {
  int due = 0;
  std::thread([&] {
    for (std::uint32_t i = 0; i < 3 * RecentRequests::kOneIn; ++i) due += RecentRequests::due();
  }).join();
  EXPECT_EQ(due, 3);
}

TEST_F(RecentRequestsTest, AVersionIsCalledWithThem) {
  const auto model = served();
  keep("m", bytes_of(test::message_of(0, 3).SerializeAsString()));
  keep("m", bytes_of("no message at all"));
  const WarmUpCounts counts = warm_up_with(recent.of("m"), *model, clock);
  EXPECT_EQ(counts.answered, 1);
  EXPECT_EQ(counts.unfit, 1);
  EXPECT_EQ(counts.failed, 0);
  // A version that has stopped refuses them.
  model->drain();
  model->close();
  const WarmUpCounts stopped = warm_up_with(recent.of("m"), *model, clock);
  EXPECT_EQ(stopped.answered, 0);
  EXPECT_EQ(stopped.failed, 1);
}

// What was in shared memory is kept with the message, whatever becomes of the region.
TEST_F(RecentRequestsTest, AMessageIsKeptWithItsSharedMemory) {
  struct Pending final : PendingRequest {
    void answer(std::span<const OutputView>, const StageTimings&) override {}
    void fail(const Refusal&) override {}
  };
  test::Random random(7);
  auto request = test::request_of(test::random_request(random, 3, 4), false);
  test::SharedObject object(test::place(request, /*keep=*/1));
  SharedMemory memory{{}};
  ASSERT_TRUE(memory.add({"region", object.key(), 0, object.content().size()}).ok());
  const std::string message = request.SerializeAsString();
  const auto infer = make_infer_protocol(&memory);
  const auto model = served();
  Pending first;
  ASSERT_TRUE(infer->parse(test::as_bytes(message)));
  ASSERT_TRUE(infer->decode(*model, clock.now(), first).ok());
  recent.add("m", test::as_bytes(message), *infer);
  object.resize(0);
  memory.remove_all();
  const auto kept = recent.of("m");
  ASSERT_EQ(kept.size(), 1U);
  Pending second;
  ASSERT_TRUE(kept[0]->protocol->parse(kept[0]->message));
  const Status status = kept[0]->protocol->decode(*model, clock.now(), second);
  ASSERT_TRUE(status.ok()) << status.message;
  const auto same = [](Bytes left, Bytes right) {
    return std::equal(left.begin(), left.end(), right.begin(), right.end());
  };
  EXPECT_EQ(second.request.samples, 3);
  EXPECT_TRUE(same(second.request.dense, first.request.dense));
  EXPECT_TRUE(same(second.request.id_list.lengths, first.request.id_list.lengths));
  EXPECT_TRUE(same(second.request.id_list.values, first.request.id_list.values));
  EXPECT_TRUE(same(second.request.id_score_list.weights, first.request.id_score_list.weights));
  EXPECT_EQ(warm_up_with(kept, *model, clock).answered, 1);
  model->drain();
  model->close();
}

}  // namespace
}  // namespace tessera

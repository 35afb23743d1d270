// The wire reader and writer against protobuf's own, which is the reference.
#include "request/wire.h"

#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "predictor.pb.h"
#include "request/utf8.h"
#include "support.h"

namespace tessera {
namespace {

using test::as_bytes;
using test::Random;

std::string text_of(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string random_text(Random& random, std::size_t most) {
  std::string made(random() % (most + 1), ' ');
  for (char& c : made) c = static_cast<char>('a' + random() % 26);
  return made;
}

void fill(Random& random, predictor::SparseFeatures& sparse) {
  if (random() % 2) sparse.set_num_features(static_cast<std::int32_t>(random()));
  if (random() % 2) sparse.set_lengths(random_text(random, 300));
  if (random() % 2) sparse.set_values(random_text(random, 40));
  if (random() % 2) sparse.set_weights(random_text(random, 40));
  if (random() % 2) sparse.set_values_int64(random_text(random, 40));
}

predictor::PredictionRequest random_message(Random& random) {
  predictor::PredictionRequest message;
  if (random() % 2) message.set_batch_size(static_cast<std::int32_t>(random()));
  if (random() % 2) message.mutable_float_features()->set_num_features(-3);
  if (random() % 2) message.mutable_float_features()->set_values(random_text(random, 200));
  if (random() % 2) fill(random, *message.mutable_id_list_features());
  if (random() % 2) fill(random, *message.mutable_id_score_list_features());
  if (random() % 4 == 0) message.mutable_embedding_features()->set_num_features(1);
  if (random() % 4 == 0) fill(random, *message.mutable_unary_features());
  if (random() % 2) message.set_model_name(random_text(random, 12));
  if (random() % 2) message.set_model_version(random_text(random, 12));
  if (random() % 2) message.set_traffic_key(random_text(random, 12));
  if (random() % 2) message.set_priority(static_cast<std::int32_t>(random()));
  if (random() % 2) {
    auto& shared = *message.mutable_shared_features();
    for (unsigned i = random() % 4; i > 0; --i) shared.add_names(random_text(random, 8));
    if (random() % 2) shared.set_num_rows(7);
    if (random() % 2) fill(random, *shared.mutable_features());
    if (random() % 2) shared.set_row_index(random_text(random, 16));
  }
  return message;
}

void expect_same(const SparseFeaturesView& view, const predictor::SparseFeatures& message) {
  EXPECT_EQ(view.num_features, message.num_features());
  EXPECT_EQ(text_of(view.lengths), message.lengths());
  EXPECT_EQ(text_of(view.values), message.values());
  EXPECT_EQ(text_of(view.weights), message.weights());
  EXPECT_EQ(text_of(view.values_int64), message.values_int64());
}

void expect_same(const PredictionRequestView& view, const predictor::PredictionRequest& message) {
  EXPECT_EQ(view.batch_size, message.batch_size());
  EXPECT_EQ(view.float_features.num_features, message.float_features().num_features());
  EXPECT_EQ(text_of(view.float_features.values), message.float_features().values());
  expect_same(view.id_list_features, message.id_list_features());
  expect_same(view.id_score_list_features, message.id_score_list_features());
  EXPECT_EQ(view.embedding_features.present, message.has_embedding_features());
  EXPECT_EQ(view.embedding_features.num_features, message.embedding_features().num_features());
  expect_same(view.unary_features, message.unary_features());
  EXPECT_EQ(view.model_name, message.model_name());
  EXPECT_EQ(view.model_version, message.model_version());
  EXPECT_EQ(view.priority, message.priority());
  EXPECT_EQ(view.traffic_key, message.traffic_key());
  const auto& shared = message.shared_features();
  EXPECT_EQ(view.shared_features.present, message.has_shared_features());
  ASSERT_EQ(view.shared_features.names.size(), static_cast<std::size_t>(shared.names_size()));
  for (int i = 0; i < shared.names_size(); ++i) {
    EXPECT_EQ(view.shared_features.names[static_cast<std::size_t>(i)], shared.names(i));
  }
  EXPECT_EQ(view.shared_features.num_rows, shared.num_rows());
  expect_same(view.shared_features.features, shared.features());
  EXPECT_EQ(text_of(view.shared_features.row_index), shared.row_index());
}

TEST(WireReader, ReadsWhatProtobufWrites) {
  Random random(1);
  for (int i = 0; i < 2'000; ++i) {
    const predictor::PredictionRequest message = random_message(random);
    const std::string bytes = message.SerializeAsString();
    PredictionRequestView view;
    ASSERT_TRUE(parse_request(as_bytes(bytes), view));
    expect_same(view, message);
  }
}

// Two messages behind each other are one message in which embedded ones are merged.
TEST(WireReader, MergesLikeProtobuf) {
  Random random(2);
  for (int i = 0; i < 2'000; ++i) {
    const std::string bytes =
        random_message(random).SerializeAsString() + random_message(random).SerializeAsString();
    predictor::PredictionRequest message;
    ASSERT_TRUE(message.ParseFromString(bytes));
    PredictionRequestView view;
    ASSERT_TRUE(parse_request(as_bytes(bytes), view));
    expect_same(view, message);
  }
}

// Whether some five bytes are a varint of more than 32 bits, as a tag may not be.
bool has_long_tag(const std::string& bytes) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
  for (std::size_t i = 4; i < bytes.size(); ++i) {
    const bool goes_on = byte(i - 4) & byte(i - 3) & byte(i - 2) & byte(i - 1) & 0x80;
    if (goes_on && byte(i) > 0x0f && byte(i) < 0x80) return true;
  }
  return false;
}

TEST(WireReader, AcceptsAndRefusesWhatProtobufDoes) {
  Random random(3);
  const google::protobuf::LogSilencer quiet;  // it prints what it refuses
  int accepted = 0;
  int refused = 0;
  for (int i = 0; i < 200'000; ++i) {
    std::string bytes = random_message(random).SerializeAsString();
    if (bytes.empty()) continue;
    for (unsigned n = 1 + random() % 3; n > 0; --n) {
      switch (random() % 3) {
        case 0: bytes[random() % bytes.size()] = static_cast<char>(random()); break;
        case 1: bytes.resize(1 + random() % bytes.size()); break;
        default: bytes.insert(random() % bytes.size(), 1, static_cast<char>(random()));
      }
    }
    predictor::PredictionRequest message;
    const bool expected = message.ParseFromString(bytes);
    PredictionRequestView view;
    const bool accepts = parse_request(as_bytes(bytes), view);
    if (expected && !accepts && has_long_tag(bytes)) continue;
    ASSERT_EQ(accepts, expected) << "round " << i;
    if (expected) {
      ++accepted;
      expect_same(view, message);
    } else {
      ++refused;
    }
    if (HasFatalFailure()) return;
  }
  // Both kinds were seen in numbers, or the comparison above says little.
  EXPECT_GT(accepted, 10'000);
  EXPECT_GT(refused, 10'000);
}

TEST(WireReader, RefusesTagsOfMoreThan32Bits) {
  const std::string bytes = "\xd8\xf7\xed\xe0\x42\x01";
  PredictionRequestView view;
  EXPECT_FALSE(parse_request(as_bytes(bytes), view));
  predictor::PredictionRequest message;
  EXPECT_TRUE(message.ParseFromString(bytes));
  EXPECT_TRUE(has_long_tag(bytes));
  const std::string good = "\xd8\xf7\xed\xe0\x02\x01";
  EXPECT_TRUE(parse_request(as_bytes(good), view));
  EXPECT_FALSE(has_long_tag(good));
}

// Groups of an unknown field, `count` deep.
std::string groups(std::size_t count) {
  return std::string(count, '\x43') + std::string(count, '\x44');
}

// A field that is a message of fewer than 2^14 bytes.
std::string embedded(const std::string& tag, const std::string& content) {
  const auto size = content.size();
  return tag + static_cast<char>(0x80 | (size & 0x7f)) + static_cast<char>(size >> 7) + content;
}

TEST(WireReader, CountsMessagesAndGroupsAsNesting) {
  const google::protobuf::LogSilencer quiet;
  for (std::size_t count = 95; count < 105; ++count) {
    const std::string in_features = embedded("\x1a", groups(count));
    const std::string in_shared = embedded("\xba\x06", in_features);
    for (const std::string& bytes : {groups(count), in_features, in_shared}) {
      predictor::PredictionRequest message;
      PredictionRequestView view;
      EXPECT_EQ(parse_request(as_bytes(bytes), view), message.ParseFromString(bytes)) << count;
    }
    // A group that has ended is none any more.
    PredictionRequestView view;
    EXPECT_EQ(parse_request(as_bytes(groups(count) + groups(count)), view), count <= 100);
  }
}

TEST(WireReader, SkipsUnknownFieldsAndGroups) {
  // Field 1000 as a group that holds field 7 = 5 and an inner group, then batch_size = 3.
  const std::string bytes = "\xc3\x3e\x38\x05\x43\x44\xc4\x3e\x08\x03";
  PredictionRequestView view;
  ASSERT_TRUE(parse_request(as_bytes(bytes), view));
  EXPECT_EQ(view.batch_size, 3);
  // Its end has another number than its beginning.
  const std::string wrong = "\xc3\x3e\xcc\x3e";
  EXPECT_FALSE(parse_request(as_bytes(wrong), view));
}

TEST(WireReader, RefusesGroupsWithoutEnd) {
  const std::string bytes(100'000, '\x43');  // field 8 begins, again and again
  PredictionRequestView view;
  EXPECT_FALSE(parse_request(as_bytes(bytes), view));
}

TEST(WireReader, RefusesNamesThatAreNoText) {
  const std::string bytes = "\xa2\x06\x02\xc3\x28";  // model_name
  PredictionRequestView view;
  EXPECT_FALSE(parse_request(as_bytes(bytes), view));
}

TEST(Utf8, KnowsItsBorders) {
  EXPECT_TRUE(is_utf8(""));
  EXPECT_TRUE(is_utf8("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82"));
  EXPECT_TRUE(is_utf8("\xf4\x8f\xbf\xbf"));
  EXPECT_FALSE(is_utf8("\xf4\x90\x80\x80"));  // above U+10FFFF
  EXPECT_FALSE(is_utf8("\xed\xa0\x80"));      // a surrogate
  EXPECT_FALSE(is_utf8("\xc0\xaf"));          // overlong
  EXPECT_FALSE(is_utf8("\xe2\x82"));          // cut short
  EXPECT_FALSE(is_utf8("\x80"));
}

TEST(WireWriter, WritesWhatProtobufReads) {
  Random random(4);
  for (int round = 0; round < 500; ++round) {
    const std::vector<float> first(random() % 300, 0.25F);
    const std::vector<float> second(random() % 3, -1.5F);
    const std::vector<OutputView> outputs = {{"default", first.data(), first.size()},
                                             {"other", second.data(), second.size()}};
    const ResponseParts parts{
        .outputs = outputs,
        .model_name = round % 2 ? "model" : "",
        .model_version = "7",
        .timings = {.decode_us = static_cast<std::int64_t>(random()),
                    .queue_us = 1,
                    .forward_us = 128,
                    .split_us = 0,
                    .batch_requests = 3,
                    .batch_samples = static_cast<std::int32_t>(random() % 1000)},
        .commit = round % 3 == 0 ? std::nullopt : std::optional<std::int64_t>(round * 100)};
    std::string bytes(response_bytes(parts), '\0');
    write_response(parts, reinterpret_cast<std::byte*>(bytes.data()));
    predictor::PredictionResponse message;
    ASSERT_TRUE(message.ParseFromString(bytes));
    ASSERT_EQ(message.predictions_size(), 2);
    const auto& data = message.predictions().at("default").data();
    EXPECT_EQ(std::vector<float>(data.begin(), data.end()), first);
    EXPECT_EQ(message.predictions().at("other").data_size(), static_cast<int>(second.size()));
    EXPECT_EQ(message.model_name(), parts.model_name);
    EXPECT_EQ(message.model_version(), "7");
    EXPECT_EQ(message.model_commit(), parts.commit.value_or(0));
    EXPECT_EQ(message.timings().decode_us(), parts.timings.decode_us);
    EXPECT_EQ(message.timings().forward_us(), 128);
    EXPECT_EQ(message.timings().batch_samples(), parts.timings.batch_samples);
  }
}

}  // namespace
}  // namespace tessera

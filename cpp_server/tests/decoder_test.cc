#include "request/decoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "request/checks.h"
#include "request/packed.h"
#include "request/request_bytes.h"
#include "support.h"

namespace tessera {
namespace {

using test::bytes_of;
using test::RequestData;

RequestData good() {
  return {.samples = 2,
          .dense = {1, 2, 3, 4},
          .lengths = {1, 0, 2, 1, 0, 0},
          .values = {5, 6, 7, 8},
          .narrow = {},
          .scored_lengths = {0, 1},
          .scored_values = {9},
          .weights = {0.5F}};
}

std::string refusal(const PredictionRequestView& view, const InputSchema& schema = test::schema(),
                    RequestLimits limits = {}) {
  DecodedRequest request;
  const Status status = RequestDecoder(schema, limits).decode(view, request);
  EXPECT_TRUE(status.ok() || status.code == Code::kInvalidArgument);
  return status.message;
}

TEST(Decoder, TakesAGoodRequest) {
  const RequestData data = good();
  DecodedRequest request;
  ASSERT_TRUE(RequestDecoder(test::schema(), {}).decode(data.view(), request).ok());
  EXPECT_EQ(request.samples, 2);
  EXPECT_EQ(request.ids, 5);
  EXPECT_EQ(request.id_list.ids, (std::vector<std::int64_t>{1, 3, 0}));
  EXPECT_EQ(request.id_score_list.ids, (std::vector<std::int64_t>{1}));
}

struct Case {
  const char* name;
  void (*change)(RequestData&, PredictionRequestView&);
  const char* message;
};

class Refuses : public testing::TestWithParam<Case> {};

TEST_P(Refuses, NamingFieldAndNumbers) {
  RequestData data = good();
  PredictionRequestView view = data.view();
  GetParam().change(data, view);
  EXPECT_EQ(refusal(view), GetParam().message);
}

const std::vector<std::int32_t> kNegative = {1, 0, 2, -1, 0, 0};
const std::vector<std::int32_t> kTwo = {1, 2};
const std::vector<float> kInfinite = {1, 2, std::numeric_limits<float>::infinity(), 4};
const std::vector<float> kNan = {std::numeric_limits<float>::quiet_NaN()};

const Case kCases[] = {
    {"no_samples", [](RequestData&, PredictionRequestView& v) { v.batch_size = 0; },
     "batch_size is 0, expected at least 1"},
    {"negative_samples", [](RequestData&, PredictionRequestView& v) { v.batch_size = -5; },
     "batch_size is -5, expected at least 1"},
    {"too_many_samples", [](RequestData&, PredictionRequestView& v) { v.batch_size = 1 << 20; },
     "batch_size is 1048576, the limit is 16384 samples"},
    {"dense_features",
     [](RequestData&, PredictionRequestView& v) { v.float_features.num_features = 3; },
     "float_features.num_features is 3, the model has 2"},
    {"dense_size",
     [](RequestData&, PredictionRequestView& v) {
       v.float_features.values = v.float_features.values.first(15);
     },
     "float_features.values has 15 bytes, expected 16 (batch_size * num_features = 4 float32 "
     "numbers)"},
    {"dense_infinite",
     [](RequestData&, PredictionRequestView& v) { v.float_features.values = bytes_of(kInfinite); },
     "float_features.values: feature 'age', row 1 is inf, expected only NaN (missing) or a "
     "finite number"},
    {"sparse_features",
     [](RequestData&, PredictionRequestView& v) { v.id_list_features.num_features = 4; },
     "id_list_features.num_features is 4, expected 3"},
    {"lengths_size",
     [](RequestData&, PredictionRequestView& v) { v.id_list_features.lengths = bytes_of(kTwo); },
     "id_list_features.lengths has 8 bytes, expected 24 (num_features * batch_size = 6 int32 "
     "numbers)"},
    {"negative_length",
     [](RequestData&, PredictionRequestView& v) {
       v.id_list_features.lengths = bytes_of(kNegative);
     },
     "id_list_features.lengths[3] is -1, expected >= 0"},
    {"values_size",
     [](RequestData&, PredictionRequestView& v) {
       v.id_list_features.values_int64 = v.id_list_features.values_int64.first(24);
     },
     "id_list_features.values_int64 has 24 bytes, expected 32 (sum(lengths) = 4 int64 numbers)"},
    {"between_both_widths",
     [](RequestData&, PredictionRequestView& v) {
       v.id_list_features.values = v.id_list_features.values_int64.first(31);
       v.id_list_features.values_int64 = {};
     },
     "id_list_features.values has 31 bytes, expected 16 (sum(lengths) = 4 int32 numbers)"},
    {"both_widths",
     [](RequestData&, PredictionRequestView& v) { v.id_list_features.values = bytes_of(kTwo); },
     "id_list_features has 8 bytes of values and 32 bytes of values_int64, expected only one of "
     "the two"},
    {"weights_where_none_belong",
     [](RequestData&, PredictionRequestView& v) { v.id_list_features.weights = bytes_of(kNan); },
     "id_list_features.weights has 4 bytes, expected 0: these features have no weights"},
    {"weights_missing",
     [](RequestData&, PredictionRequestView& v) { v.id_score_list_features.weights = {}; },
     "id_score_list_features.weights has 0 bytes, expected 4 (sum(lengths) = 1 float32 numbers)"},
    {"weights_nan",
     [](RequestData&, PredictionRequestView& v) {
       v.id_score_list_features.weights = bytes_of(kNan);
     },
     "id_score_list_features.weights[0] is nan, expected a finite number"},
    {"embedding_features",
     [](RequestData&, PredictionRequestView& v) {
       v.embedding_features = {true, 2, 1, {}};
     },
     "embedding_features has 2 bytes (num_features 1), expected an empty message: no model here "
     "uses it"},
};

INSTANTIATE_TEST_SUITE_P(Decoder, Refuses, testing::ValuesIn(kCases),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST(Decoder, CountsIdsAgainstTheLimit) {
  const RequestData data = good();
  EXPECT_EQ(refusal(data.view(), test::schema(), {.max_samples = 10, .max_ids = 4}),
            "the request has 5 ids, the limit is 4");
  EXPECT_EQ(refusal(data.view(), test::schema(), {.max_samples = 10, .max_ids = 5}), "");
}

TEST(Decoder, TakesNanOnlyAsMissing) {
  RequestData data = good();
  data.dense[1] = std::nanf("");
  EXPECT_EQ(refusal(data.view()), "");
  InputSchema strict = test::schema();
  strict.dense_may_be_missing = false;
  EXPECT_EQ(refusal(data.view(), strict),
            "float_features.values: feature 'price', row 0 is nan, expected a finite number");
}

InputSchema with_rule(OutOfRange rule) {
  InputSchema made = test::schema();
  made.features[1] = test::feature("item", Group::kIdList, Hashing::kNone, rule, 7);
  return made;
}

TEST(Decoder, RejectsIdsOutsideTheTable) {
  RequestData data = good();  // item: row 0 has {6, 7}, row 1 has {8}
  EXPECT_EQ(refusal(data.view(), with_rule(OutOfRange::kReject)),
            "id_list_features: feature 'item', row 0: id 7 is outside [0, 7)");
  data.values = {5, 6, 6, -1};
  EXPECT_EQ(refusal(data.view(), with_rule(OutOfRange::kReject)),
            "id_list_features: feature 'item', row 1: id -1 is outside [0, 7)");
  data.values = {500, 6, 0, 3};
  EXPECT_EQ(refusal(data.view(), with_rule(OutOfRange::kReject)), "");
}

TEST(Decoder, CountsIdsThatTheModelClamps) {
  RequestData data = good();
  data.values = {-5, 7, -1, 3};
  for (const OutOfRange rule : {OutOfRange::kClamp, OutOfRange::kHash}) {
    DecodedRequest request;
    ASSERT_TRUE(RequestDecoder(with_rule(rule), {}).decode(data.view(), request).ok());
    EXPECT_EQ(request.out_of_range_ids, 2);
  }
}

TEST(Decoder, RefusesBytesOfFeaturesThatTheModelLacks) {
  InputSchema schema = test::schema();
  std::erase_if(schema.features,
                [](const FeatureSpec& f) { return f.group == Group::kIdScoreList; });
  const RequestData data = good();
  PredictionRequestView view = data.view(3, 0);
  EXPECT_EQ(refusal(view, schema),
            "id_score_list_features.lengths has 8 bytes, expected 0: num_features is 0");
  view.id_score_list_features = {};
  EXPECT_EQ(refusal(view, schema), "");
}

// TorchRec's client puts its tensors' bytes into `values`, whatever their type is.
TEST(Decoder, TakesIdsOfEitherWidthInValues) {
  RequestData data = good();
  data.values = {5, std::int64_t{1} << 40, -7, 8};
  PredictionRequestView view = data.view();
  for (SparseFeaturesView* group : {&view.id_list_features, &view.id_score_list_features}) {
    group->values = std::exchange(group->values_int64, {});
  }
  DecodedRequest request;
  const Status status = RequestDecoder(test::schema(), {}).decode(view, request);
  ASSERT_TRUE(status.ok()) << status.message;
  EXPECT_TRUE(request.id_list.wide);
  EXPECT_TRUE(request.id_score_list.wide);
  EXPECT_EQ(id_at(request.id_list, 1), std::int64_t{1} << 40);
  EXPECT_EQ(id_at(request.id_score_list, 0), 9);
  // A group without ids has no bytes of either width.
  data.lengths.assign(data.lengths.size(), 0);
  view.id_list_features.lengths = bytes_of(data.lengths);
  view.id_list_features.values = {};
  EXPECT_TRUE(RequestDecoder(test::schema(), {}).decode(view, request).ok());
}

// ---- shared features ----

struct SharedData {
  RequestData own;  // the features that are not shared
  std::vector<std::int32_t> lengths;
  std::vector<std::int64_t> values;
  std::vector<std::int32_t> row_index;
  std::int32_t rows = 2;

  PredictionRequestView view(std::vector<std::string_view> names) const {
    PredictionRequestView made = own.view(3 - static_cast<std::int32_t>(names.size()));
    made.shared_features.present = true;
    made.shared_features.features.num_features = static_cast<std::int32_t>(names.size());
    made.shared_features.names = std::move(names);
    made.shared_features.num_rows = rows;
    made.shared_features.features.lengths = bytes_of(lengths);
    made.shared_features.features.values_int64 = bytes_of(values);
    made.shared_features.row_index = bytes_of(row_index);
    return made;
  }
};

// Two users: "genre" {1, 2} and {}, "user" {3} and {4, 5, 6}; three samples of users 1, 0, 1.
SharedData shared() {
  return {.own = {.samples = 3,
                  .dense = {0, 0, 0, 0, 0, 0},
                  .lengths = {1, 0, 2},
                  .values = {70, 80, 90},
                  .narrow = {},
                  .scored_lengths = {0, 0, 0},
                  .scored_values = {},
                  .weights = {}},
          .lengths = {2, 0, 1, 3},
          .values = {1, 2, 3, 4, 5, 6},
          .row_index = {1, 0, 1}};
}

std::vector<std::int64_t> numbers(Bytes bytes, std::size_t item_bytes) {
  std::vector<std::int64_t> out;
  for (std::size_t i = 0; i < bytes.size() / item_bytes; ++i) {
    out.push_back(item_bytes == 8 ? load<std::int64_t>(bytes.data(), i)
                                  : load<std::int32_t>(bytes.data(), i));
  }
  return out;
}

TEST(SharedFeatures, AreSpreadInTheSchemasOrder) {
  const SharedData data = shared();
  DecodedRequest request;
  const auto view = data.view({"genre", "user"});
  const Status status = RequestDecoder(test::schema(), {}).decode(view, request);
  ASSERT_TRUE(status.ok()) << status.message;
  // user of samples 0..2, item, genre
  EXPECT_EQ(numbers(request.id_list.lengths, 4),
            (std::vector<std::int64_t>{3, 1, 3, 1, 0, 2, 0, 2, 0}));
  EXPECT_EQ(numbers(request.id_list.values, 8),
            (std::vector<std::int64_t>{4, 5, 6, 3, 4, 5, 6, 70, 80, 90, 1, 2}));
  EXPECT_EQ(request.id_list.ids, (std::vector<std::int64_t>{7, 3, 2}));
  EXPECT_EQ(request.ids, 12);
}

TEST(SharedFeatures, CountAgainstTheLimitBeforeTheyAreSpread) {
  const SharedData data = shared();
  EXPECT_EQ(
      refusal(data.view({"genre", "user"}), test::schema(), {.max_samples = 9, .max_ids = 11}),
      "the request has 12 ids, the limit is 11");
}

TEST(SharedFeatures, HaveAtMostAsManyRowsAsARequestMayHaveSamples) {
  EXPECT_EQ(refusal(shared().view({"genre", "user"}), test::schema(), {.max_samples = 3}), "");
  SharedData many = shared();
  many.rows = 4;
  EXPECT_EQ(refusal(many.view({"genre", "user"}), test::schema(), {.max_samples = 3}),
            "shared_features.num_rows is 4, the limit is 3 rows");
}

// One id after the other, as any_outside does not look at them.
bool one_is_outside(const JaggedView& group, std::size_t first, std::size_t count,
                    std::int64_t rows) {
  for (std::size_t i = first; i < first + count; ++i) {
    if (id_at(group, i) < 0 || id_at(group, i) >= rows) return true;
  }
  return false;
}

template <typename Id>
void expect_as_one_by_one(const std::vector<std::int64_t>& all_rows) {
  constexpr std::size_t kIds = 43;  // some whole blocks of either width, and a rest
  using Limits = std::numeric_limits<Id>;
  std::vector<Id> ids(kIds + 3);
  JaggedView group;
  group.values = std::as_bytes(std::span(ids));
  group.wide = sizeof(Id) == 8;
  for (const std::int64_t rows : all_rows) {
    const auto last = static_cast<Id>(std::min<std::int64_t>(rows - 1, Limits::max()));
    const auto next = static_cast<Id>(last == Limits::max() ? last : last + 1);
    for (const Id other : {Limits::min(), Id{-1}, Id{0}, last, next, Limits::max()}) {
      for (std::size_t at = 0; at < ids.size(); ++at) {
        std::fill(ids.begin(), ids.end(), last);
        ids[at] = other;
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{16}, kIds}) {
          EXPECT_EQ(any_outside(group, 2, count, rows), one_is_outside(group, 2, count, rows))
              << "rows " << rows << ", id " << other << " at " << at << " of " << count;
        }
      }
    }
  }
}

TEST(AnyOutside, IsTrueWhereOneIdIs) {
  const std::int64_t most = std::numeric_limits<std::int32_t>::max();
  expect_as_one_by_one<std::int32_t>({1, 2, 1'000, most, most + 1, most + 2, 1LL << 40});
  expect_as_one_by_one<std::int64_t>(
      {1, 2, 1'000, most + 1, 1LL << 40, std::numeric_limits<std::int64_t>::max()});
}

TEST(RequestBytesTest, CountWhatSamplesAndSharedRowsMake) {
  const RequestBytes bytes(test::schema());  // four features of dim 4, one output of width 1
  EXPECT_EQ(bytes.samples_bytes(10), 10 * 4 * (4 * 4 + 1));
  const SharedData data = shared();
  EXPECT_EQ(bytes.shared_bytes(data.view({"genre", "user"}).shared_features), 2 * 2 * (8 + 16));
  EXPECT_EQ(bytes.shared_bytes(data.own.view().shared_features), 0);
}

TEST(SharedFeatures, AreRefusedWithFieldAndNumbers) {
  SharedData data = shared();
  EXPECT_EQ(refusal(data.view({"genre", "nobody"})),
            "shared_features.names has 'nobody', which is not an id_list feature of the model");
  EXPECT_EQ(refusal(data.view({"genre", "score"})),
            "shared_features.names has 'score', which is not an id_list feature of the model");
  EXPECT_EQ(refusal(data.view({"user", "user"})),
            "shared_features.names has 2 names of which 1 differ");
  EXPECT_EQ(refusal(data.view({})), "shared_features.names has 0 names, expected at least 1");
  PredictionRequestView view = data.view({"genre", "user"});
  view.shared_features.features.num_features = 1;
  EXPECT_EQ(refusal(view), "shared_features.features.num_features is 1, expected 2 (names)");
  data.rows = 0;
  EXPECT_EQ(refusal(data.view({"genre", "user"})),
            "shared_features.num_rows is 0, expected at least 1");
  data = shared();
  data.row_index = {0, 2, 1};
  EXPECT_EQ(refusal(data.view({"genre", "user"})),
            "shared_features.row_index[1] is 2, expected [0, 2)");
  data = shared();
  data.row_index = {0};
  EXPECT_EQ(refusal(data.view({"genre", "user"})),
            "shared_features.row_index has 4 bytes, expected 12 (batch_size = 3 int32 numbers)");
}

}  // namespace
}  // namespace tessera

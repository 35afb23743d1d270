// ModelInfer's tensors become what Predict's decoder takes, or a refusal that names them.
#include "request/infer_decoder.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "infer_message.h"
#include "inference.pb.h"
#include "shared_object.h"
#include "support.h"

namespace tessera {
namespace {

using test::as_bytes;
using test::Filler;
using test::packed;
using test::place;
using test::request_of;
using Contents = inference::InferTensorContents;
using Request = inference::ModelInferRequest;

bool same(Bytes left, Bytes right) {
  return std::equal(left.begin(), left.end(), right.begin(), right.end());
}

struct InferDecoderTest : testing::Test {
  // What became of `request`; its message is empty where it was taken.
  std::string refusal(const Request& request) {
    bytes = request.SerializeAsString();
    if (!parse_infer(as_bytes(bytes), view)) return "no ModelInferRequest";
    Status status = read_options(view, options);
    if (status.ok()) status = decoder.choose_outputs(view, regions, chosen);
    if (status.ok()) status = decoder.decode(view, regions, storage, tensors);
    if (status.ok()) status = checks.decode(tensors, decoded, kInferNames);
    EXPECT_TRUE(status.ok() || status.code == Code::kInvalidArgument);
    return status.message;
  }

  InputSchema schema = [] {
    InputSchema made = test::schema();
    made.outputs = {{"score", 1}, {"logits", 3}};
    return made;
  }();
  RequestLimits limits{.max_samples = 50, .max_ids = 2'000};
  InferDecoder decoder{schema, limits};
  RequestDecoder checks{schema, limits};
  std::string bytes;
  InferRequestView view;
  InferOptions options;
  InferRegions regions;  // there are none
  InferStorage storage;
  PredictionRequestView tensors;
  DecodedRequest decoded;
  std::vector<std::size_t> chosen;
};

TEST_F(InferDecoderTest, GivesWhatPredictGives) {
  test::Random random(1);
  for (int round = 0; round < 300; ++round) {
    const test::RequestData data =
        test::random_request(random, 1 + static_cast<std::int32_t>(random() % 20), 4);
    DecodedRequest expected;
    ASSERT_TRUE(checks.decode(data.view(), expected).ok());
    ASSERT_EQ(refusal(request_of(data, random() % 2)), "");
    EXPECT_EQ(decoded.samples, expected.samples);
    EXPECT_EQ(decoded.ids, expected.ids);
    EXPECT_TRUE(same(decoded.dense, expected.dense));
    for (const auto group : {&DecodedRequest::id_list, &DecodedRequest::id_score_list}) {
      EXPECT_EQ((decoded.*group).wide, (expected.*group).wide);
      EXPECT_EQ((decoded.*group).ids, (expected.*group).ids);
      EXPECT_TRUE(same((decoded.*group).lengths, (expected.*group).lengths));
      EXPECT_TRUE(same((decoded.*group).values, (expected.*group).values));
      EXPECT_TRUE(same((decoded.*group).weights, (expected.*group).weights));
    }
  }
}

test::RequestData two_samples() {
  test::RequestData data;
  data.samples = 2;
  data.dense = {1, 2, 3, 4};
  data.lengths = {1, 0, 0, 0, 0, 1};
  data.values = {5, 6};
  data.scored_lengths = {1, 0};
  data.scored_values = {7};
  data.weights = {0.5};
  return data;
}

TEST_F(InferDecoderTest, NamesTensorAndBothNumbers) {
  struct Case {
    std::function<void(Request&)> edit;
    const char* message;
    bool typed = false;
  };
  const Case cases[] = {
      {[](Request&) {}, ""},
      {[](Request& r) { r.mutable_inputs(0)->set_shape(1, 3); },
       "float_features has 16 bytes, expected 24 (its shape has 6 FP32 elements)"},
      {[](Request& r) {
         r.mutable_inputs(0)->set_shape(0, std::numeric_limits<std::int64_t>::max());
       },
       "float_features.shape[0] is 9223372036854775807, expected 0 to 2147483647"},
      {[](Request& r) {
         r.mutable_inputs(0)->set_shape(0, 2'147'483'647);
         r.mutable_inputs(0)->set_shape(1, 2'147'483'647);
       },
       "float_features has 16 bytes, expected 18446744056529682436 (its shape has "
       "4611686014132420609 FP32 elements)"},
      {[](Request& r) { r.mutable_inputs(0)->add_shape(1); },
       "float_features.shape has 3 dimensions, expected 2"},
      {[](Request& r) {
         r.mutable_inputs(0)->set_shape(0, 4);
         r.mutable_inputs(0)->set_shape(1, 1);
       },
       "float_features.shape[1] is 1, the model has 2 dense features"},
      {[](Request& r) { r.mutable_inputs(2)->set_datatype("FP32"); },
       "id_list_features_values has datatype 'FP32', expected INT64 or INT32 or BYTES"},
      {[](Request& r) { r.mutable_inputs(3)->set_name("float_features"); },
       "input 'float_features' is given twice"},
      {[](Request& r) {
         for (int i = 0; i < 100; ++i) {
           *r.add_inputs() = r.inputs(0);
           r.add_raw_input_contents();
         }
       },
       "input 'float_features' is given twice"},
      {[](Request& r) {
         r.set_raw_input_contents(1, packed(std::vector<std::int32_t>{1, 0, 0, 0, 0}));
         r.mutable_inputs(1)->set_shape(0, 5);
       },
       "id_list_features_lengths has 5 elements, expected 6 (3 features of 2 samples)"},
      {[](Request& r) {
         r.set_raw_input_contents(1, packed(std::vector<std::int32_t>{1, -1, 0, 0, 0, 1}));
       },
       "id_list_features_lengths[1] is -1, expected >= 0"},
      {[](Request& r) {
         r.set_raw_input_contents(5, packed(std::vector<float>{}));
         r.mutable_inputs(5)->set_shape(0, 0);
       },
       "id_score_list_features_weights has 0 bytes, expected 4 (sum(lengths) = 1 float32 numbers)"},
      // int32 ids whose bytes would be right for int64 ones.
      {[](Request& r) {
         r.mutable_inputs(2)->set_datatype("INT32");
         r.mutable_inputs(2)->set_shape(0, 4);
       },
       "id_list_features_values has 16 bytes, expected 8 (sum(lengths) = 2 int32 numbers)"},
      {[](Request& r) { r.mutable_inputs(1)->mutable_contents()->add_bytes_contents(""); },
       "id_list_features_lengths has contents in bytes_contents, expected only int_contents", true},
      {[](Request& r) { r.mutable_inputs(1)->mutable_contents()->add_int_contents(0); },
       "id_list_features_lengths has 7 elements, its shape has 6", true},
      {[](Request& r) { r.add_outputs()->set_name("x"); },
       "output 'x' is unknown; this model has 'score', 'logits'"},
      {[](Request& r) {
         for (int i = 0; i < 1'000; ++i) r.add_outputs()->set_name(i % 2 ? "score" : "logits");
       },
       "output 'logits' is asked for twice"},
  };
  for (const Case& one : cases) {
    Request request = request_of(two_samples(), one.typed);
    one.edit(request);
    EXPECT_EQ(refusal(request), one.message);
  }
}

TEST_F(InferDecoderTest, ChoosesOutputsInTheOrderAsked) {
  Request request = request_of(two_samples(), false);
  EXPECT_EQ(refusal(request), "");
  EXPECT_EQ(chosen, (std::vector<std::size_t>{0, 1}));
  request.add_outputs()->set_name("logits");
  EXPECT_EQ(refusal(request), "");
  EXPECT_EQ(chosen, (std::vector<std::size_t>{1}));
  request.add_outputs()->set_name("score");
  EXPECT_EQ(refusal(request), "");
  EXPECT_EQ(chosen, (std::vector<std::size_t>{1, 0}));
}

// Numbers of one byte each become numbers of eight: no more of them than a request may have ids.
TEST_F(InferDecoderTest, RefusesTooManyIdsBeforeItHoldsThem) {
  test::RequestData data = two_samples();
  data.values.assign(2'001, 1);
  data.lengths[0] = 2'000;
  EXPECT_EQ(refusal(request_of(data, true)), "the request has 2002 ids, the limit is 2000");
  EXPECT_EQ(storage.bytes(), 0u);
  data = two_samples();
  data.samples = 51;
  data.dense.assign(2 * 51, 0);
  data.lengths.assign(3 * 51, 0);
  data.values.clear();
  data.scored_lengths.assign(51, 0);
  data.scored_values.clear();
  data.weights.clear();
  EXPECT_EQ(refusal(request_of(data, true)), "batch_size is 51, the limit is 50 samples");
  EXPECT_EQ(storage.bytes(), 0u);
}

// Samples come from the lengths where there are no dense features.
TEST(InferDecoderWithoutDense, CountsSamplesByLengths) {
  InputSchema schema = test::schema();
  schema.dense_features.clear();
  std::erase_if(schema.features,
                [](const FeatureSpec& f) { return f.group == Group::kIdScoreList; });
  const InferDecoder decoder(schema, {});
  const auto refusal = [&](std::vector<std::int32_t> lengths) {
    Request request;
    Filler filler{request, false};
    filler.fill(filler.add("float_features", "FP32", {9, 0}), std::vector<float>{},
                &Contents::add_fp32_contents);
    filler.fill(filler.add("id_list_features_lengths", "INT32",
                           {static_cast<std::int64_t>(lengths.size())}),
                lengths, &Contents::add_int_contents);
    filler.fill(filler.add("id_list_features_values", "INT64", {0}), std::vector<std::int64_t>{},
                &Contents::add_int64_contents);
    const std::string bytes = request.SerializeAsString();
    InferRequestView view;
    InferStorage storage;
    PredictionRequestView tensors;
    EXPECT_TRUE(parse_infer(as_bytes(bytes), view));
    const Status status = decoder.decode(view, {}, storage, tensors);
    return status.ok() ? std::to_string(tensors.batch_size) : status.message;
  };
  EXPECT_EQ(refusal({0, 0, 0, 0, 0, 0}), "2");
  EXPECT_EQ(refusal({0, 0, 0, 0}),
            "id_list_features_lengths has 4 elements, expected a multiple of 3 features");
}

struct InferRegionsTest : InferDecoderTest {
  void use(const test::SharedObject& object) {
    memory.remove_all();
    ASSERT_TRUE(memory.add({"region", object.key(), 0, object.content().size()}).ok());
    regions.memory = &memory;
  }

  SharedMemory memory{{.request_bytes = 10'000}};
};

TEST_F(InferRegionsTest, GivesWhatRawContentsGive) {
  test::Random random(3);
  for (int round = 0; round < 50; ++round) {
    const test::RequestData data =
        test::random_request(random, 1 + static_cast<std::int32_t>(random() % 9), 4);
    DecodedRequest expected;
    ASSERT_TRUE(checks.decode(data.view(), expected).ok());
    Request request = request_of(data, false);
    const test::SharedObject object(place(request, static_cast<int>(random() % 8) - 1));
    use(object);
    ASSERT_EQ(refusal(request), "");
    EXPECT_TRUE(same(decoded.dense, expected.dense));
    EXPECT_TRUE(same(decoded.id_list.values, expected.id_list.values));
    EXPECT_TRUE(same(decoded.id_score_list.weights, expected.id_score_list.weights));
  }
}

// What the client changes once the request was read changes nothing of it.
TEST_F(InferRegionsTest, UsesACopy) {
  Request request = request_of(two_samples(), false);
  test::SharedObject object(place(request));
  use(object);
  ASSERT_EQ(refusal(request), "");
  const std::vector<std::byte> before(decoded.dense.begin(), decoded.dense.end());
  object.resize(0);
  EXPECT_TRUE(same(decoded.dense, before));
  EXPECT_EQ(refusal(request),
            "input 'float_features': shared memory region 'region' has shrunk: its 16 bytes from 0 "
            "on are not all there");
}

TEST_F(InferRegionsTest, NamesInputRegionAndNumbers) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  using Edit = std::function<void(inference::ModelInferRequest::InferInputTensor&)>;
  const auto set = [](const char* key, std::int64_t value) -> Edit {
    return [=](auto& input) {
      (*input.mutable_parameters())[std::string("shared_memory_") + key].set_int64_param(value);
    };
  };
  const std::pair<Edit, const char*> cases[] = {
      {set("offset", kMost),
       "input 'float_features': offset 9223372036854775807 and byte size 16 reach beyond shared "
       "memory region 'region', which has 76 bytes"},
      {set("offset", 61),
       "input 'float_features': offset 61 and byte size 16 reach beyond shared memory region "
       "'region', which has 76 bytes"},
      {set("offset", -1),
       "input 'float_features': parameter 'shared_memory_offset' is -1, expected 0 to "
       "9223372036854775807"},
      {set("byte_size", 12),
       "float_features has 12 bytes, expected 16 (its shape has 4 FP32 elements)"},
      {set("region", 1),
       "input 'float_features': parameter 'shared_memory_region' is not a string"},
      {set("other", 1),
       "parameter 'shared_memory_other' of input 'float_features' is not supported"},
      {[](auto& input) { input.mutable_parameters()->erase("shared_memory_byte_size"); },
       "input 'float_features': parameters 'shared_memory_region' and 'shared_memory_byte_size' "
       "are needed together"},
      {[](auto& input) { input.mutable_contents()->add_fp32_contents(1); },
       "float_features has typed contents beside shared memory, expected only one of the two"},
  };
  for (const auto& [edit, message] : cases) {
    Request request = request_of(two_samples(), false);
    const test::SharedObject object(place(request));
    ASSERT_EQ(object.content().size(), 76u);
    use(object);
    edit(*request.mutable_inputs(0));
    EXPECT_EQ(refusal(request), message);
  }
}

// Every pair of numbers at the edges of what 64 bits hold, as either type of parameter.
TEST_F(InferRegionsTest, ATensorLiesInItsRegion) {
  constexpr std::uint64_t kSigned = std::numeric_limits<std::int64_t>::max();
  constexpr std::uint64_t kAll = std::numeric_limits<std::uint64_t>::max();
  const std::uint64_t edges[] = {0,       1,           15,          16,        17,  59,
                                 60,      61,          75,          76,        77,  1ull << 31,
                                 kSigned, kSigned - 1, kSigned + 1, kAll - 15, kAll};
  Request request = request_of(two_samples(), false);
  const test::SharedObject object(place(request));
  ASSERT_EQ(object.content().size(), 76u);
  use(object);
  for (const std::uint64_t offset : edges) {
    for (const std::uint64_t size : edges) {
      for (const bool with_sign : {true, false}) {
        auto& parameters = *request.mutable_inputs(0)->mutable_parameters();
        const auto set = [&](const char* key, std::uint64_t number) {
          if (with_sign && number <= kSigned) {
            parameters[key].set_int64_param(static_cast<std::int64_t>(number));
          } else {
            parameters[key].set_uint64_param(number);
          }
        };
        set("shared_memory_offset", offset);
        set("shared_memory_byte_size", size);
        const std::string told = refusal(request);
        const bool inside = size <= 76 && offset <= 76 - size;
        if (inside && size == 16) {
          // Other bytes of the object are numbers, too; some of them are not finite.
          EXPECT_EQ(told.find("shared memory"), told.npos) << told;
        } else if (inside) {
          EXPECT_NE(told.find("expected 16 (its shape has 4 FP32 elements)"), told.npos) << told;
        } else if (offset > kSigned || size > kSigned) {
          EXPECT_NE(told.find("expected 0 to 9223372036854775807"), told.npos) << told;
        } else {
          EXPECT_NE(told.find("reach beyond shared memory region"), told.npos) << told;
        }
      }
    }
  }
}

TEST_F(InferRegionsTest, BoundsWhatARequestHas) {
  test::RequestData data = two_samples();
  data.values.assign(1'250, 1);
  data.lengths[0] = 1'249;
  Request request = request_of(data, false);
  const test::SharedObject object(place(request));
  use(object);
  EXPECT_EQ(refusal(request), "the request has 10040 bytes in shared memory, the limit is 10000");
}

TEST_F(InferDecoderTest, ReadsTimeoutAndPriority) {
  const auto with = [&](const char* key,
                        const std::function<void(inference::InferParameter&)>& set) {
    Request request = request_of(two_samples(), false);
    set((*request.mutable_parameters())[key]);
    return refusal(request);
  };
  const auto number = [](std::int64_t value) {
    return [value](inference::InferParameter& p) { p.set_int64_param(value); };
  };
  const auto natural = [](std::uint64_t value) {
    return [value](inference::InferParameter& p) { p.set_uint64_param(value); };
  };
  EXPECT_EQ(with("timeout", number(1'500)), "");
  EXPECT_EQ(options.timeout, std::chrono::microseconds(1'500));
  EXPECT_EQ(options.priority, 0);
  EXPECT_EQ(with("timeout", natural(std::numeric_limits<std::uint64_t>::max())),
            "parameter 'timeout' is 18446744073709551615, expected 0 to 9223372036854775807");
  EXPECT_EQ(with("timeout", number(std::numeric_limits<std::int64_t>::max())), "");
  EXPECT_GT(options.timeout, std::chrono::hours(24 * 365 * 290));
  EXPECT_EQ(with("priority", number(1)), "");
  EXPECT_EQ(options.priority, 2'147'483'646);
  EXPECT_EQ(options.timeout, Duration::zero());
  EXPECT_EQ(with("priority", natural(2'147'483'646)), "");
  EXPECT_EQ(options.priority, 1);
  EXPECT_EQ(with("priority", natural(2'147'483'647)),
            "parameter 'priority' is 2147483647, expected 0 to 2147483646");
  EXPECT_EQ(with("priority", number(-1)), "parameter 'priority' is -1, expected 0 to 2147483646");
  EXPECT_EQ(with("timeout", [](auto& p) { p.set_bool_param(true); }),
            "parameter 'timeout' is neither an int64_param nor a uint64_param");
  EXPECT_EQ(with("sequence_id", [](auto& p) { p.set_string_param(""); }), "");
  EXPECT_EQ(with("sequence_id", number(1)),
            "parameter 'sequence_id' is not supported: models keep no state between requests");
  EXPECT_EQ(with("binary_data_output", [](auto& p) { p.set_bool_param(true); }), "");
}

}  // namespace
}  // namespace tessera

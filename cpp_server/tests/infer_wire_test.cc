// ModelInfer's reader and writer against protobuf's own, which is the reference.
#include "request/infer_wire.h"

#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "inference.pb.h"
#include "request/wire_reader.h"
#include "support.h"

namespace tessera {
namespace {

using test::as_bytes;
using test::Random;

std::string random_text(Random& random, std::size_t most) {
  std::string made(random() % (most + 1), ' ');
  for (char& c : made) c = static_cast<char>('a' + random() % 26);
  return made;
}

inference::InferParameter random_parameter(Random& random) {
  inference::InferParameter made;
  switch (random() % 6) {
    case 0: made.set_bool_param(random() % 2); break;
    case 1: made.set_int64_param(static_cast<std::int64_t>(random()) - 5); break;
    case 2: made.set_string_param(random_text(random, 9)); break;
    case 3: made.set_double_param(0.5); break;
    case 4: made.set_uint64_param(random()); break;
    default: break;
  }
  return made;
}

void fill(Random& random, inference::InferTensorContents& contents) {
  const auto many = [&] { return random() % 3 == 0 ? random() % 5 : 0; };
  for (auto n = many(); n > 0; --n) contents.add_bool_contents(random() % 2);
  for (auto n = many(); n > 0; --n) {
    contents.add_int_contents(static_cast<std::int32_t>(random() >> random() % 32));
  }
  for (auto n = many(); n > 0; --n) {
    contents.add_int64_contents(
        static_cast<std::int64_t>(std::uint64_t{random()} << random() % 40));
  }
  for (auto n = many(); n > 0; --n) contents.add_uint_contents(random());
  for (auto n = many(); n > 0; --n) contents.add_uint64_contents(random());
  for (auto n = many(); n > 0; --n) contents.add_fp32_contents(static_cast<float>(random()));
  for (auto n = many(); n > 0; --n) contents.add_fp64_contents(0.25);
  for (auto n = many(); n > 0; --n) contents.add_bytes_contents(random_text(random, 5));
}

const char* const kKeys[] = {"timeout",
                             "priority",
                             "sequence_id",
                             "traffic_key",
                             "other",
                             "shared_memory_region",
                             "shared_memory_offset",
                             "shared_memory_byte_size",
                             "shared_memory_other",
                             "classification"};

inference::ModelInferRequest random_message(Random& random) {
  inference::ModelInferRequest message;
  if (random() % 2) message.set_model_name(random_text(random, 9));
  if (random() % 2) message.set_model_version(random_text(random, 9));
  if (random() % 2) message.set_id(random_text(random, 9));
  const auto parameters = [&](auto& map) {
    for (unsigned n = random() % 3; n > 0; --n) {
      map[kKeys[random() % std::size(kKeys)]] = random_parameter(random);
    }
  };
  parameters(*message.mutable_parameters());
  for (unsigned n = random() % 10; n > 0; --n) {
    auto& input = *message.add_inputs();
    if (random() % 2) input.set_name(random_text(random, 9));
    if (random() % 2) input.set_datatype("INT64");
    for (unsigned d = random() % 4; d > 0; --d) {
      input.add_shape(static_cast<std::int64_t>(random()) - 9);
    }
    if (random() % 4 == 0) parameters(*input.mutable_parameters());
    if (random() % 2) fill(random, *input.mutable_contents());
  }
  for (unsigned n = random() % 3; n > 0; --n) {
    auto& output = *message.add_outputs();
    output.set_name(random_text(random, 9));
    if (random() % 4 == 0) parameters(*output.mutable_parameters());
  }
  for (unsigned n = random() % 10; n > 0; --n) {
    message.add_raw_input_contents(random_text(random, 30));
  }
  return message;
}

template <typename Map>
void expect_same(const ParameterView& view, const Map& parameters, const std::string& key) {
  using Kind = ParameterView::Kind;
  const auto found = parameters.find(key);
  ASSERT_EQ(view.key.empty(), found == parameters.end()) << key;
  if (found == parameters.end()) return;
  const inference::InferParameter& parameter = found->second;
  switch (parameter.parameter_choice_case()) {
    case inference::InferParameter::kBoolParam: EXPECT_EQ(view.kind, Kind::kBool); break;
    case inference::InferParameter::kInt64Param:
      EXPECT_EQ(view.kind, Kind::kInt64);
      EXPECT_EQ(static_cast<std::int64_t>(view.number), parameter.int64_param());
      break;
    case inference::InferParameter::kStringParam:
      EXPECT_EQ(view.kind, Kind::kString);
      EXPECT_EQ(view.string, parameter.string_param());
      break;
    case inference::InferParameter::kDoubleParam: EXPECT_EQ(view.kind, Kind::kDouble); break;
    case inference::InferParameter::kUint64Param:
      EXPECT_EQ(view.kind, Kind::kUint64);
      EXPECT_EQ(view.number, parameter.uint64_param());
      break;
    case inference::InferParameter::PARAMETER_CHOICE_NOT_SET:
      EXPECT_EQ(view.kind, Kind::kNone);
      break;
  }
}

template <typename Map>
void expect_same(const RegionView& place, std::string_view unsupported, const Map& parameters) {
  expect_same(place.region, parameters, "shared_memory_region");
  expect_same(place.offset, parameters, "shared_memory_offset");
  expect_same(place.byte_size, parameters, "shared_memory_byte_size");
  std::string first;
  for (const auto& [key, value] : parameters) {
    const bool placing = key == "shared_memory_region" || key == "shared_memory_offset" ||
                         key == "shared_memory_byte_size";
    if (placing || (!key.starts_with("shared_memory_") && key != "classification")) continue;
    if (first.empty() || key < first) first = key;
  }
  EXPECT_EQ(unsupported, first);
}

template <typename T, typename Repeated>
void expect_elements(const InferTensorView& view, ContentField field, const Repeated& expected) {
  std::vector<std::byte> storage(3, std::byte{0xee});
  const Bytes found = read_contents(view, field, storage);
  ASSERT_EQ(found.size(), sizeof(T) * static_cast<std::size_t>(expected.size()));
  for (int i = 0; i < expected.size(); ++i) {
    const T wanted = expected[i];
    const std::byte* const number = found.data() + static_cast<std::size_t>(i) * sizeof(T);
    EXPECT_EQ(std::memcmp(number, &wanted, sizeof(T)), 0);
  }
}

void expect_same(const InferTensorView& view,
                 const inference::ModelInferRequest::InferInputTensor& input) {
  EXPECT_EQ(view.name, input.name());
  EXPECT_EQ(view.datatype, input.datatype());
  ASSERT_EQ(view.rank, static_cast<std::size_t>(input.shape_size()));
  for (int i = 0; i < std::min(input.shape_size(), 2); ++i) {
    EXPECT_EQ(view.dims[static_cast<std::size_t>(i)], input.shape(i));
  }
  expect_same(view.place, view.unsupported, input.parameters());
  const auto& contents = input.contents();
  const int counts[] = {contents.bool_contents_size(),   contents.int_contents_size(),
                        contents.int64_contents_size(),  contents.uint_contents_size(),
                        contents.uint64_contents_size(), contents.fp32_contents_size(),
                        contents.fp64_contents_size(),   contents.bytes_contents_size()};
  for (std::size_t i = 0; i < view.counts.size(); ++i) {
    EXPECT_EQ(view.counts[i], static_cast<std::size_t>(counts[i])) << kContentFields[i];
  }
  expect_elements<std::int32_t>(view, ContentField::kInt, contents.int_contents());
  expect_elements<std::int64_t>(view, ContentField::kInt64, contents.int64_contents());
  expect_elements<float>(view, ContentField::kFp32, contents.fp32_contents());
}

void expect_same(const InferRequestView& view, const inference::ModelInferRequest& message) {
  EXPECT_EQ(view.model_name, message.model_name());
  EXPECT_EQ(view.model_version, message.model_version());
  EXPECT_EQ(view.id, message.id());
  expect_same(view.timeout, message.parameters(), "timeout");
  expect_same(view.priority, message.parameters(), "priority");
  expect_same(view.sequence_id, message.parameters(), "sequence_id");
  expect_same(view.traffic_key, message.parameters(), "traffic_key");
  ASSERT_EQ(view.inputs, static_cast<std::size_t>(message.inputs_size()));
  ASSERT_EQ(view.raw_contents, static_cast<std::size_t>(message.raw_input_contents_size()));
  for (std::size_t i = 0; i < std::min(view.inputs, view.kMaxInputs); ++i) {
    expect_same(view.input[i], message.inputs(static_cast<int>(i)));
  }
  for (std::size_t i = 0; i < std::min(view.raw_contents, view.kMaxInputs); ++i) {
    const Bytes raw = view.raw_content[i];
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(raw.data()), raw.size()),
              message.raw_input_contents(static_cast<int>(i)));
  }
  ASSERT_EQ(view.outputs, static_cast<std::size_t>(message.outputs_size()));
  std::vector<InferOutputView> outputs;
  read_outputs(view, 2, outputs);
  ASSERT_EQ(outputs.size(), std::min<std::size_t>(view.outputs, 2));
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& output = message.outputs(static_cast<int>(i));
    EXPECT_EQ(outputs[i].name, output.name());
    expect_same(outputs[i].place, outputs[i].unsupported, output.parameters());
  }
  const auto placed = [](const auto& tensors) {
    return static_cast<std::size_t>(
        std::count_if(tensors.begin(), tensors.end(), [](const auto& tensor) {
          return tensor.parameters().contains("shared_memory_region") ||
                 tensor.parameters().contains("shared_memory_offset") ||
                 tensor.parameters().contains("shared_memory_byte_size");
        }));
  };
  EXPECT_EQ(view.placed_inputs, placed(message.inputs()));
  EXPECT_EQ(view.placed_outputs, placed(message.outputs()));
}

TEST(InferReader, ReadsWhatProtobufWrites) {
  Random random(1);
  for (int i = 0; i < 5'000; ++i) {
    const inference::ModelInferRequest message = random_message(random);
    const std::string bytes = message.SerializeAsString();
    InferRequestView view;
    ASSERT_TRUE(parse_infer(as_bytes(bytes), view));
    expect_same(view, message);
    if (HasFatalFailure()) return;
  }
}

// Contents in two messages are one, and numbers may come one by one.
TEST(InferReader, ReadsContentsInPiecesAndUnpacked) {
  inference::ModelInferRequest::InferInputTensor first;
  first.mutable_contents()->add_fp32_contents(1);
  first.mutable_contents()->add_int64_contents(-1);
  first.add_shape(7);
  inference::ModelInferRequest::InferInputTensor second;
  second.mutable_contents()->add_fp32_contents(2);
  second.mutable_contents()->add_fp32_contents(3);
  second.mutable_contents()->add_int_contents(-4);
  // Contents whose field 6 is a float that is not packed, whose field 2 is a varint, and whose
  // field 3 is one that protobuf gives 64 bits.
  const std::string alone("\x2a\x0a\x35\x00\x00\x80\x3f\x10\x05\x18\x80\x01", 12);
  const std::string tensor = first.SerializeAsString() + alone + second.SerializeAsString();
  const std::string bytes = std::string("\x2a") + static_cast<char>(tensor.size()) + tensor;
  inference::ModelInferRequest message;
  ASSERT_TRUE(message.ParseFromString(bytes));
  ASSERT_EQ(message.inputs(0).contents().fp32_contents_size(), 4);
  InferRequestView view;
  ASSERT_TRUE(parse_infer(as_bytes(bytes), view));
  expect_same(view, message);
}

TEST(InferReader, TakesTheLastOfAParameter) {
  inference::ModelInferRequest first;
  (*first.mutable_parameters())["timeout"].set_int64_param(5);
  inference::ModelInferRequest second;
  (*second.mutable_parameters())["timeout"].set_string_param("x");
  const std::string bytes = first.SerializeAsString() + second.SerializeAsString();
  InferRequestView view;
  ASSERT_TRUE(parse_infer(as_bytes(bytes), view));
  EXPECT_EQ(view.timeout.kind, ParameterView::Kind::kString);
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

// Whether an entry of one of the maps has fields that entries have not: protobuf's parsers differ
// there.
bool has_odd_entry(Bytes message, const std::vector<std::uint32_t>& path) {
  bool odd = false;
  read_fields(WireReader(message), [&](WireReader& reader, Tag tag, bool& handled) {
    if (path.empty()) {
      odd = odd || !(is(tag, 1, WireType::kBytes) || is(tag, 2, WireType::kBytes));
    } else if (is(tag, path.front(), WireType::kBytes)) {
      Bytes inner;
      if (!reader.bytes(inner)) return false;
      odd = odd || has_odd_entry(inner, {path.begin() + 1, path.end()});
      return true;
    }
    handled = false;
    return true;
  });
  return odd;
}

bool has_odd_entry(const std::string& bytes) {
  const Bytes message = as_bytes(bytes);
  return has_odd_entry(message, {4}) || has_odd_entry(message, {5, 4}) ||
         has_odd_entry(message, {6, 2});
}

TEST(InferReader, PassesOverEntriesWithUnknownFields) {
  // An entry of the map of parameters: the key "timeout", and a field 10 instead of a value.
  const std::string bytes("\x22\x0b\x0a\x07timeout\x52\x00", 13);
  ASSERT_TRUE(has_odd_entry(bytes));
  InferRequestView view;
  ASSERT_TRUE(parse_infer(as_bytes(bytes), view));
  EXPECT_TRUE(view.timeout.key.empty());
}

TEST(InferReader, AcceptsAndRefusesWhatProtobufDoes) {
  Random random(3);
  const google::protobuf::LogSilencer quiet;  // it prints what it refuses
  int accepted = 0;
  int refused = 0;
  for (int i = 0; i < 100'000; ++i) {
    std::string bytes = random_message(random).SerializeAsString();
    if (bytes.empty()) continue;
    for (unsigned n = 1 + random() % 3; n > 0; --n) {
      switch (random() % 3) {
        case 0: bytes[random() % bytes.size()] = static_cast<char>(random()); break;
        case 1: bytes.resize(1 + random() % bytes.size()); break;
        default: bytes.insert(random() % bytes.size(), 1, static_cast<char>(random()));
      }
    }
    inference::ModelInferRequest message;
    const bool expected = message.ParseFromString(bytes);
    InferRequestView view;
    const bool accepts = parse_infer(as_bytes(bytes), view);
    if (expected && !accepts && has_long_tag(bytes)) continue;
    ASSERT_EQ(accepts, expected) << "round " << i;
    if (expected) {
      if (has_odd_entry(bytes)) continue;
      ++accepted;
      expect_same(view, message);
    } else {
      ++refused;
    }
    if (HasFailure()) FAIL() << "round " << i;
  }
  // Both kinds were seen in numbers, or the comparison above says little.
  EXPECT_GT(accepted, 5'000);
  EXPECT_GT(refused, 5'000);
}

TEST(InferWriter, TellsWhereTheTimeWentIfItIsAsked) {
  const std::vector<float> scores = {1};
  const std::vector<OutputView> outputs = {{"score", scores.data(), 1}};
  const std::vector<std::size_t> chosen = {0};
  const StageTimings timings{.decode_us = 1,
                             .queue_us = 300,
                             .assemble_us = 0,
                             .transfer_us = 4,
                             .forward_us = 5'000'000'000,
                             .split_us = 6,
                             .batch_requests = 7,
                             .batch_samples = 8};
  const InferResponseParts parts{.outputs = outputs,
                                 .chosen = chosen,
                                 .samples = 1,
                                 .model_name = "m",
                                 .model_version = "7",
                                 .id = "",
                                 .commit = 9,
                                 .timings = &timings};
  std::string bytes(infer_response_bytes(parts), '\0');
  write_infer_response(parts, reinterpret_cast<std::byte*>(bytes.data()));
  inference::ModelInferResponse message;
  ASSERT_TRUE(message.ParseFromString(bytes));
  std::map<std::string, std::int64_t> told;
  for (const auto& [key, value] : message.parameters()) {
    EXPECT_TRUE(value.has_int64_param()) << key;
    told[key] = value.int64_param();
  }
  const std::map<std::string, std::int64_t> expected = {
      {"commit", 9},      {"decode_us", 1},      {"queue_us", 300},
      {"assemble_us", 0}, {"transfer_us", 4},    {"forward_us", 5'000'000'000},
      {"split_us", 6},    {"batch_requests", 7}, {"batch_samples", 8}};
  EXPECT_EQ(told, expected);
}

TEST(InferWriter, WritesWhatProtobufReads) {
  const std::vector<float> first = {1, 2, 3};
  const std::vector<float> second = {1, 2, 3, 4, 5, 6};
  const std::vector<OutputView> outputs = {{"score", first.data(), 3},
                                           {"logits", second.data(), 6}};
  for (const std::vector<std::size_t>& chosen :
       {std::vector<std::size_t>{0, 1}, std::vector<std::size_t>{1, 0},
        std::vector<std::size_t>{1}}) {
    for (const auto& [id, commit] :
         {std::pair(std::string(), std::optional<std::int64_t>()),
          std::pair(std::string(1'000, 'x'), std::optional<std::int64_t>(0)),
          std::pair(std::string("a"), std::optional<std::int64_t>(99'999'999))}) {
      const InferResponseParts parts{.outputs = outputs,
                                     .chosen = chosen,
                                     .samples = 3,
                                     .model_name = "m",
                                     .model_version = "7",
                                     .id = id,
                                     .commit = commit};
      std::string bytes(infer_response_bytes(parts), '\0');
      write_infer_response(parts, reinterpret_cast<std::byte*>(bytes.data()));
      inference::ModelInferResponse message;
      ASSERT_TRUE(message.ParseFromString(bytes));
      EXPECT_EQ(message.SerializeAsString(), bytes);
      EXPECT_EQ(message.model_name(), "m");
      EXPECT_EQ(message.model_version(), "7");
      EXPECT_EQ(message.id(), id);
      ASSERT_EQ(message.parameters_size(), commit.has_value() ? 1 : 0);
      if (commit.has_value()) {
        EXPECT_TRUE(message.parameters().at("commit").has_int64_param());
        EXPECT_EQ(message.parameters().at("commit").int64_param(), *commit);
      }
      ASSERT_EQ(message.outputs_size(), static_cast<int>(chosen.size()));
      ASSERT_EQ(message.raw_output_contents_size(), static_cast<int>(chosen.size()));
      for (int i = 0; i < message.outputs_size(); ++i) {
        const OutputView& output = outputs[chosen[static_cast<std::size_t>(i)]];
        const auto& written = message.outputs(i);
        EXPECT_EQ(written.name(), output.name);
        EXPECT_EQ(written.datatype(), "FP32");
        const std::vector<std::int64_t> shape(written.shape().begin(), written.shape().end());
        EXPECT_EQ(shape, output.count == 3 ? (std::vector<std::int64_t>{3})
                                           : (std::vector<std::int64_t>{3, 2}));
        EXPECT_EQ(message.raw_output_contents(i),
                  std::string(reinterpret_cast<const char*>(output.data), output.count * 4));
      }
    }
  }
}

}  // namespace
}  // namespace tessera

#include "front/rest_pages.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "common/text.h"
#include "front/kserve_metadata.h"
#include "front/repository_http.h"
#include "front/shared_memory_http.h"
#include "request/utf8.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr std::string_view kRoot = "/v2";
constexpr std::string_view kModels = "/v2/models/";

HttpAnswer json_answer(int status, const Json& json) {
  return {.status = status,
          .content_type = "application/json",
          .body = json.dump(-1, ' ', false, Json::error_handler_t::replace)};
}

Json as_json(const Message& message);

Json value_of(const Message& message, const FieldDescriptor& field) {
  const Reflection& all = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: return all.GetInt32(message, &field);
    case FieldDescriptor::CPPTYPE_INT64: return all.GetInt64(message, &field);
    case FieldDescriptor::CPPTYPE_UINT32: return all.GetUInt32(message, &field);
    case FieldDescriptor::CPPTYPE_UINT64: return all.GetUInt64(message, &field);
    case FieldDescriptor::CPPTYPE_DOUBLE: return all.GetDouble(message, &field);
    case FieldDescriptor::CPPTYPE_FLOAT: return all.GetFloat(message, &field);
    case FieldDescriptor::CPPTYPE_BOOL: return all.GetBool(message, &field);
    case FieldDescriptor::CPPTYPE_ENUM: return all.GetEnum(message, &field)->name();
    case FieldDescriptor::CPPTYPE_STRING: return all.GetString(message, &field);
    case FieldDescriptor::CPPTYPE_MESSAGE: return as_json(all.GetMessage(message, &field));
  }
  return nullptr;
}

// An element of a repeated field; the messages have numbers, strings and messages in these.
Json element_of(const Message& message, const FieldDescriptor& field, int at) {
  const Reflection& all = *message.GetReflection();
  const FieldDescriptor::CppType type = field.cpp_type();
  if (type == FieldDescriptor::CPPTYPE_MESSAGE) {
    return as_json(all.GetRepeatedMessage(message, &field, at));
  }
  if (type == FieldDescriptor::CPPTYPE_STRING) return all.GetRepeatedString(message, &field, at);
  if (type == FieldDescriptor::CPPTYPE_INT32) return all.GetRepeatedInt32(message, &field, at);
  return all.GetRepeatedInt64(message, &field, at);
}

// A map whose keys are strings and whose values are messages, by its keys' order.
Json map_of(const Message& message, const FieldDescriptor& field) {
  const Reflection& all = *message.GetReflection();
  std::vector<std::pair<std::string, Json>> entries;
  for (int at = 0; at < all.FieldSize(message, &field); ++at) {
    const Message& entry = all.GetRepeatedMessage(message, &field, at);
    entries.emplace_back(value_of(entry, *field.message_type()->map_key()),
                         value_of(entry, *field.message_type()->map_value()));
  }
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  Json made = Json::object();
  for (auto& [key, value] : entries) made[key] = std::move(value);
  return made;
}

// Every field of `message` by its name; what is not set has its default, but for messages and
// choices.
Json as_json(const Message& message) {
  const Reflection& all = *message.GetReflection();
  Json made = Json::object();
  for (int number = 0; number < message.GetDescriptor()->field_count(); ++number) {
    const FieldDescriptor& field = *message.GetDescriptor()->field(number);
    if (field.is_map()) {
      made[field.name()] = map_of(message, field);
    } else if (field.is_repeated()) {
      Json& list = made[field.name()] = Json::array();
      for (int at = 0; at < all.FieldSize(message, &field); ++at) {
        list.push_back(element_of(message, field, at));
      }
    } else if (!field.has_presence() || all.HasField(message, &field)) {
      made[field.name()] = value_of(message, field);
    }
  }
  return made;
}

HttpAnswer answer_of(const Status& status, const Message& response) {
  if (!status.ok()) return json_refusal(http_status_of(status.code), status.message);
  return json_answer(200, as_json(response));
}

// What `metadata` answers to a request that names a model, or none.
template <typename Response, typename Request>
std::pair<Status, Response> tell(const KserveMetadata& metadata, Request request,
                                 const ModelPath& asked = {}) {
  if constexpr (requires { request.set_name(asked.name); }) {
    request.set_name(asked.name);
    request.set_version(asked.version);
  }
  std::pair<Status, Response> told;
  told.first = metadata.answer(request, told.second);
  return told;
}

HttpAnswer model_page(const KserveMetadata& metadata, const ModelPath& asked) {
  using namespace inference;
  if (!is_utf8(asked.name) || !is_utf8(asked.version)) {
    return json_refusal(404, "the path is not UTF-8");
  }
  if (asked.verb == "ready") {
    const auto [status, told] = tell<ModelReadyResponse>(metadata, ModelReadyRequest(), asked);
    if (!status.ok()) return answer_of(status, told);
    return json_answer(told.ready() ? 200 : 503, {{"name", asked.name}, {"ready", told.ready()}});
  }
  if (asked.verb == "config") {
    const auto [status, told] = tell<ModelConfigResponse>(metadata, ModelConfigRequest(), asked);
    return answer_of(status, told.config());
  }
  if (asked.verb == "stats") {
    const auto [status, told] =
        tell<ModelStatisticsResponse>(metadata, ModelStatisticsRequest(), asked);
    return answer_of(status, told);
  }
  const auto [status, told] = tell<ModelMetadataResponse>(metadata, ModelMetadataRequest(), asked);
  return answer_of(status, told);
}

// Whether `path` is a page that is not REST's.
bool is_plain_page(std::string_view path) {
  return path == "/" || path == "/metrics" || path == "/healthz" || path == "/readyz";
}

}  // namespace

std::string unquoted(std::string_view part) {
  std::string made;
  for (std::size_t at = 0; at < part.size(); ++at) {
    unsigned char byte = 0;
    if (part[at] == '%' && at + 2 < part.size()) {
      const char* const digits = part.data() + at + 1;
      const auto [end, error] = std::from_chars(digits, digits + 2, byte, 16);
      if (error == std::errc() && end == digits + 2) {
        made += static_cast<char>(byte);
        at += 2;
        continue;
      }
    }
    made += part[at];
  }
  return made;
}

bool is_rest_path(std::string_view path) {
  return path.starts_with(kRoot) && (path.size() == kRoot.size() || path[kRoot.size()] == '/');
}

std::optional<ModelPath> read_model_path(std::string_view path) {
  if (!path.starts_with(kModels)) return std::nullopt;
  std::vector<std::string_view> parts;
  for (std::string_view rest = path.substr(kModels.size());;) {
    const auto slash = rest.find('/');
    parts.push_back(rest.substr(0, slash));
    if (slash == std::string_view::npos) break;
    rest.remove_prefix(slash + 1);
  }
  ModelPath found{.name = unquoted(parts[0]), .version = {}, .verb = {}};
  std::size_t used = 1;
  if (parts.size() >= 3 && parts.size() <= 4 && parts[1] == "versions") {
    if (parts[2].empty()) return std::nullopt;
    found.version = unquoted(parts[2]);
    used = 3;
  }
  if (parts[0].empty() || parts.size() > used + 1) return std::nullopt;
  if (parts.size() == used) return found;
  found.verb = std::string(parts[used]);
  constexpr auto kVerbs = std::to_array<std::string_view>({"ready", "config", "stats", "infer"});
  if (std::find(kVerbs.begin(), kVerbs.end(), found.verb) == kVerbs.end()) return std::nullopt;
  return found;
}

HttpAnswer rest_page(const ServerFacts& facts, const std::string& path) {
  using namespace inference;
  const KserveMetadata metadata(facts);
  if (path == "/v2/health/live") return json_answer(200, {{"live", true}});
  if (path == "/v2/health/ready") {
    const bool ready = tell<ServerReadyResponse>(metadata, ServerReadyRequest()).second.ready();
    return json_answer(ready ? 200 : 503, {{"ready", ready}});
  }
  if (path == kRoot) {
    const auto [status, told] = tell<ServerMetadataResponse>(metadata, ServerMetadataRequest());
    return answer_of(status, told);
  }
  if (path == "/v2/models/stats") {
    const auto [status, told] = tell<ModelStatisticsResponse>(metadata, ModelStatisticsRequest());
    return answer_of(status, told);
  }
  if (metadata.has_shared_memory() && is_shared_memory_path(path)) {
    return shared_memory_page(facts, path);
  }
  const auto asked = read_model_path(path);
  if ((asked.has_value() && asked->verb == "infer") || is_repository_path(path)) {
    return json_refusal(405, path + " is asked with POST");
  }
  if (asked.has_value()) return model_page(metadata, *asked);
  return json_refusal(404, text("there is no ", path, "; docs/rest.md has the paths"));
}

void answer_rest_post(const ServerFacts& facts, const HttpRequest& request, HttpDone done) {
  const std::string& path = request.head.path;
  if (facts.shared_memory != nullptr && is_shared_memory_path(path)) {
    done(answer_shared_memory_post(facts, request));
  } else if (is_plain_page(path) || (is_rest_path(path) && !path.starts_with("/v2/repository/"))) {
    done(json_refusal(405, path + " is asked with GET"));
  } else {
    answer_repository_post(facts, request, std::move(done));
  }
}

}  // namespace tessera

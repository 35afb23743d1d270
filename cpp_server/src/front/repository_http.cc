#include "front/repository_http.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "common/strict_json.h"
#include "common/text.h"
#include "front/repository_calls.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kIndex = "/v2/repository/index";
constexpr std::string_view kModels = "/v2/repository/models/";
constexpr int kMaxDepth = 3;

// What a path asks for: the index, where `verb` is empty, or to "load" or "unload" a model.
struct RepositoryPath {
  std::string model;
  std::string_view verb;
};

std::optional<RepositoryPath> read_path(std::string_view path) {
  if (path == kIndex) return RepositoryPath{};
  if (!path.starts_with(kModels)) return std::nullopt;
  path.remove_prefix(kModels.size());
  const auto slash = path.find('/');
  if (slash == 0 || slash == std::string_view::npos) return std::nullopt;
  const std::string_view verb = path.substr(slash + 1);
  if (verb != "load" && verb != "unload") return std::nullopt;
  return RepositoryPath{std::string(path.substr(0, slash)), verb};
}

// The object in `body`, which may be empty. Throws JsonError.
Json read_object(const std::string& body) {
  if (body.find_first_not_of(" \t\r\n") == std::string::npos) return Json::object();
  Json json = parse_strictly(body, kMaxDepth);
  if (!json.is_object()) throw JsonError("it is not an object");
  return json;
}

Parameters read_parameters(const Json& json) {
  Parameters parameters;
  for (const auto& [name, value] : json.items()) {
    Parameter& parameter = parameters[name];
    parameter = OtherParameter{};
    if (value.is_string()) parameter = value.get<std::string>();
    // A number above 2^63 - 1 cannot be a version, nor another parameter.
    const bool fits = value.is_number_integer() &&
                      (!value.is_number_unsigned() ||
                       value.get<std::uint64_t>() <= std::numeric_limits<std::int64_t>::max());
    if (fits) parameter = value.get<std::int64_t>();
  }
  return parameters;
}

HttpAnswer json_answer(const Json& json) {
  return {.content_type = "application/json",
          .body = json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"};
}

HttpAnswer index_answer(const ServerFacts& facts, const Json& json) {
  const auto ready = json.find("ready");
  if (ready != json.end() && !ready->is_boolean()) {
    return json_refusal(400, "ready is not true or false");
  }
  const bool ready_alone = ready != json.end() && ready->get<bool>();
  Json rows = Json::array();
  for (const IndexEntry& entry : index_entries(facts)) {
    if (ready_alone && entry.state != VersionState::kReady) continue;
    rows.push_back(
        {{"name", entry.model}, {"version", entry.version}, {"state", state_name(entry.state)}});
    Json& row = rows.back();
    if (!entry.reason.empty()) row["reason"] = entry.reason;
    if (!entry.labels.empty()) row["labels"] = entry.labels;
    if (entry.percent > 0) row["traffic_percent"] = entry.percent;
    if (entry.shadow) row["shadow"] = true;
    if (entry.progress > 0) row["load_progress"] = entry.progress;
  }
  return json_answer(rows);
}

RepositoryControl::Done answering(HttpDone done) {
  return [done = std::move(done)](const Status& outcome) {
    done(outcome.ok() ? HttpAnswer{.content_type = "application/json", .body = "{}\n"}
                      : json_refusal(http_status_of(outcome.code), outcome.message));
  };
}

}  // namespace

int http_status_of(Code code) {
  switch (code) {
    case Code::kOk: return 200;
    case Code::kInvalidArgument:
    case Code::kFailedPrecondition: return 400;
    case Code::kUnauthenticated: return 401;
    case Code::kNotFound: return 404;
    case Code::kAlreadyExists: return 409;
    case Code::kResourceExhausted: return 429;
    case Code::kCancelled: return 499;
    case Code::kUnavailable: return 503;
    case Code::kDeadlineExceeded: return 504;
    case Code::kUnimplemented:
    case Code::kInternal: break;
  }
  return 500;
}

bool is_repository_path(std::string_view path) { return read_path(path).has_value(); }

void answer_repository_post(const ServerFacts& facts, const HttpRequest& request, HttpDone done) {
  const std::string& path = request.head.path;
  const auto asked = read_path(path);
  if (!asked.has_value()) {
    done(json_refusal(404, text("there is no ", path, "; docs/rest.md has the paths")));
    return;
  }
  Json json;
  try {
    json = read_object(request.body);
  } catch (const JsonError& error) {
    done(json_refusal(
        400, text("the body is not a JSON object such as {\"parameters\": {}}: ", error.what())));
    return;
  }
  const char* const known = asked->verb.empty() ? "ready" : "parameters";
  for (const auto& [key, value] : json.items()) {
    if (key == known) continue;
    done(json_refusal(400, text("the body has '", key, "', expected '", known, "'")));
    return;
  }
  if (asked->verb.empty()) {
    done(index_answer(facts, json));
    return;
  }
  const auto given = json.find("parameters");
  if (given != json.end() && !given->is_object()) {
    done(json_refusal(400, "parameters is not a JSON object"));
    return;
  }
  const Parameters parameters = given == json.end() ? Parameters{} : read_parameters(*given);
  const auto call = asked->verb == "load" ? call_load : call_unload;
  call(facts.repository, asked->model, parameters, answering(std::move(done)));
}

}  // namespace tessera

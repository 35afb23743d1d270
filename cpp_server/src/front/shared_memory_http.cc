#include "front/shared_memory_http.h"

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "common/text.h"
#include "front/kserve_metadata.h"
#include "front/repository_http.h"
#include "front/rest_json.h"
#include "front/rest_pages.h"
#include "request/utf8.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kRoot = "/v2/systemsharedmemory/";
constexpr std::string_view kRegion = "region/";

// /v2/systemsharedmemory[/region/NAME]/VERB; without a name all regions are meant.
struct RegionPath {
  std::string name;
  std::string verb;
};

std::optional<RegionPath> read_path(std::string_view path) {
  if (!path.starts_with(kRoot)) return std::nullopt;
  std::string_view rest = path.substr(kRoot.size());
  RegionPath found;
  if (rest.starts_with(kRegion)) {
    rest.remove_prefix(kRegion.size());
    const auto slash = rest.find('/');
    if (slash == rest.npos || slash == 0) return std::nullopt;
    found.name = unquoted(rest.substr(0, slash));
    rest.remove_prefix(slash + 1);
  }
  found.verb = std::string(rest);
  const bool known = found.verb == "status" || found.verb == "unregister" ||
                     (found.verb == "register" && !found.name.empty());
  if (!known || !is_utf8(found.name)) return std::nullopt;
  return found;
}

HttpAnswer no_path(const std::string& path) {
  return json_refusal(404, text("there is no ", path, "; docs/rest.md has the paths"));
}

HttpAnswer refusal_of(const Status& status) {
  return json_refusal(http_status_of(status.code), status.message);
}

HttpAnswer json_answer(const Json& json) {
  return {.content_type = "application/json",
          .body = json.dump(-1, ' ', false, Json::error_handler_t::replace)};
}

// Reads the body of a registration.
Status read_body(const std::string& body, inference::SystemSharedMemoryRegisterRequest& request) {
  using Request = inference::SystemSharedMemoryRegisterRequest;
  nlohmann::json json;
  if (Status status = read_rest_json(body, json); !status.ok()) return status;
  if (!json.is_object()) return Status::invalid("the JSON is not an object");
  const auto key = json.find("key");
  if (key == json.end() || !key->is_string()) return Status::invalid("key is not a string");
  request.set_key(key->get<std::string>());
  for (const auto& [name, set] : {std::pair{"offset", &Request::set_offset},
                                  std::pair{"byte_size", &Request::set_byte_size}}) {
    const auto size = json.find(name);
    if (size == json.end()) continue;
    if (!size->is_number_unsigned()) {
      return Status::invalid(text(name, " is not a whole number from 0 on"));
    }
    (request.*set)(size->get<std::uint64_t>());
  }
  return {};
}

}  // namespace

bool is_shared_memory_path(std::string_view path) { return path.starts_with(kRoot); }

HttpAnswer shared_memory_page(const ServerFacts& facts, const std::string& path) {
  const auto asked = read_path(path);
  if (!asked.has_value()) return no_path(path);
  if (asked->verb != "status") return json_refusal(405, path + " is asked with POST");
  inference::SystemSharedMemoryStatusRequest request;
  inference::SystemSharedMemoryStatusResponse response;
  request.set_name(asked->name);
  const Status status = KserveMetadata(facts).answer(request, response);
  if (!status.ok()) return refusal_of(status);
  std::map<std::string, Json> by_name;
  for (const auto& [name, region] : response.regions()) {
    by_name[name] = {{"name", region.name()},
                     {"key", region.key()},
                     {"offset", region.offset()},
                     {"byte_size", region.byte_size()}};
  }
  Json rows = Json::array();
  for (const auto& [name, row] : by_name) rows.push_back(row);
  return json_answer(rows);
}

HttpAnswer answer_shared_memory_post(const ServerFacts& facts, const HttpRequest& request) {
  const std::string& path = request.head.path;
  const auto asked = read_path(path);
  if (!asked.has_value()) return no_path(path);
  if (asked->verb == "status") return json_refusal(405, path + " is asked with GET");
  Status status;
  if (asked->verb == "register") {
    inference::SystemSharedMemoryRegisterRequest message;
    inference::SystemSharedMemoryRegisterResponse response;
    message.set_name(asked->name);
    status = read_body(request.body, message);
    if (status.ok()) status = KserveMetadata(facts).answer(message, response);
  } else {
    inference::SystemSharedMemoryUnregisterRequest message;
    inference::SystemSharedMemoryUnregisterResponse response;
    message.set_name(asked->name);
    status = KserveMetadata(facts).answer(message, response);
  }
  return status.ok() ? json_answer(Json::object()) : refusal_of(status);
}

}  // namespace tessera

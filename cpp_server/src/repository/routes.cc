#include "repository/routes.h"

#include <algorithm>
#include <utility>

#include "common/text.h"
#include "csrc/xxh64.h"

namespace tessera {

double draw(std::string_view model, std::string_view key, std::string_view suffix) {
  thread_local std::string bytes;  // kept: requests draw all the time
  bytes.assign(model);
  bytes += '\0';
  bytes += key;
  bytes += suffix;
  return static_cast<double>(xxh64(bytes.data(), bytes.size())) * 0x1p-64;
}

Routes::Routes(std::string model, std::set<Version> ready, NotReady not_ready, const Wanted& wanted)
    : model_(std::move(model)),
      ready_(std::move(ready)),
      not_ready_(std::move(not_ready)),
      labels_(wanted.labels),
      shadow_(wanted.shadow) {
  constexpr double kWhole = 100;  // percent
  double sum = 0;
  for (const auto& [label, percent] : wanted.traffic) {
    const auto named = labels_.find(label);
    sum += percent;
    shares_.push_back({sum / kWhole, named == labels_.end() ? 0 : named->second});
  }
  usual_ = answering_version(wanted, ready_);
}

Routes::Choice Routes::choose(std::string_view asked, std::string_view key) const {
  if (!asked.empty()) {
    if (const auto number = parse_version(asked)) return exactly(*number, asked);
    if (const auto label = labels_.find(asked); label != labels_.end()) {
      return exactly(label->second, asked);
    }
    return {std::nullopt, unknown(asked)};
  }
  if (shares_.empty()) return by_default();
  const double place = draw(model_, key);
  const auto drawn = std::find_if(shares_.begin(), shares_.end() - 1,
                                  [&](const Share& share) { return place < share.upto; });
  if (ready_.contains(drawn->version)) return {drawn->version, {}};
  return by_default();
}

Routes::Choice Routes::exactly(Version version, std::string_view asked) const {
  if (ready_.contains(version)) return {version, {}};
  const auto reason = not_ready_.find(version);
  if (reason == not_ready_.end()) return {std::nullopt, unknown(asked)};
  return {std::nullopt, not_ready(version, reason->second)};
}

Routes::Choice Routes::by_default() const {
  if (usual_) return {usual_, {}};
  if (!not_ready_.empty()) {
    // The highest one: it is what will answer.
    const auto& [version, reason] = *not_ready_.rbegin();
    return {std::nullopt, not_ready(version, reason)};
  }
  return {std::nullopt, {Code::kUnavailable, text("no version of model '", model_, "' is loaded")}};
}

Status Routes::not_ready(Version version, const std::string& reason) const {
  return {Code::kUnavailable, text("version '", version, "' of model '", model_, "' ", reason)};
}

Status Routes::unknown(std::string_view asked) const {
  std::string there;
  for (const Version version : ready_) {
    there += (there.empty() ? "there is version '" : ", '") + std::to_string(version) + "'";
  }
  if (there.empty()) return not_found(asked, "none is loaded");
  std::string_view before = " and label '";
  for (const auto& [label, version] : labels_) {
    if (!ready_.contains(version)) continue;
    there.append(before).append(label).append("'");
    before = ", '";
  }
  return not_found(asked, there);
}

Status Routes::not_found(std::string_view asked, const std::string& there) const {
  return {Code::kNotFound,
          text("model_version '", asked, "' of model '", model_, "' is unknown; ", there)};
}

std::optional<Version> Routes::shadow(std::string_view key) const {
  constexpr double kWhole = 100;  // percent
  if (!shadow_ || !ready_.contains(shadow_->version)) return std::nullopt;
  if (draw(model_, key, kShadowSuffix) >= shadow_->percent / kWhole) return std::nullopt;
  return shadow_->version;
}

}  // namespace tessera

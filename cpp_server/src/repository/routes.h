// Which version of a model answers a request: a pure function of what is ready and what the request
// names. docs/repository.md has the table.
//
// Contract: Routes is immutable once it is published; choose allocates nothing but the message of a
// refusal, and may be called from any thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "repository/serving_config.h"
#include "repository/version.h"
#include "repository/wanted.h"

namespace tessera {

// Why a wanted version does not answer: it is being loaded, or its load failed.
using NotReady = std::map<Version, std::string>;

class Routes {
 public:
  // `ready`: the versions that answer. `not_ready`: those that should and do not, with the end of
  // the sentence "version '4' of model 'm' ...", such as "is being loaded".
  Routes(std::string model, std::set<Version> ready, NotReady not_ready, const Wanted& wanted);

  struct Choice {
    std::optional<Version> version;
    Status status;  // why there is none: NOT_FOUND or UNAVAILABLE
  };

  // The version that answers a request with `asked` (model_version: a number, a label or nothing)
  // and `key`, which decides between shares.
  Choice choose(std::string_view asked, std::string_view key) const;

  // The version that requests without a version, and without traffic, go to: label `stable`, else
  // the highest that is ready and not the shadow alone. Nothing: none is ready.
  std::optional<Version> usual() const { return usual_; }

  // Whether `key` is one of those that the shadow computes, too: its version where it is and is
  // ready.
  std::optional<Version> shadow(std::string_view key) const;

 private:
  struct Share {
    double upto = 0;  // the shares up to and with this one, in sum, of 1
    Version version = 0;
  };

  Choice exactly(Version version, std::string_view asked) const;
  Choice by_default() const;
  Status not_ready(Version version, const std::string& reason) const;
  Status unknown(std::string_view asked) const;
  Status not_found(std::string_view asked, const std::string& there) const;

  std::string model_;
  std::set<Version> ready_;
  NotReady not_ready_;
  Labels labels_;
  std::vector<Share> shares_;  // in the order of the labels' bytes
  std::optional<ShadowConfig> shadow_;
  std::optional<Version> usual_;
};

// Where `key` of `model` lies between 0 and 1: XXH64 (seed 0) of the model's name, a zero byte, the
// key and `suffix`, divided by 2^64. Every server gives the same.
double draw(std::string_view model, std::string_view key, std::string_view suffix = {});

// For the shadow the key is followed by a zero byte and "shadow".
inline constexpr std::string_view kShadowSuffix{"\0shadow", 7};

}  // namespace tessera

#include "repository/control.h"

namespace tessera {

std::string_view control_name(ModelControl control) {
  switch (control) {
    case ModelControl::kNone: return "none";
    case ModelControl::kPoll: return "poll";
    case ModelControl::kExplicit: return "explicit";
  }
  return "unknown";
}

std::string_view state_name(VersionState state) {
  switch (state) {
    case VersionState::kUnavailable: return "UNAVAILABLE";
    case VersionState::kLoading: return "LOADING";
    case VersionState::kReady: return "READY";
    case VersionState::kUnloading: return "UNLOADING";
  }
  return "UNKNOWN";
}

}  // namespace tessera

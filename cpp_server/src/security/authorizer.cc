#include "security/authorizer.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "common/text.h"

namespace tessera {
namespace {

// The token in a header "Bearer TOKEN"; empty where there is none.
std::string_view token_in(std::string_view authorization) {
  constexpr std::string_view kScheme = "bearer ";
  const bool bearer =
      authorization.size() > kScheme.size() &&
      std::equal(kScheme.begin(), kScheme.end(), authorization.begin(), [](char want, char got) {
        return want == (got >= 'A' && got <= 'Z' ? static_cast<char>(got - 'A' + 'a') : got);
      });
  if (!bearer) return {};
  authorization.remove_prefix(kScheme.size());
  while (authorization.starts_with(' ')) authorization.remove_prefix(1);
  while (authorization.ends_with(' ')) authorization.remove_suffix(1);
  return authorization;
}

}  // namespace

Authorizer::Authorizer(std::string path, SecurityMetrics& metrics, const Clock& clock)
    : path_(std::move(path)), metrics_(metrics), clock_(clock), tokens_(TokenTable::read(path_)) {}

Status Authorizer::admit(std::string_view authorization) {
  const std::string_view given = token_in(authorization);
  if (given.empty()) {
    return refused(TokenRefusal::kNoToken, Code::kUnauthenticated,
                   "the call has no token; send it as 'authorization: Bearer TOKEN'");
  }
  return tokens_.read([&](const TokenTable& tokens) -> Status {
    const TokenTable::Token* const token = tokens.find(given);
    if (token == nullptr) {
      return refused(TokenRefusal::kUnknownToken, Code::kUnauthenticated,
                     "this server does not know the call's token");
    }
    if (!token->take(clock_.now())) {
      return refused(TokenRefusal::kRate, Code::kResourceExhausted,
                     text("the token '", token->name(), "' allows ", token->calls_per_s(),
                          " calls a second, and there were more; try again later"));
    }
    return {};
  });
}

std::size_t Authorizer::read_again() {
  auto next = TokenTable::read(path_);
  const std::size_t size = next->size();
  tokens_.read([&](const TokenTable& former) { next->count_on_from(former); });
  tokens_.replace(std::move(next));
  return size;
}

Status Authorizer::refused(TokenRefusal why, Code code, std::string message) {
  metrics_.count(why);
  return {code, std::move(message)};
}

}  // namespace tessera

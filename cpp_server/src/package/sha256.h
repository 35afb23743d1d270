// SHA-256, piece by piece.
//
// Contract: one thread at a time; nothing blocks. Throws std::runtime_error only where OpenSSL
// itself cannot work.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

struct evp_md_ctx_st;

namespace tessera {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void update(std::span<const std::byte> piece);

  // Lower-case hex digest of all pieces; call once, last.
  std::string hex();

 private:
  evp_md_ctx_st* context_;
};

}  // namespace tessera

#include "http2/tls_session.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "http2/socket.h"

namespace tessera::http2 {
namespace {

constexpr std::size_t kReadBytes = 32 * 1024;
constexpr std::size_t kWriteBytes = 64 * 1024;
// A buffer that has grown beyond this is given back once it is empty.
constexpr std::size_t kKeptBytes = 16 * 1024;

// Lets `ssl` accept a certificate of `host` alone, a name or an address, and tells it the name.
bool expect(SSL& ssl, const std::string& host) {
  if (host.empty()) return true;
  if (::X509_VERIFY_PARAM_set1_ip_asc(::SSL_get0_param(&ssl), host.c_str()) == 1) return true;
  ::ERR_clear_error();
  return ::SSL_set1_host(&ssl, host.c_str()) == 1 &&
         SSL_set_tlsext_host_name(&ssl, host.c_str()) == 1;
}

}  // namespace

// OpenSSL's way to the bytes of a session.
struct TlsSession::Bio {
  static TlsSession& session(BIO* bio) { return *static_cast<TlsSession*>(::BIO_get_data(bio)); }

  static int read(BIO* bio, char* into, int room) {
    TlsSession& self = session(bio);
    ::BIO_clear_retry_flags(bio);
    if (self.in_.empty()) {
      ::BIO_set_retry_read(bio);
      return -1;
    }
    const std::size_t bytes = std::min(self.in_.size(), static_cast<std::size_t>(room));
    std::memcpy(into, self.in_.data(), bytes);
    self.in_ = self.in_.subspan(bytes);
    return static_cast<int>(bytes);
  }

  static int write(BIO* bio, const char* from, int bytes) {
    const auto* const begin = reinterpret_cast<const std::byte*>(from);
    TlsSession& self = session(bio);
    try {
      self.out_.insert(self.out_.end(), begin, begin + bytes);
    } catch (const std::bad_alloc&) {  // no exception may pass OpenSSL: the connection ends
      return -1;
    }
    return bytes;
  }

  static long control(BIO* /*bio*/, int command, long /*number*/, void* /*pointer*/) {
    return command == BIO_CTRL_FLUSH ? 1 : 0;
  }

  static BIO_METHOD* method() {
    static BIO_METHOD* const made = [] {
      BIO_METHOD* const method =
          ::BIO_meth_new(::BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "bytes of a connection");
      if (method == nullptr) throw std::bad_alloc();
      ::BIO_meth_set_read(method, &read);
      ::BIO_meth_set_write(method, &write);
      ::BIO_meth_set_ctrl(method, &control);
      return method;
    }();
    return made;
  }
};

TlsSession::TlsSession(ssl_ctx_st& context, Role role, const std::string& host)
    : ssl_(::SSL_new(&context)) {
  BIO* const bio = ssl_ == nullptr ? nullptr : ::BIO_new(Bio::method());
  if (bio == nullptr || !expect(*ssl_, host)) {
    ::BIO_free(bio);
    ::SSL_free(ssl_);
    throw std::bad_alloc();
  }
  ::BIO_set_data(bio, this);
  ::BIO_set_init(bio, 1);
  ::SSL_set_bio(ssl_, bio, bio);
  if (role == Role::kServer) {
    ::SSL_set_accept_state(ssl_);
  } else {
    ::SSL_set_connect_state(ssl_);
  }
}

TlsSession::~TlsSession() { ::SSL_free(ssl_); }

bool TlsSession::shaking_hands() const { return ::SSL_is_init_finished(ssl_) == 0; }

std::string TlsSession::refused_certificate() const {
  const long result = ::SSL_get_verify_result(ssl_);
  return result == X509_V_OK ? "" : ::X509_verify_cert_error_string(result);
}

TlsSession::Decrypted TlsSession::decrypt(std::span<std::byte> into, std::size_t& done) {
  while (done < into.size()) {
    ::ERR_clear_error();
    std::size_t got = 0;
    const int result = ::SSL_read_ex(ssl_, into.data() + done, into.size() - done, &got);
    if (result == 1) {
      done += got;
      continue;
    }
    return ::SSL_get_error(ssl_, result) == SSL_ERROR_WANT_READ ? Decrypted::kNeedsMore
                                                                : Decrypted::kEnded;
  }
  return Decrypted::kFull;
}

Moved TlsSession::read(int descriptor, std::span<std::byte> into) {
  // Filled and emptied within one call, so one does for all connections of a thread.
  static thread_local std::array<std::byte, kReadBytes> buffer;
  Moved moved;
  bool last = false;
  while (true) {
    const Decrypted now = decrypt(into, moved.bytes);
    if (now == Decrypted::kEnded) moved.ended = true;
    if (now == Decrypted::kFull) moved.kept = !in_.empty() || ::SSL_has_pending(ssl_) == 1;
    if (now == Decrypted::kNeedsMore && last) moved.blocked = true;
    if (now != Decrypted::kNeedsMore || last) break;
    const std::size_t room = std::clamp(into.size() - moved.bytes, std::size_t{1}, buffer.size());
    const ssize_t got = ::recv(descriptor, buffer.data(), room, 0);
    if (got > 0) {
      in_ = std::span(buffer).first(static_cast<std::size_t>(got));
      last = in_.size() < room;
    } else if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
      moved.ended = true;
      break;
    } else if (errno != EINTR) {
      moved.blocked = true;
      break;
    }
  }
  keep_rest();
  // OpenSSL has written its part of a handshake, or an alert that says why there is none.
  if (!push(descriptor)) moved.ended = true;
  return moved;
}

// What OpenSSL has not taken yet outlives the buffer that it came in.
void TlsSession::keep_rest() {
  std::vector<std::byte> rest(in_.begin(), in_.end());
  kept_ = std::move(rest);
  in_ = kept_;
}

Moved TlsSession::write(int descriptor, std::span<const std::byte> from) {
  Moved moved;
  while (moved.bytes < from.size()) {
    if (in_flight_ == 0) {
      ::ERR_clear_error();
      const std::span<const std::byte> piece =
          from.subspan(moved.bytes, std::min(from.size() - moved.bytes, kWriteBytes));
      const int result = ::SSL_write_ex(ssl_, piece.data(), piece.size(), &in_flight_);
      if (result != 1) {
        in_flight_ = 0;
        // During a handshake: it goes on when the other side has said something.
        moved.blocked = ::SSL_get_error(ssl_, result) == SSL_ERROR_WANT_READ;
        moved.ended = !push(descriptor) || !moved.blocked;
        break;
      }
    }
    if (!push(descriptor)) {
      moved.ended = true;
      break;
    }
    if (has_unsent()) {
      moved.blocked = true;
      break;
    }
    moved.bytes += std::exchange(in_flight_, 0);
  }
  return moved;
}

bool TlsSession::push(int descriptor) {
  while (has_unsent()) {
    const ssize_t sent = ::send(descriptor, out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    sent_ += static_cast<std::size_t>(sent);
  }
  out_.clear();
  sent_ = 0;
  if (out_.capacity() > kKeptBytes) out_ = {};
  return true;
}

void TlsSession::end_writing(int descriptor) {
  if (shaking_hands()) return;
  ::ERR_clear_error();
  ::SSL_shutdown(ssl_);
  push(descriptor);
}

}  // namespace tessera::http2

#include "http2/session_callbacks.h"

#include <exception>

#include "http2/connection.h"

namespace tessera::http2 {

struct SessionCallbacks {
  // Calls `body` of the connection; whatever it throws means that there is no memory.
  template <typename Body>
  static auto guarded(void* user, const Body& body)
      -> decltype(body(*static_cast<Connection*>(user))) {
    auto& connection = *static_cast<Connection*>(user);
    try {
      return body(connection);
    } catch (const std::exception&) {
      return connection.fail(CloseReason::kNoMemory);
    }
  }

  static int begin_headers(nghttp2_session*, const nghttp2_frame* frame, void* user) {
    return guarded(user, [&](Connection& c) { return c.on_begin_headers(*frame); });
  }

  static int header(nghttp2_session*, const nghttp2_frame*, nghttp2_rcbuf* name,
                    nghttp2_rcbuf* value, std::uint8_t, void* user) {
    const auto view = [](nghttp2_rcbuf* part) {
      const nghttp2_vec bytes = nghttp2_rcbuf_get_buf(part);
      return std::string_view(reinterpret_cast<const char*>(bytes.base), bytes.len);
    };
    return guarded(user, [&](Connection& c) { return c.on_header(view(name), view(value)); });
  }

  static int frame(nghttp2_session*, const nghttp2_frame* frame, void* user) {
    return guarded(user, [&](Connection& c) { return c.on_frame(*frame); });
  }

  static int invalid_frame(nghttp2_session*, const nghttp2_frame*, int, void* user) {
    return guarded(user, [&](Connection& c) {
      return c.resets_.take(c.context_.loop.now()) ? 0 : c.fail(CloseReason::kResets);
    });
  }

  static int data(nghttp2_session*, std::uint8_t, std::int32_t stream, const std::uint8_t* bytes,
                  std::size_t count, void* user) {
    return guarded(user, [&](Connection& c) {
      return c.on_data(stream, {reinterpret_cast<const std::byte*>(bytes), count});
    });
  }

  static int frame_sent(nghttp2_session*, const nghttp2_frame* frame, void* user) {
    return guarded(user, [&](Connection& c) { return c.on_frame_sent(*frame); });
  }

  static int stream_closed(nghttp2_session*, std::int32_t stream, std::uint32_t, void* user) {
    return guarded(user, [&](Connection& c) { return c.on_stream_closed(stream); });
  }

  static ssize_t answer(nghttp2_session*, std::int32_t, std::uint8_t* out, std::size_t size,
                        std::uint32_t* flags, nghttp2_data_source* source, void* user) {
    return guarded(user, [&](Connection& c) -> ssize_t {
      return c.take_answer(*static_cast<Call*>(source->ptr),
                           {reinterpret_cast<std::byte*>(out), size}, *flags);
    });
  }
};

const nghttp2_session_callbacks& server_callbacks() {
  static const CallbacksPointer made = [] {
    CallbacksPointer callbacks = make_callbacks();
    nghttp2_session_callbacks* const table = callbacks.get();
    using Table = SessionCallbacks;
    nghttp2_session_callbacks_set_on_begin_headers_callback(table, &Table::begin_headers);
    nghttp2_session_callbacks_set_on_header_callback2(table, &Table::header);
    nghttp2_session_callbacks_set_on_frame_recv_callback(table, &Table::frame);
    nghttp2_session_callbacks_set_on_invalid_frame_recv_callback(table, &Table::invalid_frame);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(table, &Table::data);
    nghttp2_session_callbacks_set_on_frame_send_callback(table, &Table::frame_sent);
    nghttp2_session_callbacks_set_on_stream_close_callback(table, &Table::stream_closed);
    return callbacks;
  }();
  return *made;
}

nghttp2_data_provider answer_source(Call& call) {
  nghttp2_data_provider provider{};
  provider.source.ptr = &call;
  provider.read_callback = &SessionCallbacks::answer;
  return provider;
}

}  // namespace tessera::http2

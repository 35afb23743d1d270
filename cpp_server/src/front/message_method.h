// A unary method whose messages are protobuf's and which is answered at once, on the loop's thread.
//
// Contract: `answer` is called on the loop's thread and does not block; what it refers to, and
// `limits` and `counters`, outlive the method. The memory of an answer is taken from `counters`
// until it has left. A message that cannot be parsed is INVALID_ARGUMENT. Compiled against
// protobuf.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <utility>

#include "common/text.h"
#include "http2/call.h"
#include "http2/limits.h"

namespace tessera {

// What the calls of the front share of the server that they come in by.
struct FrontContext {
  const http2::Limits& limits;
  http2::Counters& counters;
};

// Parses `bytes`; the status names the message where they are not one.
template <typename Message>
Status parse_message(std::span<const std::byte> bytes, Message& message) {
  if (message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return {};
  return Status::invalid(text("the message (", bytes.size(), " bytes) is not a valid ",
                              Message::descriptor()->name()));
}

template <typename Request, typename Response>
class MessageMethod final : public http2::Method {
 public:
  using Answer = std::function<Status(const Request& request, Response& response)>;

  MessageMethod(const FrontContext& context, Answer answer)
      : context_(context), answer_(std::move(answer)) {}

  http2::Call& begin(http2::EventLoop& loop) override { return *new OneCall(*this, loop); }

 private:
  class OneCall final : public http2::Call {
   public:
    OneCall(const MessageMethod& method, http2::EventLoop& its_loop)
        : Call(Kind::kUnary, its_loop), method_(method) {}

   private:
    void on_message(std::span<const std::byte> message) override {
      Request request;
      Response response;
      Status status = parse_message(message, request);
      if (status.ok()) status = method_.answer_(request, response);
      if (status.ok()) status = write(response);
      finish(status);
    }

    Status write(const Response& response) {
      const std::size_t bytes = response.ByteSizeLong();
      const FrontContext& context = method_.context_;
      if (!context.counters.take_bytes(static_cast<std::int64_t>(bytes),
                                       context.limits.max_buffered_bytes)) {
        context.counters.note_full_of_calls(loop().now());
        return {Code::kResourceExhausted, text("the server is full: there is no room for an answer "
                                               "of ",
                                               bytes, " bytes; try again later")};
      }
      taken_ = static_cast<std::int64_t>(bytes);
      response.SerializeToArray(begin_message(bytes), static_cast<int>(bytes));
      return {};
    }

    void on_end() override {
      const std::unique_ptr<OneCall> owner(this);
      method_.context_.counters.give_bytes(taken_);
    }

    const MessageMethod& method_;
    std::int64_t taken_ = 0;
  };

  const FrontContext context_;
  const Answer answer_;
};

}  // namespace tessera

// A unary method whose messages are protobuf's and which is answered at once, on the loop's thread.
//
// Contract: `answer` is called on the loop's thread and does not block; what it refers to outlives
// the method. Room for an answer is taken of what connections may hold, until it has left. A
// message that cannot be parsed is INVALID_ARGUMENT. Compiled against protobuf.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "common/text.h"
#include "http2/call.h"

namespace tessera {

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

  explicit MessageMethod(Answer answer) : answer_(std::move(answer)) {}

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
      Status status = take_room(bytes);
      if (!status.ok()) return status;
      response.SerializeToArray(begin_message(bytes), static_cast<int>(bytes));
      return {};
    }

    void on_end() override { const std::unique_ptr<OneCall> owner(this); }

    const MessageMethod& method_;
  };

  const Answer answer_;
};

}  // namespace tessera

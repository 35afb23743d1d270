// A unary method whose messages are protobuf's, whose answer is empty, and whose outcome another
// thread tells later.
//
// Contract: `begin` is called on the loop's thread and does not block; it leads to one call of
// `done`, from any thread, perhaps before it returns, and before the loop ends. What it refers to
// outlives the method. A message that cannot be parsed is INVALID_ARGUMENT. Compiled against
// protobuf.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "front/message_method.h"

namespace tessera {

template <typename Request>
class LaterMethod final : public http2::Method {
 public:
  using Done = std::function<void(const Status& outcome)>;
  using Begin = std::function<void(const Request& request, Done done)>;

  explicit LaterMethod(Begin begin) : begin_(std::move(begin)) {}

  http2::Call& begin(http2::EventLoop& loop) override { return *new OneCall(*this, loop); }

 private:
  class OneCall final : public http2::Call {
   public:
    OneCall(const LaterMethod& method, http2::EventLoop& its_loop)
        : Call(Kind::kUnary, its_loop), method_(method) {}

   private:
    void on_message(std::span<const std::byte> message) override {
      Request request;
      const Status status = parse_message(message, request);
      if (!status.ok()) {
        finish(status);
        return;
      }
      method_.begin_(request, [this](const Status& outcome) { end_with(outcome); });
    }

    void end_with(const Status& outcome) {
      Status status = outcome;
      try {
        if (status.ok()) begin_message(0);
      } catch (const std::bad_alloc&) {
        status = {Code::kResourceExhausted, "the server is out of memory; try again later"};
      }
      finish(status);
    }

    void on_end() override { const std::unique_ptr<OneCall> owner(this); }

    const LaterMethod& method_;
  };

  const Begin begin_;
};

}  // namespace tessera

#include "front/reflection_service.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>

#include <set>
#include <string>
#include <vector>

#include "health.pb.h"
#include "inference.pb.h"
#include "predictor.pb.h"
#include "reflection.pb.h"
#include "reflection_v1alpha.pb.h"

namespace tessera {
namespace {

namespace pb = google::protobuf;
using Request = grpc::reflection::v1::ServerReflectionRequest;
using Response = grpc::reflection::v1::ServerReflectionResponse;

// Files with services, which also are why the linker takes them.
std::vector<const pb::FileDescriptor*> served_files() {
  return {predictor::PredictionRequest::descriptor()->file(),
          inference::ModelInferRequest::descriptor()->file(),
          grpc::health::v1::HealthCheckRequest::descriptor()->file(),
          grpc::reflection::v1::ServerReflectionRequest::descriptor()->file(),
          grpc::reflection::v1alpha::ServerReflectionRequest::descriptor()->file()};
}

void list_services(Response& response) {
  for (const pb::FileDescriptor* file : served_files()) {
    for (int i = 0; i < file->service_count(); ++i) {
      response.mutable_list_services_response()->add_service()->set_name(
          file->service(i)->full_name());
    }
  }
}

// `file`, and what it imports that is not in `sent`.
void add_file(const pb::FileDescriptor& file, std::set<const pb::FileDescriptor*>& sent,
              Response& response) {
  if (!sent.insert(&file).second) return;
  pb::FileDescriptorProto described;
  file.CopyTo(&described);
  response.mutable_file_descriptor_response()->add_file_descriptor_proto(
      described.SerializeAsString());
  for (int i = 0; i < file.dependency_count(); ++i) {
    add_file(*file.dependency(i), sent, response);
  }
}

void answer_file(const pb::FileDescriptor* file, const std::string& asked, Response& response) {
  if (file != nullptr) {
    std::set<const pb::FileDescriptor*> sent;
    add_file(*file, sent, response);
    return;
  }
  response.mutable_error_response()->set_error_code(static_cast<int>(Code::kNotFound));
  response.mutable_error_response()->set_error_message("this server has no '" + asked + "'");
}

void answer_numbers(const std::string& type, Response& response) {
  const pb::DescriptorPool& pool = *pb::DescriptorPool::generated_pool();
  const pb::Descriptor* const message = pool.FindMessageTypeByName(type);
  if (message == nullptr) {
    answer_file(nullptr, type, response);
    return;
  }
  std::vector<const pb::FieldDescriptor*> extensions;
  pool.FindAllExtensions(message, &extensions);
  auto& numbers = *response.mutable_all_extension_numbers_response();
  numbers.set_base_type_name(type);
  for (const pb::FieldDescriptor* one : extensions) numbers.add_extension_number(one->number());
}

void answer(const Request& request, Response& response) {
  const pb::DescriptorPool& pool = *pb::DescriptorPool::generated_pool();
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  switch (request.message_request_case()) {
    case Request::kListServices: list_services(response); return;
    case Request::kFileByFilename:
      answer_file(pool.FindFileByName(request.file_by_filename()), request.file_by_filename(),
                  response);
      return;
    case Request::kFileContainingSymbol:
      answer_file(pool.FindFileContainingSymbol(request.file_containing_symbol()),
                  request.file_containing_symbol(), response);
      return;
    case Request::kFileContainingExtension: {
      const auto& asked = request.file_containing_extension();
      const pb::Descriptor* const type = pool.FindMessageTypeByName(asked.containing_type());
      const pb::FieldDescriptor* const found =
          type == nullptr ? nullptr : pool.FindExtensionByNumber(type, asked.extension_number());
      answer_file(found == nullptr ? nullptr : found->file(),
                  text(asked.containing_type(), " ", asked.extension_number()), response);
      return;
    }
    case Request::kAllExtensionNumbersOfType:
      answer_numbers(request.all_extension_numbers_of_type(), response);
      return;
    case Request::MESSAGE_REQUEST_NOT_SET: break;
  }
  response.mutable_error_response()->set_error_code(static_cast<int>(Code::kInvalidArgument));
  response.mutable_error_response()->set_error_message("message_request is not set");
}

class ReflectionMethod final : public http2::Method {
 public:
  http2::Call& begin(http2::EventLoop& loop) override;
  int open = 0;
};

class ReflectionCall final : public http2::Call {
 public:
  ReflectionCall(ReflectionMethod& method, http2::EventLoop& its_loop)
      : Call(Kind::kStreaming, its_loop), method_(method) {
    ++method_.open;
  }

 private:
  void on_message(std::span<const std::byte> message) override {
    if (ended_) return;
    Request request;
    Status status = parse_message(message, request);
    if (method_.open > kReflectionCalls) {
      status = {Code::kResourceExhausted, text("the server is full: it has ", kReflectionCalls,
                                               " reflection calls open; try again later")};
    } else if (unread_bytes() > kUnreadBytes) {
      status = {Code::kResourceExhausted, "the answers to this call are not read"};
    }
    if (!status.ok()) {
      ended_ = true;
      finish(status);
      return;
    }
    Response response;
    answer(request, response);
    const std::size_t bytes = response.ByteSizeLong();
    response.SerializeToArray(begin_message(bytes), static_cast<int>(bytes));
    flush();
  }

  void on_last_message() override {
    if (ended_) return;
    ended_ = true;
    finish({});
  }

  void on_refused(const Status&) override { ended_ = true; }

  void on_end() override {
    const std::unique_ptr<ReflectionCall> owner(this);
    --method_.open;
  }

  // Answers that may wait before further questions are refused.
  static constexpr std::size_t kUnreadBytes = 256 * 1024;

  ReflectionMethod& method_;
  bool ended_ = false;
};

http2::Call& ReflectionMethod::begin(http2::EventLoop& loop) {
  return *new ReflectionCall(*this, loop);
}

}  // namespace

void add_reflection_methods(http2::MethodTable& table) {
  for (const char* version : {"v1", "v1alpha"}) {
    table.add(text("/grpc.reflection.", version, ".ServerReflection/ServerReflectionInfo"),
              std::make_unique<ReflectionMethod>());
  }
}

}  // namespace tessera

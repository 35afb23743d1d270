// The calls about repositories by gRPC's own client and over HTTP, with a plain class in the
// repository's place.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/grpc_setup.h"
#include "common/mutex.h"
#include "common/text.h"
#include "front/grpc_front.h"
#include "front/repository_http.h"
#include "inference.grpc.pb.h"

namespace tessera {
namespace {

// Writes down what it is asked for, and answers from another thread with what `outcome` says.
class FakeControl final : public RepositoryControl {
 public:
  explicit FakeControl(ModelControl mode) : mode_(mode) {}

  std::vector<IndexEntry> index() const override {
    return {{.model = "a", .version = "3", .state = VersionState::kReady},
            {.model = "a",
             .version = "4",
             .state = VersionState::kUnavailable,
             .reason = "package a/4/model.pt: too short"},
            {.model = "b", .version = "1", .state = VersionState::kLoading, .progress = 0.5}};
  }
  std::vector<LoadCount> load_counts() const override { return {}; }
  ModelControl control() const override { return mode_; }

  void load(const std::string& model, const LoadRequest& request, Done done) override {
    const auto number = [](std::optional<Version> version) {
      return version ? std::to_string(*version) : std::string("-");
    };
    answer(text("load ", model, " ", number(request.version), " '", request.label, "' ",
                request.rollback ? number(request.rollback->version) : "no"),
           std::move(done));
  }
  void unload(const std::string& model, std::optional<Version> version, Done done) override {
    answer(text("unload ", model, " ", version ? std::to_string(*version) : "-"), std::move(done));
  }

  std::vector<std::string> asked() {
    const MutexLock lock(mutex_);
    return asked_;
  }

  // Returns once every answer has been given.
  void stop() {
    std::vector<std::jthread> left;
    const MutexLock lock(mutex_);
    left.swap(answering_);
  }

 private:
  void answer(std::string what, Done done) {
    const MutexLock lock(mutex_);
    const bool known = what.find(" nobody") == std::string::npos;
    asked_.push_back(std::move(what));
    answering_.emplace_back([known, done = std::move(done)] {
      done(known ? Status{} : Status{Code::kNotFound, "model_name 'nobody' is unknown"});
    });
  }

  const ModelControl mode_;
  Mutex mutex_;
  std::vector<std::string> asked_ TESSERA_GUARDED_BY(mutex_);
  std::vector<std::jthread> answering_ TESSERA_GUARDED_BY(mutex_);
};

struct Outcome {
  int code = 0;
  std::string message;
};

struct RepositoryCallsTest : testing::Test {
  explicit RepositoryCallsTest(RepositoryControl* its_control) : control(its_control) {
    prepare_grpc();
    const int port = front.start({.host = "127.0.0.1"}, /*threads=*/2);
    stub = inference::GRPCInferenceService::NewStub(grpc::CreateChannel(
        "127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials()));
  }
  RepositoryCallsTest() : RepositoryCallsTest(&explicit_control) {}

  ~RepositoryCallsTest() override {
    front.stop(std::chrono::seconds(1));
    explicit_control.stop();
    polling_control.stop();
    front.release();
  }

  using Set =
      std::function<void(google::protobuf::Map<std::string, inference::ModelRepositoryParameter>&)>;

  Outcome load(
      const std::string& model, const Set& set = [](auto&) {}) {
    inference::RepositoryModelLoadRequest request;
    request.set_model_name(model);
    set(*request.mutable_parameters());
    inference::RepositoryModelLoadResponse response;
    grpc::ClientContext of_call;
    const grpc::Status status = stub->RepositoryModelLoad(&of_call, request, &response);
    return {status.error_code(), status.error_message()};
  }

  Outcome unload(
      const std::string& model, const Set& set = [](auto&) {}) {
    inference::RepositoryModelUnloadRequest request;
    request.set_model_name(model);
    set(*request.mutable_parameters());
    inference::RepositoryModelUnloadResponse response;
    grpc::ClientContext of_call;
    const grpc::Status status = stub->RepositoryModelUnload(&of_call, request, &response);
    return {status.error_code(), status.error_message()};
  }

  HttpAnswer post(const std::string& path, const std::string& body = "") const {
    std::promise<HttpAnswer> answered;
    const ServerFacts facts{registry, clock, "1.2.3", [] { return false; }, control};
    HttpRequest request{.head = {}, .body = body, .peer = {}, .held = nullptr};
    request.head.path = "/v2/repository/" + path;
    answer_repository_post(facts, request,
                           [&](HttpAnswer answer) { answered.set_value(std::move(answer)); });
    return answered.get_future().get();
  }

  FakeControl explicit_control{ModelControl::kExplicit};
  FakeControl polling_control{ModelControl::kPoll};
  RepositoryControl* control;
  ServerConfig config;
  SteadyClock clock;
  Log log{LogLevel::kError, true};
  ModelMetrics unresolved{"", ""};
  Admission admission{[] {}};
  ByteBudget budget{1 << 20};
  Registry registry{{"m"}};
  PredictContext context{registry, unresolved, admission, budget, clock, log};
  http2::Counters counters;
  GrpcFront front{context, {registry, clock, "1.2.3", [] { return false; }, control}, counters};
  std::unique_ptr<inference::GRPCInferenceService::Stub> stub;
};

TEST_F(RepositoryCallsTest, LoadAndUnloadAnswerWhenTheOutcomeIsKnown) {
  EXPECT_EQ(load("a").code, grpc::StatusCode::OK);
  EXPECT_EQ(load("a",
                 [](auto& with) {
                   with["version"].set_int64_param(4);
                   with["label"].set_string_param("canary");
                 })
                .code,
            grpc::StatusCode::OK);
  EXPECT_EQ(load("a", [](auto& with) { with["version"].set_string_param("4"); }).code, 0);
  EXPECT_EQ(load("a", [](auto& with) { with["rollback"].set_string_param("previous"); }).code, 0);
  EXPECT_EQ(load("a", [](auto& with) { with["rollback"].set_int64_param(3); }).code, 0);
  EXPECT_EQ(unload("a", [](auto& with) { with["unload_dependents"].set_bool_param(true); }).code,
            0);
  EXPECT_EQ(unload("a", [](auto& with) { with["version"].set_string_param("3"); }).code, 0);
  const Outcome unknown = unload("nobody");
  EXPECT_EQ(unknown.code, grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(unknown.message, "model_name 'nobody' is unknown");
  EXPECT_EQ(explicit_control.asked(),
            (std::vector<std::string>{"load a - '' no", "load a 4 'canary' no", "load a 4 '' no",
                                      "load a - '' -", "load a - '' 3", "unload a -", "unload a 3",
                                      "unload nobody -"}));
}

TEST_F(RepositoryCallsTest, WrongParametersAreRefusedByName) {
  const std::pair<Set, std::string> cases[] = {
      {[](auto& with) { with["verson"].set_int64_param(1); },
       "parameter 'verson' is unknown, expected 'version', 'label', 'rollback'; did you mean "
       "'version'?"},
      {[](auto& with) { with["version"].set_int64_param(0); },
       "parameter 'version' is 0, expected a version, a positive whole number"},
      {[](auto& with) { with["version"].set_string_param("03"); },
       "parameter 'version' is '03', expected a version, a positive whole number"},
      {[](auto& with) { with["version"].set_bool_param(true); },
       "parameter 'version' is neither text nor a whole number, expected a version, a positive "
       "whole number"},
      {[](auto& with) { with["label"].set_string_param("7"); },
       "parameter 'label' is '7', expected a letter, then letters, digits, '_' or '-', at most 64 "
       "of them"},
      {[](auto& with) { with["rollback"].set_string_param("last"); },
       "parameter 'rollback' is 'last', expected 'previous', a version, "
       "or a state such as '3.42'"}};
  for (const auto& [set, message] : cases) {
    const Outcome outcome = load("a", set);
    EXPECT_EQ(outcome.code, grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(outcome.message, message);
  }
  EXPECT_EQ(unload("a", [](auto& with) { with["label"].set_string_param("x"); }).message,
            "parameter 'label' is unknown, expected 'version'");
  EXPECT_TRUE(explicit_control.asked().empty());
}

TEST_F(RepositoryCallsTest, IndexNamesEveryVersion) {
  const auto rows = [&](bool ready) {
    inference::RepositoryIndexRequest request;
    request.set_ready(ready);
    inference::RepositoryIndexResponse response;
    grpc::ClientContext of_call;
    EXPECT_TRUE(stub->RepositoryIndex(&of_call, request, &response).ok());
    std::vector<std::string> found;
    for (const auto& row : response.models()) {
      found.push_back(text(row.name(), " ", row.version(), " ", row.state(), " ", row.reason()));
    }
    return found;
  };
  EXPECT_EQ(rows(false),
            (std::vector<std::string>{
                "a 3 READY ", "a 4 UNAVAILABLE package a/4/model.pt: too short", "b 1 LOADING "}));
  EXPECT_EQ(rows(true), (std::vector<std::string>{"a 3 READY "}));
}

TEST_F(RepositoryCallsTest, HttpIsTheSame) {
  EXPECT_EQ(post("index", R"({"ready": true})").body,
            R"([{"name":"a","state":"READY","version":"3"}])"
            "\n");
  EXPECT_EQ(post("models/a/load").status, 200);
  EXPECT_EQ(post("models/a/load", R"({"parameters": {"version": 4, "label": "b"}})").status, 200);
  EXPECT_EQ(post("models/a/unload", R"({"parameters": {"unload_dependents": false}})").status, 200);
  EXPECT_EQ(explicit_control.asked(),
            (std::vector<std::string>{"load a - '' no", "load a 4 'b' no", "unload a -"}));
  const HttpAnswer unknown = post("models/nobody/load");
  EXPECT_EQ(unknown.status, 404);
  EXPECT_EQ(unknown.content_type, "application/json");
  EXPECT_EQ(unknown.body, "{\"error\":\"model_name 'nobody' is unknown\"}\n");
}

TEST_F(RepositoryCallsTest, HttpRefusesWhatItCannotRead) {
  const std::string deep = std::string(30'000, '[');
  const std::pair<std::string, std::string> cases[] = {
      {"models/a/load", "[]"},
      {"models/a/load", "{"},
      {"models/a/load", R"({"a": )" + deep},
      {"models/a/load", R"({"parameters": 3})"},
      {"models/a/load", R"({"parameters": {"version": [1]}})"},
      {"models/a/load", R"({"parameters": {"version": 18446744073709551615}})"},
      {"models/a/load", R"({"parameters": {"version": 1.0}})"},
      {"models/a/load", R"({"version": 1})"},
      {"models/a/load", R"({"parameters": {"version": 1, "version": 2}})"},
      {"models/a/load", R"({"parameters": {}, "parameters": {}})"},
      {"models/a/load", R"({"parameters": {"version": 1e999}})"},
      {"index", R"({"ready": 1})"}};
  for (const auto& [path, body] : cases) {
    const HttpAnswer answer = post(path, body);
    EXPECT_EQ(answer.status, 400) << body.substr(0, 40);
    EXPECT_TRUE(answer.body.starts_with("{\"error\":\"")) << answer.body;
  }
  for (const char* path : {"", "models/a", "models//load", "models/a/drop", "models/a/b/load"}) {
    EXPECT_EQ(post(path).status, 404) << path;
  }
  EXPECT_TRUE(explicit_control.asked().empty());
}

struct PollingCallsTest : RepositoryCallsTest {
  PollingCallsTest() : RepositoryCallsTest(&polling_control) {}
};

TEST_F(PollingCallsTest, MayNotChangeAnything) {
  for (const Outcome& outcome : {load("a"), unload("a")}) {
    EXPECT_EQ(outcome.code, grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_EQ(outcome.message,
              "--model-control is poll; calls may load and unload with --model-control explicit");
  }
  EXPECT_EQ(post("models/a/load").status, 400);
  EXPECT_EQ(post("index").status, 200);
  EXPECT_TRUE(polling_control.asked().empty());
}

struct NoRepositoryTest : RepositoryCallsTest {
  NoRepositoryTest() : RepositoryCallsTest(nullptr) {}
};

TEST_F(NoRepositoryTest, CallsAreRefused) {
  EXPECT_EQ(load("m").code, grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(post("models/m/unload").status, 400);
  EXPECT_EQ(post("index").body, R"([{"name":"m","state":"LOADING","version":""}])"
                                "\n");
}

}  // namespace
}  // namespace tessera

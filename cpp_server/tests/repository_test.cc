// What a repository's folder, serving.yaml and control.json say, and what follows from them.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/flags.h"
#include "common/nearest.h"
#include "repository/control_record.h"
#include "repository/folder.h"
#include "repository/serving_config.h"
#include "repository/small_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class RepositoryTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "tessera_repository_XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& content = "x") const {
    fs::create_directories(fs::path(root_ + "/" + path).parent_path());
    std::ofstream(root_ + "/" + path) << content;
  }

  std::string root_;
};

// What the function says of what a user got wrong; empty: nothing.
template <typename Function>
std::string error_of(const Function& function) {
  try {
    function();
    return {};
  } catch (const UsageError& error) {
    return error.what();
  }
}

TEST(Names, TheNearestIsOneThatIsNear) {
  EXPECT_EQ(nearest("lables", {"versions", "labels"}), "labels");
  EXPECT_EQ(nearest("max_batch_sample", {"max_batch_samples", "max_batch_ids"}),
            "max_batch_samples");
  EXPECT_EQ(nearest("replicas", {"versions", "labels"}), "");
  EXPECT_EQ(nearest(std::string(60'000, 'a'), {"versions"}), "");
}

TEST_F(RepositoryTest, FindsModelsAndVersions) {
  write("ranker/3/model.pt", "abc");
  write("ranker/12/model.pt");
  write("ranker/5/other");  // its file may be on its way
  write("ranker/.4-partial/model.pt");
  write("ranker/serving.yaml", "");
  write("empty/serving.yaml", "");
  write(".trash/1/model.pt");
  write("README.md");
  const RepositoryFolder found = scan_repository(root_);
  EXPECT_EQ(found.remarks, std::vector<std::string>{});
  ASSERT_EQ(found.models.size(), 2U);
  EXPECT_EQ(found.models[0].name, "empty");
  EXPECT_TRUE(found.models[0].versions.empty());
  const ModelFolder& ranker = found.models[1];
  EXPECT_EQ(ranker.name, "ranker");
  EXPECT_TRUE(ranker.remarks.empty());
  ASSERT_EQ(ranker.versions.size(), 2U);
  EXPECT_EQ(ranker.versions.at(3).bytes, 3);
  EXPECT_EQ(ranker.package_path(12), root_ + "/ranker/12/model.pt");
}

TEST_F(RepositoryTest, SaysWhichNamesCannotBeUsed) {
  write("ranker/03/model.pt");
  fs::create_directories(root_ + "/ranker/4/model.pt");
  write("ran ker/1/model.pt");
  const RepositoryFolder found = scan_repository(root_);
  ASSERT_EQ(found.remarks.size(), 1U);
  EXPECT_NE(found.remarks[0].find("'ran ker' is not a model's name"), std::string::npos);
  ASSERT_EQ(found.models.size(), 1U);
  ASSERT_EQ(found.models[0].remarks.size(), 2U);
  EXPECT_NE(found.models[0].remarks[0].find("'03' is not a version"), std::string::npos);
  EXPECT_EQ(found.models[0].remarks[1], root_ + "/ranker/4/model.pt: is not a regular file");
  EXPECT_TRUE(found.models[0].versions.empty());
}

TEST_F(RepositoryTest, AFolderThatIsNotThereIsTold) {
  const RepositoryFolder found = scan_repository(root_ + "/none");
  EXPECT_TRUE(found.models.empty());
  ASSERT_EQ(found.remarks.size(), 1U);
  EXPECT_NE(found.remarks[0].find("cannot be read"), std::string::npos);
}

TEST_F(RepositoryTest, AReplacedFileHasAnotherFingerprint) {
  write("m/1/model.pt", "aaaa");
  const Fingerprint before = scan_model(root_ + "/m", "m").versions.at(1);
  EXPECT_EQ(scan_model(root_ + "/m", "m").versions.at(1), before);
  write("m/1/next", "bbbb");
  fs::rename(root_ + "/m/1/next", root_ + "/m/1/model.pt");
  EXPECT_NE(scan_model(root_ + "/m", "m").versions.at(1), before);
}

TEST(ServingConfigTest, ReadsEveryKey) {
  const ServingConfig config = parse_serving_config(R"(
versions: [7, 3]
labels: {stable: 3, canary: 7}
traffic: {stable: 99.5, canary: 0.5}
shadow: {version: 7, share: 10}
batching: {max_batch_samples: 256, max_delay_us: 0, max_queue_requests: 9}
)",
                                                    "f");
  EXPECT_EQ(config.versions,
            (VersionChoice{.kind = VersionChoice::Kind::kList, .latest = 1, .list = {3, 7}}));
  EXPECT_EQ(config.labels, (Labels{{"stable", 3}, {"canary", 7}}));
  EXPECT_EQ(config.traffic, (Shares{{"stable", 99.5}, {"canary", 0.5}}));
  EXPECT_EQ(config.shadow, (ShadowConfig{.version = 7, .percent = 10}));
  BatchLimits batches;
  batches.max_delay = std::chrono::seconds(1);
  QueueLimits queue;
  const auto samples = queue.max_samples;
  config.batching.apply(batches, queue);
  EXPECT_EQ(batches.max_samples, 256);
  EXPECT_EQ(batches.max_ids, BatchLimits{}.max_ids);
  EXPECT_EQ(batches.max_delay, Duration::zero());
  EXPECT_EQ(queue.max_requests, 9);
  EXPECT_EQ(queue.max_samples, samples);
}

TEST(ServingConfigTest, WhatIsMissingHasItsDefault) {
  for (const char* empty : {"", "# nothing\n", "{}", "---\n", "versions: {latest: 1}"}) {
    EXPECT_EQ(parse_serving_config(empty, "f"), ServingConfig{}) << empty;
  }
  EXPECT_EQ(parse_serving_config("versions: all", "f").versions.kind, VersionChoice::Kind::kAll);
  EXPECT_EQ(parse_serving_config("shadow: {version: 4}", "f").shadow->percent, 100);
}

TEST(ServingConfigTest, SaysWhatIsWrong) {
  const std::pair<const char*, const char*> cases[] = {
      {"lables: {a: 1}",
       "f: key is 'lables'; give one of versions, labels, traffic, shadow, batching; did you mean "
       "labels?"},
      {"- 1", "f: expected keys such as 'versions: {latest: 2}' at the top of the file"},
      {"versions: {latest: 0}", "f: versions.latest is 0; give how many, a positive whole number"},
      {"versions: {latest: '2'}",
       "f: versions.latest is '2'; give how many, a positive whole number"},
      {"versions: 3", "f: versions is 3; give {latest: N}, all, or a list such as [3, 7]"},
      {"versions: {last: 3}",
       "f: versions is a mapping; give {latest: N}, all, or a list such as [3, 7]"},
      {"versions: []", "f: versions is a list; give at least one version, and each once"},
      {"versions: [3, 3]", "f: versions is a list; give at least one version, and each once"},
      {"versions: [03]", "f: versions: a version is 03; give a version, a positive whole number"},
      {"labels: 3", "f: labels is 3; give a mapping such as {stable: 3}"},
      {"labels: {3: 3}",
       "f: labels: a label is '3'; give a letter, then letters, digits, '_' or '-', at most 64 of "
       "them"},
      {"labels: {stable: x}", "f: labels.stable is 'x'; give a version, a positive whole number"},
      {"labels: {stable: }", "f: labels.stable is empty; give a version, a positive whole number"},
      {"traffic: {a: 50, b: 49}", "f: traffic is 99 percent in sum; let its shares be 100 in sum"},
      {"traffic: {a: -1, b: 101}", "f: traffic.a is -1; give a percentage from 0 to 100"},
      {"traffic: {a: .nan}", "f: traffic.a is '.nan'; give a percentage from 0 to 100"},
      {"traffic: {a: nan}", "f: traffic.a is 'nan'; give a percentage from 0 to 100"},
      {"shadow: {share: 10}",
       "f: shadow.version is empty; give a version, a positive whole number"},
      {"shadow: {version: 1, share: 0}",
       "f: shadow.share is 0; give a percentage above 0 and up to 100"},
      {"shadow: {versoin: 1}",
       "f: shadow: key is 'versoin'; give one of version, share; did you mean version?"},
      {"batching: {max_delay_us: 60000001}",
       "f: batching.max_delay_us is 60000001; give 60000000 at most"},
      {"batching: {max_batch_samples: 1.5}",
       "f: batching.max_batch_samples is 1.5; give a whole number of at least 1"},
      {"batching: {max_batch_samples: 010}",
       "f: batching.max_batch_samples is 010; give a whole number of at least 1"},
      {"labels: {a: 1}\nlabels: {b: 1}", "f: labels is given twice (line 2); keep one of the two"},
      {"labels: {a: &x 1}",
       "f: not valid here (line 1, column 13): an anchor is not allowed; write the value alone"},
      {"labels: {a: *x}",
       "f: not valid YAML: line 1, column 13: the referenced anchor is not defined"},
      {"labels: {a: !!int 1}",
       "f: not valid here (line 1, column 13): a tag is not allowed; write the value alone"},
      {"labels: {no: 1}",
       "f: not valid here (line 1, column 10): the key no means true or false in YAML; put it in "
       "quotes"},
      {"versions: all\n---\nversions: all", "f: has more than one YAML document; keep one"},
      {"\xff", "f: not UTF-8 text; save it as such"},
  };
  for (const auto& [yaml, error] : cases) {
    EXPECT_EQ(error_of([&text = yaml] { parse_serving_config(text, "f"); }), error) << yaml;
  }
}

TEST(ServingConfigTest, AnyTextIsReadOrRefused) {
  const std::string hostile[] = {std::string(60'000, '['),
                                 std::string(30'000, '{'),
                                 std::string(20'000, '-'),
                                 "a: [",
                                 "{a",
                                 "? [a]\n: b",
                                 "? ? ? ? ? a",
                                 "a: |\n\tb",
                                 "%YAML 3.0\n---\n",
                                 "'",
                                 "\"\\x",
                                 [] {
                                   std::string dashes;
                                   for (int i = 0; i < 10'000; ++i) dashes += "- ";
                                   return dashes;
                                 }()};
  for (const std::string& yaml : hostile) {
    EXPECT_NE(error_of([&] { parse_serving_config(yaml, "f"); }), "") << yaml.substr(0, 20);
  }
}

TEST_F(RepositoryTest, ServingYamlIsBounded) {
  EXPECT_EQ(read_serving_config(root_), ServingConfig{});
  write("serving.yaml", "versions: all\n#" + std::string(kMaxServingConfigBytes, 'x'));
  EXPECT_EQ(error_of([&] { read_serving_config(root_); }),
            root_ + "/serving.yaml: has more than 65536 bytes, the limit; make it shorter");
  fs::remove(root_ + "/serving.yaml");
  ASSERT_EQ(::mkfifo((root_ + "/serving.yaml").c_str(), 0600), 0);
  EXPECT_EQ(error_of([&] { read_serving_config(root_); }),
            root_ + "/serving.yaml: is not a regular file; put one in its place or remove it");
}

TEST_F(RepositoryTest, ARecordComesBackAsItWasWritten) {
  EXPECT_EQ(read_control_record(root_), ControlRecord{});
  const ControlRecord record{
      .unloaded = true, .add = {5, 7}, .remove = {4}, .labels = {{"stable", 3}, {"canary", 5}}};
  write_control_record(root_, {});
  write_control_record(root_, record);
  EXPECT_EQ(read_control_record(root_), record);
  EXPECT_EQ(
      *read_small_file(root_ + "/control.json", 1'000),
      R"({"format":1,"unloaded":true,"add":[5,7],"remove":[4],"labels":{"canary":5,"stable":3}})"
      "\n");
  // Nothing else is left behind.
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator{}), 1);
}

TEST_F(RepositoryTest, ARecordThatCannotBeWrittenChangesNothing) {
  const std::string folder = root_ + "/none";
  EXPECT_NE(error_of([&] { write_control_record(folder, {}); }).find("cannot be written"),
            std::string::npos);
  ControlRecord large;
  for (Version version = 1; version < 20'000; ++version) large.add.insert(version);
  write_control_record(root_, {});
  EXPECT_NE(error_of([&] { write_control_record(root_, large); }).find("the limit is 65536"),
            std::string::npos);
  EXPECT_EQ(read_control_record(root_), ControlRecord{});
}

TEST(ControlRecordTest, SaysWhatIsWrong) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "f: is not JSON: at byte 1 something else is expected; write it anew or remove it"},
      {"[]", "f: is not a JSON object; write it anew or remove it"},
      {R"({"format": 2})", "f: format is 2; this server reads 1"},
      {R"({"format": true})", "f: format is true; this server reads 1"},
      {R"({"unloaded": 1})", "f: unloaded is 1; give true or false"},
      {R"({"add": 5})", "f: add is 5; give a list of versions"},
      {R"({"add": [5, 0]})", "f: add has 0; give versions, positive whole numbers"},
      {R"({"add": [1.0]})", "f: add has 1.0; give versions, positive whole numbers"},
      {R"({"add": [18446744073709551615]})",
       "f: add has 18446744073709551615; give versions, positive whole numbers"},
      {R"({"add": [3], "remove": [3]})", "f: add and remove both have 3; leave it in one of them"},
      {R"({"add": [3], "add": [4]})",
       "f: is not JSON: a key is there twice: \"add\"; write it anew or remove it"},
      {R"({"add": [1e999]})",
       "f: is not JSON: a number is larger than a double may be; write it anew or remove it"},
      {R"({"labels": {"1": 3}})",
       "f: labels has \"1\"; give a letter, then letters, digits, '_' or '-', at most 64 of them"},
      {R"({"labels": {"a": "3"}})",
       "f: labels.a is \"3\"; give a version, a positive whole number"},
      {R"({"laels": {}})",
       "f: key is \"laels\"; give one of format, unloaded, add, remove, labels"},
      {R"({"add": [[[[1]]]]})",
       "f: is not JSON: it is nested more than 3 deep; write it anew or remove it"},
  };
  for (const auto& [json, error] : cases) {
    EXPECT_EQ(error_of([&text = json] { parse_control_record(text, "f"); }), error) << json;
  }
  EXPECT_NE(error_of([] { parse_control_record(std::string(60'000, '['), "f"); }), "");
  EXPECT_EQ(parse_control_record("{}", "f"), ControlRecord{});
}

}  // namespace
}  // namespace tessera

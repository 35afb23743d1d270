// The package file: archive, hashes, manifest, golden answers' container.
#include <gtest/gtest.h>

#include <cstdio>
#include <random>

#include "package/manifest.h"
#include "package/package_error.h"
#include "package/records.h"
#include "package/safetensors.h"
#include "package/sha256.h"
#include "package/verify.h"
#include "support.h"
#include "zip_writer.h"

namespace tessera {
namespace {

using test::Random;
using test::ZipEntry;

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span(text));
}

struct PackageTest : testing::Test {
  ~PackageTest() override { std::remove(path.c_str()); }

  std::string write(const std::string& content) { return test::write_file(path, content); }

  // Why the archive is refused; empty when it is not.
  std::string refusal(const std::string& content) {
    write(content);
    try {
      const PackageFile file(path);
      const Records records(file);
      for (const auto& [name, record] : records.all()) records.read(name, 1 << 20);
    } catch (const PackageError& error) {
      return std::string(error.what()).substr(("package " + path + ": ").size());
    }
    return "";
  }

  const std::string path = testing::TempDir() + "tessera_package_test_" +
                           testing::UnitTest::GetInstance()->current_test_info()->name();
};

const std::vector<ZipEntry> kTwo = {{"m/data.pkl", "weights"},
                                    {"m/code/a.py", std::string(70'000, 'x'), true}};

TEST_F(PackageTest, ReadsStoredAndDeflatedRecords) {
  write(test::zip(kTwo));
  const PackageFile file(path);
  const Records records(file);
  ASSERT_EQ(records.all().size(), 2u);
  EXPECT_EQ(text_of(records.read("data.pkl", 100)), "weights");
  EXPECT_EQ(text_of(records.read("code/a.py", 100'000)), std::string(70'000, 'x'));
  EXPECT_THROW(records.read("code/a.py", 69'999), PackageError);
  EXPECT_THROW(records.read("nothing", 100), PackageError);
}

TEST_F(PackageTest, RefusesWhatTwoReadersCouldReadDifferently) {
  const std::string good = test::zip(kTwo);
  EXPECT_EQ(refusal(good), "");
  EXPECT_EQ(refusal(""), "is damaged, cut short or no package at all (too short)");
  EXPECT_EQ(refusal(good + "more"),
            "is damaged, cut short or no package at all (the archive's end record is not at the "
            "file's end)");
  EXPECT_EQ(refusal(test::zip(kTwo, "before")),
            "the archive does not begin at the file's first byte");
  EXPECT_EQ(refusal(test::zip({{"m/a", "1"}, {"m/a", "2"}})), "record 'a' is there twice");
  EXPECT_EQ(refusal(test::zip({{"m/a", "1"}, {"n/b", "2"}})),
            "record 'n/b' has a name that no package uses");
  for (const char* name : {"m/../a", "/a", "m//a", "m/a/", "m/./a", "m\\a", "a"}) {
    EXPECT_EQ(refusal(test::zip({{"m/first", "1"}, {name, "2"}})),
              std::string("record '") + name + "' has a name that no package uses");
  }
  EXPECT_EQ(refusal(test::zip({{"m/a", "1", false, "m/b"}})),
            "record 'm/a' is damaged: its local header contradicts the archive's directory");
  EXPECT_EQ(refusal(test::zip({{"m/a", "1", false, "", 1}})),
            "record 'm/a' is encrypted or compressed in a way that no package uses");
}

TEST_F(PackageTest, EveryTruncationAndAnyByteFlipIsRefusedOrReadsTheSame) {
  const std::string good = test::zip(kTwo);
  for (std::size_t size = 0; size < good.size(); ++size) {
    ASSERT_NE(refusal(good.substr(0, size)), "") << size;
  }
  Random random(1);
  for (int i = 0; i < 2'000; ++i) {  // must not crash or read past anything; ASan looks on
    std::string bad = good;
    bad[random() % bad.size()] = static_cast<char>(random());
    refusal(bad);
  }
}

TEST_F(PackageTest, SaysWhatAPathIs) {
  EXPECT_THROW(PackageFile("/nowhere/model.pt"), PackageError);
  try {
    PackageFile folder(testing::TempDir());
    FAIL() << "a folder was opened";
  } catch (const PackageError& error) {
    EXPECT_NE(std::string(error.what()).find("is not a file"), std::string::npos);
  }
}

TEST_F(PackageTest, NoticesThatItsFileChanged) {
  write(test::zip(kTwo));
  const PackageFile file(path);
  file.check_unchanged();
  write("something else");
  EXPECT_THROW(file.check_unchanged(), PackageError);
}

TEST(Sha256Test, GivesThePublishedDigests) {  // FIPS 180-2, appendix B
  Sha256 empty;
  EXPECT_EQ(empty.hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  Sha256 pieces;
  pieces.update(as_bytes("a"));
  pieces.update(as_bytes("bc"));
  EXPECT_EQ(pieces.hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

std::string digest(const std::string& content) {
  Sha256 sha;
  sha.update(as_bytes(content));
  return sha.hex();
}

TEST_F(PackageTest, ComparesEveryRecordWithTheManifest) {
  write(test::zip(kTwo));
  const PackageFile file(path);
  const Records records(file);
  Manifest manifest;
  manifest.records["data.pkl"] = {digest("weights"), 7};
  manifest.records["code/a.py"] = {digest(std::string(70'000, 'x')), 70'000};
  EXPECT_EQ(verify_records(records, manifest), digest(test::zip(kTwo)));

  const auto why = [&](const Manifest& other) {
    try {
      verify_records(records, other);
    } catch (const PackageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  Manifest changed = manifest;
  changed.records["data.pkl"] = {digest("Weights"), 7};
  EXPECT_NE(why(changed).find("record 'data.pkl' was changed"), std::string::npos);
  Manifest missing = manifest;
  missing.records["more"] = {digest(""), 0};
  EXPECT_NE(why(missing).find("records are missing: more"), std::string::npos);
  Manifest extra = manifest;
  extra.records.erase("data.pkl");
  EXPECT_NE(why(extra).find("not listed in the manifest: data.pkl"), std::string::npos);
}

const char* const kManifest = R"({
  "format_version": 1, "name": "ranker", "version": "3", "created": "2026-01-01T00:00:00Z",
  "versions": {"tessera": "0.1", "torch": "2.13.0+cpu", "fbgemm": "1.8.0",
               "torch_min": "2.11", "torch_below": "2.14"},
  "backend": "fbgemm", "operator_libraries": ["fbgemm_gpu_tbe_inference"],
  "schema": {"dense_features": ["I1"], "dense_missing": "nan", "dense_transform": "log",
             "features": [{"name": "C1", "group": "id_list", "table": "t", "rows": 10, "dim": 4,
                           "pooling": "mean", "hashing": "none", "out_of_range": "clamp"}],
             "outputs": [{"name": "default", "width": 1}]},
  "dtype": "int8", "tables": [{"name": "t", "bytes": 80}], "bytes_fp32": 160,
  "bytes_packaged": 100, "plan": {"num_shards": 1, "placements": []}, "device": "cpu",
  "source": {}, "training_metrics": {}, "evaluation": null,
  "golden": {"samples": 4, "atol": 1e-6, "rtol": 1e-5},
  "records": {"data.pkl": {"sha256": "ab", "bytes": 7}}})";

std::string changed(const std::string& from, const std::string& to) {
  std::string json = kManifest;
  const auto at = json.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return json.replace(at, from.size(), to);
}

std::string manifest_refusal(const std::string& json) {
  try {
    parse_manifest(as_bytes(json));
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(ManifestTest, ReadsWhatAServerNeeds) {
  const Manifest manifest = parse_manifest(as_bytes(kManifest));
  EXPECT_EQ(manifest.name, "ranker");
  EXPECT_EQ(manifest.torch_below, MajorMinor(2, 14));
  EXPECT_EQ(manifest.table_bytes, 80u);
  EXPECT_EQ(manifest.golden_rtol, 1e-5);
  EXPECT_EQ(manifest.records.at("data.pkl").bytes, 7u);
  ASSERT_EQ(manifest.schema.features.size(), 1u);
  EXPECT_EQ(manifest.schema.features[0].out_of_range, OutOfRange::kClamp);
  EXPECT_TRUE(manifest.schema.dense_may_be_missing);
}

TEST(ManifestTest, IsStrict) {
  EXPECT_EQ(manifest_refusal("{"), "the manifest is not JSON");
  EXPECT_EQ(manifest_refusal(changed("\"format_version\": 1", "\"format_version\": 2")),
            "the package's format_version is 2, this server reads 1; package the model again, or "
            "serve it with the tessera that wrote it");
  EXPECT_EQ(manifest_refusal("[]").substr(0, 42), "the package's format_version is missing, t");
  EXPECT_EQ(manifest_refusal(changed("\"backend\"", "\"back_end\"")),
            "manifest: unknown key 'back_end'");
  EXPECT_EQ(manifest_refusal(changed("\"rows\": 10, ", "")), "feature: missing key 'rows'");
  EXPECT_EQ(manifest_refusal(changed("\"rows\": 10", "\"rows\": 0")),
            "manifest.rows: is 0, must be >= 1");
  EXPECT_EQ(manifest_refusal(changed("\"rows\": 10", "\"rows\": true")),
            "manifest.rows: expected an integer");
  EXPECT_EQ(manifest_refusal(changed("\"clamp\"", "\"wrap\"")),
            "manifest.out_of_range: 'wrap' is unknown");
  EXPECT_EQ(manifest_refusal(changed("\"2.14\"", "\"two\"")), "'two' is no torch version");
}

std::string safetensors(const std::string& header, const std::string& data) {
  std::string out;
  test::put(out, header.size(), 8);
  return out + header + data;
}

TEST(SafetensorsTest, ReadsTensors) {
  const std::string file = safetensors(
      R"({"__metadata__":{"a":"b"},"x":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},)"
      R"("none":{"dtype":"F32","shape":[0,3],"data_offsets":[8,8]}})",
      "12345678");
  const auto tensors = read_safetensors(as_bytes(file));
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors.at("x").bytes.size(), 8u);
  EXPECT_EQ(tensors.at("none").shape, (std::vector<std::int64_t>{0, 3}));
}

TEST(SafetensorsTest, RefusesWhatDoesNotFit) {
  const char* const headers[] = {
      R"({"x":{"dtype":"I32","shape":[3],"data_offsets":[0,8]}})",
      R"({"x":{"dtype":"I32","shape":[2],"data_offsets":[4,12]}})",
      R"({"x":{"dtype":"I32","shape":[2],"data_offsets":[8,0]}})",
      R"({"x":{"dtype":"I32","shape":[-2],"data_offsets":[0,8]}})",
      R"({"x":{"dtype":"I32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})",
      R"({"x":{"dtype":"F16","shape":[4],"data_offsets":[0,8]}})",
      R"({"x":{"dtype":"I32","shape":[2]}})",
      R"({"x")",
  };
  for (const char* header : headers) {
    const std::string file = safetensors(header, "12345678");
    EXPECT_THROW(read_safetensors(as_bytes(file)), std::invalid_argument) << header;
  }
  std::string too_long = safetensors("{}", "");
  too_long[0] = 100;
  EXPECT_THROW(read_safetensors(as_bytes(too_long)), std::invalid_argument);
}

}  // namespace
}  // namespace tessera

// The package file: archive, hashes, manifest, golden answers' container.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <map>
#include <random>
#include <stdexcept>
#include <stop_token>
#include <utility>

#include "common/flags.h"
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

using test::as_bytes;
using test::Random;
using test::text_of;
using test::ZipEntry;

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
                           std::to_string(::getpid()) + "_" +
                           testing::UnitTest::GetInstance()->current_test_info()->name();
};

const char* const kManifestName = "model/extra/tessera/manifest.json";

// Two records and a manifest's place.
const std::vector<ZipEntry> kTwo = {{"model/code/a.py", std::string(700, 'x')},
                                    {"model/data.pkl", "weights"},
                                    {kManifestName, "{}"}};

TEST_F(PackageTest, ReadsRecords) {
  write(test::zip(kTwo));
  const PackageFile file(path);
  const Records records(file);
  ASSERT_EQ(records.all().size(), 3u);
  EXPECT_EQ(text_of(records.read("data.pkl", 100)), "weights");
  EXPECT_EQ(text_of(records.read("code/a.py", 1'000)), std::string(700, 'x'));
  EXPECT_EQ(records.all().at("code/a.py").offset % 64, 0u);
  EXPECT_THROW(records.read("code/a.py", 699), PackageError);
  EXPECT_THROW(records.read("nothing", 100), PackageError);
}

// The refusal's part between the brackets.
std::string reason(const std::string& refusal) {
  const auto begin = refusal.find(" (");
  const auto end = refusal.find("); if an older Tessera wrote it");
  if (begin == std::string::npos || end == std::string::npos) return refusal;
  return refusal.substr(begin + 2, end - begin - 2);
}

TEST_F(PackageTest, SaysWhatIsWrongWithAnArchive) {
  const std::string good = test::zip(kTwo);
  EXPECT_EQ(refusal(good), "");
  EXPECT_EQ(reason(refusal("")), "it is too short");
  EXPECT_EQ(reason(refusal(good + "more")), "the archive's end record is not at the file's end");
  EXPECT_EQ(reason(refusal(test::zip({{"model/a", "1"}, {"model/a", "2"}}))),
            "record 'a' is not in the order of names");
  EXPECT_EQ(reason(refusal(test::zip({{"model/b", "1"}, {"model/a", "2"}}))),
            "record 'a' is not in the order of names");
  EXPECT_EQ(reason(refusal(test::zip({{kManifestName, "{}"}, {"model/z", "2"}}))),
            "record 'z' is not in the order of names");
  EXPECT_EQ(reason(refusal(test::zip({{"model/a", "1"}, {"n/b", "2"}}))),
            "record 'n/b' has a name that no package uses");
  for (const char* name : {"model/../a", "/a", "model//a", "model/a/", "model/./a", "model/m\\a",
                           "a", "model/", "model/a b"}) {
    EXPECT_EQ(reason(refusal(test::zip({{name, "2"}}))),
              std::string("record '") + name + "' has a name that no package uses");
  }
  EXPECT_EQ(reason(refusal(test::zip({{"model/\x7f\n\xad", "2"}}))),
            "record 'model/?\?\?' has a name that no package uses");
  std::string changed = good;
  changed[changed.find("weights")] = 'W';
  EXPECT_EQ(refusal(changed), "record 'data.pkl' is damaged: its CRC-32 does not hold");
}

TEST_F(PackageTest, EveryTruncationEveryChangedByteAndEveryByteMoreIsRefused) {
  const std::string good = test::zip(kTwo);
  for (std::size_t size = 0; size < good.size(); ++size) {
    ASSERT_NE(refusal(good.substr(0, size)), "") << size;
  }
  Random random(1);
  for (std::size_t at = 0; at < good.size(); ++at) {
    for (const int bit : {0, 7, static_cast<int>(random() % 6) + 1}) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
      ASSERT_NE(refusal(bad), "") << at;
    }
    std::string longer = good;
    longer.insert(at, 1, '\0');
    ASSERT_NE(refusal(longer), "") << at;
  }
  for (int i = 0; i < 2'000; ++i) {  // must not crash or read past anything; ASan looks on
    std::string bad = good;
    for (unsigned n = 1 + random() % 8; n > 0; --n) {
      bad[random() % bad.size()] = static_cast<char>(random());
    }
    if (bad == good) continue;
    ASSERT_NE(refusal(bad), "");
  }
}

TEST(LayoutTest, LargeRecordsHaveZip64Fields) {
  constexpr std::uint64_t kLarge = 0xffffffff;
  const Record record{.offset = 0, .bytes = kLarge, .crc32 = 1};
  // 30 bytes, the name, a zip64 field of 20 and the padding's 4.
  const std::string header = local_header("a", record, 0);
  EXPECT_EQ(header.size() % 64, 0u);
  EXPECT_EQ(header.substr(30 + 7, 4), std::string("\x01\0\x10\0", 4));
  EXPECT_EQ(header.substr(18, 8), std::string(8, '\xff'));
  EXPECT_EQ(directory_entry("a", record, 5).size(), 46u + 7 + 20);
  EXPECT_EQ(directory_entry("a", record, kLarge).size(), 46u + 7 + 28);
  EXPECT_EQ(directory_entry("a", {.bytes = 7}, kLarge).size(), 46u + 7 + 12);
  EXPECT_EQ(directory_end(3, 100, kLarge - 1).size(), 22u);
  EXPECT_EQ(directory_end(3, 100, kLarge).size(), 56u + 20 + 22);
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
  for (const char* name : {"data.pkl", "code/a.py"}) {
    const std::string content = text_of(records.read(name, 1'000));
    manifest.records[name] = {digest(content), content.size(), records.all().at(name).crc32};
  }
  verify_records(records, manifest.records);

  const auto why = [&](const Manifest& other) {
    try {
      verify_records(records, other.records);
    } catch (const PackageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  Manifest changed = manifest;
  changed.records["data.pkl"].sha256 = digest("Weights");
  EXPECT_NE(why(changed).find("record 'data.pkl' was changed"), std::string::npos);
  Manifest other_header = manifest;
  other_header.records["data.pkl"].crc32 ^= 1;
  EXPECT_NE(why(other_header).find("the header of record 'data.pkl' was changed"),
            std::string::npos);
  Manifest missing = manifest;
  missing.records["more"] = {digest(""), 0, 0};
  EXPECT_NE(why(missing).find("records are missing: more"), std::string::npos);
  Manifest extra = manifest;
  extra.records.erase("data.pkl");
  EXPECT_NE(why(extra).find("not listed in the manifest: data.pkl"), std::string::npos);
  Manifest divided = manifest;
  divided.records["data.pkl"].chunks = {digest("weights")};
  EXPECT_NE(why(divided).find("names 1 chunks of record 'data.pkl', whose 7 bytes have 0"),
            std::string::npos);
}

TEST_F(PackageTest, ComparesTheChunksOfLargeRecords) {
  std::string large(2 * kChunkBytes + 5, '\0');
  for (std::size_t i = 0; i < large.size(); i += 997) large[i] = static_cast<char>(i);
  const std::string zipped = test::zip({{"model/data/0", large},
                                        {"model/data/1", "small"},
                                        {"model/" + std::string(kManifestRecord), "{}"}});
  write(zipped);
  const PackageFile file(path);
  const Records records(file);
  Manifest manifest;
  manifest.records["data/0"] = {
      "never looked at",
      large.size(),
      records.all().at("data/0").crc32,
      {digest(large.substr(0, kChunkBytes)), digest(large.substr(kChunkBytes, kChunkBytes)),
       digest(large.substr(2 * kChunkBytes))}};
  manifest.records["data/1"] = {digest("small"), 5, records.all().at("data/1").crc32};
  std::map<std::string, std::vector<std::byte>> kept;
  const auto into = [&](const std::string& name, const Record& record) -> Destination {
    if (name != "data/0") return {};
    kept[name].resize(record.bytes);
    return {.place = kept[name]};
  };
  for (const bool when_idle : {false, true}) {
    for (const unsigned threads : {1U, 4U}) {
      kept.clear();
      std::atomic<std::uint64_t> compared = 0;
      std::atomic<unsigned> paused = 0;
      verify_records(records, manifest.records,
                     {.into = into,
                      .threads = threads,
                      .when_idle = when_idle,
                      .progress = [&](std::uint64_t bytes) { compared += bytes; },
                      .pauses =
                          [&] {
                            return [&, mine = false]() mutable {
                              if (!std::exchange(mine, true)) ++paused;
                            };
                          }});
      EXPECT_EQ(text_of(kept.at("data/0")), large);
      EXPECT_EQ(compared, large.size() + 5);
      EXPECT_GE(paused, 1U);
      EXPECT_LE(paused, threads);
    }
  }

  // From memory, from the file, and from both.
  const std::string manifest_text = "{}";
  const auto manifest_bytes = as_bytes(manifest_text);
  const Contents nothing = {{kManifestRecord, manifest_bytes}};
  const Contents some = {{kManifestRecord, manifest_bytes}, {"data/0", kept.at("data/0")}};
  for (const Contents& contents : {nothing, some}) {
    EXPECT_EQ(file_sha256(records, manifest.records, contents, {}), digest(zipped));
  }
  std::stop_source stopped;
  stopped.request_stop();
  EXPECT_EQ(file_sha256(records, manifest.records, some, stopped.get_token()), "");

  const std::uint64_t place = records.all().at("data/0").offset + kChunkBytes + 3;
  std::string bad = zipped;
  bad[place] = static_cast<char>(bad[place] ^ 1);
  bad[place + kChunkBytes] = static_cast<char>(bad[place + kChunkBytes] ^ 1);
  write(bad);
  const PackageFile other(path);
  const Records others(other);
  for (const auto& [when_idle, threads] :
       {std::pair(false, 1U), std::pair(true, 1U), std::pair(false, 4U), std::pair(true, 4U)}) {
    try {
      verify_records(others, manifest.records, {.threads = threads, .when_idle = when_idle});
      FAIL() << "a changed chunk was not found";
    } catch (const PackageError& error) {
      // The first, whichever thread is faster.
      EXPECT_NE(std::string(error.what()).find("of bytes 8388608 to 16777216 of 16777221, the"),
                std::string::npos);
    }
  }
  EXPECT_THROW(file_sha256(others, manifest.records, nothing, {}), PackageError);
}

const char* const kManifest = R"({
  "format_version": 4, "name": "ranker", "version": "3", "created": "2026-01-01T00:00:00Z",
  "versions": {"tessera": "0.1", "torch": "2.13.0+cpu", "fbgemm": "1.8.0",
               "torch_min": "2.11", "torch_below": "2.14"},
  "backend": "fbgemm", "operator_libraries": ["fbgemm_gpu_tbe_inference"],
  "schema": {"dense_features": ["I1"], "dense_missing": "nan",
             "dense_columns": [""], "string_hash": "xxh64",
             "features": [{"name": "C1", "group": "id_list", "strings": true, "column": "",
                           "weights_column": "", "many": true, "max_length": 0, "keep": "first", "table": "t",
                           "rows": 10, "dim": 4, "pooling": "mean", "hashing": "none",
                           "out_of_range": "clamp"}],
             "outputs": [{"name": "default", "width": 1}]},
  "dtype": "int8", "dense_dtype": "bf16", "bytes_fp32": 160,
  "tables": [{"name": "t", "rows": 10, "dim": 4, "dtype": "int8", "bytes": 80, "bytes_fp32": 160,
              "max_abs_error": 0.1, "rmse": 0, "relative_rmse": 0.0}],
  "bytes_packaged": 100, "plan": {"num_shards": 1, "placements": []}, "device": "cpu",
  "source": {}, "training_metrics": {}, "evaluation": null,
  "golden": {"samples": 4, "atol": 1e-6, "rtol": 1e-5},
  "records": {"data.pkl": {
    "sha256": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "bytes": 7, "crc32": 9, "chunks": []}},
 "signature": null
}
)";

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
  EXPECT_TRUE(manifest.schema.features[0].strings);
  EXPECT_TRUE(manifest.schema.dense_may_be_missing);
}

TEST(ManifestTest, MayNotBeTooDeepToPrint) {
  for (const std::size_t depth : {400UL, 1'000UL, 300'000UL}) {
    const std::string nested = std::string(depth, '[') + std::string(depth, ']');
    const std::string refusal = manifest_refusal("{\"format_version\": " + nested + "}");
    if (depth < 500) {
      EXPECT_TRUE(refusal.starts_with("the package's format_version is missing")) << refusal;
    } else {
      EXPECT_EQ(refusal, "the manifest is nested more than 500 deep");
    }
  }
}

TEST(ManifestTest, IsStrict) {
  EXPECT_EQ(manifest_refusal("{"), "the manifest is not JSON");
  EXPECT_EQ(
      manifest_refusal(changed("\"format_version\": 4", "\"format_version\": 2")),
      "the package's format_version is 2, this server reads 3 to 5; package the model again, or "
      "serve it with the tessera that wrote it");
  EXPECT_EQ(manifest_refusal("[]").substr(0, 42), "the package's format_version is missing, t");
  EXPECT_EQ(manifest_refusal(changed("\"backend\"", "\"back_end\"")),
            "manifest: missing key 'backend'");
  EXPECT_EQ(manifest_refusal(changed("\"backend\"", "\"nickname\": 1, \"backend\"")),
            "manifest: unknown key 'nickname'");
  EXPECT_EQ(manifest_refusal(changed("\"rows\": 10, ", "\"rows\": 1, \"rows\": 10, ")),
            "a key is there twice");
  EXPECT_EQ(manifest_refusal(changed("\"signature\": null", "\"signature\":null")),
            "the manifest's signature is not written as package files have it");
  EXPECT_EQ(manifest_refusal(changed("\"rows\": 10, ", "")),
            "manifest.schema.features[0]: missing key 'rows'");
  EXPECT_EQ(manifest_refusal(changed("\"rows\": 10", "\"rows\": 0")),
            "manifest.schema.features[0].rows: is out of its range, 1 to 9223372036854775807");
  EXPECT_EQ(manifest_refusal(changed("\"rows\": 10", "\"rows\": true")),
            "manifest.schema.features[0].rows: expected an integer, found true or false");
  EXPECT_EQ(manifest_refusal(changed("\"clamp\"", "\"wrap\"")),
            "manifest.schema.features[0].out_of_range: expected one of reject, clamp, hash");
  EXPECT_EQ(manifest_refusal(changed("\"2.14\"", "\"two\"")),
            "manifest.versions.torch_below: expected a release such as 2.13");
  EXPECT_EQ(manifest_refusal(changed("1e-6", "1e999")), "the manifest is not JSON");
  EXPECT_EQ(manifest_refusal(changed("1e-6", "-1e-6")),
            "manifest.golden.atol: is out of its range, 0 to 1.7976931348623157e+308");
  EXPECT_EQ(manifest_refusal(changed("\"ranker\"", "\"a\\nb\"")),
            "manifest.name: has a letter that cannot be printed");
  EXPECT_EQ(manifest_refusal(changed("\"ranker\"", "\"\xc3\xa4\"")),
            "the manifest has a byte that is not ASCII");
  EXPECT_EQ(manifest_refusal(changed("\"num_shards\": 1", "\"num_shards\": 4097")),
            "manifest.plan.num_shards: is out of its range, 1 to 4096");
  EXPECT_EQ(manifest_refusal("[" + std::string(500'000, ',') + "]"),
            "the manifest has more than 400000 values");
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

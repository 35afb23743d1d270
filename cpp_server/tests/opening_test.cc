// What loading does beside the checks: the file's hash behind being ready, stand-ins for large
// tables.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>

#include "package/file_hash.h"
#include "package/package_file.h"
#include "package/scripted_source.h"
#include "package/storages.h"
#include "support.h"

namespace tessera {
namespace {

using test::as_bytes;
using test::text_of;

TEST(FileHashTest, IsToldOnceItIsKnown) {
  std::promise<void> go;
  std::promise<std::string> told;
  FileHash hash([&](const std::stop_token&) {
    go.get_future().wait();
    return std::string("ab");
  });
  EXPECT_EQ(hash.known(), "");
  hash.tell([&](const FileHash::Result& result) { told.set_value(result.sha256); });
  go.set_value();
  EXPECT_EQ(told.get_future().get(), "ab");
  EXPECT_EQ(hash.known(), "ab");
  std::string at_once;
  hash.tell([&](const FileHash::Result& result) { at_once = result.sha256; });
  EXPECT_EQ(at_once, "ab");
}

TEST(FileHashesTest, KnowFilesThatHaveNotChanged) {
  const std::filesystem::path path =
      std::filesystem::path(::testing::TempDir()) / "file_hashes_test";
  std::ofstream(path) << "one";
  const std::string first = PackageFile(path).identity();
  EXPECT_EQ(PackageFile(path).identity(), first);
  FileHashes hashes;
  EXPECT_EQ(hashes.of(first), "");
  hashes.add(first, "ab");
  EXPECT_EQ(hashes.of(first), "ab");
  // The same size and the same time, which the clock of the file system tells apart by now.
  const auto written = std::filesystem::last_write_time(path);
  std::string second = first;
  for (int i = 0; i < 1'000 && second == first; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::ofstream(path) << "two";
    std::filesystem::last_write_time(path, written);
    second = PackageFile(path).identity();
  }
  EXPECT_NE(second, first);
  EXPECT_EQ(hashes.of(second), "");
  std::filesystem::remove(path);
}

TEST(FileHashTest, SaysWhyItCannotBeHad) {
  std::promise<void> go;
  std::promise<FileHash::Result> told;
  FileHash hash([&](const std::stop_token&) -> std::string {
    go.get_future().wait();
    throw std::runtime_error("gone");
  });
  hash.tell([&](const FileHash::Result& result) { told.set_value(result); });
  go.set_value();
  const FileHash::Result result = told.get_future().get();
  EXPECT_EQ(result.failure, "gone");
  EXPECT_EQ(result.sha256, "");
  EXPECT_EQ(hash.known(), "");
  std::string at_once;
  hash.tell([&](const FileHash::Result& again) { at_once = again.failure; });
  EXPECT_EQ(at_once, "gone");
}

TEST(FileHashTest, ItsEndDoesNotWaitForTheHash) {
  std::promise<bool> stopped;
  {
    FileHash hash([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) std::this_thread::yield();
      stopped.set_value(true);
      return std::string();
    });
    hash.tell([](const FileHash::Result&) { ADD_FAILURE() << "there is no result"; });
  }
  EXPECT_TRUE(stopped.get_future().get());
}

// The opcodes that torch writes for a bytes tensor of `elements` (below 256) whose storage is
// number `key`; `word` and `kind` are texts or what refers to them.
std::string pickled_tensor(const std::string& word, const std::string& kind, char key,
                           char elements, char size) {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + word + kind + std::string("X\x01\0\0\0", 5) +
         key + std::string("X\x03\0\0\0cpu", 8) + "K" + elements + "tQK" + std::string(1, '\0') +
         "(K" + size + "t(K\x01t\x89" + "tR";
}

std::string pickled_text(const std::string& content) {
  return "X" + std::string(1, static_cast<char>(content.size())) + std::string(3, '\0') + content;
}

TEST(StoragesTest, FindsAndReplacesSizes) {
  const std::string word = pickled_text("storage") + "q" + '\x01';
  const std::string bytes = "ctorch\nByteStorage\n";
  const std::string floats = "ctorch\nFloatStorage\n";
  const auto pickle = [&](char first, char second_size) {
    return "\x80\x02" + pickled_tensor(word, bytes, '0', first, first) +
           pickled_tensor(std::string("h\x01"), floats, '1', 9, 9) +
           pickled_tensor(std::string("h\x01"), bytes, '2', 9, second_size) + ".";
  };
  const std::string content = pickle(7, 8);
  const Storages storages(as_bytes(content));
  EXPECT_TRUE(storages.plain("0"));
  EXPECT_FALSE(storages.plain("1"));  // not of bytes
  EXPECT_FALSE(storages.plain("2"));  // a tensor of a part of it
  EXPECT_FALSE(storages.plain("3"));
  EXPECT_EQ(text_of(storages.with_sizes({})), content);
  EXPECT_EQ(text_of(storages.with_sizes({{"0", 200}})), pickle('\xc8', 8));
  std::string wide = text_of(storages.with_sizes({{"0", 70'000}}));
  EXPECT_EQ(wide.size(), content.size() + 2 * 3);
  EXPECT_NE(wide.find(std::string("J\x70\x11\x01\0tQ", 7)), std::string::npos);
  wide = text_of(storages.with_sizes({{"0", 1ULL << 33}}));
  EXPECT_NE(wide.find(std::string("\x8a\x08\0\0\0\0\x02\0\0\0tQ", 12)), std::string::npos);
  EXPECT_EQ(text_of(Storages(as_bytes(wide)).with_sizes({{"0", 7}})), content);
}

TEST(StoragesTest, TellsHowManyBytesEachHas) {
  const std::string content =
      "\x80\x02" + pickled_tensor(pickled_text("storage"), "ctorch\nLongStorage\n", '3', 5, 5) +
      ".";
  EXPECT_EQ(Storages(as_bytes(content)).bytes(), (std::map<std::string, std::uint64_t>{{"3", 40}}));
}

TEST(StoragesTest, RefusesNamesThatNoPackageMayHave) {
  for (const char* name : {"cos\nsystem\n", "c__torch__.torch.classes.a\nB\n",
                           "c__torch__.torch\nclasses.a.B\n", "ctorch\nsave\n"}) {
    EXPECT_THROW(Storages(as_bytes("\x80\x02" + std::string(name) + ".")), std::invalid_argument);
  }
  EXPECT_NO_THROW(Storages(as_bytes(std::string("\x80\x02") + "c__torch__.a\nB\n.")));
}

// The same cases as in tests/packaging/test_storages.py.
TEST(StoragesTest, RefusesWhatLiesTooDeep) {
  const auto refusal = [](const std::string& content) -> std::string {
    try {
      Storages(as_bytes(content)).bytes();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  const std::string why = "data.pkl is not as torch writes it: ";
  const std::string begin = "\x80\x02";
  const std::string deep = why + "its values lie in one another more than 1000 times";
  EXPECT_EQ(refusal(begin + ")" + std::string(1000, '\x85') + "."), "");
  EXPECT_EQ(refusal(begin + ")" + std::string(1001, '\x85') + "."), deep);
  EXPECT_EQ(refusal(begin + ")" + std::string(200'000, '\x85') + "."), deep);
  std::string lists(200'000, ']');
  EXPECT_EQ(refusal(begin + lists + std::string(199'999, 'a') + "."), deep);
  EXPECT_EQ(refusal(begin + "(" + std::string(600'000, 'N') + "t."),
            why + "it has more than 524288 opcodes, a dictionary counted as 16");
  EXPECT_EQ(refusal(begin + "]q\x01" + "h\x01" + ")a" + "."),
            why + "it fills a container that it has named again");
  EXPECT_EQ(refusal(begin + "]2)a."), why + "it fills a container that it has named again");
  EXPECT_EQ(refusal(begin + "t."), why + "it takes more values than there are");
}

std::string source_refusal(const std::string& source, const std::set<std::string>& more = {}) {
  try {
    check_source(as_bytes(source), more);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

// The same cases as in tests/packaging/test_operators.py.
TEST(SourceTest, NothingRunsWhileItIsOpened) {
  const std::string begin = "class M(Module):\n  __parameters__ = []\n  training : bool\n";
  EXPECT_EQ(source_refusal(begin + "  def forward(self: __torch__.M,\n      x: Tensor) -> Tensor:\n"
                                   "    return torch.save(x, \"a\")\n"),
            "");
  EXPECT_EQ(source_refusal(begin + "  x : Final[int] = torch.save(1, \"a\")\n"),
            "line 4 computes something where only a literal may be");
  EXPECT_EQ(source_refusal("def f(x: int=torch.f()) -> int:\n  return x\n"),
            "line 1 computes something where only a literal may be");
  EXPECT_EQ(source_refusal("def f(x: int=3) -> int:\n  return x\n"), "");
  const std::string state =
      begin + "  def __setstate__(self: __torch__.M, state: Tuple[Tensor, bool]) -> NoneType:\n";
  EXPECT_EQ(source_refusal(state + "    self.x = (state)[0]\n    _1 = ops.mkldnn."
                                   "_reorder_linear_weight((state)[0])\n    return None\n"),
            "");
  EXPECT_EQ(source_refusal(state + "    _1 = torch.save((state)[0], (state)[1])\n"),
            "line 5 would call torch.save while torch opens it");
  EXPECT_EQ(source_refusal(state + "    _1 = torch.save((state)[0], (state)[1])\n", {"aten::save"}),
            "");
  EXPECT_EQ(source_refusal(state + "    f = torch.save; f((state)[0])\n"),
            "line 5 has ';' where torch writes none");
  EXPECT_EQ(source_refusal(state + "    (state)[0].save(\"a\")\n"),
            "line 5 would run while torch opens it and is not plain enough");
  EXPECT_EQ(source_refusal(begin + "  def __setstate__(self: M, state: Any) -> NoneType:\n"),
            "line 4 defines __setstate__ in a way that packages do not have");
  EXPECT_EQ(source_refusal("x = 1 # comment\n"), "line 1 has '#' where torch writes none");
  EXPECT_EQ(source_refusal(begin + "   x = 1\n"), "line 4 is not laid out as torch writes it");
  EXPECT_EQ(source_refusal("x = [\n"), "a bracket is not closed");
}

TEST(StoragesTest, RefusesWhatTorchDoesNotWrite) {
  const std::string good =
      "\x80\x02" + pickled_tensor(pickled_text("storage"), "ctorch\nByteStorage\n", '0', 7, 7) +
      ".";
  const std::size_t said = good.rfind("t(K\x01t");  // behind the tensor's size
  ASSERT_TRUE(Storages(as_bytes(good)).plain("0"));
  for (std::size_t cut = 0; cut <= said; ++cut) {
    // Refused, or too short to say anything of a storage.
    try {
      EXPECT_FALSE(Storages(as_bytes(good.substr(0, cut))).plain("0"));
    } catch (const std::invalid_argument&) {
    }
  }
  std::mt19937 random(7);
  for (int i = 0; i < 20'000; ++i) {  // must not crash or read past anything; ASan looks on
    std::string bad = good;
    for (unsigned n = 1 + random() % 4; n > 0; --n) {
      bad[random() % bad.size()] = static_cast<char>(random());
    }
    try {
      const Storages storages(as_bytes(bad));
      if (storages.plain("0")) storages.with_sizes({{"0", 1 << 20}});
    } catch (const std::invalid_argument&) {
    }
  }
  EXPECT_THROW(Storages(as_bytes("cos\nsystem\n\xff")), std::invalid_argument);
}

}  // namespace
}  // namespace tessera

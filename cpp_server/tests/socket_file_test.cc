// Unix sockets at a path: whose file is replaced, whose is not, and who removes it.
#include "front/socket_file.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "common/unix_address.h"
#include "server/config.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class SocketFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "/socketXXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    path_ = folder_ / "grpc";
  }
  void TearDown() override { fs::remove_all(folder_); }

  static std::string refusal(const std::string& path) {
    try {
      const SocketFile made(path, "--flag");
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  }

  // What connect says of a path: 0 or an errno.
  static int connecting(const std::string& path) {
    const auto address = unix_address(path);
    const int client = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int done =
        ::connect(client, reinterpret_cast<const sockaddr*>(&*address), sizeof(*address));
    const int reason = done == 0 ? 0 : errno;
    ::close(client);
    return reason;
  }

  fs::path folder_, path_;
};

TEST_F(SocketFileTest, IsThereAsLongAsItLives) {
  {
    const SocketFile listening(path_, "--flag");
    EXPECT_EQ(connecting(path_), 0);
  }
  EXPECT_FALSE(fs::exists(path_));
  EXPECT_EQ(connecting(path_), ENOENT);
}

TEST_F(SocketFileTest, ReplacesWhatWasLeftBehind) {
  const auto address = unix_address(path_.string());
  const int left = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(::bind(left, reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)), 0);
  ::close(left);
  ASSERT_EQ(connecting(path_), ECONNREFUSED);
  const SocketFile listening(path_, "--flag");
  EXPECT_EQ(connecting(path_), 0);
}

TEST_F(SocketFileTest, LeavesAnotherListenerAlone) {
  const SocketFile first(path_, "--flag");
  EXPECT_EQ(refusal(path_),
            "the Unix socket " + path_.string() +
                " cannot be listened on (another program listens there); choose another --flag");
  EXPECT_EQ(connecting(path_), 0);
}

TEST_F(SocketFileTest, LeavesOtherFilesAlone) {
  std::ofstream(path_) << "kept";
  EXPECT_NE(refusal(path_).find("a file is there that is not a socket"), std::string::npos);
  EXPECT_EQ(fs::file_size(path_), 4u);
  fs::remove(path_);
  // Nor is a link to a listener followed, whose file is another's.
  const SocketFile other(folder_ / "other", "--flag");
  fs::create_symlink(folder_ / "other", path_);
  EXPECT_NE(refusal(path_).find("a file is there that is not a socket"), std::string::npos);
}

TEST_F(SocketFileTest, RemovesNoFileThatTookItsPlace) {
  {
    const SocketFile listening(path_, "--flag");
    fs::remove(path_);
    std::ofstream(path_) << "kept";
  }
  EXPECT_EQ(fs::file_size(path_), 4u);
}

TEST_F(SocketFileTest, SaysWhatAPathMayBe) {
  const std::string longest(kMostSocketPath, 'x');
  EXPECT_TRUE(unix_address(longest).has_value());
  EXPECT_FALSE(unix_address(longest + "x").has_value());
  EXPECT_FALSE(unix_address(std::string("a\0b", 3)).has_value());
  EXPECT_NE(refusal(longest + "x").find("a path has 1 to 107 bytes"), std::string::npos);
  EXPECT_NE(refusal(folder_ / "none" / "x").find("No such file"), std::string::npos);
}

}  // namespace
}  // namespace tessera

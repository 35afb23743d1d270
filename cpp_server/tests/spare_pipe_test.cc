// UBSan's check of virtual calls in a process without descriptors (spare_pipe.cc). In a build
// without UBSan nothing asks, and the call is one like any other.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <memory>

namespace {

class Shape {
 public:
  virtual ~Shape() = default;
  virtual int corners() const = 0;
};

class Square final : public Shape {
 public:
  int corners() const override { return 4; }
};

// Not inline, so that the compiler does not know which class it is.
__attribute__((noinline)) int corners_of(const Shape& shape) { return shape.corners(); }

// Sets the limit of descriptors to what are open, and back.
class NoDescriptors {
 public:
  NoDescriptors() {
    getrlimit(RLIMIT_NOFILE, &before_);
    const int next = dup(STDERR_FILENO);
    close(next);
    const rlimit none{static_cast<rlim_t>(next), before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_{};
};

TEST(SparePipe, TheFirstVirtualCallOfAKindWithoutDescriptors) {
  const std::unique_ptr<Shape> shape = std::make_unique<Square>();
  int corners = 0;
  int opened = 0;
  rlimit after{};
  rlimit within{};
  {
    const NoDescriptors none;
    getrlimit(RLIMIT_NOFILE, &within);
    corners = corners_of(*shape);
    opened = open("/dev/null", O_RDONLY);
    getrlimit(RLIMIT_NOFILE, &after);
  }
  EXPECT_EQ(corners, 4);
  EXPECT_EQ(opened, -1) << "there was a descriptor left";
  EXPECT_EQ(after.rlim_cur, within.rlim_cur);
}

}  // namespace

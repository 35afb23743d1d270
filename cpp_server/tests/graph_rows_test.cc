#include "model/graph_rows.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using Rows = std::vector<std::int64_t>;

TEST(GraphRows, DoubleAndThenGrowBySteps) {
  EXPECT_EQ(graph_rows(1), Rows({1}));
  EXPECT_EQ(graph_rows(512), Rows({1, 2, 4, 8, 16, 32, 64, 128, 256, 512}));
  EXPECT_EQ(graph_rows(2'048), Rows({1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1'024, 1'536, 2'048}));
}

TEST(GraphRows, EndWithTheFirstThatHoldsTheLargestBatch) {
  EXPECT_EQ(graph_rows(3), Rows({1, 2, 4}));
  EXPECT_EQ(graph_rows(513).back(), 1'024);
  EXPECT_EQ(graph_rows(3'000).back(), 3'072);
  EXPECT_EQ(graph_rows(4'096).back(), 4'096);
}

}  // namespace
}  // namespace tessera

// The page that people look at.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "fake_repository.h"
#include "front/status_page.h"
#include "support.h"

namespace tessera {
namespace {

TEST(StatusPage, ShowsTheVersionsOfRepositories) {
  const test::FakeClock clock;
  const ModelList models;
  const std::string page =
      StatusPage(models, clock).page("ready", "1", test::FakeRepository().index(), {});
  for (const char* part :
       {"<td>ranker</td><td>4</td><td>LOADING</td><td>canary, next (shadow)</td><td>2.5%</td>"
        "<td class=\"prose\"><progress max=\"100\" value=\"50\"></progress> 50%</td>",
        "<td>ranker</td><td>5</td><td>UNAVAILABLE</td><td></td><td></td>"
        "<td class=\"prose\">a &lt;damaged&gt; file</td>",
        "<td>empty</td>"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(StatusPage(models, clock).page("ready", "1", {}, {}).find("<h2>Versions"),
            std::string::npos);
}

TEST(StatusPage, ShowsHowFreshTheFollowedVersionsAre) {
  test::FakeClock clock;
  ModelList models;
  ModelMetrics& model = *models.add("ranker", "3");
  StatusPage board(models, clock);
  EXPECT_EQ(board.page("ready", "1", {}, {}).find("Freshness"), std::string::npos);
  model.follow.followed = true;
  model.follow.commit = 42;
  model.follow.set_newest_example(
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count() +
      100);  // of another clock, ahead of ours
  clock.advance(std::chrono::seconds(1));
  board.tick();
  const std::string page = board.page(
      "ready", "1",
      {{.model = "ranker", .version = "3", .state = VersionState::kReady, .commit = 42}}, {});
  EXPECT_NE(page.find("<h2>Freshness</h2>"), std::string::npos);
  EXPECT_NE(page.find("<polyline points=\"600,60.0\"/>"), std::string::npos) << page;
  EXPECT_NE(page.find("(at most 0.0 s in 10 minutes)"), std::string::npos);
  EXPECT_NE(page.find("<td>ranker</td><td>3.42</td><td>READY</td>"), std::string::npos);
}

TEST(StatusPage, ShowsTheLastMinute) {
  test::FakeClock clock;
  ModelList models;
  ModelMetrics& model = *models.add("<ranker>", "3");
  StatusPage board(models, clock);
  for (int i = 0; i < 100; ++i) model.count_request(Code::kOk, std::chrono::microseconds(3'500));
  clock.advance(std::chrono::seconds(10));
  board.tick();
  EXPECT_NE(board.page("ready", "1", {}, {}).find("<td>10.0</td>"), std::string::npos);
  EXPECT_NE(board.page("ready", "1", {}, {}).find("&lt;ranker&gt;"), std::string::npos);
  EXPECT_EQ(board.page("ready", "1", {}, {}).find("<ranker>"), std::string::npos);
  clock.advance(std::chrono::seconds(61));  // the requests are out of the window
  board.tick();
  clock.advance(std::chrono::seconds(1));
  board.tick();
  EXPECT_EQ(board.page("ready", "1", {}, {}).find("<td>10.0</td>"), std::string::npos);
}

TEST(StatusPage, DrawsTheLastHourAndShadows) {
  test::FakeClock clock;
  ModelList models;
  ModelMetrics& model = *models.add("ranker", "3");
  StatusPage board(models, clock);
  const auto page = [&] { return board.page("ready", "1", {}, {}); };
  EXPECT_NE(page().find("p99 and p50, up to 0.00 ms; not answered, up to 0.00/s"),
            std::string::npos);
  const auto pass = [&](int answered, int refused) {
    for (int i = 0; i < answered; ++i) {
      model.count_request(Code::kOk, std::chrono::microseconds(4'000));
    }
    for (int i = 0; i < refused; ++i) model.count_request(Code::kInvalidArgument, Duration::zero());
    clock.advance(LastHour::kStep);
    board.tick();
  };
  pass(100, 0);
  pass(0, 0);  // nothing is drawn
  pass(100, 40);
  EXPECT_NE(page().find("not answered, up to 2.00/s"), std::string::npos) << page();
  // Three points at the right; the second has no latency.
  EXPECT_NE(page().find("<path class=\"errors\" d=\"M177 40.00h1L178 40.00L179 0.00\"/>"),
            std::string::npos)
      << page();
  const std::string drawn = page().substr(page().find("class=\"p99\""));
  EXPECT_TRUE(drawn.starts_with("class=\"p99\" d=\"M177 ")) << drawn;
  EXPECT_NE(drawn.substr(0, drawn.find("/>")).find("h1M179 "), std::string::npos) << drawn;
  // An hour later they are gone, and no more is kept than an hour has.
  for (std::size_t i = 0; i < LastHour::kPoints; ++i) pass(0, 0);
  EXPECT_NE(page().find("not answered, up to 0.00/s"), std::string::npos);

  auto shadow = std::make_shared<ShadowMetrics>("ranker", "3", "<4>");
  for (int i = 0; i < 4; ++i) shadow->difference.observe(0.25);
  shadow->count(ShadowResult::kCompared);
  const std::string shown = board.page("ready", "1", {}, {shadow});
  EXPECT_NE(shown.find("<td>ranker</td><td>3</td><td>&lt;4&gt;</td><td>1</"
                       "td><td>0</td><td>0</td>"
                       "<td>0.250000</td>"),
            std::string::npos)
      << shown;
}

}  // namespace
}  // namespace tessera

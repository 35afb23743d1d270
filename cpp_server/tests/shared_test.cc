// Requests that share rows of features, on their way to a batch: against the same requests with a
// copy of the shared features for every sample.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>

#include "batching/merger.h"
#include "batching/pending_request.h"
#include "batching/request_queue.h"
#include "request/decoder.h"
#include "request/packed.h"
#include "support.h"

namespace tessera {
namespace {

using test::bytes_of;

class Request final : public PendingRequest {
  void answer(std::span<const OutputView>, const StageTimings&) override {}
  void fail(const Refusal&) override {}
};

class MemoryOnly final : public test::MemorySession {
 public:
  MemoryOnly() : MemorySession(test::schema()) {}
  std::unique_ptr<Scores> forward(const HostBatch&) override { return nullptr; }
};

const std::vector<std::string> kNames = {"user", "item", "genre"};

// A message of schema()'s features in which `shared` ones are given in `rows` rows; `view` borrows
// it.
struct Ranking {
  test::RequestData own;
  test::RequestData once;  // its id_list features alone
  std::vector<std::string> shared;
  std::int32_t rows = 1;
  std::vector<std::int32_t> row_index;

  PredictionRequestView view() const {
    PredictionRequestView made = own.view(static_cast<std::int32_t>(3 - shared.size()));
    if (shared.empty()) return made;
    const auto count = static_cast<std::int32_t>(shared.size());
    const PredictionRequestView given = once.view(count);
    made.shared_features.present = true;
    for (const std::string& name : shared) made.shared_features.names.push_back(name);
    made.shared_features.num_rows = rows;
    made.shared_features.features = given.id_list_features;
    made.shared_features.row_index = bytes_of(row_index);
    return made;
  }
};

Ranking random_ranking(test::Random& random, std::vector<std::string> shared) {
  Ranking made;
  const auto samples = static_cast<std::int32_t>(1 + random() % 9);
  made.rows = static_cast<std::int32_t>(1 + random() % 5);
  made.own = test::random_request(random, samples, 4, static_cast<int>(3 - shared.size()));
  made.once = test::random_request(random, made.rows, 4, static_cast<int>(shared.size()));
  made.shared = std::move(shared);
  for (std::int32_t b = 0; b < samples; ++b) {
    made.row_index.push_back(
        static_cast<std::int32_t>(random() % static_cast<unsigned>(made.rows)));
  }
  return made;
}

// The set in any order, as clients name it.
std::vector<std::string> shuffled(std::vector<std::string> names, test::Random& random) {
  std::shuffle(names.begin(), names.end(), random);
  return names;
}

// Ids of a part of a cut request that its samples do not share.
std::int64_t own_ids(const Part& part) {
  const DecodedRequest& request = part.request->request;
  std::int64_t own = 0;
  for (std::size_t f = 0; f < part.id_count.size(); ++f) {
    const bool shared = f < request.id_list.ids.size() && request.shared.has(f);
    if (!shared) own += part.id_count[f];
  }
  return own;
}

// The requests of one batch by either way, and their parts.
struct Batch {
  explicit Batch(bool shares_rows) : decoder(test::schema(), {}, shares_rows) {}

  void add(const Ranking& ranking, std::int64_t max_samples, std::int64_t max_ids) {
    Request& request = requests.emplace_back();
    const Status status = decoder.decode(ranking.view(), request.request);
    ASSERT_TRUE(status.ok()) << status.message;
    for (Part& part : cut_request(request, 1, max_samples, max_ids)) {
      EXPECT_LE(part.samples(), max_samples);
      EXPECT_TRUE(part.samples() == 1 || part.ids <= max_ids || own_ids(part) <= max_ids / 2);
      parts.push_back(std::move(part));
    }
  }

  RequestDecoder decoder;
  std::deque<Request> requests;
  std::vector<Part> parts;
};

// Every sample's own bags of the id_list features, [F * B].
std::vector<std::vector<std::int64_t>> spread(const HostBatch& batch) {
  std::vector<std::vector<std::int64_t>> bags;
  std::size_t at = 0;
  for (const std::int32_t length : batch.id_list.lengths) {
    bags.emplace_back();
    for (std::int32_t k = 0; k < length; ++k, ++at) {
      bags.back().push_back(batch.id_list.narrow.empty() ? batch.id_list.values[at]
                                                         : batch.id_list.narrow[at]);
    }
  }
  EXPECT_EQ(at, batch.id_list.ids());
  if (batch.row_index.empty()) return bags;
  const auto samples = static_cast<std::size_t>(batch.rows);
  const auto shared = static_cast<std::size_t>(
      std::count(batch.shared.begin(), batch.shared.end(), std::uint8_t{1}));
  const std::size_t rows = (bags.size() - (batch.shared.size() - shared) * samples) / shared;
  std::vector<std::vector<std::int64_t>> all;
  std::size_t first = 0;
  for (const std::uint8_t once : batch.shared) {
    for (std::size_t b = 0; b < samples; ++b) {
      all.push_back(bags[first + (once != 0 ? static_cast<std::size_t>(batch.row_index[b]) : b)]);
    }
    first += once != 0 ? rows : samples;
  }
  EXPECT_EQ(first, bags.size());
  return all;
}

std::vector<std::int64_t> numbers(const HostGroup& group) {
  std::vector<std::int64_t> found(group.values.begin(), group.values.end());
  found.insert(found.end(), group.narrow.begin(), group.narrow.end());
  return found;
}

// Users with `shared_ids` ids each, who take turns in `samples` candidates of one id each.
Ranking users(std::int32_t rows, std::int32_t samples, std::int32_t shared_ids) {
  Ranking made;
  made.own.samples = samples;
  made.own.dense.assign(static_cast<std::size_t>(2 * samples), 0);
  made.own.lengths.assign(static_cast<std::size_t>(2 * samples), 0);
  std::fill_n(made.own.lengths.begin(), samples, 1);
  made.own.values.assign(static_cast<std::size_t>(samples), 1);
  made.own.scored_lengths.assign(static_cast<std::size_t>(samples), 0);
  made.rows = rows;
  made.once.lengths.assign(static_cast<std::size_t>(rows), shared_ids);
  made.once.values.assign(static_cast<std::size_t>(rows * shared_ids), 2);
  made.shared = {"user"};
  for (std::int32_t b = 0; b < samples; ++b) made.row_index.push_back(b % rows);
  return made;
}

TEST(Shared, ManySharedIdsAreNotLookedUpForEverySampleAnew) {
  struct Case {
    std::int32_t users;
    std::int32_t shared_ids;
    std::vector<std::int64_t> samples;  // of each part of at most 100 ids
  };
  const std::vector<Case> cases = {
      {1, 10, {90, 90, 20}},
      {1, 50, {50, 50, 50, 50}},
      {1, 99, {50, 50, 50, 50}},
      {1, 900, {50, 50, 50, 50}},
      {2, 40, {50, 50, 50, 50}},
      // Six of 61 ids are as many as the request has, which is 320.
      {2, 60, {1, 1, 1, 1, 1, 1, 50, 50, 50, 44}},
  };
  for (const Case& one : cases) {
    const Ranking ranking = users(one.users, 200, one.shared_ids);
    Batch batch(true);
    batch.add(ranking, 1'000, 100);
    std::vector<std::int64_t> samples;
    for (const Part& part : batch.parts) {
      samples.push_back(part.samples());
      const std::int64_t rows = std::min<std::int64_t>(part.samples(), one.users);
      EXPECT_EQ(part.ids, part.samples() + rows * one.shared_ids);
    }
    EXPECT_EQ(samples, one.samples) << one.users << " users of " << one.shared_ids;
  }
}

TEST(Shared, AMixedBatchOfPartsIsTheBatchThatRepeats) {
  test::Random random(11);
  const std::vector<std::vector<std::string>> sets = {
      {"user"}, {"item"}, {"user", "genre"}, {"user", "item", "genre"}, {"item", "genre"}};
  for (int round = 0; round < 300; ++round) {
    Batch once(true);
    Batch repeated(false);
    const std::vector<std::string>& set = sets[random() % sets.size()];
    const auto max_samples = static_cast<std::int64_t>(1 + random() % 10);
    const auto max_ids = static_cast<std::int64_t>(1 + random() % 60);
    std::deque<Ranking> rankings;
    for (std::uint32_t count = 1 + random() % 4; count > 0; --count) {
      rankings.push_back(random_ranking(
          random, random() % 3 == 0 ? std::vector<std::string>{} : shuffled(set, random)));
      once.add(rankings.back(), max_samples, max_ids);
      repeated.add(rankings.back(), 1'000, 1'000'000);
    }
    Merger merger(test::schema());
    MemoryOnly compact;
    compact.padding = random() % 4;
    compact.takes_narrow = random() % 2 == 0;
    const HostBatch found = merger.merge(once.parts, compact);
    MemoryOnly plain;
    plain.padding = compact.padding;
    const HostBatch expected = merger.merge(repeated.parts, plain);
    ASSERT_TRUE(expected.row_index.empty());
    ASSERT_EQ(found.samples, expected.samples);
    // A row of padding uses some row: it is nobody's.
    const auto wanted = [&](const HostBatch& batch) {
      std::vector<std::vector<std::int64_t>> bags = spread(batch);
      const auto rows = static_cast<std::size_t>(batch.rows);
      for (std::size_t bag = 0; bag < bags.size(); ++bag) {
        if (bag % rows >= static_cast<std::size_t>(batch.samples)) bags[bag].clear();
      }
      return bags;
    };
    EXPECT_EQ(wanted(found), wanted(expected));
    EXPECT_EQ(numbers(found.id_score_list), numbers(expected.id_score_list));
    EXPECT_TRUE(std::equal(found.dense.begin(), found.dense.end(), expected.dense.begin(),
                           expected.dense.end()));
    std::int64_t ids = 0;
    for (const Part& part : once.parts) ids += part.ids;
    EXPECT_EQ(static_cast<std::int64_t>(found.id_list.ids() + found.id_score_list.ids()), ids);
  }
}

Ranking two_candidates() {
  Ranking made;
  made.own = {.samples = 2,
              .dense = {1, 2, 3, 4},
              .lengths = {1, 1, 0, 0},
              .values = {5, 6},
              .narrow = {},
              .scored_lengths = {0, 0},
              .scored_values = {},
              .weights = {}};
  made.once.lengths = {2};
  made.once.values = {7, 8};
  made.shared = {"user"};
  made.row_index = {0, 0};
  return made;
}

TEST(Shared, IdsCountAsTheyAreLookedUp) {
  const Ranking ranking = two_candidates();
  DecodedRequest once;
  ASSERT_TRUE(
      RequestDecoder(test::schema(), {.max_ids = 4}, true).decode(ranking.view(), once).ok());
  EXPECT_EQ(once.ids, 4);
  EXPECT_EQ(once.id_list.ids, (std::vector<std::int64_t>{2, 2, 0}));
  EXPECT_EQ(once.bags(0), 1);
  EXPECT_EQ(once.bags(1), 2);
  DecodedRequest repeated;
  EXPECT_EQ(RequestDecoder(test::schema(), {.max_ids = 4}, false)
                .decode(ranking.view(), repeated)
                .message,
            "the request has 6 ids, the limit is 4");
}

TEST(Shared, AnIdOutsideIsNamedByItsRowAndCountedAsItIsLookedUp) {
  Ranking ranking = two_candidates();
  InputSchema schema = test::schema();
  schema.features[0] =
      test::feature("user", Group::kIdList, Hashing::kNone, OutOfRange::kReject, 8);
  for (const bool shares_rows : {false, true}) {
    DecodedRequest request;
    EXPECT_EQ(RequestDecoder(schema, {}, shares_rows).decode(ranking.view(), request).message,
              "shared_features.features: feature 'user', row 0: id 8 is outside [0, 8)");
  }
  schema.features[0].out_of_range = OutOfRange::kClamp;
  for (const bool shares_rows : {false, true}) {
    DecodedRequest request;
    ASSERT_TRUE(RequestDecoder(schema, {}, shares_rows).decode(ranking.view(), request).ok());
    EXPECT_EQ(request.out_of_range_ids, shares_rows ? 1 : 2);
  }
}

TEST(Shared, ABatchHasOneSetOfSharedFeatures) {
  RequestQueue queue{{.max_requests = 10, .max_samples = 100}};
  test::Random random(3);
  const std::vector<std::vector<std::string>> sets = {
      {}, {"user", "item"}, {}, {"item", "user"}, {"user"}, {}, {"user", "item"}};
  std::deque<Ranking> rankings;
  std::vector<DroppedPart> dropped;
  Batch batch(true);
  for (const std::vector<std::string>& set : sets) {
    rankings.push_back(random_ranking(random, set));
    batch.add(rankings.back(), 1'000, 1'000'000);
    std::vector<Part> parts = {batch.parts.back()};
    ASSERT_TRUE(queue.push(parts, TimePoint{}, dropped));
  }
  std::vector<std::size_t> sizes;
  while (queue.parts() > 0) {
    std::vector<Part> taken;
    queue.cut(1'000, 1'000'000, TimePoint{}, taken, dropped);
    sizes.push_back(taken.size());
  }
  EXPECT_EQ(sizes, (std::vector<std::size_t>{4, 2, 1}));
}

}  // namespace
}  // namespace tessera

// How fast a package runs without a server: batches in memory go through the same sessions that
// tessera-server's workers use, copies to and from a GPU included.
//
//   in_process MODEL.pt IDS_PER_BAG SECONDS SESSIONS B [B...]
//
// IDS_PER_BAG is one number for all features or one for each with commas. Prints a line of CSV for
// each batch size B: B, sessions, median and 99th percentile of one forward in microseconds,
// samples per second of all sessions together. Before, on stderr: the largest difference between
// the scores of the same samples with int32 and int64 ids, in a large batch and in a small one.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <iostream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "model/loader.h"
#include "model/operator_libraries.h"

namespace {

using namespace tessera;
using Steady = std::chrono::steady_clock;

// Different batches in turn, so that rows do not stay in a cache.
constexpr std::size_t kBatches = 8;

struct Inputs {
  std::vector<float> dense;
  std::vector<std::int32_t> lengths;
  std::vector<std::int32_t> ids;
};

Inputs draw(const InputSchema& schema, std::int64_t B, const std::vector<std::int32_t>& bags,
            std::mt19937& random) {
  Inputs inputs;
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < schema.dense_features.size() * static_cast<std::size_t>(B); ++i) {
    inputs.dense.push_back(normal(random));
  }
  for (std::size_t f = 0; f < schema.features.size(); ++f) {
    const std::int32_t bag = bags[bags.size() == 1 ? 0 : f];
    const FeatureSpec& feature = schema.features[f];
    const bool is_row = feature.hashing == Hashing::kNone;
    for (std::int64_t row = 0; row < B; ++row) {
      inputs.lengths.push_back(bag);
      for (std::int32_t k = 0; k < bag; ++k) {
        const auto bits = static_cast<std::uint32_t>(random());
        inputs.ids.push_back(
            is_row ? static_cast<std::int32_t>(bits % static_cast<std::uint64_t>(feature.rows))
                   : static_cast<std::int32_t>(bits >> 1U));
      }
    }
  }
  return inputs;
}

std::unique_ptr<Scores> pass(Session& session, const Inputs& inputs, std::int64_t B,
                             bool narrow = true) {
  const HostBatch batch = session.reserve(
      {.samples = B, .plain_ids = static_cast<std::int64_t>(inputs.ids.size()), .narrow = narrow});
  std::fill(std::copy(inputs.dense.begin(), inputs.dense.end(), batch.dense.begin()),
            batch.dense.end(), 0.0F);
  const auto rows = static_cast<std::size_t>(batch.rows);
  const auto samples = static_cast<std::size_t>(B);
  for (std::size_t f = 0; f < inputs.lengths.size() / samples; ++f) {
    auto* const begin = batch.id_list.lengths.data() + f * rows;
    std::fill(std::copy_n(inputs.lengths.data() + f * samples, samples, begin), begin + rows, 0);
  }
  if (batch.id_list.narrow.empty()) {
    std::copy(inputs.ids.begin(), inputs.ids.end(), batch.id_list.values.begin());
  } else {
    std::copy(inputs.ids.begin(), inputs.ids.end(), batch.id_list.narrow.begin());
  }
  return session.forward(batch);
}

// The first `count` samples of `inputs`, which are B.
Inputs head(const Inputs& inputs, std::int64_t B, std::int64_t count, std::size_t dense_features) {
  Inputs some;
  const auto samples = static_cast<std::size_t>(B);
  const auto kept = static_cast<std::size_t>(count);
  some.dense.assign(inputs.dense.begin(),
                    inputs.dense.begin() + static_cast<std::ptrdiff_t>(kept * dense_features));
  std::size_t at = 0;
  for (std::size_t bag = 0; bag < inputs.lengths.size(); ++bag) {
    const auto length = static_cast<std::size_t>(inputs.lengths[bag]);
    if (bag % samples < kept) {
      some.lengths.push_back(inputs.lengths[bag]);
      for (std::size_t k = 0; k < length; ++k) some.ids.push_back(inputs.ids[at + k]);
    }
    at += length;
  }
  return some;
}

void check(Session& session, const InputSchema& schema, const std::vector<std::int32_t>& bags) {
  constexpr std::int64_t kLarge = 3'000;
  std::mt19937 random(3);
  const Inputs large = draw(schema, kLarge, bags, random);
  const auto values = [&](const Inputs& inputs, std::int64_t B, bool narrow) {
    const auto scores = pass(session, inputs, B, narrow);
    const auto output = scores->output(0);
    return std::vector<float>(output.begin(), output.end());
  };
  const std::vector<float> expected = values(large, kLarge, true);
  float largest = 0;
  for (const std::int64_t B : {std::int64_t{1}, std::int64_t{5}, std::int64_t{200}, kLarge}) {
    const Inputs some = head(large, kLarge, B, schema.dense_features.size());
    for (const bool narrow : {false, true}) {
      const std::vector<float> found = values(some, B, narrow);
      for (std::size_t i = 0; i < found.size(); ++i) {
        largest = std::max(largest, std::abs(found[i] - expected[i]));
      }
    }
  }
  std::cerr << "largest difference between batches: " << largest << ", scores from "
            << *std::min_element(expected.begin(), expected.end()) << " to "
            << *std::max_element(expected.begin(), expected.end()) << '\n';
}

void measure(Runner& runner, const InputSchema& schema, const std::vector<std::int32_t>& bags,
             double seconds, std::size_t sessions, std::int64_t B) {
  std::mt19937 random(7);
  std::vector<Inputs> batches;
  while (batches.size() < kBatches) batches.push_back(draw(schema, B, bags, random));
  std::vector<std::unique_ptr<Session>> opened;
  for (std::size_t i = 0; i < sessions; ++i) {
    opened.push_back(runner.open_session(i % runner.devices().size()));
    if (!opened.back()->remark().empty()) std::cerr << opened.back()->remark() << '\n';
  }
  std::vector<std::vector<double>> times(sessions);
  std::atomic<std::size_t> ready = 0;
  Steady::time_point begin;
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < sessions; ++i) {
      threads.emplace_back([&, i] {
        Session& session = *opened[i];
        session.begin_thread(1);
        for (const Inputs& inputs : batches) pass(session, inputs, B);
        if (++ready == sessions) begin = Steady::now();
        while (ready < sessions) std::this_thread::yield();
        const auto end = Steady::now() + std::chrono::duration<double>(seconds);
        for (std::size_t n = i; Steady::now() < end || times[i].size() < 3; ++n) {
          const auto start = Steady::now();
          pass(session, batches[n % kBatches], B);
          times[i].push_back(
              std::chrono::duration<double, std::micro>(Steady::now() - start).count());
        }
      });
    }
  }
  const double took = std::chrono::duration<double>(Steady::now() - begin).count();
  std::vector<double> all;
  for (const auto& some : times) all.insert(all.end(), some.begin(), some.end());
  std::sort(all.begin(), all.end());
  std::cout << B << ',' << sessions << ',' << all[all.size() / 2] << ','
            << all[all.size() * 99 / 100] << ','
            << static_cast<double>(all.size()) * static_cast<double>(B) / took << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) {
    std::cerr << "usage: in_process MODEL.pt IDS_PER_BAG SECONDS SESSIONS B [B...]\n";
    return 2;
  }
  std::vector<std::int32_t> bags;
  std::istringstream parts(argv[2]);
  for (std::string part; std::getline(parts, part, ',');) bags.push_back(std::stoi(part));
  std::vector<std::int64_t> sizes;
  for (int i = 5; i < argc; ++i) sizes.push_back(std::stoll(argv[i]));
  const LoadedPackage package = load_package(
      argv[1], {.library_folders = library_folders({}),
                .gpu = {.max_batch_samples = *std::max_element(sizes.begin(), sizes.end())}});
  std::cerr << "loaded in " << seconds(package.load_time) << " s\n";
  const auto sessions = static_cast<std::size_t>(std::stoi(argv[4]));
  {
    const std::unique_ptr<Session> session = package.runner->open_session(0);
    session->begin_thread(1);
    check(*session, package.manifest.schema, bags);
  }
  for (const std::int64_t B : sizes) {
    measure(*package.runner, package.manifest.schema, bags, std::stod(argv[3]), sessions, B);
  }
}

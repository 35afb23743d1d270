#include "batching/pending_request.h"

#include <algorithm>
#include <cassert>
#include <iterator>
#include <new>

#include "common/out_of_memory.h"
#include "request/packed.h"

namespace tessera {
namespace {

std::int64_t micros(Duration duration) {
  return std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
}

}  // namespace

Refusal out_of_memory_refusal() { return {out_of_memory_status(), RejectReason::kQueueFull}; }

std::string_view reason_name(RejectReason reason) {
  switch (reason) {
    case RejectReason::kQueueFull: return "queue_full";
    case RejectReason::kDeadline: return "deadline";
    case RejectReason::kCancelled: return "cancelled";
    case RejectReason::kInvalid: return "invalid";
    case RejectReason::kDraining: return "draining";
  }
  return "unknown";
}

void PendingRequest::expect_parts(std::size_t parts, std::size_t outputs) {
  joined_.reset();
  if (parts == 1) return;
  joined_ = std::make_unique<Joined>();
  const MutexLock lock(joined_->mutex);
  joined_->left = parts;
  joined_->pieces.resize(parts * outputs);
}

StageTimings PendingRequest::stage_timings(const PassTimings& pass) const {
  return {.decode_us = micros(decode),
          .queue_us = micros(pass.started - arrival),
          .assemble_us = micros(pass.assemble),
          .transfer_us = micros(pass.transfer),
          .forward_us = micros(pass.forward),
          .split_us = 0,
          .batch_requests = static_cast<std::int32_t>(pass.requests),
          .batch_samples = static_cast<std::int32_t>(pass.samples)};
}

bool PendingRequest::deliver(std::size_t part, std::span<const OutputView> rows,
                             const PassTimings& pass) {
  StageTimings timings = stage_timings(pass);
  timings.split_us = micros(std::chrono::steady_clock::now() - pass.computed);
  if (joined_ == nullptr) {
    commit_ = pass.commit;
    answer(rows, timings);
    return true;
  }
  switch (join(*joined_, part, rows, timings, pass.commit)) {
    case Join::kNoMemory: drop(out_of_memory_refusal()); return true;
    case Join::kWaits: return true;
    case Join::kMixed: return false;
    case Join::kWhole: finish_joined(*joined_); return true;
  }
  return true;
}

PendingRequest::Join PendingRequest::join(Joined& joined, std::size_t part,
                                          std::span<const OutputView> rows,
                                          const StageTimings& timings, std::int64_t commit) {
  const MutexLock lock(joined.mutex);
  try {
    joined.names.clear();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      joined.pieces[part * rows.size() + i].assign(rows[i].data, rows[i].data + rows[i].count);
      joined.names.push_back(rows[i].name);
    }
  } catch (const std::bad_alloc&) {
    return Join::kNoMemory;
  }
  joined.mixed = joined.mixed || joined.commit.value_or(commit) != commit;
  joined.commit = commit;
  StageTimings& sum = joined.timings;
  sum.decode_us = timings.decode_us;
  sum.queue_us = std::max(sum.queue_us, timings.queue_us);
  sum.assemble_us += timings.assemble_us;
  sum.transfer_us += timings.transfer_us;
  sum.forward_us += timings.forward_us;
  sum.split_us += timings.split_us;
  sum.batch_requests = std::max(sum.batch_requests, timings.batch_requests);
  sum.batch_samples = std::max(sum.batch_samples, timings.batch_samples);
  if (--joined.left > 0) return Join::kWaits;
  return joined.mixed && !joined.refusal.has_value() ? Join::kMixed : Join::kWhole;
}

void PendingRequest::drop(const Refusal& refusal) {
  if (joined_ == nullptr) {
    fail(refusal);
    return;
  }
  Joined& joined = *joined_;
  {
    const MutexLock lock(joined.mutex);
    if (!joined.refusal.has_value()) joined.refusal = refusal;
    joined.failed = true;
    if (--joined.left > 0) return;
  }
  finish_joined(joined);
}

// Every part has come: no other thread uses `joined` any more, and answer and fail end it.
void PendingRequest::finish_joined(Joined& joined) {
  std::optional<Refusal> refusal;
  std::vector<std::vector<float>> pieces;
  std::vector<std::string_view> names;
  StageTimings timings;
  {
    const MutexLock lock(joined.mutex);
    refusal = std::move(joined.refusal);
    pieces = std::move(joined.pieces);
    names = std::move(joined.names);
    timings = joined.timings;
    commit_ = joined.commit.value_or(0);
  }
  if (refusal.has_value()) {
    fail(*refusal);
    return;
  }
  const std::size_t outputs = names.size();
  std::vector<std::vector<float>> whole;
  std::vector<OutputView> views;
  try {
    whole.resize(outputs);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      std::vector<float>& target = whole[i % outputs];
      target.insert(target.end(), pieces[i].begin(), pieces[i].end());
    }
    for (std::size_t i = 0; i < outputs; ++i) {
      views.push_back({names[i], whole[i].data(), whole[i].size()});
    }
  } catch (const std::bad_alloc&) {
    fail(out_of_memory_refusal());
    return;
  }
  answer(views, timings);
}

namespace {

// Adds, for every feature of `group` that is one of `shared` or (with `of_shared` false) is not,
// the ids of each of its bags to that bag's entry of `bag_ids`.
void add_bag_ids(const JaggedView& group, const SharedRows& shared, bool of_shared,
                 std::int64_t samples, std::vector<std::int64_t>& bag_ids) {
  std::size_t first_bag = 0;
  for (std::size_t f = 0; f < group.ids.size(); ++f) {
    const auto bags = static_cast<std::size_t>(shared.has(f) ? shared.rows : samples);
    if (shared.has(f) == of_shared) {
      for (std::size_t bag = 0; bag < bags; ++bag) {
        bag_ids[bag] += load<std::int32_t>(group.lengths.data(), first_bag + bag);
      }
    }
    first_bag += bags;
  }
}

// Ids of the bags [begin, end) of the feature whose first bag is `first_bag`.
std::int64_t ids_between(const JaggedView& group, std::size_t first_bag, std::int64_t begin,
                         std::int64_t end) {
  std::int64_t count = 0;
  for (std::int64_t bag = begin; bag < end; ++bag) {
    count += load<std::int32_t>(group.lengths.data(), first_bag + static_cast<std::size_t>(bag));
  }
  return count;
}

// Appends where the part's bags of each feature of `group` lie among its ids. `begin` holds, per
// feature, where its bags of the part begin (of a shared feature: where all its bags begin), and is
// moved behind them.
void add_id_ranges(const JaggedView& group, const SharedRows& shared, std::int64_t samples,
                   Part& part, std::span<std::int64_t> begin) {
  std::size_t first_bag = 0;
  for (std::size_t f = 0; f < group.ids.size(); ++f) {
    if (shared.has(f)) {
      const std::int64_t before = ids_between(group, first_bag, 0, part.shared_begin);
      part.id_begin.push_back(begin[f] + before);
      part.id_count.push_back(ids_between(group, first_bag, part.shared_begin, part.shared_end));
      first_bag += static_cast<std::size_t>(shared.rows);
      continue;
    }
    const std::int64_t count = ids_between(group, first_bag, part.row_begin, part.row_end);
    part.id_begin.push_back(begin[f]);
    part.id_count.push_back(count);
    begin[f] += count;
    first_bag += static_cast<std::size_t>(samples);
  }
}

std::vector<std::int64_t> feature_begins(const JaggedView& group) {
  std::vector<std::int64_t> begins;
  std::int64_t at = 0;
  for (const std::int64_t ids : group.ids) {
    begins.push_back(at);
    at += ids;
  }
  return begins;
}

// Shared rows [begin, end) that some samples use.
struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  bool operator==(const RowRange&) const = default;
};

// The range that also has the row of `sample`.
RowRange widened(RowRange range, const SharedRows& shared, std::int64_t sample) {
  if (!shared.any()) return range;
  const std::int64_t row =
      load<std::int32_t>(shared.row_index.data(), static_cast<std::size_t>(sample));
  if (range.begin == range.end) return {row, row + 1};
  return {std::min(range.begin, row), std::max(range.end, row + 1)};
}

// Consecutive parts of the rows of a request that does not fit a batch.
std::vector<Part> cut_rows(PendingRequest& pending, std::int64_t max_samples,
                           std::int64_t max_ids) {
  const DecodedRequest& request = pending.request;
  std::vector<Part> parts;
  std::vector<std::int64_t> row_ids(static_cast<std::size_t>(request.samples), 0);
  const SharedRows none;
  const SharedRows& shared = request.shared;
  add_bag_ids(request.id_list, shared, /*of_shared=*/false, request.samples, row_ids);
  add_bag_ids(request.id_score_list, none, /*of_shared=*/false, request.samples, row_ids);
  std::vector<std::int64_t> shared_ids(static_cast<std::size_t>(shared.rows), 0);
  add_bag_ids(request.id_list, shared, /*of_shared=*/true, request.samples, shared_ids);
  std::vector<std::int64_t> before(1, 0);
  for (const std::int64_t ids : shared_ids) before.push_back(before.back() + ids);
  const auto ids_of = [&before](RowRange rows) {
    return before[static_cast<std::size_t>(rows.end)] -
           before[static_cast<std::size_t>(rows.begin)];
  };
  std::vector<std::int64_t> plain_begin = feature_begins(request.id_list);
  std::vector<std::int64_t> scored_begin = feature_begins(request.id_score_list);
  std::int64_t looked_up = 0;
  for (std::int64_t row = 0; row < request.samples;) {
    Part part;
    part.request = &pending;
    part.index = parts.size();
    part.row_begin = row;
    RowRange rows;
    std::int64_t own_ids = 0;
    while (row < request.samples && row - part.row_begin < max_samples) {
      const std::int64_t own = own_ids + row_ids[static_cast<std::size_t>(row)];
      const RowRange wider = widened(rows, shared, row);
      // A row is looked up again in every part that has it. So the rows that a part has leave own
      // ids at least half of the room, and once parts have looked up as many ids as there are, so
      // do all.
      const bool rows_pay = wider == rows || looked_up >= request.ids;
      const bool fits = own + ids_of(wider) <= max_ids || (rows_pay && own <= max_ids / 2);
      if (row > part.row_begin && !fits) break;
      own_ids = own;
      rows = wider;
      ++row;
    }
    part.row_end = row;
    part.last = row == request.samples;
    part.ids = own_ids + ids_of(rows);
    looked_up += part.ids;
    part.shared_begin = rows.begin;
    part.shared_end = rows.end;
    add_id_ranges(request.id_list, shared, request.samples, part, plain_begin);
    add_id_ranges(request.id_score_list, none, request.samples, part, scored_begin);
    parts.push_back(std::move(part));
  }
  assert(!parts.empty());
  return parts;
}

}  // namespace

std::vector<Part> cut_request(PendingRequest& pending, std::size_t outputs,
                              std::int64_t max_samples, std::int64_t max_ids) {
  std::vector<Part> parts;
  cut_request(pending, outputs, max_samples, max_ids, parts);
  return parts;
}

void cut_request(PendingRequest& pending, std::size_t outputs, std::int64_t max_samples,
                 std::int64_t max_ids, std::vector<Part>& parts) {
  const DecodedRequest& request = pending.request;
  if (request.samples <= max_samples && (request.ids <= max_ids || request.samples == 1)) {
    pending.expect_parts(1, outputs);
    Part& whole = parts.emplace_back();
    whole.request = &pending;
    whole.last = true;
    whole.row_end = request.samples;
    whole.ids = request.ids;
    whole.shared_end = request.shared.rows;
    return;
  }
  std::vector<Part> cut = cut_rows(pending, max_samples, max_ids);
  pending.expect_parts(cut.size(), outputs);
  parts.reserve(parts.size() + cut.size());
  std::move(cut.begin(), cut.end(), std::back_inserter(parts));
}

}  // namespace tessera

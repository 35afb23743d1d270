#include "batching/pending.h"

#include <algorithm>
#include <cassert>

#include "request/packed.h"

namespace tessera {
namespace {

std::int64_t micros(Duration duration) {
  return std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
}

}  // namespace

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

void PendingRequest::deliver(std::size_t part, std::span<const OutputView> rows,
                             const PassTimings& pass) {
  StageTimings timings = stage_timings(pass);
  timings.split_us = micros(std::chrono::steady_clock::now() - pass.computed);
  if (joined_ == nullptr) {
    answer(rows, timings);
    return;
  }
  Joined& joined = *joined_;
  {
    const MutexLock lock(joined.mutex);
    joined.names.clear();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      joined.pieces[part * rows.size() + i].assign(rows[i].data, rows[i].data + rows[i].count);
      joined.names.push_back(rows[i].name);
    }
    StageTimings& sum = joined.timings;
    sum.decode_us = timings.decode_us;
    sum.queue_us = std::max(sum.queue_us, timings.queue_us);
    sum.assemble_us += timings.assemble_us;
    sum.transfer_us += timings.transfer_us;
    sum.forward_us += timings.forward_us;
    sum.split_us += timings.split_us;
    sum.batch_requests = std::max(sum.batch_requests, timings.batch_requests);
    sum.batch_samples = std::max(sum.batch_samples, timings.batch_samples);
    if (--joined.left > 0) return;
  }
  finish_joined(joined);
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
    joined.dead = true;
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
  }
  if (refusal.has_value()) {
    fail(*refusal);
    return;
  }
  const std::size_t outputs = names.size();
  std::vector<std::vector<float>> whole(outputs);
  std::vector<OutputView> views;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    std::vector<float>& target = whole[i % outputs];
    target.insert(target.end(), pieces[i].begin(), pieces[i].end());
  }
  for (std::size_t i = 0; i < outputs; ++i) {
    views.push_back({names[i], whole[i].data(), whole[i].size()});
  }
  answer(views, timings);
}

namespace {

// Ids of each row over all features of `group`, added to `row_ids`.
void add_row_ids(const JaggedView& group, std::vector<std::int64_t>& row_ids) {
  const std::size_t rows = row_ids.size();
  for (std::size_t i = 0; i < group.lengths.size() / 4; ++i) {
    row_ids[i % rows] += load<std::int32_t>(group.lengths.data(), i);
  }
}

// Appends where the rows [row_begin, row_end) of each feature of `group` lie among its ids.
// `begin` holds, per feature, where the row `row_begin` begins, and is moved to `row_end`.
void add_id_ranges(const JaggedView& group, std::int64_t rows, Part& part,
                   std::span<std::int64_t> begin) {
  for (std::size_t f = 0; f < group.ids.size(); ++f) {
    const std::byte* const lengths = group.lengths.data() + f * static_cast<std::size_t>(rows) * 4;
    std::int64_t count = 0;
    for (std::int64_t row = part.row_begin; row < part.row_end; ++row) {
      count += load<std::int32_t>(lengths, static_cast<std::size_t>(row));
    }
    part.id_begin.push_back(begin[f]);
    part.id_count.push_back(count);
    begin[f] += count;
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

}  // namespace

std::vector<Part> split_request(PendingRequest& pending, std::size_t outputs,
                                std::int64_t max_samples, std::int64_t max_ids) {
  const DecodedRequest& request = pending.request;
  std::vector<Part> parts;
  if (request.samples <= max_samples && (request.ids <= max_ids || request.samples == 1)) {
    parts.resize(1);
    parts[0].request = &pending;
    parts[0].row_end = request.samples;
    parts[0].ids = request.ids;
    pending.expect_parts(1, outputs);
    return parts;
  }
  std::vector<std::int64_t> row_ids(static_cast<std::size_t>(request.samples), 0);
  add_row_ids(request.id_list, row_ids);
  add_row_ids(request.id_score_list, row_ids);
  std::vector<std::int64_t> plain_begin = feature_begins(request.id_list);
  std::vector<std::int64_t> scored_begin = feature_begins(request.id_score_list);
  for (std::int64_t row = 0; row < request.samples;) {
    Part part;
    part.request = &pending;
    part.index = parts.size();
    part.row_begin = row;
    while (row < request.samples && row - part.row_begin < max_samples) {
      const std::int64_t ids = row_ids[static_cast<std::size_t>(row)];
      if (row > part.row_begin && part.ids + ids > max_ids) break;
      part.ids += ids;
      ++row;
    }
    part.row_end = row;
    add_id_ranges(request.id_list, request.samples, part, plain_begin);
    add_id_ranges(request.id_score_list, request.samples, part, scored_begin);
    parts.push_back(std::move(part));
  }
  assert(!parts.empty());
  pending.expect_parts(parts.size(), outputs);
  return parts;
}

}  // namespace tessera

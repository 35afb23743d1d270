#include "row_overlay.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "cpu_kernels.h"
#include "row_exchange.h"

namespace tessera {
namespace {

// Rows of a piece of work.
constexpr std::size_t kAtOnce = 1024;
constexpr std::size_t kBytesAtOnce = 256U << 10;

// All storages of overlays that are shown. Lookups of other models look at it as well, so it has a
// lock, which is held for some 100 ns.
struct Shown {
  std::mutex mutex;
  std::vector<const LaidStorage*> storages;
  std::atomic<std::size_t> count = 0;
};

// It stays until the process is gone: an overlay may end after what is destroyed at its exit.
Shown& shown() {
  static Shown* const all = new Shown;
  return *all;
}

thread_local std::int64_t looks_up_to = std::numeric_limits<std::int64_t>::max();

std::int64_t next_number() {
  static std::atomic<std::int64_t> last = 0;
  return ++last;
}

std::int64_t address(const void* pointer) { return reinterpret_cast<std::int64_t>(pointer); }

// Rounded towards minus infinity.
std::int64_t divided(std::int64_t number, std::int64_t by) {
  return number / by - (number % by < 0 ? 1 : 0);
}

}  // namespace

LaidTable::LaidTable(NewRows rows) : rows_(std::move(rows)) {
  const auto stride = static_cast<std::int64_t>(rows_.stride);
  const std::size_t bytes = (count() + 1) * rows_.stride;
  memory_ = std::unique_ptr<std::byte, GiveBack>(static_cast<std::byte*>(take_memory(bytes)),
                                                 GiveBack{.bytes = bytes});
  const std::int64_t apart = address(memory_.get()) - address(rows_.table);
  distance_ = divided(apart + stride - 1, stride);
  new_rows_ = memory_.get() + (distance_ * stride - apart);
  const std::uint32_t last = rows_.numbers.back();
  while ((last >> shift_) >= count()) ++shift_;
  begins_.resize((last >> shift_) + 2);
  std::size_t row = 0;
  for (std::size_t at = 0; at < begins_.size(); ++at) {
    while (row < count() && (rows_.numbers[row] >> shift_) < at) ++row;
    begins_[at] = static_cast<std::uint32_t>(row);
  }
}

const std::byte* LaidTable::end() const {
  return rows_.table + rows_.numbers.back() * rows_.stride + rows_.width;
}

std::optional<std::int64_t> LaidTable::find_within(std::uint32_t row) const {
  const std::uint32_t* const numbers = rows_.numbers.data();
  const std::size_t at = row >> shift_;
  const std::uint32_t* const end = numbers + begins_[at + 1];
  const std::uint32_t* const found = std::lower_bound(numbers + begins_[at], end, row);
  if (found == end || *found != row) return std::nullopt;
  return distance_ + (found - numbers);
}

void LaidTable::keep(std::size_t first, std::size_t count) const {
  const std::size_t width = rows_.width;
  for_each_row(
      count, width,
      [&](std::size_t i) { return rows_.table + rows_.numbers[first + i] * rows_.stride; },
      [&](std::byte* row, std::size_t i) {
        std::byte* const value = rows_.values + (first + i) * width;
        std::memcpy(new_rows_ + (first + i) * rows_.stride, value, width);
        write_nothing_to(row, width);
        std::memcpy(value, row, width);
      });
}

void LaidTable::write(std::size_t first, std::size_t count) const {
  for_each_row(
      count, rows_.width,
      [&](std::size_t i) { return rows_.table + rows_.numbers[first + i] * rows_.stride; },
      [&](std::byte* row, std::size_t i) {
        std::memcpy(row, new_rows_ + (first + i) * rows_.stride, rows_.width);
      });
}

void LaidTable::restore() const {
  write_rows_at(
      count(), rows_.width,
      [&](std::size_t i) { return rows_.table + rows_.numbers[i] * rows_.stride; }, rows_.values);
}

bool LaidStorage::sort() {
  std::sort(tables_.begin(), tables_.end(),
            [](const LaidTable* a, const LaidTable* b) { return a->begin() < b->begin(); });
  return std::adjacent_find(tables_.begin(), tables_.end(),
                            [](const LaidTable* a, const LaidTable* b) {
                              return a->end() > b->begin();
                            }) == tables_.end();
}

LaidStorage::Range LaidStorage::within(const std::byte* begin, const std::byte* end) const {
  const auto first = std::partition_point(tables_.begin(), tables_.end(),
                                          [&](const LaidTable* t) { return t->end() <= begin; });
  const auto last = std::partition_point(first, tables_.end(),
                                         [&](const LaidTable* t) { return t->begin() < end; });
  return {static_cast<std::size_t>(first - tables_.begin()),
          static_cast<std::size_t>(last - tables_.begin())};
}

void LaidStorage::lay(const std::uint8_t* weights, const FeaturePlan& plan, std::int64_t begin,
                      std::int64_t end, std::int64_t* rows, std::int64_t* starts) const {
  if (overlay_.all_.load(std::memory_order_acquire)) return;
  const auto* const base = reinterpret_cast<const std::byte*>(weights);
  const std::int64_t data_bytes = row_data_bytes(plan.weight_type, plan.dim);
  const std::byte* const data = base + plan.data_offset;
  const Range range = within(data, data + (plan.rows - 1) * plan.row_stride + data_bytes);
  Range scales{0, 0};
  if (plan.scale_type != kNoScale) {
    const std::byte* const scale = base + plan.scale_offset;
    scales = within(scale, scale + ((plan.rows - 1) >> plan.scale_shift) * plan.scale_stride +
                               scale_bytes(plan.scale_type));
  }
  const bool scaled = scales.first != scales.last;
  if (range.first == range.last && !scaled) return;
  const LaidTable* const table = range.first < range.last ? tables_[range.first] : nullptr;
  const auto fits = [&] {
    if (table == nullptr || range.last - range.first != 1) return false;
    const auto stride = static_cast<std::int64_t>(table->stride());
    const auto width = static_cast<std::int64_t>(table->width());
    if (plan.row_stride != stride) return false;
    const std::int64_t at = data - table->begin();
    const std::int64_t first = divided(at, stride);
    if (at - first * stride + data_bytes > width) return false;
    if (!has_bias(plan.scale_type)) return !scaled;
    const std::int64_t scale = base + plan.scale_offset - table->begin() - first * stride;
    return plan.scale_shift == 0 && plan.scale_stride == stride && scale >= 0 &&
           scale + scale_bytes(plan.scale_type) <= width &&
           (!scaled || (scales.first == range.first && scales.last == range.last));
  };
  if (!fits()) {
    overlay_.write_all_or_throw();
    return;
  }
  const std::int64_t first =
      divided(data - table->begin(), static_cast<std::int64_t>(table->stride()));
  for (std::int64_t i = begin; i < end; ++i) {
    if (rows[i] == kSkipped) continue;
    if (const auto found = table->find(rows[i] + first)) {
      rows[i] = *found - first;
      starts[i] = plan.data_offset + rows[i] * plan.row_stride;
    }
  }
}

std::int64_t LaidStorage::number() const { return overlay_.number(); }

RowOverlay::RowOverlay(std::vector<NewRows> tables) : number_(next_number()) {
  tables_.reserve(tables.size());
  for (NewRows& rows : tables) {
    const std::byte* const storage = rows.storage;
    const std::byte* const end = storage + rows.storage_bytes;
    tables_.push_back(std::make_unique<LaidTable>(std::move(rows)));
    auto found = std::find_if(storages_.begin(), storages_.end(),
                              [&](const auto& one) { return one->holds(storage); });
    if (found == storages_.end()) {
      found = storages_.insert(found, std::make_unique<LaidStorage>(*this, storage, end));
    }
    (*found)->add(*tables_.back());
  }
  for (const auto& storage : storages_) {
    if (!storage->sort())
      throw std::invalid_argument("the rows of two tables lie within each other");
  }
}

RowOverlay::~RowOverlay() {
  if (shown_) hide();
}

template <typename Work>
bool RowOverlay::go_on(Turn& turn, Work work) {
  if (turn.table == tables_.size()) return false;
  const LaidTable& table = *tables_[turn.table];
  const std::size_t most = std::clamp<std::size_t>(kBytesAtOnce / table.width(), 1, kAtOnce);
  const std::size_t count = std::min(most, table.count() - turn.row);
  work(table, turn.row, count);
  turn.row += count;
  if (turn.row == table.count()) turn = {.table = turn.table + 1, .row = 0};
  return turn.table != tables_.size();
}

bool RowOverlay::keep() {
  return go_on(kept_, [](const LaidTable& table, std::size_t first, std::size_t count) {
    table.keep(first, count);
  });
}

void RowOverlay::show(Shows how) {
  beside_ = how == Shows::kBeside;
  Shown& all = shown();
  const std::lock_guard lock(all.mutex);
  for (const auto& storage : storages_) all.storages.push_back(storage.get());
  all.count = all.storages.size();
  shown_ = true;
}

void RowOverlay::hide() {
  Shown& all = shown();
  const std::lock_guard lock(all.mutex);
  for (const auto& storage : storages_) std::erase(all.storages, storage.get());
  all.count = all.storages.size();
  shown_ = false;
}

void RowOverlay::take_back() {
  hide();
  const std::lock_guard lock(mutex_);
  if (written_.table == 0 && written_.row == 0) return;
  for (const auto& table : tables_) table->restore();
}

bool RowOverlay::write_some() {
  const std::lock_guard lock(mutex_);
  const bool more = go_on(written_, [](const LaidTable& table, std::size_t first,
                                       std::size_t count) { table.write(first, count); });
  if (!more) all_.store(true, std::memory_order_release);
  return more;
}

bool RowOverlay::write() {
  const bool more = write_some();
  if (!more && shown_) hide();
  return more;
}

void RowOverlay::write_all() {
  while (write_some()) {
  }
}

void RowOverlay::write_all_or_throw() {
  if (beside_) {
    fits_ = false;
    throw std::runtime_error("a table's rows cannot be laid under this plan beside other lookups");
  }
  write_all();
}

void look_up_to(std::int64_t number) { looks_up_to = number; }

const LaidStorage* laid_over(const std::uint8_t* weights) {
  Shown& all = shown();
  if (all.count.load(std::memory_order_acquire) == 0) return nullptr;
  const auto* const byte = reinterpret_cast<const std::byte*>(weights);
  const std::lock_guard lock(all.mutex);
  for (const LaidStorage* const storage : all.storages) {
    if (storage->holds(byte) && storage->number() <= looks_up_to) return storage;
  }
  return nullptr;
}

}  // namespace tessera

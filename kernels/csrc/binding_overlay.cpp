// A commit's rows laid over those of tables on the CPU; see row_overlay.h.
//
// An overlay is known by a number. `overlay_make` checks all that it is given and copies nothing.
// `overlay_keep` and `overlay_write` do one piece, so that tessera-server looks between two whether
// it is wanted elsewhere; a server's Python makes one call for the making and all pieces, with
// pauses, as each gives the interpreter's lock away and waits for it again.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "binding_rows.h"
#include "idle_thread.h"
#include "pauses.h"
#include "row_overlay.h"

namespace tessera {
namespace {

// An overlay, and what it must not outlive.
struct Held {
  std::vector<Tensor> storages;
  std::vector<Tensor> values;
  std::unique_ptr<RowOverlay> overlay;
};

class Overlays {
 public:
  int64_t add(std::shared_ptr<Held> held) {
    const int64_t number = held->overlay->number();
    const std::lock_guard lock(mutex_);
    held_[number] = std::move(held);
    return number;
  }

  std::shared_ptr<Held> get(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = held_.find(number);
    TORCH_CHECK(found != held_.end(), "overlay: there is no overlay ", number);
    return found->second;
  }

  void drop(int64_t number) {
    std::shared_ptr<Held> held = get(number);
    const std::lock_guard lock(mutex_);
    held_.erase(number);
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Held>> held_;
};

// It stays until the process is gone.
Overlays& overlays() {
  static Overlays* const all = new Overlays;
  return *all;
}

NewRows new_rows(const Rows& rows, const Tensor& storage, const Tensor& values) {
  NewRows made{.storage = static_cast<std::byte*>(storage.mutable_data_ptr()),
               .storage_bytes = static_cast<std::size_t>(storage.numel()),
               .table = rows.begin(),
               .stride = rows.stride(),
               .width = rows.width(),
               .numbers = {},
               .values = static_cast<std::byte*>(values.mutable_data_ptr())};
  TORCH_CHECK(rows.count() > 0, "rows: an overlay needs at least one of each table");
  TORCH_CHECK(rows.number(rows.count() - 1) <= UINT32_MAX, "rows: the last one is ",
              rows.number(rows.count() - 1), ", expected at most ", UINT32_MAX);
  made.numbers.reserve(rows.count());
  for (std::size_t i = 0; i < rows.count(); ++i) {
    made.numbers.push_back(static_cast<std::uint32_t>(rows.number(i)));
  }
  return made;
}

std::shared_ptr<Held> made(at::TensorList storages, at::TensorList rows, at::TensorList values,
                           at::IntArrayRef offsets, at::IntArrayRef strides) {
  const std::vector<Rows> all = checked(storages, rows, values, offsets, strides);
  std::vector<NewRows> tables;
  tables.reserve(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    tables.push_back(new_rows(all[i], storages[i], values[i]));
  }
  auto held = std::make_shared<Held>(
      Held{.storages = storages.vec(), .values = values.vec(), .overlay = nullptr});
  try {
    held->overlay = std::make_unique<RowOverlay>(std::move(tables));
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK(false, "rows: ", error.what());
  }
  return held;
}

int64_t overlay_make(at::TensorList storages, at::TensorList rows, at::TensorList values,
                     at::IntArrayRef offsets, at::IntArrayRef strides) {
  return overlays().add(made(storages, rows, values, offsets, strides));
}

bool overlay_keep(int64_t overlay) { return overlays().get(overlay)->overlay->keep(); }

bool overlay_write(int64_t overlay) { return overlays().get(overlay)->overlay->write(); }

// Calls `work` until it gives false, while CPUs have nothing else to do.
template <typename Work>
void aside(double share, double seconds, Work work) {
  TORCH_CHECK(share > 0 && share <= 1, "share: ", share, ", expected more than 0 and at most 1");
  Pauses pauses(share, seconds);
  bool more = true;
  run_when_idle([&](const std::stop_token& stop) {
    while (more && !stop.stop_requested()) {
      more = work();
      if (more) pauses.rest();
    }
  });
}

int64_t overlay_make_aside(at::TensorList storages, at::TensorList rows, at::TensorList values,
                           at::IntArrayRef offsets, at::IntArrayRef strides, double share,
                           double seconds) {
  std::shared_ptr<Held> held;
  aside(share, seconds, [&] {
    if (held != nullptr) return held->overlay->keep();
    held = made(storages, rows, values, offsets, strides);
    return true;
  });
  return overlays().add(std::move(held));
}

void overlay_write_aside(int64_t overlay, double share, double seconds) {
  const auto held = overlays().get(overlay);
  aside(share, seconds, [&] { return held->overlay->write(); });
}

void overlay_show(int64_t overlay) { overlays().get(overlay)->overlay->show(Shows::kAlone); }

void overlay_show_beside(int64_t overlay) {
  overlays().get(overlay)->overlay->show(Shows::kBeside);
}

bool overlay_fits(int64_t overlay) { return overlays().get(overlay)->overlay->fits(); }

void overlay_look_up_to(int64_t overlay) { look_up_to(overlay); }

void overlay_take_back(int64_t overlay) { overlays().get(overlay)->overlay->take_back(); }

void overlay_drop(int64_t overlay) { overlays().drop(overlay); }

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("overlay_make", tessera::overlay_make);
  m.impl("overlay_make_aside", tessera::overlay_make_aside);
}

// They have no tensor that would tell a device.
TORCH_LIBRARY_IMPL(tessera, CompositeImplicitAutograd, m) {
  m.impl("overlay_keep", tessera::overlay_keep);
  m.impl("overlay_look_up_to", tessera::overlay_look_up_to);
  m.impl("overlay_fits", tessera::overlay_fits);
  m.impl("overlay_show", tessera::overlay_show);
  m.impl("overlay_show_beside", tessera::overlay_show_beside);
  m.impl("overlay_take_back", tessera::overlay_take_back);
  m.impl("overlay_write", tessera::overlay_write);
  m.impl("overlay_write_aside", tessera::overlay_write_aside);
  m.impl("overlay_drop", tessera::overlay_drop);
}

// Marks of memory that is left to the system for a while (page_marks.h). Calls of operators, as a
// thread of Python that stands back for others must not have the interpreter's lock meanwhile.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "page_marks.h"

namespace tessera {
namespace {

void check_memory(const at::Tensor& memory) {
  TORCH_CHECK(memory.scalar_type() == at::kByte && memory.dim() == 1 && memory.is_contiguous(),
              "memory: a contiguous uint8 vector is needed, got ", memory.scalar_type(), " ",
              memory.sizes());
  TORCH_CHECK(reinterpret_cast<std::uintptr_t>(memory.const_data_ptr()) % kMarkedPage == 0,
              "memory: it must begin where a page of ", kMarkedPage, " bytes does");
}

at::Tensor page_marks_of(const at::Tensor& memory) {
  check_memory(memory);
  const auto* const begin = static_cast<const std::byte*>(memory.const_data_ptr());
  const auto found = page_marks({begin, static_cast<std::size_t>(memory.numel())});
  at::Tensor marks = at::empty({static_cast<int64_t>(found.size())}, at::kShort);
  std::memcpy(marks.mutable_data_ptr(), found.data(), found.size() * sizeof(std::uint16_t));
  return marks;
}

bool take_back(const at::Tensor& memory, const at::Tensor& marks) {
  check_memory(memory);
  TORCH_CHECK(marks.scalar_type() == at::kShort && marks.dim() == 1 && marks.is_contiguous(),
              "marks: those of page_marks are needed, got ", marks.scalar_type(), " ",
              marks.sizes());
  auto* const begin = static_cast<std::byte*>(memory.mutable_data_ptr());
  const auto* const first = static_cast<const std::uint16_t*>(marks.const_data_ptr());
  return take_back_pages({begin, static_cast<std::size_t>(memory.numel())},
                         {first, static_cast<std::size_t>(marks.numel())});
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("page_marks", tessera::page_marks_of);
  m.impl("take_back_pages", tessera::take_back);
}

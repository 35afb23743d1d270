#include "package/pickle_depth.h"

#include <algorithm>
#include <stdexcept>

#include "common/text.h"
#include "package/format_rules.h"

namespace tessera {
namespace {

[[noreturn]] void missing() { throw std::invalid_argument("it takes more values than there are"); }

}  // namespace

void PickleDepth::follow(unsigned char opcode, std::int64_t number) {
  opcodes_ += opcode == '}' ? kDictOpcodes : 1;
  if (opcodes_ > kMaxOpcodes) {
    throw std::invalid_argument(
        text("it has more than ", kMaxOpcodes, " opcodes, a dictionary counted as ", kDictOpcodes));
  }
  switch (opcode) {
    case 0x80:  // PROTO
    case '.': return;
    case 'q':
    case 'r': memo_[number] = top().depth; return;
    case 'h':
    case 'j': {
      const auto known = memo_.find(number);
      if (known == memo_.end()) throw std::invalid_argument("what it refers to is not there");
      stack_.push_back({.depth = known->second, .named = true});
      return;
    }
    case '2': stack_.push_back({.depth = top().depth, .named = true}); return;
    case '(': marks_.push_back(stack_.size()); return;
    case 0x85:  // TUPLE1
    case 'Q': wrap(1); return;
    case 0x86:  // TUPLE2
    case 'R':
    case 0x81: wrap(2); return;  // NEWOBJ
    case 0x87: wrap(3); return;  // TUPLE3
    case 't':
    case 'l':
    case 'd': wrap_to_mark(); return;
    case 'a':
    case 'b':
    case 's': {
      const std::size_t count = opcode == 's' ? 2 : 1;
      if (stack_.size() < count) missing();
      fill(take(stack_.size() - count));
      return;
    }
    case 'e':
    case 'u': fill(take(pop_mark())); return;
    case '1': stack_.resize(pop_mark()); return;
    case '0':
      if (!marks_.empty() && marks_.back() == stack_.size()) {
        marks_.pop_back();
      } else {
        top();
        stack_.pop_back();
      }
      return;
    default: stack_.emplace_back(); return;  // a value without others in it
  }
}

void PickleDepth::wrap(std::size_t count) {
  if (stack_.size() < count) missing();
  const std::size_t depth = take(stack_.size() - count);
  stack_.push_back({.depth = depth});
}

void PickleDepth::wrap_to_mark() {
  const std::size_t depth = take(pop_mark());
  stack_.push_back({.depth = depth});
}

void PickleDepth::fill(std::size_t depth) {
  Value& filled = top();
  if (filled.named) throw std::invalid_argument("it fills a container that it has named again");
  filled.depth = std::max(filled.depth, depth);
}

std::size_t PickleDepth::take(std::size_t start) {
  if (start > stack_.size()) missing();
  std::size_t deepest = 0;
  for (std::size_t at = start; at < stack_.size(); ++at) {
    deepest = std::max(deepest, stack_[at].depth);
  }
  if (deepest + 1 > kMaxPickleDepth) {
    throw std::invalid_argument(
        text("its values lie in one another more than ", kMaxPickleDepth, " times"));
  }
  stack_.resize(start);
  return deepest + 1;
}

std::size_t PickleDepth::pop_mark() {
  if (marks_.empty()) missing();
  const std::size_t mark = marks_.back();
  marks_.pop_back();
  return mark;
}

PickleDepth::Value& PickleDepth::top() {
  if (stack_.empty()) missing();
  return stack_.back();
}

}  // namespace tessera

// How deeply the values of a pickle lie in one another, found without making any of them.
//
// torch gives a value back by a recursion as deep as the value, so a pickle of 400 KB whose tuples
// lie in one another 200,000 times would end the process.  Counting the opcodes bounds what the
// values take.  The same as serving/package/pickle_depth.py.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace tessera {

class PickleDepth {
 public:
  // Takes the next opcode; `number` is the argument of those that number a value or name it again.
  // Throws std::invalid_argument: there are more than kMaxOpcodes (a dictionary counts as
  // kDictOpcodes: it takes more memory than any other value), values lie deeper than
  // kMaxPickleDepth, a container is filled after it was named again, or values are missing.
  void follow(unsigned char opcode, std::int64_t number);

 private:
  struct Value {
    std::size_t depth = 0;
    bool named = false;  // it was named again: it must be whole
  };

  void wrap(std::size_t count);
  void wrap_to_mark();
  void fill(std::size_t depth);
  std::size_t take(std::size_t start);  // the depth of what holds the values from `start` on
  std::size_t pop_mark();
  Value& top();

  std::vector<Value> stack_;
  std::vector<std::size_t> marks_;
  std::map<std::int64_t, std::size_t> memo_;
  std::size_t opcodes_ = 0;
};

}  // namespace tessera

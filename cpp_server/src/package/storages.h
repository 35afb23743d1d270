// The pickles of a TorchScript archive: what they name, and the sizes of the storages in them, read
// and replaced, so that torch can be given an archive without its large tables.
//
// torch's pickler writes every tensor as a persistent id of its storage (its element type, the
// number of its record below "data/", its device, its number of elements) and then offset, sizes
// and strides. This finds those numbers among the pickle's opcodes; no object is made of it, and
// memory does not grow with what the pickle would make.
//
// Contract: plain values and free functions; any thread; nothing blocks. Throws
// std::invalid_argument when the content is not as torch writes it, or names what no package may.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace tessera {

inline constexpr const char* kDataRecord = "data.pkl";
inline constexpr const char* kConstantsRecord = "constants.pkl";

class Storages {
 public:
  // Finds the storages in `content`, which must outlive this; `record` names it in errors.
  explicit Storages(std::span<const std::byte> content, const char* record = kDataRecord);

  // Whether `with_sizes` can change a storage (by its number, as text): one of bytes whose tensors
  // are all one-dimensional and the whole of it.
  bool plain(const std::string& key) const;

  // The bytes of every storage, by its number as text; torch itself does not compare them.
  std::map<std::string, std::uint64_t> bytes() const;

  // The content with other sizes, in elements, for some storages that are plain.
  std::vector<std::byte> with_sizes(const std::map<std::string, std::uint64_t>& sizes) const;

 private:
  struct Place {
    std::size_t begin = 0;
    std::size_t end = 0;
  };
  struct Storage {
    std::int64_t elements = 0;
    std::int64_t element_bytes = 0;
    std::vector<Place> numbers = {};  // of the storage itself and of each tensor in it
    bool plain = false;
  };

  friend class StorageFinder;

  std::span<const std::byte> content_;
  std::map<std::string, Storage> storages_;
};

}  // namespace tessera

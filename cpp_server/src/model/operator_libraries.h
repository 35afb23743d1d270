// Operator libraries: from the names in a package's manifest to loaded shared objects.
//
// A package names the libraries whose operators its graph calls. Only names that this server
// knows are ever loaded, and only from folders that the operator of the server chose, so a
// package cannot make the server load a file of its choice.
//
// Contract: loading is permanent for the process and not undone. Call from one thread at a
// time, before the archive is opened; blocks on the disk.
#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera {

// A library is unknown, missing, refused by the loader, or lacks the operators it is known for.
class LibraryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Where libraries are looked for, in this order: `given` (--ops-dir), the folders of the
// environment variable TESSERA_OPS_DIR (separated by ':'), the checkout that this program was built
// in, and the fbgemm_gpu and tessera packages beside the torch wheel that this process runs with.
std::vector<std::filesystem::path> library_folders(const std::vector<std::string>& given);

// Loads each library of `names` once. Throws LibraryError.
void load_operator_libraries(const std::vector<std::string>& names,
                             const std::vector<std::filesystem::path>& folders);

}  // namespace tessera

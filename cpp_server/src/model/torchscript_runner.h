// The Runner of a TorchScript package on the CPU.
//
// Contract: see Runner. The constructor blocks while torch opens the archive. This header
// names no torch type, so that nothing but its source file is compiled against torch.
#pragma once

#include <memory>
#include <string>

#include "model/runner.h"
#include "package/package_file.h"
#include "package/schema.h"

namespace tessera {

class TorchScriptRunner final : public Runner {
 public:
  // Opens the archive in `file`, whose records must have been verified and whose operator
  // libraries must be loaded; freezes and optimizes it for inference. Throws PackageError.
  TorchScriptRunner(std::shared_ptr<const PackageFile> file, const InputSchema& schema);
  ~TorchScriptRunner() override;

  void prepare_thread(int compute_threads) override;
  std::unique_ptr<Scores> forward(const HostBatch& batch) override;

 private:
  struct Module;
  std::unique_ptr<Module> module_;
  InputSchema schema_;
};

// "2.13.0", with the local part if there is one: the torch that this program was built with.
std::string torch_version();

}  // namespace tessera

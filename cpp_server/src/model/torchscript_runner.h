// The Runners of a TorchScript package: on the CPU, and on one or several GPUs.
//
// Contract: see Runner. Opening blocks while torch reads the archive. This header names no torch
// type, so that only source files are compiled against torch.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/runner.h"
#include "package/manifest.h"
#include "package/verify.h"

namespace tessera {

class Opening;

// Opens what was verified of the file at `path`; the operator libraries must be loaded. With
// `changing` the runner has weights that may change in place. Throws PackageError.
std::unique_ptr<Runner> open_on_cpu(const Opening& opening, const std::string& path,
                                    const Manifest& manifest, bool changing);

struct GpuOptions {
  std::vector<int> devices = {};         // by CUDA's numbers; empty: every one that is there
  std::int64_t max_batch_samples = 512;  // CUDA graphs are recorded for batches of up to these
  // And of up to these. A worker that launches a batch kernel by kernel keeps a CPU busy with it:
  // of four workers with batches of 4,096, a forward took 733 us, and as a graph 480.
  std::int64_t graph_samples = 4'096;
  bool changing = false;  // the runner has weights that may change in place
  // Called between pieces of what goes to the devices beside large tables; null: nothing is.
  std::function<void()> rest = nullptr;
  ReadOptions reading = {};  // of large tables
};

// What was verified of the file at `path`, on GPUs, the whole model on each; large tables are read
// and compared now. Throws PackageError also where this program was built without CUDA or a device
// is not there.
std::unique_ptr<Runner> open_on_gpus(const Opening& opening, const std::string& path,
                                     const Manifest& manifest, const GpuOptions& options);

// "2.13.0", with the local part if there is one: the torch that this program was built with.
std::string torch_version();

}  // namespace tessera

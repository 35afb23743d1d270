// In the place of gpu_runner.cc where the LibTorch has no CUDA.
#include "model/torchscript_runner.h"
#include "package/package_error.h"

namespace tessera {

std::unique_ptr<Runner> open_on_gpus(const Opening& /*opening*/, const std::string& path,
                                     const Manifest& /*manifest*/, const GpuOptions& /*options*/) {
  throw PackageError(path,
                     "was packaged for device 'cuda', and this server was built with a LibTorch "
                     "without CUDA; build it with a CUDA build of torch or package the model with "
                     "--device cpu");
}

}  // namespace tessera

// Layers of e4m3 numbers on a GPU.  Products are torch's (cuBLASLt's) where the GPU has
// instructions for them, compute capability 8.9 or more; elsewhere they are made in bfloat16, which
// holds every e4m3 number.
#include <ATen/ops/_scaled_mm.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "binding_fp8.h"
#ifdef TESSERA_CUBLASLT
#include "cublas_fp8.h"
#endif
#include "cuda_layers_fp8.h"

namespace tessera {
namespace {

using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;

void launched(cudaError_t status) {
  TORCH_CHECK(status == cudaSuccess,
              "a kernel of e4m3 numbers was not launched: ", cudaGetErrorString(status));
}

// Whether a device multiplies e4m3 numbers itself; asked once per device and thread.
bool multiplies_float8(int device) {
  static thread_local int known = -1;
  static thread_local bool found = false;
  if (device != known) {
    int major = 0;
    int minor = 0;
    launched(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    launched(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    found = major * 10 + minor >= 89;
    known = device;
  }
  return found;
}

const uint8_t* bytes_of(const Tensor& tensor) {
  return static_cast<const uint8_t*>(tensor.const_data_ptr());
}

// `result` as the product with its ReLU by one call of cuBLASLt; false where that is not possible,
// or the library was built without it.
bool multiplied_with_relu([[maybe_unused]] const Tensor& input,
                          [[maybe_unused]] const Tensor& weight,
                          [[maybe_unused]] const OptionalTensor& bias,
                          [[maybe_unused]] const Tensor& first_scale,
                          [[maybe_unused]] const Tensor& second_scale,
                          [[maybe_unused]] Tensor& result) {
#ifdef TESSERA_CUBLASLT
  constexpr int64_t kWorkspace = 32 << 20;  // what cuBLAS advises for Hopper
  const Tensor workspace = at::empty({kWorkspace}, input.options().dtype(at::kByte));
  CublasFp8 job{};
  job.input = bytes_of(input);
  job.weight = bytes_of(weight);
  job.bias = bias.has_value() ? bias->const_data_ptr() : nullptr;
  job.scales[0] = first_scale.const_data_ptr<float>();
  job.scales[1] = second_scale.const_data_ptr<float>();
  job.out = result.mutable_data_ptr();
  job.narrow_out = result.scalar_type() == kE4m3;
  job.rows = input.size(0);
  job.inputs = weight.size(1);
  job.outputs = weight.size(0);
  job.input_stride = input.stride(0);
  job.workspace = workspace.mutable_data_ptr();
  job.workspace_bytes = static_cast<size_t>(kWorkspace);
  return launch_relu_product_fp8(job, c10::cuda::getCurrentCUDAStream());
#else
  return false;
#endif
}

// The product with its scales, bias and ReLU as `type`.  (A scale of the result, which the function
// takes as well, has no effect in torch 2.11.)
Tensor product(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
               const Tensor& first_scale, const Tensor& second_scale, bool relu,
               at::ScalarType type) {
  constexpr int64_t kWhole = 16;  // columns, and bytes, that a row has a multiple of
  const bool aligned = (input.stride(0) | weight.size(0) | weight.size(1)) % kWhole == 0 &&
                       reinterpret_cast<uintptr_t>(input.const_data_ptr()) % kWhole == 0;
  if (aligned && multiplies_float8(input.device().index())) {
    if (relu) {
      Tensor result = at::empty({input.size(0), weight.size(0)}, input.options().dtype(type));
      if (multiplied_with_relu(input, weight, bias, first_scale, second_scale, result)) {
        return result;
      }
    }
    Tensor result = at::_scaled_mm(input, weight.t(), first_scale, second_scale, bias, c10::nullopt,
                                   type, /*use_fast_accum=*/true);
    if (!relu) return result;
    if (type != kE4m3) return result.relu_();
    launched(launch_relu_fp8(static_cast<uint8_t*>(result.mutable_data_ptr()), result.numel(),
                             c10::cuda::getCurrentCUDAStream()));
    return result;
  }
  const auto narrow = [](const Tensor& tensor) { return tensor.to(at::kBFloat16); };
  Tensor result = at::mm(narrow(input), narrow(weight).t()).to(at::kFloat);
  result.mul_(first_scale).mul_(second_scale);
  if (bias.has_value()) result.add_(*bias);
  if (relu) result.relu_();
  return type == kE4m3 ? to_float8(result) : result.to(type);
}

Tensor linear_fp8(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                  const Tensor& scales, bool relu, c10::optional<at::ScalarType> dtype) {
  const at::ScalarType type =
      check_linear_fp8(input, weight, bias.value_or(Tensor()), scales, dtype);
  const c10::cuda::CUDAGuard guard(input.device());
  if (input.size(0) == 0) {
    return at::empty({0, weight.size(0)}, input.options().dtype(type));
  }
  return product(input, weight, bias, scale_of(scales, 0), scale_of(scales, 1), relu, type);
}

Tensor cross_layer_fp8(const Tensor& x0, const Tensor& x, const Tensor& v, const Tensor& weight,
                       const Tensor& bias, const Tensor& scales) {
  check_cross_fp8(x0, x, v, weight, bias, scales);
  const c10::cuda::CUDAGuard guard(x0.device());
  const Tensor out = at::empty({x0.size(0), x0.size(1)}, x0.options());
  if (out.size(0) == 0) return out;
  CudaCrossFp8 job{};
  job.x0 = bytes_of(x0);
  job.x = bytes_of(x);
  job.v = bytes_of(v);
  job.weight = bytes_of(weight);
  job.bias = bias.const_data_ptr();
  job.scales[0] = scales.const_data_ptr<float>();
  job.scales[1] = job.scales[0] + kScaleStep;
  job.out = static_cast<uint8_t*>(out.mutable_data_ptr());
  job.rows = out.size(0);
  job.width = out.size(1);
  job.inner = weight.size(1);
  job.x0_stride = x0.stride(0);
  job.x_stride = x.stride(0);
  job.v_stride = v.stride(0);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  cudaError_t status = cudaSuccess;
  if (launch_cross_fp8(job, x0.device().index(), stream, &status)) {
    launched(status);
    return out;
  }
  const Tensor one = at::ones({1}, scales.options());
  const Tensor layer = product(v, weight, bias, scale_of(scales, 0), one, false, at::kBFloat16);
  job.v = bytes_of(layer);
  job.v_stride = layer.stride(0);
  launched(launch_cross_fp8_elements(job, stream));
  return out;
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CUDA, m) {
  m.impl("linear_fp8", tessera::linear_fp8);
  m.impl("cross_layer_fp8", tessera::cross_layer_fp8);
}

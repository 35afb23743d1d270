#include "cublas_fp8.h"

#include <cublasLt.h>

#include <array>
#include <memory>
#include <type_traits>

namespace tessera {
namespace {

constexpr int kMostDevices = 64;

// A handle of this thread for the current device; null where there is none.  It stays for good:
// when a thread ends, CUDA may be gone already.
cublasLtHandle_t handle_of_device() {
  static thread_local std::array<cublasLtHandle_t, kMostDevices> handles{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= kMostDevices) return nullptr;
  cublasLtHandle_t& handle = handles[static_cast<size_t>(device)];
  if (handle == nullptr && cublasLtCreate(&handle) != CUBLAS_STATUS_SUCCESS) handle = nullptr;
  return handle;
}

struct Free {
  void operator()(cublasLtMatmulDesc_t given) const { cublasLtMatmulDescDestroy(given); }
  void operator()(cublasLtMatrixLayout_t given) const { cublasLtMatrixLayoutDestroy(given); }
  void operator()(cublasLtMatmulPreference_t given) const {
    cublasLtMatmulPreferenceDestroy(given);
  }
};

template <typename Pointer>
using Owned = std::unique_ptr<std::remove_pointer_t<Pointer>, Free>;

// What cuBLASLt calls a column is a row here: it stores matrices column by column.
Owned<cublasLtMatrixLayout_t> layout(cudaDataType_t type, int64_t columns, int64_t rows,
                                     int64_t stride) {
  cublasLtMatrixLayout_t made = nullptr;
  const auto height = static_cast<uint64_t>(columns);
  const auto width = static_cast<uint64_t>(rows);
  if (cublasLtMatrixLayoutCreate(&made, type, height, width, stride) != CUBLAS_STATUS_SUCCESS) {
    return nullptr;
  }
  return Owned<cublasLtMatrixLayout_t>(made);
}

// Sets attributes one after the other, and remembers whether all could be set.
class Description {
 public:
  Description() {
    cublasLtMatmulDesc_t made = nullptr;
    good_ =
        cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS;
    if (good_) made_.reset(made);
  }

  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    good_ = good_ && cublasLtMatmulDescSetAttribute(made_.get(), attribute, &value,
                                                    sizeof(value)) == CUBLAS_STATUS_SUCCESS;
  }

  bool good() const { return good_; }
  cublasLtMatmulDesc_t get() const { return made_.get(); }

 private:
  Owned<cublasLtMatmulDesc_t> made_;
  bool good_ = false;
};

void describe(const CublasFp8& job, Description& product) {
  product.set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  product.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, job.scales[1]);
  product.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, job.scales[0]);
  product.set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});
  if (job.bias == nullptr) {
    product.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_RELU);
    return;
  }
  product.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_RELU_BIAS);
  product.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, job.bias);
  product.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_16BF);
}

}  // namespace

bool launch_relu_product_fp8(const CublasFp8& job, cudaStream_t stream) {
  cublasLtHandle_t const handle = handle_of_device();
  Description product;
  describe(job, product);
  const auto weight = layout(CUDA_R_8F_E4M3, job.inputs, job.outputs, job.inputs);
  const auto input = layout(CUDA_R_8F_E4M3, job.inputs, job.rows, job.input_stride);
  // A matrix to add, which there is none of, would be bfloat16.
  const auto added = layout(CUDA_R_16BF, job.outputs, job.rows, job.outputs);
  const auto out =
      layout(job.narrow_out ? CUDA_R_8F_E4M3 : CUDA_R_16BF, job.outputs, job.rows, job.outputs);
  cublasLtMatmulPreference_t made = nullptr;
  if (handle == nullptr || !product.good() || !weight || !input || !added || !out ||
      cublasLtMatmulPreferenceCreate(&made) != CUBLAS_STATUS_SUCCESS) {
    return false;
  }
  const Owned<cublasLtMatmulPreference_t> preference(made);
  if (cublasLtMatmulPreferenceSetAttribute(made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                           &job.workspace_bytes,
                                           sizeof(job.workspace_bytes)) != CUBLAS_STATUS_SUCCESS) {
    return false;
  }
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  if (cublasLtMatmulAlgoGetHeuristic(handle, product.get(), weight.get(), input.get(), added.get(),
                                     out.get(), made, 1, &found, &count) != CUBLAS_STATUS_SUCCESS ||
      count == 0) {
    return false;
  }
  const float one = 1.0f;
  const float zero = 0.0f;
  // `out` may stand for the matrix that is not added only where it has its type.
  const void* const nothing = job.narrow_out ? nullptr : job.out;
  return cublasLtMatmul(handle, product.get(), &one, job.weight, weight.get(), job.input,
                        input.get(), &zero, nothing, added.get(), job.out, out.get(), &found.algo,
                        job.workspace, job.workspace_bytes, stream) == CUBLAS_STATUS_SUCCESS;
}

}  // namespace tessera

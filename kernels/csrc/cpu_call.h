// What the operators on the CPU share: a call's checked job, its working memory, its ids as rows.
//
// Contract: free functions; any thread.  Working memory (offsets, resolved rows) belongs to the
// calling thread and is kept between calls, so one thread prepares one call at a time.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>

#include "cpu_kernels.h"

namespace tessera {

using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;

// Under this many ids per thread another thread costs more than it brings.
constexpr int64_t kIdsPerThread = 1024;

// Scratch that grows to the largest call of its thread and is never shrunk.  Unlike a vector it
// leaves its elements unwritten.
template <class T>
T* scratch(std::unique_ptr<T[]>& memory, int64_t& capacity, int64_t count) {
  if (capacity < count) {
    const int64_t wanted = std::max(count, 2 * capacity);
    // Where that fails, what there was is still there.
    memory.reset(new T[static_cast<size_t>(wanted)]);
    capacity = wanted;
  }
  return memory.get();
}

struct ThreadScratch {
  std::unique_ptr<int64_t[]> offsets;
  std::unique_ptr<int64_t[]> rows;
  std::unique_ptr<int64_t[]> starts;
  std::unique_ptr<float[]> vectors;  // also as room for elements of 2 bytes
  int64_t offsets_capacity = 0;
  int64_t rows_capacity = 0;
  int64_t starts_capacity = 0;
  int64_t vectors_capacity = 0;
};

ThreadScratch& thread_scratch();

// A checked call: the job without its output, and where resolved rows and counts go.
struct Call {
  LookupJob job;
  int64_t* rows;
  int64_t* starts;
  int64_t* outside;
  int64_t ids;
};

// A call over `bags` bags in all.  How they belong to features is the caller's to set: batch is 0,
// and resolve_bags and the kernels take job.offsets from a bag on.
Call prepare_bags(const Tensor& weights, const Tensor& plan, const Tensor& indices,
                  const Tensor& lengths, const OptionalTensor& id_weights,
                  const OptionalTensor& outside, bool offsets, int64_t bags, int64_t width);

// A call whose features all have the same number of bags.
Call prepare(const Tensor& weights, const Tensor& plan, const Tensor& indices,
             const Tensor& lengths, const OptionalTensor& id_weights, const OptionalTensor& outside,
             bool offsets, int64_t width);

// Resolves the ids of bags [bag_begin, bag_end).  Several threads may work on other bags.
void resolve_bags(const LookupJob& job, const Tensor& indices, int64_t bag_begin, int64_t bag_end,
                  int64_t* rows, int64_t* starts, int64_t* outside);

// Runs `work(begin, end)` over [0, count) on as many threads as torch was given and `ids` ids are
// worth.
template <class Work>
void over_threads(int64_t ids, int64_t count, const Work& work) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), 1 + ids / kIdsPerThread);
  if (threads <= 1) {
    work(0, count);
    return;
  }
  at::parallel_for(0, count, (count + threads - 1) / threads, work);
}

// Resolves and looks up every bag of `job`, which `ids` ids are in, and writes its columns.
inline void run_job(const Call& call, const LookupJob& job, const Tensor& indices, int64_t ids) {
  over_threads(ids, job.features * job.batch, [&](int64_t begin, int64_t end) {
    resolve_bags(job, indices, begin, end, call.rows, call.starts, call.outside);
    cpu_kernels().lookup(job, begin, end);
  });
}

}  // namespace tessera

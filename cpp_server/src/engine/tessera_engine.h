/* libtessera-engine: a package's scores in one's own process, without a server between.
 *
 * It is tessera-server without its transport: the same checks of a request, the same bounded queue
 * and batches, the same workers, CPUs and GPUs, and so the same bits. docs/engine.md has examples.
 *
 * Legend: B samples of a request, F features of a group, N ids of a group.
 *
 * Contract
 * - Functions may be called from any thread, several at once, but for tessera_engine_free, which is
 *   the last call of its engine and begins when every other call has returned.
 * - No exception leaves a function. Functions that can fail return a tessera_engine_code and write
 *   one line of text, ended by a zero, into the caller's `message` of `message_bytes` bytes (at
 *   most that; null: the caller wants none).
 * - A request's arrays and the memory for its scores are borrowed from tessera_engine_submit until
 *   its completion was taken. Nobody may change them meanwhile: sizes are checked once.
 * - Every request that tessera_engine_submit or tessera_engine_submit_many takes has exactly one
 *   completion.
 * - A process that has an engine must not fork and go on to use it in the child.
 * - Of the process it sets: torch's fusion strategy (none), and for threads that use torch for the
 *   first time after it was opened, torch's number of threads (one). Packages' operator libraries
 *   stay loaded. Warnings and internal errors are written to stderr.
 */
#ifndef TESSERA_ENGINE_H_
#define TESSERA_ENGINE_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TESSERA_ENGINE_API __attribute__((visibility("default")))
#else
#define TESSERA_ENGINE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Grows when a structure or the meaning of a call changes. */
#define TESSERA_ENGINE_ABI 2

/* gRPC's numbers, as tessera-server answers. */
typedef enum tessera_engine_code {
  TESSERA_ENGINE_OK = 0,
  TESSERA_ENGINE_INVALID_ARGUMENT = 3,   /* the request or the call is wrong; the text says how */
  TESSERA_ENGINE_DEADLINE_EXCEEDED = 4,  /* the time was over before the work began; not computed */
  TESSERA_ENGINE_RESOURCE_EXHAUSTED = 8, /* the queue or the memory for requests is full */
  TESSERA_ENGINE_INTERNAL = 13,          /* the model failed; stderr has the cause under the id */
  TESSERA_ENGINE_UNAVAILABLE = 14        /* the engine is closed */
} tessera_engine_code;

typedef struct tessera_engine tessera_engine;

/* What the package takes and gives; the texts live as long as the engine. */
typedef struct tessera_engine_facts {
  const char* model;
  const char* version;
  const char* device; /* "cpu" or "cuda" */
  int64_t dense_features;
  int64_t id_list_features;
  int64_t id_score_list_features;
  int64_t outputs;
  int64_t scores_per_sample; /* the sum of the outputs' widths */
} tessera_engine_facts;

/* The bags of a group's features, feature-major; all zero for a group that the model lacks. */
typedef struct tessera_engine_group {
  const int32_t* lengths; /* [F * B] */
  size_t length_count;
  const void* values; /* [N] ids, int32 or int64 */
  size_t value_count;
  const float* weights; /* [N]; of the id_score_list group alone */
  size_t weight_count;
  int32_t value_bytes; /* 4 or 8: of one id */
} tessera_engine_group;

typedef struct tessera_engine_request {
  int64_t samples; /* B */
  const float*
      dense; /* [B * dense features], row-major; NaN: missing, where the model takes that */
  size_t dense_count;
  tessera_engine_group id_list;
  tessera_engine_group id_score_list;
  int64_t timeout_us; /* the work begins within so long or not at all; 0: no limit */
  int32_t priority;   /* higher is computed first */
} tessera_engine_request;

#define TESSERA_ENGINE_MESSAGE_BYTES 240

typedef struct tessera_engine_completion {
  uint64_t tag; /* of tessera_engine_submit */
  int32_t code; /* a tessera_engine_code; OK: the scores are in the caller's memory */
  char message[TESSERA_ENGINE_MESSAGE_BYTES]; /* empty where the code is OK */
} tessera_engine_completion;

/* A request and its place for tessera_engine_submit_many, with tessera_engine_submit's meanings. */
typedef struct tessera_engine_submission {
  const tessera_engine_request* request; /* may be that of several submissions */
  float* scores;
  size_t score_count;
  uint64_t tag;
} tessera_engine_submission;

/* TESSERA_ENGINE_ABI of the library, and the version of the Tessera that it belongs to. */
TESSERA_ENGINE_API int32_t tessera_engine_abi(void);
TESSERA_ENGINE_API const char* tessera_engine_version(void);

/* Loads the package at `path` and starts the workers; blocks for as long as that takes. `flags` are
 * `flag_count` of tessera-server's, each as "--name=value" or "--name": allow-op, gpus, log-format,
 * log-level, max-batch-ids, max-batch-samples, max-delay-us, max-inflight-bytes,
 * max-queue-requests, max-queue-samples, max-request-ids, max-request-samples, ops-dir, public-key,
 * require-signature, skip-golden, threads-per-worker, worker-niceness and workers. `tessera-server
 * --help` has their meanings and defaults. Neither the environment nor a file adds to them.
 * INVALID_ARGUMENT: a flag or the package has to be changed. */
TESSERA_ENGINE_API int32_t tessera_engine_open(const char* path, const char* const* flags,
                                               size_t flag_count, tessera_engine** engine,
                                               char* message, size_t message_bytes);

TESSERA_ENGINE_API void tessera_engine_describe(const tessera_engine* engine,
                                                tessera_engine_facts* facts);

/* The name of output `index` (below `outputs`) and how many scores it has of each sample; null:
 * there is no such output. */
TESSERA_ENGINE_API const char* tessera_engine_output(const tessera_engine* engine, int64_t index,
                                                     int64_t* width);

/* Checks `request` and queues it; it does not wait. The scores will be in `scores`, which has room
 * for exactly B * scores_per_sample of them: all of the first output, row-major, then of the
 * second. OK: a completion with `tag` will follow. Otherwise the request was not taken, and the
 * caller has its memory back. RESOURCE_EXHAUSTED: try again when completions have been taken. */
TESSERA_ENGINE_API int32_t tessera_engine_submit(tessera_engine* engine,
                                                 const tessera_engine_request* request,
                                                 float* scores, size_t score_count, uint64_t tag,
                                                 char* message, size_t message_bytes);

/* tessera_engine_submit for `count` requests in their order; it waits for the queue's lock once for
 * dozens of them. Returns how many were taken, from the first on. Where that is not all, the next
 * one was refused: `code` has why, `message` says so, and the ones behind it were not looked at. */
TESSERA_ENGINE_API size_t tessera_engine_submit_many(tessera_engine* engine,
                                                     const tessera_engine_submission* submissions,
                                                     size_t count, int32_t* code, char* message,
                                                     size_t message_bytes);

/* Takes at least one and at most `capacity` completions, in the order in which they came, and
 * returns how many. 0: none has come for `timeout_us` microseconds (below zero: waits without
 * limit). -1: the engine is closed and every completion was taken. Completions of requests that
 * wait here count among max-inflight-bytes until they are taken. */
TESSERA_ENGINE_API int64_t tessera_engine_wait(tessera_engine* engine,
                                               tessera_engine_completion* completions,
                                               size_t capacity, int64_t timeout_us);

/* Ends the engine: later submits get UNAVAILABLE, every request that was taken is computed, and the
 * workers end and the model's memory is given back; blocks until then. Completions can still be
 * taken. A second call changes nothing. */
TESSERA_ENGINE_API void tessera_engine_close(tessera_engine* engine);

/* Closes the engine, if nobody has, and ends it with the completions that nobody has taken. Null is
 * let pass. */
TESSERA_ENGINE_API void tessera_engine_free(tessera_engine* engine);

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_ENGINE_H_ */

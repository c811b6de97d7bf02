/* A libnccl for tests: ranks are processes of one host, memory is the host's, streams are threads. Each file rests
 * on those below it only:
 *
 *   nccl.c          what a caller asks and enqueues
 *   group.c         groups of calls, and what a call is refused for
 *   communicator.c  a communicator's life, and its operations as threads do them
 *   work.c          what an operation is made of: messages to and from the other ranks, and arithmetic
 *   mesh.c          one Unix socket between any two ranks: how they meet, and how messages cross
 *   numbers.c       data types, and their sums
 *   faults.c        results, faults on demand, the text of the last error
 *
 * The declarations are those of nccl.h, which cannot be included without CUDA's headers. */
#ifndef KVPLUG_FAKE_NCCL_FAULTS_H
#define KVPLUG_FAKE_NCCL_FAULTS_H

#include "fake.h"

typedef enum {
    ncclSuccess,
    ncclUnhandledCudaError,
    ncclSystemError,
    ncclInternalError,
    ncclInvalidArgument,
    ncclInvalidUsage,
    ncclRemoteError,
    ncclInProgress,
    ncclTimeout,
} ncclResult_t;

#define SETTINGS_OF_NCCL(SETTING) \
    SETTING(VERSION, "version", 23203, false) \
    SETTING(HOLD, "hold", 0, false) \
    SETTING(CALL_RESULT, "call_result", 0, false) \
    SETTING(CALL_HANGS, "call_hangs", 0, false) \
    SETTING(INIT_HANGS, "init_hangs", 0, false) \
    SETTING(INIT_RESULT, "init_result", 0, false) \
    SETTING(BEGIN_RESULT, "begin_result", 0, false) \
    SETTING(FAIL_AFTER, "fail_after", -1, false) \
    SETTING(FAIL_RESULT, "fail_result", ncclRemoteError, false) \
    SETTING(HANG_AFTER, "hang_after", -1, false) \
    SETTING(EXIT_AFTER, "exit_after", -1, false) \
    SETTING(PEER_RESULT, "peer_result", ncclRemoteError, false) \
    SETTING(ABORT_HANGS, "abort_hangs", 0, false) \
    SETTING(OPERATIONS, "operations", 0, true) \
    SETTING(COMMUNICATORS, "communicators", 0, true)

enum { AFTER_GATE = GATE, SETTINGS_OF_NCCL(AS_CONSTANT) SETTINGS };

void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *last_warning(void);

#endif

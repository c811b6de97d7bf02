/* A libnccl for tests: ranks are processes of one host, memory is the host's, streams are threads. Each file rests
 * on those below it only:
 *
 *   nccl.c          what a caller asks and enqueues
 *   group.c         groups of calls, and what a call is refused for
 *   communicator.c  a communicator's life, and its operations as threads do them
 *   work.c          what an operation is made of: messages to and from the other ranks, and arithmetic
 *   mesh.c          one Unix socket between any two ranks: how they meet, and how messages cross
 *   numbers.c       data types, and what it is to reduce them
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

enum {
    VERSION = FIRST_OF_LIBRARY, /* what ncclGetVersion gives */
    POLLS,          /* how many times a call on a non-blocking communicator is still in progress */
    HOLD,           /* operations do not begin while it is 1 */
    CALL_RESULT,    /* what enqueuing gives at once, if it is not 0 */
    CALL_HANGS,     /* enqueuing does not return while it is 1 */
    INIT_HANGS,     /* 1: this rank does not show itself to the others */
    INIT_RESULT,    /* what the start ends in, if it is not 0 */
    BEGIN_RESULT,   /* what the start of a non-blocking one gives at once, if it is not 0; it is there, and failed */
    FAIL_AFTER,     /* so many operations are done, then the communicator fails; -1: never */
    FAIL_RESULT,    /* what it fails with */
    HANG_AFTER,     /* so many operations are done, then one never ends; -1: never */
    EXIT_AFTER,     /* so many operations are done, then the process kills itself inside the next; -1: never */
    PEER_RESULT,    /* what the communicator fails with when a rank is gone; 0: the operation never ends */
    FINALIZE_HANGS, /* 1: a communicator is never finalized */
    ABORT_HANGS,    /* ncclCommAbort does not return while it is 1 */
    OPERATIONS,     /* counts those that were done */
    COMMUNICATORS,  /* counts those that are there */
    ABORTS,         /* counts those that were aborted */
    SETTINGS
};

void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *last_warning(void);

#endif

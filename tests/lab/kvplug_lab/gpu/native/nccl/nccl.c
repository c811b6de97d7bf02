#include "group.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#define API_MAGIC 0xcafebeefu

/* -- communicators ------------------------------------------------------------------------------------------ */

EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                                           const void *config) {
    struct {
        size_t size;
        unsigned magic, version;
        int blocking;
    } known = {0};
    memcpy(&known, config, offsetof(__typeof__(known), blocking) + sizeof known.blocking);
    if (known.magic != API_MAGIC || known.blocking) {
        warn("ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER, or blocking");
        return ncclInvalidArgument;
    }
    return begin_start(comm, nranks, &id, rank);
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank) {
    ncclResult_t state = begin_start(comm, nranks, &id, rank);
    if (state != ncclInProgress)
        return state;
    (*comm)->blocking = true;
    while (state == ncclInProgress && !ncclCommGetAsyncError(*comm, &state))
        usleep(1000);
    return state;
}

/* It must be there, and no plugin calls it. */
EXPORT ncclResult_t ncclCommFinalize(void) { return ncclInvalidUsage; }

#define GETTER(name, what) \
    EXPORT ncclResult_t name(ncclComm_t comm, int *value) { \
        ncclResult_t result = check_ready(comm, __func__); \
        if (!result) \
            *value = what; \
        return result; \
    }

GETTER(ncclCommCount, comm->mesh.nranks)
GETTER(ncclCommUserRank, comm->mesh.rank)
GETTER(ncclCommCuDevice, 0)

/* -- operations ------------------------------------------------------------------------------------------- */

EXPORT ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, ncclComm_t comm,
                                  void *stream) {
    return enqueue(__func__, comm, stream, (struct operation){ALL_REDUCE, send, recv, count, type, op, 0});
}

EXPORT ncclResult_t ncclReduce(const void *send, void *recv, size_t count, int type, int op, int root,
                               ncclComm_t comm, void *stream) {
    return enqueue(__func__, comm, stream, (struct operation){REDUCE, send, recv, count, type, op, root});
}

EXPORT ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, ncclComm_t comm,
                                  void *stream) {
    return enqueue(__func__, comm, stream, (struct operation){BROADCAST, send, recv, count, type, 0, root});
}

EXPORT ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, int type, ncclComm_t comm,
                                  void *stream) {
    return enqueue(__func__, comm, stream, (struct operation){ALL_GATHER, send, recv, count, type, 0, 0});
}

EXPORT ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op, ncclComm_t comm,
                                      void *stream) {
    return enqueue(__func__, comm, stream, (struct operation){REDUCE_SCATTER, send, recv, count, type, op, 0});
}

EXPORT ncclResult_t ncclSend(const void *send, size_t count, int type, int peer, ncclComm_t comm, void *stream) {
    return enqueue(__func__, comm, stream, (struct operation){SEND, send, NULL, count, type, 0, peer});
}

EXPORT ncclResult_t ncclRecv(void *recv, size_t count, int type, int peer, ncclComm_t comm, void *stream) {
    return enqueue(__func__, comm, stream, (struct operation){RECV, NULL, recv, count, type, 0, peer});
}

/* -- what needs no communicator ----------------------------------------------------------------------------- */

EXPORT ncclResult_t ncclGetVersion(int *version) {
    *version = (int)setting(VERSION);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    unsigned char token[(NAME - 1) / 2];
    if (getrandom(token, sizeof token, 0) != (ssize_t)sizeof token)
        return ncclSystemError;
    memset(id, 0, sizeof *id);
    memcpy(id->internal, ID, sizeof ID - 1);
    for (size_t at = 0; at < sizeof token; at++)
        snprintf(id->internal + sizeof ID - 1 + 2 * at, 3, "%02x", token[at]);
    return ncclSuccess;
}

EXPORT const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = {
        "no error",         "unhandled cuda error", "unhandled system error",
        "internal error",   "invalid argument",     "invalid usage",
        "remote process exited or there was a network error",
        "NCCL operation in progress", "timeout",
    };
    return (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}

EXPORT const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return last_warning();
}

/* -- what newer releases have -------------------------------------------------------------------------------- */

#ifndef OLD_NCCL

EXPORT ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
    ncclResult_t result = check_ready(comm, __func__);
    (void)flags;
    if (!result)
        comm->suspended = true;
    return result;
}

EXPORT ncclResult_t ncclCommResume(ncclComm_t comm) {
    ncclResult_t result = check_ready(comm, __func__);
    if (!result)
        comm->suspended = false;
    return result;
}

#endif

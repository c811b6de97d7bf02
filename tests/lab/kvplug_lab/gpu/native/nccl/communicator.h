#ifndef KVPLUG_FAKE_NCCL_COMMUNICATOR_H
#define KVPLUG_FAKE_NCCL_COMMUNICATOR_H

#include <pthread.h>

#include "work.h"

#define ID "kvplug fake id " /* what a unique id begins with */

typedef struct {
    char internal[128];
} ncclUniqueId;

/* Never freed, so that one that was destroyed is distinguished from one that exists. */
struct ncclComm {
    _Atomic uint64_t magic;
    struct mesh mesh;
    struct ncclComm **place; /* the caller's: written at once, and again when the start is over */
    bool blocking, suspended;
    atomic_int state; /* a ncclResult_t: in progress until it has met the others */
    atomic_long polls;
    atomic_bool aborted;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread; /* of the start */
    int inside;               /* threads that use the mesh */
    uint64_t given, finished; /* operations go one after the other, whatever stream they are on */
};

typedef struct ncclComm *ncclComm_t;

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state);
/* Not refused: a thread meets the other ranks. */
ncclResult_t begin_start(ncclComm_t *comm, int nranks, const ncclUniqueId *id, int rank);
ncclResult_t check(ncclComm_t comm, const char *function);
ncclResult_t check_ready(ncclComm_t comm, const char *function);
/* Hands operations to a stream: they are one, of the communicator's next turn. False: there is no such stream. */
bool launch(ncclComm_t comm, void *stream, const struct operation *operations, size_t count);

#endif

/* A libnccl for tests: ranks are processes of one host, memory is the host's, streams are threads.
 *
 *   nccl.c          what a caller asks and enqueues
 *   group.c         groups of calls, and what a call is refused for
 *   communicator.c  a communicator's life, and its operations as threads do them
 *   work.c          what an operation is made of: messages to and from the other ranks, and arithmetic
 *   mesh.c          one Unix socket between any two ranks: how they meet, and how messages cross
 *   numbers.c       data types, and what it is to reduce them
 *   streams.c       streams, events on them, copies
 *   settings.c      faults on demand, counters, the text of the last error
 *
 * The declarations are those of nccl.h, which cannot be included without CUDA's headers. */
#ifndef KVPLUG_FAKE_H
#define KVPLUG_FAKE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

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

typedef struct {
    char internal[128];
} ncclUniqueId;

/* -- settings.c: each can be set by name, also by KVPLUG_TEST_NCCL="name=value,..." in the environment -- */

enum setting {
    VERSION,        /* what ncclGetVersion gives */
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

long setting(enum setting which);
void tally(enum setting which, long by);
void wait_while(enum setting which, atomic_bool *unless); /* as long as it is set and *unless is not */
void wake_waiting(void);
void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *last_warning(void);

/* -- streams.c -- */

struct stream;

struct stream *stream_of(void *handle); /* NULL: it is none */
void stream_add(struct stream *stream, void (*run)(void *), void *argument);
void stream_order(struct stream *stream, struct stream *other); /* what comes next waits for what other has now */

/* -- numbers.c -- */

enum { TYPES = 12, OPERATORS = 5 };

size_t bytes_of(int type);
void reduce(int type, int op, void *out, const void *const *in, int ranks, size_t count);

/* -- mesh.c -- */

enum { NAME = 32, TEXT = 64 };

struct hello {
    uint64_t magic;
    int nranks, rank;
    char gpu[TEXT], host[TEXT];
};

struct message {
    struct message *next;
    int peer;
    bool out;
    uint64_t head[3]; /* a magic number, what it belongs to, bytes */
    size_t nbytes, done;
    char *data;
};

enum outcome { DONE, ABORTED, LOST, CONTRADICTED };

struct mesh {
    int nranks, rank;
    char name[NAME];
    int wake; /* an eventfd: readable once all waiting must end */
    int refused; /* -1: nobody */
    int *sockets;
    struct hello *hellos;
};

/* An outcome other than DONE leaves the sockets unusable. */
enum outcome mesh_meet(struct mesh *mesh);
enum outcome mesh_exchange(struct mesh *mesh, struct message *messages, bool dies_inside);
enum outcome mesh_wait_for_wake(struct mesh *mesh);
void mesh_close(struct mesh *mesh);

/* -- work.c -- */

enum kind { ALL_REDUCE = 1, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECV, FINALIZE };

struct operation {
    enum kind kind;
    const void *send;
    void *recv;
    size_t count;
    int type, op, peer; /* peer: or the root */
};

ncclResult_t check_pairs(const struct operation *operations, size_t count, int rank);
enum outcome work(struct mesh *mesh, const struct operation *operations, size_t count, bool dies_inside);

/* -- communicator.c -- */

#define ID "kvplug fake id " /* what a unique id begins with */
#define API_MAGIC 0xcafebeefu

/* Never freed, so that one that was destroyed is told from one that is there. */
struct ncclComm {
    _Atomic uint64_t magic;
    struct mesh mesh;
    struct ncclComm **place; /* the caller's: written at once, and again when the start is over */
    bool blocking, finalized, suspended;
    atomic_int state; /* a ncclResult_t: in progress until it has met the others */
    atomic_long polls;
    atomic_bool aborted;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread; /* of the start, then of the end */
    bool has_thread;
    int inside;               /* threads that use the mesh */
    uint64_t given, finished; /* operations go one after the other, whatever stream they are on */
};

typedef struct ncclComm *ncclComm_t;

ncclResult_t check(ncclComm_t comm, const char *function);
ncclResult_t check_ready(ncclComm_t comm, const char *function);
/* Hands operations to a stream: they are one, of the communicator's next turn. */
void launch(ncclComm_t comm, struct stream *stream, const struct operation *operations, size_t count);
ncclResult_t wait_for_start(ncclComm_t *comm);

/* -- group.c -- */

bool start_in_group(ncclComm_t *comm); /* false: this thread is in no group */
ncclResult_t enqueue(const char *function, ncclComm_t comm, void *handle, struct operation operation);

#endif

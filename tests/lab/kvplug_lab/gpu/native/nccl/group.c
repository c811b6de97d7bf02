#include "group.h"

#include <stdlib.h>

#include "numbers.h"

enum { STARTING = 64 };

struct task {
    struct task *next;
    ncclComm_t comm;
    void *stream;
    struct operation operation;
};

static _Thread_local struct {
    int depth;
    ncclResult_t error;
    struct task *first, **last;
    ncclComm_t *starting[STARTING]; /* blocking ones, whose start the end of the group waits for */
    int n_starting;
} group;

static bool is_pair(const struct task *task) {
    return task->operation.kind == SEND || task->operation.kind == RECV;
}

/* What the stream is given from now on waits for what the other has now. */
static void order(void *stream, void *other) {
    struct event event;
    if (stream_record(other, &event))
        stream_follow(stream, event);
}

/* All of one communicator become one operation, collectives first, on the first of their streams: the others wait. */
static ncclResult_t launch_first(void) {
    ncclComm_t comm = group.first->comm;
    void *stream = group.first->stream;
    size_t tasks = 0;
    for (struct task *task = group.first; task; task = task->next)
        tasks += task->comm == comm;
    struct operation *operations = calloc(tasks, sizeof *operations);
    void **others = calloc(tasks, sizeof *others);
    size_t count = 0, n_others = 0;
    for (int pairs = 0; pairs < 2; pairs++)
        for (struct task *task = group.first; task; task = task->next)
            if (task->comm == comm && is_pair(task) == pairs)
                operations[count++] = task->operation;
    for (struct task **place = &group.first; *place;) {
        struct task *task = *place;
        if (task->comm != comm) {
            place = &task->next;
            continue;
        }
        bool known = task->stream == stream;
        for (size_t at = 0; at < n_others; at++)
            known |= others[at] == task->stream;
        if (!known)
            others[n_others++] = task->stream;
        *place = task->next;
        free(task);
    }
    ncclResult_t result = check_pairs(operations, count, comm->mesh.rank);
    if (!result) {
        for (size_t at = 0; at < n_others; at++)
            order(stream, others[at]);
        bool launched = launch(comm, stream, operations, count);
        for (size_t at = 0; at < n_others; at++)
            order(others[at], stream);
        result = !launched                         ? ncclInvalidArgument /* it was closed inside the group */
                 : atomic_load(&comm->polls) > 0 ? ncclInProgress
                                                 : ncclSuccess;
    }
    free(operations);
    free(others);
    return result;
}

bool start_in_group(ncclComm_t *comm) {
    if (!group.depth || group.n_starting == STARTING)
        return false;
    group.starting[group.n_starting++] = comm;
    return true;
}

EXPORT ncclResult_t ncclGroupStart(void) {
    if (!group.depth++) {
        group.error = ncclSuccess;
        group.last = &group.first;
    }
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd(void) {
    if (!group.depth) {
        warn("ncclGroupEnd: not in a group call.");
        return ncclInvalidUsage;
    }
    if (--group.depth)
        return ncclSuccess;
    ncclResult_t result = group.error;
    while (group.n_starting) {
        ncclResult_t started = wait_for_start(group.starting[--group.n_starting]);
        result = result ? result : started;
    }
    while (group.first) {
        if (result == ncclSuccess || result == ncclInProgress) {
            ncclResult_t launched = launch_first();
            result = launched ? launched : result;
        } else {
            struct task *task = group.first;
            group.first = task->next;
            free(task);
        }
    }
    return result;
}

static ncclResult_t failed(ncclResult_t result) {
    if (result && group.depth && !group.error)
        group.error = result;
    return result;
}

ncclResult_t enqueue(const char *function, ncclComm_t comm, void *stream, struct operation operation) {
    ncclResult_t result = check_ready(comm, function);
    if (result)
        return failed(result);
    wait_while(CALL_HANGS, NULL);
    bool pair = operation.kind == SEND || operation.kind == RECV;
    struct event now;
    if (operation.type < 0 || operation.type >= TYPES || operation.op < 0 || operation.op >= OPERATORS) {
        warn("%s : invalid type %d or reduction operation %d", function, operation.type, operation.op);
        result = ncclInvalidArgument;
    } else if (operation.peer < 0 || operation.peer >= comm->mesh.nranks) {
        warn("%s : invalid root or peer %d (should be in the 0..%d range)", function, operation.peer,
             comm->mesh.nranks - 1);
        result = ncclInvalidArgument;
    } else if (!stream_record(stream, &now)) {
        warn("%s : %p is no stream", function, stream);
        result = ncclInvalidArgument;
    } else if (comm->finalized || comm->suspended) {
        warn("%s : the communicator is %s", function, comm->finalized ? "finalized" : "suspended");
        result = ncclInvalidUsage;
    } else
        result = (ncclResult_t)setting(CALL_RESULT);
    if (result)
        return failed(result);
    if (!pair && operation.count == 0)
        return ncclSuccess;
    ncclGroupStart();
    struct task *task = calloc(1, sizeof *task);
    *task = (struct task){NULL, comm, stream, operation};
    *group.last = task;
    group.last = &task->next;
    return ncclGroupEnd();
}

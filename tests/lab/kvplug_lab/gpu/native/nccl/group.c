#include "group.h"

#include <stdlib.h>

#include "numbers.h"

/* What this thread has enqueued in its group: all of one communicator and one stream, which is what plugins do. */
static _Thread_local struct {
    int depth;
    ncclResult_t error;
    ncclComm_t comm;
    void *stream;
    struct operation *operations;
    size_t count;
} group;

static ncclResult_t launch_group(void) {
    ncclResult_t result = check_pairs(group.operations, group.count, group.comm->mesh.rank);
    if (result)
        return result;
    if (!launch(group.comm, group.stream, group.operations, group.count))
        return ncclInvalidArgument; /* the stream was closed inside the group */
    return atomic_load(&group.comm->polls) > 0 ? ncclInProgress : ncclSuccess;
}

EXPORT ncclResult_t ncclGroupStart(void) {
    if (!group.depth++)
        group.error = ncclSuccess;
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
    if (group.count && !result)
        result = launch_group();
    free(group.operations);
    group.operations = NULL;
    group.count = 0;
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
    if (operation.type < 0 || operation.type >= TYPES || operation.op) {
        warn("%s : invalid type %d, or reduction operation %d, which is not a sum", function, operation.type,
             operation.op);
        result = ncclInvalidArgument;
    } else if (operation.peer < 0 || operation.peer >= comm->mesh.nranks) {
        warn("%s : invalid root or peer %d (should be in the 0..%d range)", function, operation.peer,
             comm->mesh.nranks - 1);
        result = ncclInvalidArgument;
    } else if (!stream_record(stream, &now)) {
        warn("%s : %p is not a stream", function, stream);
        result = ncclInvalidArgument;
    } else if (comm->suspended) {
        warn("%s : the communicator is suspended", function);
        result = ncclInvalidUsage;
    } else
        result = (ncclResult_t)setting(CALL_RESULT);
    if (group.count && (group.comm != comm || group.stream != stream))
        result = ncclInvalidUsage;
    if (result)
        return failed(result);
    if (!pair && operation.count == 0)
        return ncclSuccess;
    ncclGroupStart();
    group.comm = comm;
    group.stream = stream;
    group.operations = realloc(group.operations, (group.count + 1) * sizeof operation);
    group.operations[group.count++] = operation;
    return ncclGroupEnd();
}

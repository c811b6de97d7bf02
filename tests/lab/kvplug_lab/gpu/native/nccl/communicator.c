#define _GNU_SOURCE
#include "communicator.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

static const uint64_t ALIVE = 0x6576696c61636e6e;

ncclResult_t check(ncclComm_t comm, const char *function) {
    if (comm && atomic_load(&comm->magic) == ALIVE)
        return ncclSuccess;
    warn(comm ? "%s : corrupted comm object detected" : "%s : comm argument is NULL", function);
    return ncclInvalidArgument;
}

ncclResult_t check_ready(ncclComm_t comm, const char *function) {
    if (check(comm, function))
        return ncclInvalidArgument;
    int state = atomic_load(&comm->state);
    if (state == ncclInProgress || (state == ncclSuccess && atomic_load(&comm->polls) > 0)) {
        warn("Attempt to use communicator before the previous operation returned ncclSuccess");
        return ncclInvalidArgument;
    }
    return state;
}

static bool enter(ncclComm_t comm) {
    pthread_mutex_lock(&comm->lock);
    bool may = !atomic_load(&comm->aborted);
    comm->inside += may;
    pthread_mutex_unlock(&comm->lock);
    return may;
}

static void leave(ncclComm_t comm) {
    pthread_mutex_lock(&comm->lock);
    comm->inside--;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
}

/* As a kernel does: an operation that failed ends only by an abort. The state shows it. */
static void judge(ncclComm_t comm, enum outcome outcome) {
    int lost = (int)setting(PEER_RESULT);
    if (outcome == DONE || outcome == ABORTED)
        return;
    if (outcome == REFUSED)
        atomic_store(&comm->state, ncclSystemError);
    if (outcome == LOST && lost)
        atomic_store(&comm->state, lost);
    mesh_wait_for_wake(&comm->mesh);
}

static ncclResult_t check_gpus(const struct mesh *mesh) {
    for (int one = 0; one < mesh->nranks; one++)
        for (int other = 0; other < one; other++) {
            const struct hello *a = &mesh->hellos[one], *b = &mesh->hellos[other];
            if (*a->gpu && !strcmp(a->gpu, b->gpu) && !strcmp(a->host, b->host)) {
                warn("Duplicate GPU detected : rank %d and rank %d both on CUDA device %s", other, one, a->gpu);
                return ncclInvalidUsage;
            }
        }
    return ncclSuccess;
}

static void *start(void *argument) {
    ncclComm_t comm = argument;
    prctl(PR_SET_NAME, "fake-nccl-start");
    if (!enter(comm))
        return NULL;
    enum outcome outcome = setting(INIT_HANGS) ? mesh_wait_for_wake(&comm->mesh) : mesh_meet(&comm->mesh);
    if (outcome == DONE) {
        long result = setting(INIT_RESULT);
        atomic_store(&comm->state, result ? (int)result : (int)check_gpus(&comm->mesh));
    } else
        judge(comm, outcome);
    __atomic_store_n(comm->place, comm, __ATOMIC_RELEASE);
    leave(comm);
    return NULL;
}

static void wait_for_all_given(ncclComm_t comm) {
    pthread_mutex_lock(&comm->lock);
    while (comm->finished < comm->given && !atomic_load(&comm->aborted))
        pthread_cond_wait(&comm->changed, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
}

struct launch {
    ncclComm_t comm;
    uint64_t turn;
    size_t count;
    struct operation operations[];
};

static bool fails_now(ncclComm_t comm) {
    if (due(FAIL_AFTER, OPERATIONS)) {
        atomic_store(&comm->state, (int)setting(FAIL_RESULT));
        warn("asked to fail after %ld operations", setting(FAIL_AFTER));
    }
    int state = atomic_load(&comm->state);
    return state != ncclSuccess && state != ncclInProgress;
}

static void execute(ncclComm_t comm, const struct launch *what) {
    wait_while(HOLD, &comm->aborted);
    if (fails_now(comm) || due(HANG_AFTER, OPERATIONS)) {
        mesh_wait_for_wake(&comm->mesh);
        return;
    }
    enum outcome outcome = work(&comm->mesh, what->operations, what->count, due(EXIT_AFTER, OPERATIONS));
    if (outcome == DONE) {
        tally(OPERATIONS, (long)what->count);
        fails_now(comm);
    }
    judge(comm, outcome);
}

static void run(void *argument) {
    struct launch *what = argument;
    ncclComm_t comm = what->comm;
    pthread_mutex_lock(&comm->lock);
    while (comm->finished < what->turn && !atomic_load(&comm->aborted))
        pthread_cond_wait(&comm->changed, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
    if (enter(comm)) {
        execute(comm, what);
        leave(comm);
    }
    pthread_mutex_lock(&comm->lock);
    comm->finished++;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
}

bool launch(ncclComm_t comm, void *stream, const struct operation *operations, size_t count) {
    size_t size = sizeof(struct launch) + count * sizeof *operations;
    struct launch *what = malloc(size);
    what->comm = comm;
    what->count = count;
    memcpy(what->operations, operations, count * sizeof *operations);
    pthread_mutex_lock(&comm->lock);
    what->turn = comm->given;
    bool added = stream_add(stream, run, what, size);
    comm->given += added;
    pthread_mutex_unlock(&comm->lock);
    free(what);
    atomic_store(&comm->polls, !comm->blocking);
    return added;
}

/* -- a communicator's life -------------------------------------------------------------------------------- */

static void wake(ncclComm_t comm) {
    uint64_t one = 1;
    pthread_mutex_lock(&comm->lock);
    atomic_store(&comm->aborted, true);
    if (write(comm->mesh.wake, &one, sizeof one) < 0)
        abort();
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    wake_waiting();
}

static void give_back(ncclComm_t comm) {
    wake(comm);
    pthread_mutex_lock(&comm->lock);
    while (comm->inside)
        pthread_cond_wait(&comm->changed, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
    pthread_join(comm->thread, NULL);
    mesh_close(&comm->mesh);
    tally(COMMUNICATORS, -1);
}

/* Of those that end it at once, one does. */
static bool is_mine_to_end(ncclComm_t comm) {
    uint64_t alive = ALIVE;
    return comm && atomic_compare_exchange_strong(&comm->magic, &alive, 0);
}

static ncclResult_t not_started(ncclComm_t comm, const char *call, int number) {
    warn("Call to %s failed: %s", call, strerror(number));
    if (comm->mesh.wake >= 0)
        close(comm->mesh.wake);
    free(comm->mesh.sockets);
    free(comm->mesh.hellos);
    free(comm);
    return ncclSystemError;
}

ncclResult_t begin_start(ncclComm_t *place, int nranks, const ncclUniqueId *id, int rank) {
    if (!place || nranks < 1 || rank < 0 || rank >= nranks || memcmp(id->internal, ID, sizeof ID - 1)) {
        warn("Invalid rank requested : %d/%d, or an invalid unique id", rank, nranks);
        return ncclInvalidArgument;
    }
    ncclComm_t comm = calloc(1, sizeof *comm);
    comm->mesh = (struct mesh){.nranks = nranks, .rank = rank, .refused = -1};
    memcpy(comm->mesh.name, id->internal + sizeof ID - 1, NAME - 1);
    comm->mesh.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (comm->mesh.wake < 0)
        return not_started(comm, "eventfd", errno);
    comm->mesh.sockets = malloc((size_t)nranks * sizeof(int));
    comm->mesh.hellos = calloc((size_t)nranks, sizeof(struct hello));
    for (int at = 0; at < nranks; at++)
        comm->mesh.sockets[at] = -1;
    comm->place = place;
    atomic_store(&comm->state, ncclInProgress);
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->changed, NULL);
    atomic_store(&comm->magic, ALIVE);
    int number = pthread_create(&comm->thread, NULL, start, comm);
    if (number)
        return not_started(comm, "pthread_create", number);
    *place = comm;
    tally(COMMUNICATORS, 1);
    long result = setting(BEGIN_RESULT);
    atomic_store(&comm->polls, 1);
    if (result)
        warn("asked to fail at once");
    return result ? (ncclResult_t)result : ncclInProgress;
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
    if (check(comm, __func__))
        return ncclInvalidArgument;
    *state = (ncclResult_t)atomic_load(&comm->state);
    if (*state == ncclSuccess && atomic_load(&comm->polls) > 0) {
        atomic_fetch_sub(&comm->polls, 1);
        *state = ncclInProgress;
    }
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (check(comm, __func__))
        return ncclInvalidArgument;
    wait_for_all_given(comm);
    if (is_mine_to_end(comm))
        give_back(comm);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (!comm)
        return ncclSuccess;
    if (check(comm, __func__) || !is_mine_to_end(comm))
        return ncclInvalidArgument;
    wait_while(ABORT_HANGS, NULL);
    give_back(comm);
    return ncclSuccess;
}

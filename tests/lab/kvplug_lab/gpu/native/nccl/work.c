#include "work.h"

#include <stdlib.h>
#include <string.h>

#include "numbers.h"

/* An operation while it is worked on. `parts` has one place for what each rank contributes. */
struct job {
    const struct operation *operation;
    struct message *messages;
    char *scratch;
    const void **parts;
};

static size_t size_of(const struct operation *operation) {
    return operation->count * bytes_of(operation->type);
}

static void add(struct message ***last, int peer, bool out, const struct operation *operation, char *data,
                size_t nbytes) {
    struct message *message = calloc(1, sizeof *message);
    bool pair = operation->kind == SEND || operation->kind == RECV;
    message->peer = peer;
    message->out = out;
    message->head[1] = pair ? SEND : (uint64_t)operation->kind;
    message->nbytes = nbytes;
    message->data = data;
    **last = message;
    *last = &message->next;
}

static void prepare(struct mesh *mesh, struct job *job, struct message ***last) {
    const struct operation *operation = job->operation;
    int ranks = mesh->nranks, rank = mesh->rank, peer = operation->peer;
    size_t nbytes = size_of(operation);
    char *send = (char *)operation->send, *recv = operation->recv;
    bool collects = operation->kind == ALL_REDUCE || operation->kind == REDUCE_SCATTER ||
                    (operation->kind == REDUCE && rank == peer);
    if (collects) {
        job->scratch = malloc(nbytes * (size_t)ranks + 1);
        job->parts = calloc((size_t)ranks, sizeof *job->parts);
        for (int other = 0; other < ranks; other++)
            job->parts[other] = job->scratch + nbytes * (size_t)other;
        job->parts[rank] = send + (operation->kind == REDUCE_SCATTER ? nbytes * (size_t)rank : 0);
    }
    if (operation->kind == SEND && peer != rank)
        add(last, peer, true, operation, send, nbytes);
    if (operation->kind == RECV && peer != rank)
        add(last, peer, false, operation, recv, nbytes);
    if (operation->kind == SEND || operation->kind == RECV)
        return;
    for (int other = 0; other < ranks; other++) {
        if (other == rank)
            continue;
        size_t place = nbytes * (size_t)other;
        bool from = operation->kind == REDUCE || operation->kind == BROADCAST ? rank == peer : true;
        bool to = operation->kind == REDUCE || operation->kind == BROADCAST ? other == peer : true;
        if (operation->kind == REDUCE) {
            if (from)
                add(last, other, false, operation, job->scratch + place, nbytes);
            if (to)
                add(last, other, true, operation, send, nbytes);
        } else {
            if (from)
                add(last, other, true, operation, send + (operation->kind == REDUCE_SCATTER ? place : 0), nbytes);
            if (to)
                add(last, other, false, operation,
                    collects                        ? job->scratch + place
                    : operation->kind == ALL_GATHER ? recv + place
                                                    : recv,
                    nbytes);
        }
    }
}

static void finish(struct mesh *mesh, struct job *job) {
    const struct operation *operation = job->operation;
    size_t nbytes = size_of(operation);
    if (job->parts)
        sum(operation->type, operation->recv, job->parts, mesh->nranks, operation->count);
    else if (operation->kind == ALL_GATHER)
        memmove((char *)operation->recv + nbytes * (size_t)mesh->rank, operation->send, nbytes);
    else if (operation->kind == BROADCAST && mesh->rank == operation->peer && operation->recv)
        memmove(operation->recv, operation->send, nbytes);
}

/* What a rank sends to itself is copied: the first to the first that it receives from itself, and so on. */
static void pair_with_self(struct job *jobs, size_t count, int rank) {
    size_t receiving = 0;
    for (size_t at = 0; at < count; at++) {
        const struct operation *sending = jobs[at].operation;
        if (sending->kind != SEND || sending->peer != rank)
            continue;
        while (jobs[receiving].operation->kind != RECV || jobs[receiving].operation->peer != rank)
            receiving++;
        memmove(jobs[receiving].operation->recv, sending->send, size_of(sending));
        receiving++;
    }
}

ncclResult_t check_pairs(const struct operation *operations, size_t count, int rank) {
    size_t sent = 0, received = 0;
    for (size_t at = 0; at < count; at++)
        if (operations[at].peer == rank) {
            sent += operations[at].kind == SEND;
            received += operations[at].kind == RECV;
        }
    if (sent == received)
        return ncclSuccess;
    warn("Trying to %s without a matching %s", sent > received ? "send to self" : "recv to self",
         sent > received ? "recv" : "send");
    return ncclInvalidUsage;
}

enum outcome work(struct mesh *mesh, const struct operation *operations, size_t count, bool dies_inside) {
    struct job *jobs = calloc(count, sizeof *jobs);
    struct message *messages = NULL, **last = &messages;
    for (size_t at = 0; at < count; at++) {
        jobs[at].operation = &operations[at];
        prepare(mesh, &jobs[at], &last);
    }
    enum outcome outcome = mesh_exchange(mesh, messages, dies_inside);
    if (outcome == DONE)
        pair_with_self(jobs, count, mesh->rank);
    for (size_t at = 0; at < count; at++) {
        if (outcome == DONE)
            finish(mesh, &jobs[at]);
        free(jobs[at].scratch);
        free(jobs[at].parts);
    }
    while (messages) {
        struct message *next = messages->next;
        free(messages);
        messages = next;
    }
    free(jobs);
    return outcome;
}

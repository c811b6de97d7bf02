#define _GNU_SOURCE
#include "mesh.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "faults.h"

static const uint64_t HELLO = 0x6f6c6c65684c434e, HEAD = 0x646165684c43434e;

static socklen_t address_of(const struct mesh *mesh, int rank, struct sockaddr_un *address) {
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "kvplug-fake-nccl-%s-%d",
                          mesh->name, rank);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

/* DONE: the socket can be read or written. fd -1: only the time passes, which is DONE as well. */
static enum outcome ready(const struct mesh *mesh, int fd, short events, int timeout_ms) {
    struct pollfd polled[2] = {{mesh->wake, POLLIN, 0}, {fd, events, 0}};
    while (poll(polled, 2, timeout_ms) < 0)
        if (errno != EINTR)
            return LOST;
    return polled[0].revents ? ABORTED : DONE;
}

enum outcome mesh_wait_for_wake(struct mesh *mesh) { return ready(mesh, -1, 0, -1); }

static enum outcome read_hello(const struct mesh *mesh, int fd, struct hello *hello) {
    size_t done = 0;
    while (done < sizeof *hello) {
        enum outcome outcome = ready(mesh, fd, POLLIN, -1);
        if (outcome != DONE)
            return outcome;
        ssize_t got = read(fd, (char *)hello + done, sizeof *hello - done);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
            return LOST;
        done += got > 0 ? (size_t)got : 0;
    }
    if (hello->magic != HELLO || hello->nranks != mesh->nranks || hello->rank < 0 || hello->rank >= mesh->nranks) {
        warn("Bootstrap : rank %d has %d ranks, and rank %d has %d", mesh->rank, mesh->nranks, hello->rank,
             hello->nranks);
        return CONTRADICTED;
    }
    return DONE;
}

static enum outcome refused(const char *call) {
    warn("Call to %s failed: %s", call, strerror(errno));
    return REFUSED;
}

static enum outcome connect_to(struct mesh *mesh, int rank) {
    struct sockaddr_un address;
    socklen_t length = address_of(mesh, rank, &address);
    for (;;) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (fd < 0)
            return refused("socket");
        if (!connect(fd, (struct sockaddr *)&address, length)) {
            mesh->sockets[rank] = fd;
            return DONE;
        }
        close(fd); /* it is not there yet, or has more in its queue than it takes */
        enum outcome outcome = ready(mesh, -1, 0, 2);
        if (outcome != DONE)
            return outcome;
    }
}

static enum outcome accept_one(struct mesh *mesh, int listener) {
    struct hello hello;
    enum outcome outcome = ready(mesh, listener, POLLIN, -1);
    if (outcome != DONE)
        return outcome;
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0)
        return refused("accept4");
    outcome = read_hello(mesh, fd, &hello);
    if (outcome == DONE && mesh->sockets[hello.rank] >= 0) {
        warn("Bootstrap : rank %d is there twice", hello.rank);
        outcome = CONTRADICTED;
    }
    if (outcome == DONE) {
        mesh->sockets[hello.rank] = fd;
        mesh->hellos[hello.rank] = hello;
    } else
        mesh->refused = fd; /* the refused rank gets no message, and waits as long as this one, as with NCCL */
    return outcome;
}

static bool say_hello(struct mesh *mesh, int rank) {
    const struct hello *hello = &mesh->hellos[mesh->rank];
    return send(mesh->sockets[rank], hello, sizeof *hello, MSG_NOSIGNAL) == (ssize_t)sizeof *hello;
}

static enum outcome meet(struct mesh *mesh, int listener) {
    struct sockaddr_un address;
    socklen_t length = address_of(mesh, mesh->rank, &address);
    enum outcome outcome = DONE;
    if (bind(listener, (struct sockaddr *)&address, length) || listen(listener, 64)) {
        warn("Bootstrap : rank %d: %s", mesh->rank, strerror(errno));
        return LOST;
    }
    for (int rank = 0; rank < mesh->rank; rank++)
        if ((outcome = connect_to(mesh, rank)) != DONE)
            return outcome;
        else if (!say_hello(mesh, rank))
            return LOST;
    for (int rank = mesh->rank + 1; rank < mesh->nranks; rank++)
        if ((outcome = accept_one(mesh, listener)) != DONE)
            return outcome;
    for (int rank = mesh->rank + 1; rank < mesh->nranks; rank++)
        if (!say_hello(mesh, rank))
            return LOST;
    for (int rank = 0; rank < mesh->rank; rank++)
        if ((outcome = read_hello(mesh, mesh->sockets[rank], &mesh->hellos[rank])) != DONE)
            return outcome;
    return DONE;
}

enum outcome mesh_meet(struct mesh *mesh) {
    const char *gpu = getenv("KVPLUG_TEST_NCCL_GPU"), *host = getenv("NCCL_HOSTID");
    struct hello *hello = &mesh->hellos[mesh->rank];
    hello->magic = HELLO;
    hello->nranks = mesh->nranks;
    hello->rank = mesh->rank;
    snprintf(hello->gpu, TEXT, "%s", gpu ? gpu : "");
    snprintf(hello->host, TEXT, "%s", host ? host : "");
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener < 0)
        return refused("socket");
    enum outcome outcome = meet(mesh, listener);
    close(listener);
    return outcome;
}

/* What can be moved of a message without waiting; half of it, where the process dies inside. */
static enum outcome move(int fd, struct message *message, bool dies_inside) {
    char *head = (char *)message->head;
    uint64_t expected[3];
    while (message->done < sizeof message->head + message->nbytes) {
        bool in_head = message->done < sizeof message->head;
        char *at = in_head ? head + message->done : message->data + (message->done - sizeof message->head);
        size_t left = (in_head ? sizeof message->head : sizeof message->head + message->nbytes) - message->done;
        if (dies_inside && !in_head) {
            if (message->done > sizeof message->head)
                raise(SIGKILL);
            left = (left + 1) / 2;
        }
        memcpy(expected, message->head, sizeof expected);
        ssize_t got = message->out ? send(fd, at, left, MSG_NOSIGNAL)
                      : in_head    ? recv(fd, (char *)expected + message->done, left, 0)
                                   : recv(fd, at, left, 0);
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            return DONE;
        if (got <= 0)
            return LOST;
        if (in_head && !message->out && memcmp(expected, message->head, sizeof expected)) {
            if (message->done + (size_t)got == sizeof expected)
                warn("rank %d sent %llu bytes for call %llu, where %llu bytes for call %llu belong", message->peer,
                     (unsigned long long)expected[2], (unsigned long long)expected[1],
                     (unsigned long long)message->head[2], (unsigned long long)message->head[1]);
            return CONTRADICTED;
        }
        message->done += (size_t)got;
    }
    return DONE;
}

static bool is_done(const struct message *message) {
    return message->done == sizeof message->head + message->nbytes;
}

/* The first message of each rank and direction that is not done: those behind it wait, a socket has one order. */
static int first_of_each(const struct mesh *mesh, struct message *messages, struct message **first) {
    int left = 0;
    memset(first, 0, 2 * (size_t)mesh->nranks * sizeof *first);
    for (struct message *each = messages; each; each = each->next) {
        struct message **place = &first[2 * each->peer + each->out];
        if (!is_done(each)) {
            left++;
            if (!*place)
                *place = each;
        }
    }
    return left;
}

enum outcome mesh_exchange(struct mesh *mesh, struct message *messages, bool dies_inside) {
    struct message **first = calloc(2 * (size_t)mesh->nranks, sizeof *first);
    struct pollfd *polled = calloc((size_t)mesh->nranks + 1, sizeof *polled);
    enum outcome outcome = DONE;
    for (struct message *each = messages; each; each = each->next) {
        each->head[0] = HEAD;
        each->head[2] = each->nbytes;
    }
    while (outcome == DONE && first_of_each(mesh, messages, first)) {
        polled[mesh->nranks] = (struct pollfd){mesh->wake, POLLIN, 0};
        for (int rank = 0; rank < mesh->nranks; rank++) {
            short events = (short)((first[2 * rank] ? POLLIN : 0) | (first[2 * rank + 1] ? POLLOUT : 0));
            polled[rank] = (struct pollfd){events ? mesh->sockets[rank] : -1, events, 0};
        }
        if (poll(polled, (nfds_t)mesh->nranks + 1, -1) < 0) {
            outcome = errno == EINTR ? DONE : LOST;
            continue;
        }
        if (polled[mesh->nranks].revents) {
            outcome = ABORTED;
            continue;
        }
        for (int at = 0; at < 2 * mesh->nranks && outcome == DONE; at++) {
            if (first[at] && polled[at / 2].revents)
                outcome = move(mesh->sockets[at / 2], first[at], dies_inside);
            if (outcome == LOST)
                warn("rank %d is gone", at / 2);
        }
    }
    if (dies_inside && outcome == DONE) /* there was too little for half of it */
        raise(SIGKILL);
    free(polled);
    free(first);
    return outcome;
}

void mesh_close(struct mesh *mesh) {
    for (int rank = 0; rank < mesh->nranks; rank++)
        if (mesh->sockets[rank] >= 0)
            close(mesh->sockets[rank]);
    if (mesh->refused >= 0)
        close(mesh->refused);
    close(mesh->wake);
    free(mesh->sockets);
    free(mesh->hellos);
}

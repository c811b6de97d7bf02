#ifndef KVPLUG_FAKE_NCCL_MESH_H
#define KVPLUG_FAKE_NCCL_MESH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

/* REFUSED: by this system. */
enum outcome { DONE, ABORTED, LOST, CONTRADICTED, REFUSED };

struct mesh {
    int nranks, rank;
    char name[NAME];
    int wake; /* an eventfd: readable once all waiting must end */
    int refused; /* -1: none */
    int *sockets;
    struct hello *hellos;
};

/* An outcome other than DONE leaves the sockets unusable. */
enum outcome mesh_meet(struct mesh *mesh);
enum outcome mesh_exchange(struct mesh *mesh, struct message *messages, bool dies_inside);
enum outcome mesh_wait_for_wake(struct mesh *mesh);
void mesh_close(struct mesh *mesh);

#endif

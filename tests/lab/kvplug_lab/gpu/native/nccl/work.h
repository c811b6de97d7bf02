#ifndef KVPLUG_FAKE_NCCL_WORK_H
#define KVPLUG_FAKE_NCCL_WORK_H

#include "faults.h"
#include "mesh.h"

enum kind { ALL_REDUCE = 1, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECV };

struct operation {
    enum kind kind;
    const void *send;
    void *recv;
    size_t count;
    int type, op, peer; /* peer: or the root */
};

ncclResult_t check_pairs(const struct operation *operations, size_t count, int rank);
enum outcome work(struct mesh *mesh, const struct operation *operations, size_t count, bool dies_inside);

#endif

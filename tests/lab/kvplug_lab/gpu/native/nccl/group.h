#ifndef KVPLUG_FAKE_NCCL_GROUP_H
#define KVPLUG_FAKE_NCCL_GROUP_H

#include "communicator.h"

ncclResult_t enqueue(const char *function, ncclComm_t comm, void *stream, struct operation operation);

#endif

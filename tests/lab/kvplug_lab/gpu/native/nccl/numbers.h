#ifndef KVPLUG_FAKE_NCCL_NUMBERS_H
#define KVPLUG_FAKE_NCCL_NUMBERS_H

#include <stddef.h>

enum { TYPES = 12 };

size_t bytes_of(int type);
void sum(int type, void *out, const void *const *in, int ranks, size_t count);

#endif

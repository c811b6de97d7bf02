#ifndef KVPLUG_FAKE_NCCL_NUMBERS_H
#define KVPLUG_FAKE_NCCL_NUMBERS_H

#include <stddef.h>

enum { TYPES = 12, OPERATORS = 5 };

size_t bytes_of(int type);
void reduce(int type, int op, void *out, const void *const *in, int ranks, size_t count);

#endif

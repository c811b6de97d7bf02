/* A libcudart for tests: device memory is shared memory, streams are threads.
 *
 *   cudart.c     devices, errors, events, and what a caller enqueues
 *   memory.c     allocations, and those of other processes
 *   streams.c    work that is done in order, beside its caller
 *   settings.c   faults on demand, counters
 *
 * The declarations are those of driver_types.h and cuda_runtime_api.h. */
#ifndef KVPLUG_FAKE_H
#define KVPLUG_FAKE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorDeviceUninitialized = 201,
    cudaErrorMapBufferObjectFailed = 205,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorStreamCaptureUnsupported = 900,
} cudaError_t;

/* -- settings.c: each can be set by name, also by KVPLUG_TEST_CUDART="name=value,..." in the environment -- */

enum setting {
    VERSION,            /* what cudaRuntimeGetVersion gives */
    DEVICES,            /* how many GPUs there are */
    GPU,                /* the first byte of the UUID of device 0 */
    HOLD,               /* what streams were given does not begin while it is 1 */
    GATE,               /* streams stay where a gate was put in them while it is 1 */
    CAPTURING,          /* 1: some thread captures a graph, and others may not do what could disturb it */
    DELAY_US,           /* each copy takes so much longer */
    MALLOC_RESULT,      /* what cudaMalloc gives, if it is not 0 */
    OPEN_RESULT,        /* what cudaIpcOpenMemHandle gives, if it is not 0 */
    COPY_RESULT,        /* what cudaMemcpyAsync gives at once, if it is not 0 */
    FAIL_AFTER,         /* so many copies are done, then the device fails for good; -1: never */
    FAIL_RESULT,        /* what it fails with */
    EXIT_AFTER,         /* so many copies are done, then the process kills itself inside the next; -1: never */
    COPIES,             /* counts those that were done */
    ALLOCATIONS,        /* counts those that are there */
    MAPPINGS,           /* counts other processes' allocations that are open here */
    FREED_WHILE_MAPPED, /* counts allocations that were freed while a living process had them open */
    SETTINGS
};

long setting(enum setting which);
void tally(enum setting which, long by);
void wait_while(enum setting which);
bool disturbs_capture(void);

/* -- streams.c -- */

uint64_t stream_add(void *handle, void (*run)(void *), void *argument); /* 0: there is no such stream */
uint64_t stream_ticket(void *handle, uint64_t *id); /* all that it was given; *id 0: there is no such stream */
bool stream_reached(uint64_t id, uint64_t ticket);
void stream_wait(uint64_t id, uint64_t ticket);
void streams_drain(void);

#endif

/* A libcudart for tests: device memory is shared memory, streams are threads.
 *
 *   cudart.c     devices, errors, events, and what a caller enqueues
 *   memory.c     allocations, and those of other processes
 *   faults.c     faults on demand, graphs that a thread captures
 *
 * The declarations are those of driver_types.h and cuda_runtime_api.h. */
#ifndef KVPLUG_FAKE_CUDART_FAULTS_H
#define KVPLUG_FAKE_CUDART_FAULTS_H

#include "fake.h"

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

enum {
    VERSION = FIRST_OF_LIBRARY, /* what cudaRuntimeGetVersion gives */
    DEVICES,            /* how many GPUs there are */
    GPU,                /* the first byte of the UUID of device 0 */
    HOLD,               /* copies do not begin while it is 1 */
    CAPTURING,          /* 1: some thread captures a graph, and others may not do what could disturb it */
    DELAY_US,           /* each copy takes so much longer */
    MALLOC_RESULT,      /* what cudaMalloc gives, if it is not 0 */
    OPEN_RESULT,        /* what cudaIpcOpenMemHandle gives, if it is not 0 */
    COPY_RESULT,        /* what cudaMemcpyAsync gives at once, if it is not 0 */
    FAIL_AFTER,         /* so many copies are done, then the device fails for good; -1: never */
    FAIL_RESULT,        /* what it fails with */
    FAILED,             /* what it has failed with; 0: it works */
    EXIT_AFTER,         /* so many copies are done, then the process kills itself inside the next; -1: never */
    COPIES,             /* counts those that were done */
    ALLOCATIONS,        /* counts those that are there */
    MAPPINGS,           /* counts other processes' allocations that are open here */
    FREED_WHILE_MAPPED, /* counts allocations that were freed while a living process had them open; a reset clears it */
    SETTINGS
};

bool disturbs_capture(void);

#endif

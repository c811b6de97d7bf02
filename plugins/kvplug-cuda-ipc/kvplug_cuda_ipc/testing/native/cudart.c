#define _GNU_SOURCE
#include "fake.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static atomic_int failed; /* of the device, for good */

static __thread int capture_mode; /* 2: relaxed */

bool disturbs_capture(void) { return setting(CAPTURING) && capture_mode != 2; }

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

static cudaError_t usable(void) { return (cudaError_t)atomic_load(&failed); }

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = (int)setting(VERSION);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "cudaSuccess";
    case cudaErrorInvalidValue:
        return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
        return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice:
        return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
        return "cudaErrorInvalidDevice";
    case cudaErrorDeviceUninitialized:
        return "cudaErrorDeviceUninitialized";
    case cudaErrorMapBufferObjectFailed:
        return "cudaErrorMapBufferObjectFailed";
    case cudaErrorInvalidResourceHandle:
        return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
        return "cudaErrorNotReady";
    case cudaErrorIllegalAddress:
        return "cudaErrorIllegalAddress";
    case cudaErrorStreamCaptureUnsupported:
        return "cudaErrorStreamCaptureUnsupported";
    }
    return "unrecognized error code";
}

EXPORT const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

EXPORT cudaError_t cudaGetLastError(void) { return usable(); }

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    *count = (int)setting(DEVICES);
    return *count ? usable() : cudaErrorNoDevice;
}

EXPORT cudaError_t cudaSetDevice(int device) {
    return device >= 0 && device < setting(DEVICES) ? usable() : cudaErrorInvalidDevice;
}

EXPORT cudaError_t cudaGetDeviceProperties_v2(void *properties, int device) {
    if (device < 0 || device >= setting(DEVICES))
        return cudaErrorInvalidDevice;
    memset(properties, 0, 1024);
    strcpy(properties, "a GPU of the tests");
    ((unsigned char *)properties)[256] = (unsigned char)(setting(GPU) + device);
    return usable();
}

struct copy {
    void *to;
    const void *from;
    size_t nbytes;
};

static void run_copy(void *argument) {
    struct copy *copy = argument;
    long done = setting(COPIES);
    if (setting(DELAY_US))
        usleep((useconds_t)setting(DELAY_US));
    if (setting(EXIT_AFTER) >= 0 && done >= setting(EXIT_AFTER)) {
        memmove(copy->to, copy->from, copy->nbytes / 2);
        kill(getpid(), SIGKILL);
    }
    if (setting(FAIL_AFTER) >= 0 && done >= setting(FAIL_AFTER))
        atomic_store(&failed, (int)setting(FAIL_RESULT));
    if (!usable())
        memmove(copy->to, copy->from, copy->nbytes);
    tally(COPIES, 1);
    free(copy);
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, int kind, void *stream) {
    if (setting(COPY_RESULT))
        return (cudaError_t)setting(COPY_RESULT);
    if (kind != 4)
        return cudaErrorInvalidValue;
    if (usable())
        return usable();
    struct copy *copy = malloc(sizeof *copy);
    *copy = (struct copy){to, from, nbytes};
    if (stream_add(stream, run_copy, copy))
        return cudaSuccess;
    free(copy);
    return cudaErrorInvalidResourceHandle;
}

struct event {
    uint64_t stream, ticket;
};

EXPORT cudaError_t cudaEventCreateWithFlags(struct event **event, unsigned int flags) {
    *event = flags == 2 ? calloc(1, sizeof **event) : NULL;
    return *event ? usable() : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaEventRecord(struct event *event, void *stream) {
    event->ticket = stream_ticket(stream, &event->stream);
    return event->stream ? usable() : cudaErrorInvalidResourceHandle;
}

EXPORT cudaError_t cudaEventQuery(struct event *event) {
    if (disturbs_capture())
        return cudaErrorStreamCaptureUnsupported;
    bool done = stream_reached(event->stream, event->ticket);
    return usable() ? usable() : done ? cudaSuccess : cudaErrorNotReady;
}

EXPORT cudaError_t cudaEventDestroy(struct event *event) {
    free(event);
    return usable();
}

static void run_wait(void *argument) {
    struct event *awaited = argument;
    stream_wait(awaited->stream, awaited->ticket);
    free(awaited);
}

EXPORT cudaError_t cudaStreamWaitEvent(void *stream, const struct event *event, unsigned int flags) {
    struct event *awaited = malloc(sizeof *awaited);
    *awaited = *event;
    if (!flags && stream_add(stream, run_wait, awaited))
        return usable();
    free(awaited);
    return cudaErrorInvalidValue;
}

/* After a failure of the device: as if the process were a new one. */
EXPORT void kvplug_fake_heal(void) { atomic_store(&failed, 0); }

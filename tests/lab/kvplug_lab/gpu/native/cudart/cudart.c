#define _GNU_SOURCE
#include "faults.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static cudaError_t usable(void) { return (cudaError_t)setting(FAILED); }

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = (int)setting(VERSION);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }

EXPORT const char *cudaGetErrorName(cudaError_t error) {
#define AS_CASE(name, number) \
    case number: \
        return #name;
    switch (error) { ERRORS(AS_CASE) }
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

static void run_copy(void *argument) {
    struct copy *copy = argument;
    wait_while(HOLD, NULL);
    if (setting(DELAY_US))
        usleep((useconds_t)setting(DELAY_US));
    if (due(EXIT_AFTER, COPIES)) {
        memmove(copy->to, copy->from, copy->nbytes / 2);
        kill(getpid(), SIGKILL);
    }
    if (due(FAIL_AFTER, COPIES))
        set(FAILED, setting(FAIL_RESULT));
    if (!usable())
        memmove(copy->to, copy->from, copy->nbytes);
    tally(COPIES, 1);
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, int kind, void *stream) {
    if (kind != 4)
        return cudaErrorInvalidValue;
    if (usable())
        return usable();
    struct copy copy = {to, from, nbytes};
    return stream_add(stream, run_copy, &copy, sizeof copy) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

EXPORT cudaError_t cudaEventCreateWithFlags(struct event **event, unsigned int flags) {
    *event = flags == 2 ? calloc(1, sizeof **event) : NULL;
    return *event ? usable() : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaEventRecord(struct event *event, void *stream) {
    return stream_record(stream, event) ? usable() : cudaErrorInvalidResourceHandle;
}

EXPORT cudaError_t cudaEventQuery(struct event *event) {
    if (disturbs_capture())
        return cudaErrorStreamCaptureUnsupported;
    bool done = event_done(*event);
    return usable() ? usable() : done ? cudaSuccess : cudaErrorNotReady;
}

EXPORT cudaError_t cudaEventDestroy(struct event *event) {
    free(event);
    return usable();
}

EXPORT cudaError_t cudaStreamWaitEvent(void *stream, const struct event *event, unsigned int flags) {
    return !flags && stream_follow(stream, *event) ? usable() : cudaErrorInvalidValue;
}

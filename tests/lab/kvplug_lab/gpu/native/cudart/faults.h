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

#define ERRORS(ERROR) \
    ERROR(cudaSuccess, 0) \
    ERROR(cudaErrorInvalidValue, 1) \
    ERROR(cudaErrorMemoryAllocation, 2) \
    ERROR(cudaErrorNoDevice, 100) \
    ERROR(cudaErrorInvalidDevice, 101) \
    ERROR(cudaErrorDeviceUninitialized, 201) \
    ERROR(cudaErrorMapBufferObjectFailed, 205) \
    ERROR(cudaErrorInvalidResourceHandle, 400) \
    ERROR(cudaErrorNotReady, 600) \
    ERROR(cudaErrorIllegalAddress, 700) \
    ERROR(cudaErrorStreamCaptureUnsupported, 900)

#define AS_ERROR(name, number) name = number,
typedef enum { ERRORS(AS_ERROR) } cudaError_t;

#define SETTINGS_OF_CUDART(SETTING) \
    SETTING(VERSION, "version", 12090, false) \
    SETTING(DEVICES, "devices", 1, false) \
    SETTING(GPU, "gpu", 1, false) \
    SETTING(HOLD, "hold", 0, false) \
    SETTING(CAPTURING, "capturing", 0, false) \
    SETTING(DELAY_US, "delay_us", 0, false) \
    SETTING(MALLOC_RESULT, "malloc_result", 0, false) \
    SETTING(OPEN_RESULT, "open_result", 0, false) \
    SETTING(FAIL_AFTER, "fail_after", -1, false) \
    SETTING(FAIL_RESULT, "fail_result", cudaErrorIllegalAddress, false) \
    SETTING(FAILED, "failed", 0, false) \
    SETTING(EXIT_AFTER, "exit_after", -1, false) \
    SETTING(COPIES, "copies", 0, true) \
    SETTING(ALLOCATIONS, "allocations", 0, true) \
    SETTING(MAPPINGS, "mappings", 0, true) \
    SETTING(FREED_WHILE_MAPPED, "freed_while_mapped", 0, false) /* a reset clears it */

enum { AFTER_GATE = GATE, SETTINGS_OF_CUDART(AS_CONSTANT) SETTINGS };

bool disturbs_capture(void);

#endif

#include "faults.h"

const char settings_variable[] = "KVPLUG_TEST_CUDART";
const int n_settings = SETTINGS;
struct setting settings[SETTINGS] = {
    [GATE] = {"gate", 0},
    [VERSION] = {"version", 12090},
    [DEVICES] = {"devices", 1},
    [GPU] = {"gpu", 1},
    [HOLD] = {"hold", 0},
    [CAPTURING] = {"capturing", 0},
    [DELAY_US] = {"delay_us", 0},
    [MALLOC_RESULT] = {"malloc_result", 0},
    [OPEN_RESULT] = {"open_result", 0},
    [COPY_RESULT] = {"copy_result", 0},
    [FAIL_AFTER] = {"fail_after", -1},
    [FAIL_RESULT] = {"fail_result", cudaErrorIllegalAddress},
    [FAILED] = {"failed", 0},
    [EXIT_AFTER] = {"exit_after", -1},
    [COPIES] = {"copies", 0, .counts = true},
    [ALLOCATIONS] = {"allocations", 0, .counts = true},
    [MAPPINGS] = {"mappings", 0, .counts = true},
    [FREED_WHILE_MAPPED] = {"freed_while_mapped", 0},
};

static __thread int capture_mode; /* 2: relaxed */

bool disturbs_capture(void) { return setting(CAPTURING) && capture_mode != 2; }

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

#include "faults.h"

const char settings_variable[] = "KVPLUG_TEST_CUDART";
const int n_settings = SETTINGS;
struct setting settings[SETTINGS] = {AS_SETTING(GATE, "gate", 0, false) SETTINGS_OF_CUDART(AS_SETTING)};

static __thread int capture_mode; /* 2: relaxed */

bool disturbs_capture(void) { return setting(CAPTURING) && capture_mode != 2; }

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

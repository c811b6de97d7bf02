#include "faults.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

const char settings_variable[] = "KVPLUG_TEST_NCCL";
const int n_settings = SETTINGS;
struct setting settings[SETTINGS] = {
    [GATE] = {"gate", 0},
    [VERSION] = {"version", 23203},
    [POLLS] = {"polls", 1},
    [HOLD] = {"hold", 0},
    [CALL_RESULT] = {"call_result", 0},
    [CALL_HANGS] = {"call_hangs", 0},
    [INIT_HANGS] = {"init_hangs", 0},
    [INIT_RESULT] = {"init_result", 0},
    [BEGIN_RESULT] = {"begin_result", 0},
    [FAIL_AFTER] = {"fail_after", -1},
    [FAIL_RESULT] = {"fail_result", ncclRemoteError},
    [HANG_AFTER] = {"hang_after", -1},
    [EXIT_AFTER] = {"exit_after", -1},
    [PEER_RESULT] = {"peer_result", ncclRemoteError},
    [FINALIZE_HANGS] = {"finalize_hangs", 0},
    [ABORT_HANGS] = {"abort_hangs", 0},
    [OPERATIONS] = {"operations", 0, .counts = true},
    [COMMUNICATORS] = {"communicators", 0, .counts = true},
    [ABORTS] = {"aborts", 0, .counts = true},
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char warning[1024];

void warn(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&lock);
    vsnprintf(warning, sizeof warning, format, arguments);
    pthread_mutex_unlock(&lock);
    va_end(arguments);
}

const char *last_warning(void) { return warning; }

static void forget_in_child(void) { pthread_mutex_init(&lock, NULL); }

__attribute__((constructor)) static void look_out_for_forks(void) { pthread_atfork(NULL, NULL, forget_in_child); }

#include "faults.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

const char settings_variable[] = "KVPLUG_TEST_NCCL";
const int n_settings = SETTINGS;
struct setting settings[SETTINGS] = {AS_SETTING(GATE, "gate", 0, false) SETTINGS_OF_NCCL(AS_SETTING)};

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

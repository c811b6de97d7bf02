#include "fake.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    const char *name;
    atomic_long value;
} settings[SETTINGS] = {
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
    [OPERATIONS] = {"operations", 0},
    [COMMUNICATORS] = {"communicators", 0},
    [ABORTS] = {"aborts", 0},
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char warning[1024];

static int find(const char *name, size_t length) {
    for (int which = 0; which < SETTINGS; which++)
        if (strlen(settings[which].name) == length && !memcmp(settings[which].name, name, length))
            return which;
    return -1;
}

long setting(enum setting which) { return atomic_load(&settings[which].value); }

void tally(enum setting which, long by) { atomic_fetch_add(&settings[which].value, by); }

void wake_waiting(void) {
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void wait_while(enum setting which, atomic_bool *unless) {
    pthread_mutex_lock(&lock);
    while (setting(which) && !(unless && atomic_load(unless)))
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

EXPORT int kvplug_fake_set(const char *name, long value) {
    int which = find(name, strlen(name));
    if (which < 0)
        return -1;
    atomic_store(&settings[which].value, value);
    wake_waiting();
    return 0;
}

EXPORT int kvplug_fake_get(const char *name, long *value) {
    int which = find(name, strlen(name));
    if (which < 0)
        return -1;
    *value = setting(which);
    return 0;
}

static void forget_in_child(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&changed, NULL);
}

__attribute__((constructor)) static void read_environment(void) {
    pthread_atfork(NULL, NULL, forget_in_child);
    const char *text = getenv("KVPLUG_TEST_NCCL");
    while (text && *text) {
        size_t name = strcspn(text, "=");
        int which = find(text, name);
        if (which < 0 || text[name] != '=') {
            fprintf(stderr, "KVPLUG_TEST_NCCL: what is %s?\n", text);
            abort();
        }
        char *end;
        atomic_store(&settings[which].value, strtol(text + name + 1, &end, 10));
        text = *end == ',' ? end + 1 : end;
    }
}

void warn(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&lock);
    vsnprintf(warning, sizeof warning, format, arguments);
    pthread_mutex_unlock(&lock);
    va_end(arguments);
}

const char *last_warning(void) { return warning; }

#include "fake.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    const char *name;
    atomic_long value;
} settings[SETTINGS] = {
    [VERSION] = {"version", 12090},
    [DEVICES] = {"devices", 1},
    [GPU] = {"gpu", 1},
    [HOLD] = {"hold", 0},
    [GATE] = {"gate", 0},
    [CAPTURING] = {"capturing", 0},
    [DELAY_US] = {"delay_us", 0},
    [MALLOC_RESULT] = {"malloc_result", 0},
    [OPEN_RESULT] = {"open_result", 0},
    [COPY_RESULT] = {"copy_result", 0},
    [FAIL_AFTER] = {"fail_after", -1},
    [FAIL_RESULT] = {"fail_result", cudaErrorIllegalAddress},
    [EXIT_AFTER] = {"exit_after", -1},
    [COPIES] = {"copies", 0},
    [ALLOCATIONS] = {"allocations", 0},
    [MAPPINGS] = {"mappings", 0},
    [FREED_WHILE_MAPPED] = {"freed_while_mapped", 0},
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static int find(const char *name, size_t length) {
    for (int which = 0; which < SETTINGS; which++)
        if (strlen(settings[which].name) == length && !memcmp(settings[which].name, name, length))
            return which;
    return -1;
}

long setting(enum setting which) { return atomic_load(&settings[which].value); }

void tally(enum setting which, long by) { atomic_fetch_add(&settings[which].value, by); }

void wait_while(enum setting which) {
    pthread_mutex_lock(&lock);
    while (setting(which))
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

EXPORT int kvplug_fake_set(const char *name, long value) {
    int which = find(name, strlen(name));
    if (which < 0)
        return -1;
    pthread_mutex_lock(&lock);
    atomic_store(&settings[which].value, value);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
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
    const char *text = getenv("KVPLUG_TEST_CUDART");
    while (text && *text) {
        size_t name = strcspn(text, "=");
        int which = find(text, name);
        if (which < 0 || text[name] != '=') {
            fprintf(stderr, "KVPLUG_TEST_CUDART: what is %s?\n", text);
            abort();
        }
        char *end;
        atomic_store(&settings[which].value, strtol(text + name + 1, &end, 10));
        text = *end == ',' ? end + 1 : end;
    }
}

#include "fake.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static int find(const char *name, size_t length) {
    for (int which = 0; which < n_settings; which++)
        if (strlen(settings[which].name) == length && !memcmp(settings[which].name, name, length))
            return which;
    return -1;
}

long setting(int which) { return atomic_load(&settings[which].value); }

void tally(int which, long by) { atomic_fetch_add(&settings[which].value, by); }

bool due(int which, int counter) { return setting(which) >= 0 && setting(counter) >= setting(which); }

void wake_waiting(void) {
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void set(int which, long value) {
    atomic_store(&settings[which].value, value);
    wake_waiting();
}

void wait_while(int which, atomic_bool *unless) {
    pthread_mutex_lock(&lock);
    while (setting(which) && !(unless && atomic_load(unless)))
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

EXPORT int kvplug_fake_set(const char *name, long value) {
    int which = find(name, strlen(name));
    if (which >= 0)
        set(which, value);
    return which < 0 ? -1 : 0;
}

EXPORT int kvplug_fake_get(const char *name, long *value) {
    int which = find(name, strlen(name));
    if (which >= 0)
        *value = setting(which);
    return which < 0 ? -1 : 0;
}

EXPORT void kvplug_fake_reset(void) {
    for (int which = 0; which < n_settings; which++)
        if (!settings[which].counts)
            set(which, settings[which].initial);
}

static void forget_in_child(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&changed, NULL);
}

__attribute__((constructor)) static void read_environment(void) {
    pthread_atfork(NULL, NULL, forget_in_child);
    const char *text = getenv(settings_variable);
    while (text && *text) {
        size_t name = strcspn(text, "=");
        int which = find(text, name);
        if (which < 0 || text[name] != '=') {
            fprintf(stderr, "%s: what is %s?\n", settings_variable, text);
            abort();
        }
        char *end;
        set(which, strtol(text + name + 1, &end, 10));
        text = *end == ',' ? end + 1 : end;
    }
    for (int which = 0; which < n_settings; which++)
        settings[which].initial = setting(which);
}

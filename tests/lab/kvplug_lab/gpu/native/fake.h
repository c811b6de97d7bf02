/* What every fake library rests on.
 *
 *   settings.c   faults on demand and counters, by name
 *   streams.c    work that is done in order, beside its caller
 *
 * A folder beside this one holds a library: its table of settings, and the functions that it exports. */
#ifndef KVPLUG_FAKE_H
#define KVPLUG_FAKE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* -- settings.c: each can be set by name, also by VARIABLE="name=value,..." in the environment -- */

struct setting {
    const char *name;
    atomic_long value;
    bool counts;  /* a reset leaves it as it is */
    long initial; /* what a reset sets: the value in the table, or the one in the environment */
};

/* GATE: streams stay where a gate was put in them while it is 1. */
enum { GATE };

/* A library lists its settings as SETTING(CONSTANT, "name", initial, counts); fake.py explains them. These
 * two make constants of the list, which the functions below take, and the table. */
#define AS_CONSTANT(constant, name, initial, counts) constant,
#define AS_SETTING(constant, name, initial, counts) [constant] = {name, initial, counts, 0},

extern struct setting settings[];
extern const int n_settings;
extern const char settings_variable[];

long setting(int which);
void set(int which, long value);
void tally(int which, long by);
bool due(int which, int counter); /* so many were counted; never, if the setting is negative */
void wait_while(int which, atomic_bool *unless); /* as long as it is set and *unless is not; unless: or NULL */
void wake_waiting(void);

/* -- streams.c -- */

/* A moment in the work of a stream: all that it was given before. */
struct event {
    uint64_t stream, ticket;
};

struct copy {
    void *to;
    const void *from;
    size_t nbytes;
};

/* False: there is no such stream. NULL is the default stream. */
bool stream_add(void *handle, void (*run)(void *), const void *argument, size_t size); /* keeps a copy of it */
bool stream_record(void *handle, struct event *event);
bool stream_follow(void *handle, struct event event); /* what it is given from now on begins after the event */
bool event_done(struct event event);
void streams_drain(void); /* waits for all that any stream has now */

#endif

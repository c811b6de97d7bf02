#include "fake.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

struct item {
    struct item *next;
    void (*run)(void *);
    _Alignas(max_align_t) char argument[];
};

/* Handles are numbers that never come again: an event outlives its stream. A freed stream is here until it has
 * done what it had. */
struct stream {
    struct stream *next;
    struct item *first, **last;
    uint64_t id, added, done;
    bool closing;
};

/* One lock for all: tests have few streams. */
static pthread_mutex_t lock;
static pthread_cond_t changed;
static struct stream *streams, *default_stream;
static uint64_t last_id;

/* A forked child has no thread of its parent's, and one of those may have held the lock. */
static void begin_anew(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&changed, &attributes);
    pthread_condattr_destroy(&attributes);
    streams = default_stream = NULL;
}

__attribute__((constructor)) static void begin(void) {
    begin_anew();
    pthread_atfork(NULL, NULL, begin_anew);
}

static void *live(void *argument) {
    prctl(PR_SET_NAME, "fake-stream");
    struct stream *stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first && !stream->closing)
            pthread_cond_wait(&changed, &lock);
        struct item *item = stream->first;
        if (!item)
            break;
        if (!(stream->first = item->next))
            stream->last = &stream->first;
        pthread_mutex_unlock(&lock);
        item->run(item->argument);
        free(item);
        pthread_mutex_lock(&lock);
        stream->done++;
        pthread_cond_broadcast(&changed);
    }
    struct stream **place = &streams;
    while (*place != stream)
        place = &(*place)->next;
    *place = stream->next;
    pthread_mutex_unlock(&lock);
    free(stream);
    return NULL;
}

/* NULL: there is no memory for another thread. */
static struct stream *new_stream(void) {
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_attr_t attributes;
    pthread_t thread;
    stream->id = last_id + 1;
    stream->last = &stream->first;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int number = pthread_create(&thread, &attributes, live, stream);
    pthread_attr_destroy(&attributes);
    if (number) {
        free(stream);
        return NULL;
    }
    last_id++;
    stream->next = streams;
    streams = stream;
    return stream;
}

static struct stream *of_id(uint64_t id) {
    struct stream *stream = streams;
    while (stream && stream->id != id)
        stream = stream->next;
    return stream;
}

static struct stream *find(void *handle) {
    if (!handle)
        return default_stream ? default_stream : (default_stream = new_stream());
    struct stream *stream = of_id((uintptr_t)handle);
    return stream && !stream->closing ? stream : NULL;
}

bool stream_add(void *handle, void (*run)(void *), const void *argument, size_t size) {
    pthread_mutex_lock(&lock);
    struct stream *stream = find(handle);
    if (stream) {
        struct item *item = malloc(sizeof *item + size);
        item->next = NULL;
        item->run = run;
        if (size)
            memcpy(item->argument, argument, size);
        *stream->last = item;
        stream->last = &item->next;
        stream->added++;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return stream;
}

bool stream_record(void *handle, struct event *event) {
    pthread_mutex_lock(&lock);
    bool unused = !handle && !default_stream; /* it needs no thread yet */
    struct stream *stream = unused ? NULL : find(handle);
    *event = stream ? (struct event){stream->id, stream->added} : (struct event){0, 0};
    pthread_mutex_unlock(&lock);
    return unused || stream;
}

static bool reached(struct event event) {
    struct stream *stream = of_id(event.stream);
    return !stream || stream->done >= event.ticket; /* one that is gone has done all it had */
}

bool event_done(struct event event) {
    pthread_mutex_lock(&lock);
    bool done = reached(event);
    pthread_mutex_unlock(&lock);
    return done;
}

static void run_wait(void *argument) {
    struct event *event = argument;
    pthread_mutex_lock(&lock);
    while (!reached(*event))
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

bool stream_follow(void *handle, struct event event) { return stream_add(handle, run_wait, &event, sizeof event); }

void streams_drain(void) {
    pthread_mutex_lock(&lock);
    for (uint64_t id = 1, newest = last_id; id <= newest; id++) {
        struct stream *stream = of_id(id);
        for (struct event event = {id, stream ? stream->added : 0}; !reached(event);)
            pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
}

/* -- for tests. An event of theirs is a ticket: the number of what its stream had been given. Where an answer
 *    is -1, there is no such stream. --------------------------------------------------------------------------- */

EXPORT void *kvplug_fake_stream_new(void) {
    pthread_mutex_lock(&lock);
    struct stream *stream = new_stream();
    void *handle = stream ? (void *)(uintptr_t)stream->id : NULL;
    pthread_mutex_unlock(&lock);
    return handle;
}

/* What it has is still done; nothing waits for that. */
EXPORT void kvplug_fake_stream_free(void *handle) {
    pthread_mutex_lock(&lock);
    struct stream *stream = handle ? find(handle) : NULL;
    if (stream)
        stream->closing = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

EXPORT int64_t kvplug_fake_stream_record(void *handle) {
    struct event event;
    return stream_record(handle, &event) ? (int64_t)event.ticket : -1;
}

/* 1: all up to the event is done. 0: not in timeout_ms (negative: no limit). */
EXPORT int kvplug_fake_stream_wait(void *handle, int64_t ticket, int64_t timeout_ms) {
    struct timespec until;
    int answer = 1, late = 0;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += timeout_ms % 1000 * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&lock);
    struct stream *stream = find(handle);
    if (!stream)
        answer = -1;
    else
        for (struct event event = {stream->id, (uint64_t)ticket}; answer == 1 && !reached(event);) {
            if (timeout_ms < 0)
                pthread_cond_wait(&changed, &lock);
            else if (late || timeout_ms == 0)
                answer = 0;
            else
                late = pthread_cond_timedwait(&changed, &lock, &until) == ETIMEDOUT;
        }
    pthread_mutex_unlock(&lock);
    return answer;
}

EXPORT int kvplug_fake_stream_follow(void *handle, void *other, int64_t ticket) {
    struct event event;
    if (!stream_record(other, &event))
        return -1;
    event.ticket = (uint64_t)ticket;
    return stream_follow(handle, event) ? 0 : -1;
}

static void run_copy(void *argument) {
    struct copy *copy = argument;
    memmove(copy->to, copy->from, copy->nbytes);
}

EXPORT int kvplug_fake_stream_copy(void *handle, void *to, const void *from, size_t nbytes) {
    struct copy copy = {to, from, nbytes};
    return stream_add(handle, run_copy, &copy, sizeof copy) ? 0 : -1;
}

static void run_gate(void *unused) {
    (void)unused;
    wait_while(GATE, NULL);
}

EXPORT int kvplug_fake_stream_gate(void *handle) { return stream_add(handle, run_gate, NULL, 0) ? 0 : -1; }

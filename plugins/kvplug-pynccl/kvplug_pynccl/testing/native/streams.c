#include "fake.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct item {
    struct item *next;
    void (*run)(void *);
    void *argument;
};

struct stream {
    struct stream *next;
    struct item *first, **last;
    uint64_t added, done;
    bool closing;
};

/* One lock for all: tests have few streams. A freed one is here until it has done what it had. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct stream *streams, *default_stream;

static void by_the_monotonic_clock(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
}

static void *live(void *argument) {
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

static struct stream *new_stream(void) {
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_attr_t attributes;
    pthread_t thread;
    stream->last = &stream->first;
    stream->next = streams;
    streams = stream;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, live, stream))
        abort();
    pthread_attr_destroy(&attributes);
    return stream;
}

static struct stream *find(void *handle) {
    struct stream *stream = streams;
    if (!handle)
        return default_stream ? default_stream : (default_stream = new_stream());
    while (stream && stream != handle)
        stream = stream->next;
    return stream && !stream->closing ? stream : NULL;
}

struct stream *stream_of(void *handle) {
    pthread_once(&once, by_the_monotonic_clock);
    pthread_mutex_lock(&lock);
    struct stream *stream = find(handle);
    pthread_mutex_unlock(&lock);
    return stream;
}

static void add(struct stream *stream, void (*run)(void *), void *argument) {
    struct item *item = malloc(sizeof *item);
    *item = (struct item){NULL, run, argument};
    *stream->last = item;
    stream->last = &item->next;
    stream->added++;
    pthread_cond_broadcast(&changed);
}

void stream_add(struct stream *stream, void (*run)(void *), void *argument) {
    pthread_mutex_lock(&lock);
    add(stream, run, argument);
    pthread_mutex_unlock(&lock);
}

/* A forked child has no thread of its parent's, and somebody may have held the lock. */
static void forget_in_child(void) {
    static const pthread_once_t not_yet = PTHREAD_ONCE_INIT;
    pthread_mutex_init(&lock, NULL);
    once = not_yet;
    streams = default_stream = NULL;
}

__attribute__((constructor)) static void look_out_for_forks(void) { pthread_atfork(NULL, NULL, forget_in_child); }

struct order {
    struct stream *other;
    uint64_t ticket;
};

static bool reached(struct stream *stream, uint64_t ticket) {
    struct stream *there = streams;
    while (there && there != stream)
        there = there->next;
    return !there || there->done >= ticket; /* one that is gone has done all it had */
}

static void wait_in_order(void *argument) {
    struct order *order = argument;
    pthread_mutex_lock(&lock);
    while (!reached(order->other, order->ticket))
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    free(order);
}

static void add_order(struct stream *stream, struct stream *other, uint64_t ticket) {
    struct order *order = malloc(sizeof *order);
    *order = (struct order){other, ticket};
    add(stream, wait_in_order, order);
}

void stream_order(struct stream *stream, struct stream *other) {
    pthread_mutex_lock(&lock);
    add_order(stream, other, other->added);
    pthread_mutex_unlock(&lock);
}

EXPORT void *kvplug_fake_stream_new(void) {
    pthread_once(&once, by_the_monotonic_clock);
    pthread_mutex_lock(&lock);
    struct stream *stream = new_stream();
    pthread_mutex_unlock(&lock);
    return stream;
}

/* What it has is still done; nobody waits for that. */
EXPORT int kvplug_fake_stream_free(void *handle) {
    pthread_once(&once, by_the_monotonic_clock);
    pthread_mutex_lock(&lock);
    struct stream *stream = find(handle);
    if (stream && stream != default_stream)
        stream->closing = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return stream ? 0 : -1;
}

/* An event: the number of what the stream has been given so far. -1: it is no stream. */
EXPORT int64_t kvplug_fake_stream_record(void *handle) {
    pthread_once(&once, by_the_monotonic_clock);
    pthread_mutex_lock(&lock);
    struct stream *stream = find(handle);
    int64_t ticket = stream ? (int64_t)stream->added : -1;
    pthread_mutex_unlock(&lock);
    return ticket;
}

/* 1: all up to the event is done. 0: not in timeout_ms (negative: no limit). -1: it is no stream. */
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
    pthread_once(&once, by_the_monotonic_clock);
    pthread_mutex_lock(&lock);
    struct stream *stream = find(handle);
    if (!stream)
        answer = -1;
    else
        while (answer == 1 && !reached(stream, (uint64_t)ticket)) {
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

/* What the stream is given from now on waits for an event of another one. */
EXPORT int kvplug_fake_stream_order(void *handle, void *other_handle, int64_t ticket) {
    pthread_once(&once, by_the_monotonic_clock);
    pthread_mutex_lock(&lock);
    struct stream *stream = find(handle), *other = find(other_handle);
    if (stream && other)
        add_order(stream, other, (uint64_t)ticket);
    pthread_mutex_unlock(&lock);
    return stream && other ? 0 : -1;
}

struct copy {
    void *to;
    const void *from;
    size_t nbytes;
};

static void run_copy(void *argument) {
    struct copy *copy = argument;
    memmove(copy->to, copy->from, copy->nbytes);
    free(copy);
}

EXPORT int kvplug_fake_stream_copy(void *handle, void *to, const void *from, size_t nbytes) {
    struct stream *stream = stream_of(handle);
    if (!stream)
        return -1;
    struct copy *copy = malloc(sizeof *copy);
    *copy = (struct copy){to, from, nbytes};
    stream_add(stream, run_copy, copy);
    return 0;
}

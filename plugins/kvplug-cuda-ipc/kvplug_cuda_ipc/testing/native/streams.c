#include "fake.h"

#include <pthread.h>
#include <stdlib.h>

struct item {
    struct item *next;
    void (*run)(void *);
    void *argument;
};

/* Handles are numbers that never come again: an event outlives its stream. */
struct stream {
    struct stream *next;
    struct item *first, **last;
    uint64_t id, added, done;
    bool closing;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct stream *streams, *default_stream;
static uint64_t last_id;

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
        wait_while(HOLD);
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
    stream->id = ++last_id;
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

uint64_t stream_add(void *handle, void (*run)(void *), void *argument) {
    pthread_mutex_lock(&lock);
    struct stream *stream = find(handle);
    uint64_t ticket = 0;
    if (stream) {
        struct item *item = malloc(sizeof *item);
        *item = (struct item){NULL, run, argument};
        *stream->last = item;
        stream->last = &item->next;
        ticket = ++stream->added;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return ticket;
}

uint64_t stream_ticket(void *handle, uint64_t *id) {
    pthread_mutex_lock(&lock);
    bool unused = !handle && !default_stream; /* it needs no thread yet */
    struct stream *stream = unused ? NULL : find(handle);
    uint64_t ticket = stream ? stream->added : 0;
    *id = unused ? UINT64_MAX : stream ? stream->id : 0;
    pthread_mutex_unlock(&lock);
    return ticket;
}

static bool reached(uint64_t id, uint64_t ticket) {
    struct stream *stream = of_id(id);
    return !stream || stream->done >= ticket; /* one that is gone has done all it had */
}

bool stream_reached(uint64_t id, uint64_t ticket) {
    pthread_mutex_lock(&lock);
    bool answer = reached(id, ticket);
    pthread_mutex_unlock(&lock);
    return answer;
}

void stream_wait(uint64_t id, uint64_t ticket) {
    pthread_mutex_lock(&lock);
    while (!reached(id, ticket))
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

/* What cudaFree does: everything that any stream has now is waited for. */
void streams_drain(void) {
    pthread_mutex_lock(&lock);
    for (uint64_t id = 1, newest = last_id; id <= newest; id++) {
        struct stream *stream = of_id(id);
        for (uint64_t ticket = stream ? stream->added : 0; !reached(id, ticket);)
            pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
}

/* A forked child has no thread of its parent's, and somebody may have held the lock. */
static void forget_in_child(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&changed, NULL);
    streams = default_stream = NULL;
}

__attribute__((constructor)) static void look_out_for_forks(void) { pthread_atfork(NULL, NULL, forget_in_child); }

EXPORT void *kvplug_fake_stream_new(void) {
    pthread_mutex_lock(&lock);
    struct stream *stream = new_stream();
    void *handle = (void *)(uintptr_t)stream->id;
    pthread_mutex_unlock(&lock);
    return handle;
}

/* What it has is still done; nobody waits for that. */
EXPORT void kvplug_fake_stream_free(void *handle) {
    pthread_mutex_lock(&lock);
    struct stream *stream = handle ? find(handle) : NULL;
    if (stream)
        stream->closing = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void run_gate(void *unused) {
    (void)unused;
    wait_while(GATE);
}

/* What the stream is given from now on begins when the gate is open. */
EXPORT void kvplug_fake_stream_gate(void *handle) { stream_add(handle, run_gate, NULL); }
